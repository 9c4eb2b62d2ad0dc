"""Tables of runs: per domain and average, over seeds, beside FedAvg and beside the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from protofed.config import EACH
from protofed.federation.simulation import NO_WEIGHTS
from protofed.models.mixed import model_names
from protofed.runs.records import BESIDE, SEEN, SELECTION

if TYPE_CHECKING:
    from protofed.runs.result import Result

BASELINE = "fedavg"
AVERAGE = "average"
CONFIDENCE = 0.95
FEW = 5
"""With fewer seeds than this a table says so."""
NONE = "—"
TESTED = {
    "global": "the global model",
    "clients": "each domain's clients' own models",
    "everyone": "every client's own model on all domains, mean over the clients (own domain: "
    "each on its own)",
}
"""Who was tested, in words."""
WEIGHTS = {"samples": "sample counts", NO_WEIGHTS: "no model is averaged"}
"""What models are weighed by, in words; other rules are named by themselves."""


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

    @property
    def label(self) -> str:
        """The row it belongs to: a study's label, else the method."""
        return str(self.summary.get("method", self.settings["method"]))

    @property
    def unseen(self) -> str | None:
        """The domain that the run did not train on, or ``each``; None: it trained on all."""
        left_out: str | None = self.settings.get("leave_out")
        return left_out

    @property
    def values(self) -> dict[str, float]:
        """Accuracy per column; with an unseen domain also the average of the others."""
        if self.unseen not in self.accuracy:
            return dict(self.accuracy)
        seen = [a for d, a in self.accuracy.items() if d not in (self.unseen, AVERAGE)]
        return {**self.accuracy, SEEN: fmean(seen)}

    @property
    def beside(self) -> dict[str, float]:
        """Averages of accuracies beside the method's own, e.g. of clients on their own domain."""
        found = self.summary.get("beside", {}).items()
        return {BESIDE.get(name, name): each[AVERAGE] for name, each in found}


