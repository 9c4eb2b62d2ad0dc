"""Tables of runs: per domain and average, over seeds, beside FedAvg and beside the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from protofed.federation.records import SELECTION

if TYPE_CHECKING:
    from protofed.federation.run import Result

BASELINE = "fedavg"
AVERAGE = "average"
CONFIDENCE = 0.95
FEW = 5
"""With fewer seeds than this a table says so."""
NONE = "—"


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

    @property
    def half(self) -> float | None:
        """Half the width of the mean's 95 % interval, by Student's t."""
        if self.error is None:
            return None
        from scipy.stats import t  # slow to import

        return float(t.ppf((1 + CONFIDENCE) / 2, self.seeds - 1)) * self.error

    @property
    def noise(self) -> bool:
        """Whether a difference cannot be told from none: its interval contains 0."""
        return self.half is None or abs(self.mean) <= self.half


@dataclass(frozen=True)
class Measure:
    """What a table needs of a run, or of several that make one column each (``leave_out``)."""

    seed: int
    accuracy: Mapping[str, float]
    megabytes: float
    seconds: float
    summary: Mapping[str, Any]
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> Measure:
        """From a run's summary and its configuration."""
        return cls(
            settings["seed"],
            summary["accuracy"],
            (summary["bytes_up"] + summary["bytes_down"]) / 1e6,
            summary["seconds"],
            summary,
            settings,
        )

    @classmethod
    def of_result(cls, result: Result) -> Measure:
        """From a run in memory."""
        settings = {**asdict(result.config), "method": result.config.method.name}
        return cls.of({**result.summary, "accuracy": result.accuracy}, settings)


@dataclass(frozen=True)
class Row:
    """A line: accuracy per domain and average, the paired difference to FedAvg, its costs.

    ``accuracy`` is empty where no run is there; ``state`` then says why, if that is known.
    ``paper`` has what the paper prints.
    """

    method: str
    accuracy: Mapping[str, Spread]
    difference: Spread | None
    megabytes: float | None
    seconds: float | None
    wanted: int = 0
    differences: Mapping[str, Spread] = field(default_factory=dict)
    paper: Mapping[str, float] = field(default_factory=dict)
    paper_std: float | None = None
    state: str = ""

    @property
    def seeds(self) -> int:
        """How many seeds are there."""
        return max((s.seeds for s in self.accuracy.values()), default=0)


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and whether it is the best of its column or the second."""

    text: str
    mark: str = ""


def rows(results: Sequence[Result]) -> list[Row]:
    """A row per method, in the order in which they come."""
    runs: dict[str, dict[int, Measure]] = {}
    for result in results:
        measure = Measure.of_result(result)
        runs.setdefault(result.summary["method"], {})[measure.seed] = measure
    base = runs.get(BASELINE, {})
    return [row(method, own, base if method != BASELINE else {}) for method, own in runs.items()]


def row(
    label: str,
    runs: Mapping[int, Measure],
    base: Mapping[int, Measure],
    wanted: int = 0,
    **more: Any,
) -> Row:
    """The line of a method's runs, by seed; ``base``: the runs it is compared with."""
    if not runs:
        return Row(label, {}, None, None, None, wanted, **more)
    measures = list(runs.values())
    # paired: the same seed has the same clients, samples and initial weights
    paired = [s for s in runs if s in base]
    columns = list(measures[0].accuracy)
    differences = {
        c: Spread.of([runs[s].accuracy[c] - base[s].accuracy[c] for s in paired])
        for c in columns
        if paired
    }
    return Row(
        label,
        {c: Spread.of([m.accuracy[c] for m in measures]) for c in columns},
        differences.get(AVERAGE),
        fmean(m.megabytes for m in measures),
        fmean(m.seconds for m in measures),
        wanted or len(measures),
        differences,
        **more,
    )


def grid(
    table: Sequence[Row], columns: Sequence[str] = (), baseline: str = "FedAvg"
) -> tuple[list[str], list[list[Cell]]]:
    """Header and cells: a line for each row and, where the paper prints it, one for the paper."""
    columns = columns or next((list(r.accuracy) for r in table if r.accuracy), [AVERAGE])
    partial = any(r.seeds < r.wanted for r in table)
    costs = any(r.accuracy for r in table)
    name = "FedAvg" if baseline == BASELINE else baseline
    header = ["method", *columns, f"Δ {name}", *["MB", "s"] * costs, *["seeds"] * partial]
    marks = {c: _marks(table, c) for c in columns}
    own = {r.method: r for r in table}.get(baseline)
    body = []
    for r in table:
        cells = [Cell(r.method + (f" ({r.state})" if r.state else ""))]
        for c in columns:
            text = _spread(r.accuracy[c]) if c in r.accuracy else NONE
            cells.append(Cell(text, marks[c].get(r.method, "")))
        cells.append(Cell("" if r.difference is None else _signed(r.difference)))
        if costs:
            cells += [Cell(NONE if v is None else f"{v:.0f}") for v in (r.megabytes, r.seconds)]
        if partial:
            cells.append(Cell(f"{r.seeds}/{r.wanted}"))
        body.append(cells)
        if r.paper:
            body.append(_paper(r, columns, own, len(header)))
    return header, body


