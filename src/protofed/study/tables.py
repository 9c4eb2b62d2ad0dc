"""Tables of runs: per domain and average, over seeds, with the difference to FedAvg."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from protofed.federation.records import SELECTION

if TYPE_CHECKING:
    from protofed.federation.run import Result

BASELINE = "fedavg"


@dataclass(frozen=True)
class Spread:
    """A mean over seeds; ``std`` is None for a single seed."""

    mean: float
    std: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Mean and standard deviation of the values."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.std is None else self.std / math.sqrt(self.seeds)


@dataclass(frozen=True)
class Row:
    """One method: accuracy per domain and average, the paired difference to FedAvg, its costs."""

    method: str
    accuracy: Mapping[str, Spread]
    difference: Spread | None
    megabytes: float
    seconds: float


def rows(results: Sequence[Result]) -> list[Row]:
    """A row per method, in the order in which they come."""
    by_method: dict[str, dict[int, Result]] = {}
    for result in results:
        by_method.setdefault(result.summary["method"], {})[result.config.seed] = result
    base = by_method.get(BASELINE, {})
    table = []
    for method, runs in by_method.items():
        accuracies = [r.accuracy for r in runs.values()]
        # paired: the same seed has the same clients, samples and initial weights
        pairs = [
            runs[s].accuracy["average"] - base[s].accuracy["average"] for s in runs if s in base
        ]
        summaries = [r.summary for r in runs.values()]
        table.append(
            Row(
                method,
                {d: Spread.of([a[d] for a in accuracies]) for d in accuracies[0]},
                Spread.of(pairs) if pairs and method != BASELINE else None,
                fmean(s["bytes_up"] + s["bytes_down"] for s in summaries) / 1e6,
                fmean(s["seconds"] for s in summaries),
            )
        )
    return table


def cells(table: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and text of each cell."""
    domains = list(table[0].accuracy)
    header = ["method", *domains, "Δ FedAvg", "MB", "s"]
    body = []
    for row in table:
        difference = "" if row.difference is None else _signed(row.difference)
        body.append(
            [
                row.method,
                *(_spread(row.accuracy[d]) for d in domains),
                difference,
                f"{row.megabytes:.0f}",
                f"{row.seconds:.0f}",
            ]
        )
    return header, body


def caption(results: Sequence[Result]) -> str:
    """What the numbers are, in one paragraph: data, split, seeds, precision, BatchNorm, rule."""
    config, summary = results[0].config, results[0].summary
    seeds = sorted({r.config.seed for r in results})
    clients = ", ".join(f"{d} {n} × {config.samples[d]:g}" for d, n in config.clients.items() if n)
    if any(r.config.clients != config.clients for r in results):
        clients = "differ from seed to seed"
    many = "± standard deviation over seeds; Δ: paired by seed, ± standard error; " * (
        len(seeds) > 1
    )
    return (
        f"Test accuracy in %, {SELECTION}; {many}"
        f"task {config.task} ({summary['data']}), protocol {config.protocol}, "
        f"{config.rounds} rounds, clients × samples: {clients}{_special(results[0])}; "
        f"seeds {', '.join(map(str, seeds))}; {config.precision} on {config.device}; "
        f"BatchNorm: {summary['batchnorm']}; weights by {config.average}. "
        "MB: all that travelled, up and down; s: seconds of the run on one thread, "
        "runs side by side slow each other."
    )


def _special(result: Result) -> str:
    """What the split has beyond clients and samples, and a domain that nobody trained on."""
    config, summary = result.config, result.summary
    words = []
    if config.dirichlet is not None:
        words.append(f"label skew Dirichlet({config.dirichlet:g})")
    if config.quantity is not None:
        words.append(f"sizes Dirichlet({config.quantity:g})")
    if config.repair:
        words.append("missing classes repaired")
    for client in summary.get("clients", ()):
        if "what was left" in client.get("note", ""):
            words.append(f"{client['client']} only {client['samples']}: what was left")
    if config.leave_out is not None:
        tested = summary["tested"][config.leave_out]
        words.append(f"{config.leave_out} left out of training and tested on {tested} images")
    return "".join(f", {w}" for w in words)


def markdown(results: Sequence[Result]) -> str:
    """The table as Markdown, with its caption."""
    header, body = cells(rows(results))
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{caption(results)}\n"


def _spread(value: Spread) -> str:
    return f"{value.mean:.1f}" + (f" ± {value.std:.1f}" if value.std is not None else "")


def _signed(value: Spread) -> str:
    return f"{value.mean:+.1f}" + (f" ± {value.error:.1f}" if value.error is not None else "")