@dataclass(frozen=True)
class Row:
    """A line: accuracy per domain and average, the paired difference to FedAvg, its costs.

    ``accuracy`` is empty where no run is there; ``state`` then says why, if that is known.
    ``paper`` has what the paper prints. With one domain ``unseen`` there is also ``seen``, the
    average of the others, and what counts is the unseen domain; with ``each`` their average.
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
    unseen: str | None = None
    seen: Spread | None = None
    beside: Mapping[str, Spread] = field(default_factory=dict)

    @property
    def seeds(self) -> int:
        """How many seeds are there."""
        return max((s.seeds for s in self.accuracy.values()), default=0)

    @property
    def main(self) -> str:
        """The column that counts."""
        return self.unseen if self.unseen and self.unseen in self.accuracy else AVERAGE

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to show: with an unseen domain that one first, and no average with it."""
        if self.main == AVERAGE:
            return tuple(self.accuracy)
        seen = (d for d in self.accuracy if d not in (self.main, AVERAGE))
        return (self.main, *seen, SEEN)

    def at(self, column: str) -> Spread | None:
        """The accuracy in a column; None where there is none."""
        return self.seen if column == SEEN else {**self.beside, **self.accuracy}.get(column)


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and whether it is the best of its column or the second."""

    text: str
    mark: str = ""


def rows(results: Sequence[Result], baseline: str = BASELINE) -> list[Row]:
    """A row per method, in the order in which they come."""
    runs: dict[str, dict[int, Measure]] = {}
    for result in results:
        measure = Measure.of_result(result)
        runs.setdefault(result.summary["method"], {})[measure.seed] = measure
    base = runs.get(baseline, {})
    return [row(method, own, base if method != baseline else {}) for method, own in runs.items()]


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
    columns = list(measures[0].values)
    differences = {
        c: Spread.of([runs[s].values[c] - base[s].values[c] for s in paired])
        for c in columns
        if paired and all(c in base[s].values for s in paired)
    }
    spreads = {c: Spread.of([m.values[c] for m in measures]) for c in columns}
    seen = spreads.pop(SEEN, None)
    return Row(
        label,
        spreads,
        differences.get(AVERAGE),
        fmean(m.megabytes for m in measures),
        fmean(m.seconds for m in measures),
        wanted or len(measures),
        differences,
        unseen=measures[0].unseen,
        seen=seen,
        beside={n: Spread.of([m.beside[n] for m in measures]) for n in measures[0].beside},
        **more,
    )


def grid(
    table: Sequence[Row], columns: Sequence[str] = (), baseline: str = "FedAvg"
) -> tuple[list[str], list[list[Cell]]]:
    """Header and cells: a line for each row and, where the paper prints it, one for the paper."""
    columns = columns or next((r.columns for r in table if r.accuracy), [AVERAGE])
    partial = any(r.seeds < r.wanted for r in table)
    costs = any(r.accuracy for r in table)
    name = "FedAvg" if baseline == BASELINE else baseline
    unseen = {r.unseen for r in table if r.accuracy}
    said = {AVERAGE: f"unseen {AVERAGE}"} if unseen == {EACH} else {}
    said |= {domain: f"{domain} (unseen)" for domain in unseen if len(unseen) == 1 and domain}
    names = [said.get(c, c) for c in columns]
    of = ", unseen" if any(unseen) else ""
    beside = list(dict.fromkeys(n for r in table for n in r.beside))
    costs_names = ["MB", "s"] * costs
    header = ["method", *names, f"Δ {name}{of}", *beside, *costs_names, *["seeds"] * partial]
    marks = {c: _marks(table, c) for c in columns}
    own = {r.method: r for r in table}.get(baseline)
    body = []
    for r in table:
        cells = [Cell(r.method + (f" ({r.state})" if r.state else ""))]
        for c in columns:
            own_c = r.at(c)
            text = _spread(own_c) if own_c is not None else NONE
            cells.append(Cell(text, marks[c].get(r.method, "")))
        delta = r.differences.get(r.main)
        cells.append(Cell("" if delta is None else _signed(delta)))
        cells += [Cell(_spread(r.beside[n]) if n in r.beside else "") for n in beside]
        if costs:
            cells += [Cell(NONE if v is None else f"{v:.0f}") for v in (r.megabytes, r.seconds)]
        if partial:
            cells.append(Cell(f"{r.seeds}/{r.wanted}"))
        body.append(cells)
        if r.paper:
            body.append(_paper(r, columns, own, len(header)))
    if own is None and not any(r.differences for r in table):  # there is nothing to compare with
        del header[1 + len(columns)]
        for line in body:
            del line[1 + len(columns)]
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
    found = {r.method: r.at(column) for r in table}
    means = {method: round(s.mean, 1) for method, s in found.items() if s is not None}
    ranks = sorted(set(means.values()), reverse=True)[:2]
    if len(means) < 2:
        return {}
    names = ("best", "second")
    return {m: names[ranks.index(v)] for m, v in means.items() if v in ranks}


# ---- captions -----------------------------------------------------------------------------------


def caption(results: Sequence[Result]) -> str:
    """What the numbers are, in one paragraph: data, split, seeds, precision, BatchNorm, rule."""
    return describe([Measure.of_result(r) for r in results])


def describe(measures: Sequence[Measure]) -> str:
    """The same from measures; what differs between them is said to differ."""
    first, summary = measures[0].settings, measures[0].summary
    seeds = sorted({m.seed for m in measures})
    by_row: dict[str, set[int]] = {}
    for m in measures:
        by_row.setdefault(m.label, set()).add(m.seed)
    clients = held(first["clients"], first["samples"])
    if any(m.settings["clients"] != first["clients"] for m in measures):
        clients = "differ between the runs"

    def one(name: str) -> str:
        found = list(dict.fromkeys(str(m.settings[name]) for m in measures))
        return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"

    runs = "all runs of the row" if first.get("leave_out") == EACH else "the run"
    many = (
        f"± standard deviation over seeds; Δ: paired by seed, ± standard error (± half its "
        f"{CONFIDENCE:.0%} interval; noise: that contains 0); "
    ) * (len(seeds) > 1)
    return (
        f"Test accuracy in %{_on_unseen(measures)}, {SELECTION}; {many}"
        f"task {first['task']} ({summary['data'].rstrip('.')}), protocol {one('protocol')}, "
        f"{one('rounds')} rounds, clients × samples: {clients}{_special(first, summary)}; "
        f"seeds {', '.join(map(str, seeds))}{few(len(seeds), min(map(len, by_row.values())))}; "
        f"{one('precision')} on {one('device')}; {_who(measures)}"
        f"BatchNorm: {_said(measures, 'batchnorm')}; {_averaged(measures)}. "
        f"MB: all that traveled, up and down; s: seconds of {runs}, "
        "runs side by side slow each other."
    )


def _on_unseen(measures: Sequence[Measure]) -> str:
    """Which of the numbers are of a domain that nobody trained on."""
    if all(m.settings.get("leave_out") == EACH for m in measures):
        return " on the column's domain by a model trained without it"
    unseen = {m.unseen for m in measures}
    if unseen == {None}:
        return ""
    which = unseen.pop() if len(unseen) == 1 else "a row's unseen domain"
    return f" (Δ: on {which}, which nobody trained on; {SEEN}: on the others)"


def _averaged(measures: Sequence[Measure]) -> str:
    """How models are averaged, if any are."""
    if all(m.summary.get("weights") == NO_WEIGHTS for m in measures):
        return "no model is averaged"
    return f"weights of the average: {_said(measures, 'weights', WEIGHTS)}"


def _who(measures: Sequence[Measure]) -> str:
    """Who was tested, where that is not one global model alone."""
    if all(m.summary.get("evaluated", "global") == "global" for m in measures):
        return ""
    return f"tested: {_said(measures, 'evaluated', TESTED)}; "


def _said(measures: Sequence[Measure], key: str, words: Mapping[str, str] | None = None) -> str:
    """What the runs' summaries say under a key; rows that differ from most are named."""
    said: dict[str, list[str]] = {}
    for m in measures:
        # a run of an earlier version says nothing of its weights
        text = m.summary.get(key, f"{m.settings.get('average')} unless the method has its own")
        rows = said.setdefault((words or {}).get(text, text), [])
        rows += [m.label] * (m.label not in rows)
    most, *others = sorted(said, key=lambda words: -len(said[words]))
    named = "; ".join(f"{', '.join(said[words])}: {words}" for words in others)
    return most + (f" ({named})" if named else "")