def _paper(r: Row, columns: Sequence[str], base: Row | None, width: int) -> list[Cell]:
    cells = [Cell("  paper (ours − paper)")]
    for c in columns:
        if c not in r.paper:
            cells.append(Cell(""))
            continue
        text = "NaN" if math.isnan(r.paper[c]) else f"{r.paper[c]:.2f}"
        if c == AVERAGE and r.paper_std is not None:
            text += f" ± {r.paper_std:.2f}"
        if c in r.accuracy and not math.isnan(r.paper[c]):
            text += f" ({_sign(r.accuracy[c].mean - r.paper[c])})"
        cells.append(Cell(text))
    theirs = base.paper.get(AVERAGE) if base is not None and base is not r else None
    known = theirs is not None and not math.isnan(r.paper.get(AVERAGE, math.nan))
    cells.append(Cell(f"{_minus(r.paper[AVERAGE] - theirs, 2)}" if known and theirs else ""))
    return cells + [Cell("")] * (width - len(cells))


def cells(table: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and text of each cell."""
    header, body = grid(table)
    return header, [[cell.text for cell in line] for line in body]


def _marks(table: Sequence[Row], column: str) -> dict[str, str]:
    """The best and the second of a column, as they are printed: equal texts are equally good."""
    means = {r.method: round(r.accuracy[column].mean, 1) for r in table if column in r.accuracy}
    ranks = sorted(set(means.values()), reverse=True)[:2]
    if len(means) < 2:
        return {}
    names = ("best", "second")
    return {m: names[ranks.index(v)] for m, v in means.items() if v in ranks}


# ---- captions -----------------------------------------------------------------------------------


def caption(results: Sequence[Result]) -> str:
    """What the numbers are, in one paragraph: data, split, seeds, precision, BatchNorm, rule."""
    return describe([Measure.of_result(r) for r in results])


def describe(measures: Sequence[Measure], baseline: str = "FedAvg") -> str:
    """The same from measures; what differs between them is said to differ."""
    first, summary = measures[0].settings, measures[0].summary
    seeds = sorted({m.seed for m in measures})
    clients = ", ".join(
        f"{d} {n} × {first['samples'][d]:g}" for d, n in first["clients"].items() if n
    )
    unseen = {m.settings.get("leave_out") for m in measures}
    each = len(unseen) > 1 or "each" in unseen
    if each:
        clients = "one client for each domain but the column's, which is only tested on"
    elif any(m.settings["clients"] != first["clients"] for m in measures):
        clients = "differ between the runs"

    def one(name: str) -> str:
        found = list(dict.fromkeys(str(m.settings[name]) for m in measures))
        return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"

    many = (
        f"± standard deviation over seeds; Δ: paired by seed, ± standard error (± half its "
        f"{CONFIDENCE:.0%} interval; noise: that contains 0); "
    ) * (len(seeds) > 1)
    special = "" if each else _special(first, summary)
    return (
        f"Test accuracy in %, {SELECTION}; {many}"
        f"task {first['task']} ({summary['data']}), protocol {one('protocol')}, "
        f"{one('rounds')} rounds, clients × samples: {clients}{special}; "
        f"seeds {', '.join(map(str, seeds))}{few(len(seeds))}; "
        f"{one('precision')} on {one('device')}; "
        f"BatchNorm: {summary['batchnorm']}; weights by {one('average')}. "
        "MB: all that travelled, up and down; s: seconds of the run, "
        "runs side by side slow each other."
    )


def few(seeds: int) -> str:
    """A warning where seeds are few."""
    if seeds >= FEW:
        return ""
    if seeds == 1:
        return " (one seed: differences cannot be told from noise)"
    return f" (fewer than {FEW} seeds: intervals are wide and only rough)"


def _special(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """What the split has beyond clients and samples, and a domain that nobody trained on."""
    words = []
    if (alpha := settings.get("dirichlet")) is not None:
        words.append(f"label skew Dirichlet({alpha:g})")
    if (beta := settings.get("quantity")) is not None:
        words.append(f"sizes Dirichlet({beta:g})")
    if settings.get("repair"):
        words.append("missing classes repaired")
    for client in summary.get("clients", ()):
        if "what was left" in client.get("note", ""):
            words.append(f"{client['client']} only {client['samples']}: what was left")
    if (left_out := settings.get("leave_out")) is not None:
        tested = summary["tested"][left_out]
        words.append(f"{left_out} left out of training and tested on {tested} images")
    return "".join(f", {w}" for w in words)


def markdown(results: Sequence[Result]) -> str:
    """The table as Markdown, with its caption."""
    from protofed.study.render import to_markdown

    return to_markdown(*grid(rows(results)), caption(results))


def _spread(value: Spread) -> str:
    return f"{value.mean:.1f}" + (f" ± {value.std:.1f}" if value.std is not None else "")


def _signed(value: Spread) -> str:
    if value.half is None:
        return _sign(value.mean)
    noise = ", noise" if value.noise else ""
    return f"{_sign(value.mean)} ± {value.error:.1f} (±{value.half:.1f}{noise})"


def _sign(value: float) -> str:
    return _minus(value, 1)


def _minus(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text if float(text) else f"{0:+.{digits}f}"  # never -0.0