def held(clients: Mapping[str, int], samples: Mapping[str, float]) -> str:
    """Who holds how much, in words: ``mnist 6 × 600``, or ``webcam 1 × 20 %``."""

    def amount(n: float) -> str:
        return f"{100 * n:g} %" if isinstance(n, float) else f"{n}"

    return ", ".join(f"{d} {n} × {amount(samples[d])}" for d, n in clients.items() if n)


def few(seeds: int, fewest: int | None = None) -> str:
    """A warning where seeds are few, or where ``fewest``, those of a row, are."""
    if seeds >= FEW:
        if fewest is None or fewest >= FEW:
            return ""
        return f" (rows with fewer than {FEW} of them: intervals are wide and only rough)"
    if seeds == 1:
        return " (one seed: differences cannot be told from noise)"
    return f" (fewer than {FEW} seeds: intervals are wide and only rough)"


def _special(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """What the split has beyond clients and samples, and a domain that nobody trained on."""
    words = []
    if len(names := model_names(settings["model"])) > 1:
        words.append(f"with different models ({' and '.join(names)})")
    if (alpha := settings.get("dirichlet")) is not None:
        words.append(f"label skew Dirichlet({alpha:g})")
    if (beta := settings.get("quantity")) is not None:
        words.append(f"sizes Dirichlet({beta:g})")
    if settings.get("repair"):
        words.append("missing classes repaired")
    for client in summary.get("clients", ()):
        if "what was left" in client.get("note", ""):
            words.append(f"{client['client']} only {client['samples']}: what was left")
    left_out = settings.get("leave_out")
    if left_out == EACH:
        tested = ", ".join(f"{d} {n}" for d, n in summary["tested"].items())
        words.append(f"without those of the unseen domain, which is tested on images: {tested}")
    elif left_out is not None:
        tested = summary["tested"][left_out]
        words.append(f"{left_out} left out of training and tested on {tested} images")
    return "".join(f", {w}" for w in words)


def markdown(results: Sequence[Result]) -> str:
    """The table as Markdown, with its caption."""
    from protofed.studies.render import to_markdown

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
