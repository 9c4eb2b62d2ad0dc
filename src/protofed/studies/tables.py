"""Tables of runs: accuracy per domain and on average, against FedAvg and against the paper.

``Measure`` is a run, ``TableRow`` all seeds of a method. ``grid`` makes the text of the cells of
the accuracies, ``cost_grid`` those of the costs, and ``protofed.studies.render`` writes both in any
format.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import TYPE_CHECKING, Any

from protofed.config import EACH, short_option, shown_task, training_options
from protofed.data.split import UNUSED, VAL_FOLDERS
from protofed.federation.simulation import NO_WEIGHTS
from protofed.models.mixed import model_names
from protofed.runs.folder import plain_settings
from protofed.runs.records import (
    BESIDE,
    LAST,
    SEEN,
    VALIDATION,
    last_mean,
    over_rounds,
    selection,
)
from protofed.studies.history import changed_options, is_variant

if TYPE_CHECKING:
    from protofed.runs.result import Result

Rounds = Sequence[Mapping[str, Any]]
BASELINE = "fedavg"
AVERAGE = "average"
WORST, SPREAD = "worst", "spread"
"""Columns next to the average: the lowest domain, and the standard deviation over the domains."""
CONFIDENCE = 0.95
FEW_SEEDS = 5
"""With fewer seeds than this, a table warns."""
NO_VALUE = "—"
NOT_RUN, DIVERGED = "not run", "diverged"
TESTED = {
    "global": "the global model",
    "clients": "each domain's clients' own models",
    "everyone": "every client's own model on all domains, mean over the clients (own domain: "
    "each on its own)",
}
"""Which models were tested, in words."""
WEIGHTS = {"samples": "sample counts", NO_WEIGHTS: "no model is averaged"}
"""How models are weighted, in words; any other rule goes by its own name."""


@dataclass(frozen=True)
class Spread:
    """A mean over seeds; ``std`` is None for a single seed."""

    mean: float
    std: float | None
    seeds: int
    values: tuple[float, ...] = field(default=(), compare=False)
    """The value of each seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        std = stdev(values) if len(values) > 1 else None
        return cls(fmean(values), std, len(values), tuple(values))

    @property
    def error(self) -> float | None:
        return None if self.std is None else self.std / math.sqrt(self.seeds)

    @property
    def half(self) -> float | None:
        """Half the width of the mean's 95 % interval, by Student's t."""
        return None if self.std is None else self._quantile * self.std / math.sqrt(self.seeds)

    def half_for(self, seeds: int) -> float | None:
        """Half the width of the 95 % interval in which the mean of other ``seeds`` falls."""
        if self.std is None:
            return None
        return self._quantile * self.std * math.sqrt(1 / self.seeds + 1 / seeds)

    @property
    def _quantile(self) -> float:
        from scipy.stats import t  # slow to import

        return float(t.ppf((1 + CONFIDENCE) / 2, self.seeds - 1))

    @property
    def noise(self) -> bool:
        """Whether a difference may be zero: its interval contains 0."""
        return self.half is None or abs(self.mean) <= self.half


@dataclass(frozen=True)
class Measure:
    """What a table needs from a run, or from several that give one column each (``leave_out``)."""

    seed: int
    accuracy: Mapping[str, float]
    megabytes: float
    seconds: float
    summary: Mapping[str, Any]
    settings: Mapping[str, Any]
    progress: tuple[tuple[float, float], ...] = ()
    """For each round: the accuracy that counts, as a mean of the last rounds, and the MB so far."""
    last: int = LAST
    """The rounds that accuracies are means of."""

    @classmethod
    def of(
        cls,
        summary: Mapping[str, Any],
        settings: Mapping[str, Any],
        rounds: Rounds,
        last: int = LAST,
    ) -> Measure:
        if last != LAST:
            beside = {n: last_mean(rounds, n, last) for n in summary.get("beside", ())}
            own = {"accuracy": last_mean(rounds, last=last), "beside": beside}
            summary = {**summary, **own}
        return cls(
            settings["seed"],
            summary["accuracy"],
            (summary["bytes_up"] + summary["bytes_down"]) / 1e6,
            summary["seconds"],
            summary,
            settings,
            progress(rounds, settings.get("leave_out"), last),
            last,
        )

    @classmethod
    def of_result(cls, result: Result, last: int = LAST) -> Measure:
        method = result.config.method
        asked = {**asdict(result.config), "method": method.name, "options": method.options()}
        # the summary's may be the label of a row
        settings = plain_settings(asked, {**result.summary, "method": method.name})
        summary = {**result.summary, "accuracy": result.accuracy}
        return cls.of(summary, settings, result.rounds, last)

    @property
    def label(self) -> str:
        """The row it belongs to: a study's label, or else the method."""
        return str(self.summary.get("method", self.settings["method"]))

    @property
    def unseen(self) -> str | None:
        """The domain that the run did not train on, or ``each``; None if it trained on all."""
        left_out: str | None = self.settings.get("leave_out")
        return left_out

    @property
    def main(self) -> str:
        """The column that counts: the unseen domain, or else the average."""
        return self.unseen if self.unseen and self.unseen in self.accuracy else AVERAGE

    @property
    def values(self) -> dict[str, float]:
        """Accuracy per column, and what is derived from those that belong together.

        That is their worst domain and their spread; with an unseen domain, the average of the
        others.
        """
        if self.main == AVERAGE:
            return {**self.accuracy, **over_domains(self.accuracy)}
        seen = [a for d, a in self.accuracy.items() if d not in (self.main, AVERAGE)]
        return {**self.accuracy, SEEN: fmean(seen)}

    def reaches(self, target: float) -> tuple[int, float] | None:
        """The first round, from 1, that has reached an accuracy, and the MB until then."""
        rounds = enumerate(self.progress, start=1)
        # a run reaches its own last value, whatever the last digits
        return next(((r, sent) for r, (a, sent) in rounds if a >= target - 1e-9), None)

    def on_validation(self) -> Measure:
        """The run with its validation accuracy instead of all accuracies on test images."""
        accuracy = self.summary["beside"]["validation"]
        summary = {**self.summary, "beside": {}}
        return replace(self, accuracy=accuracy, summary=summary, progress=())

    @property
    def beside(self) -> dict[str, float]:
        """Averages of further accuracies, e.g. of clients on their own domain."""
        found = self.summary.get("beside", {}).items()
        return {BESIDE.get(name, name): each[AVERAGE] for name, each in found}


def over_domains(accuracy: Mapping[str, float]) -> dict[str, float]:
    """The worst domain and the standard deviation over the domains, if there are several."""
    found = [a for d, a in accuracy.items() if d != AVERAGE and not math.isnan(a)]
    return {WORST: min(found), SPREAD: pstdev(found)} if len(found) > 1 else {}


def progress(
    rounds: Rounds, unseen: str | None, last: int = LAST
) -> tuple[tuple[float, float], ...]:
    """A run's way to its accuracy; see ``Measure``."""
    if not rounds:
        return ()
    main = next(iter(over_rounds(rounds, unseen).values()))
    means = [fmean(main[max(0, r - last) : r]) for r in range(1, len(main) + 1)]
    sent = accumulate(r.get("bytes_up", 0) + r.get("bytes_down", 0) for r in rounds)
    return tuple(zip(means, (n / 1e6 for n in sent), strict=True))


@dataclass(frozen=True)
class TableRow:
    """The runs of one label: accuracy per domain and average, the difference to FedAvg, costs.

    ``accuracy`` is empty where there is no run; ``state`` then says why, if that is known.
    ``paper`` is what the paper prints. With one ``unseen`` domain, that is what counts; with
    ``each`` it is the average of all of them.
    """

    label: str
    accuracy: Mapping[str, Spread]
    megabytes: float | None = None
    seconds: float | None = None
    wanted: int = 0
    """The number of seeds asked for."""
    differences: Mapping[str, Spread] = field(default_factory=dict)
    """Per column: to the baseline, paired by seed."""
    paper: Mapping[str, float] = field(default_factory=dict)
    paper_std: float | None = None
    state: str = ""
    unseen: str | None = None
    derived: Mapping[str, Spread] = field(default_factory=dict)
    """What is derived from the domains' accuracies: worst, spread, the average of the seen ones."""
    beside: Mapping[str, Spread] = field(default_factory=dict)
    method: str = ""
    """The name of the method; empty if unknown."""
    variant: bool = False
    """Whether its hyper-parameters differ from the method's defaults."""
    target: float | None = None
    """The accuracy whose cost is asked for, as a mean over seeds; None if there is none."""
    reached: tuple[Spread, Spread] | None = None
    """Rounds and MB until the target, over the seeds that reach it; None if none does."""
    seed_list: tuple[int, ...] = ()
    """The seeds of its runs, in the order of every ``Spread.values``."""

    @property
    def was_run(self) -> bool:
        return bool(self.accuracy) or self.state == DIVERGED

    @property
    def seeds(self) -> int:
        return max((s.seeds for s in self.accuracy.values()), default=0)

    @property
    def main(self) -> str:
        return self.unseen if self.unseen and self.unseen in self.accuracy else AVERAGE

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to show: an unseen domain comes first, and replaces the average."""
        if self.main == AVERAGE:
            return tuple(self.accuracy)
        seen = (d for d in self.accuracy if d not in (self.main, AVERAGE))
        return (self.main, *seen, SEEN)

    def at(self, column: str) -> Spread | None:
        return {**self.derived, **self.beside, **self.accuracy}.get(column)


@dataclass(frozen=True)
class TableCell:
    """The text of a cell; ``mark`` is ``best`` or ``second`` in its column, or empty."""

    text: str
    mark: str = ""


@dataclass(frozen=True)
class TableLine:
    """A line of a table: ours, or what the paper prints for the line above.

    If the row has no runs, there is no line above: the ``label`` says whose line it is.
    """

    cells: tuple[TableCell, ...]
    paper: bool = False
    label: str = ""


def rows(results: Sequence[Result], baseline: str = BASELINE, last: int = LAST) -> list[TableRow]:
    runs: dict[str, dict[int, Measure]] = {}
    for result in results:
        measure = Measure.of_result(result, last)
        runs.setdefault(measure.label, {})[measure.seed] = measure
    base = runs.get(baseline, {}) if len(runs) > 1 else {}
    targets = targets_of(base)
    return [
        row(label, own, base if label != baseline else {}, targets=targets)
        for label, own in runs.items()
    ]


def targets_of(base: Mapping[int, Measure]) -> dict[int, float]:
    """The accuracy that the baseline ends with, by seed."""
    return {seed: m.values[m.main] for seed, m in base.items()}


def row(
    label: str,
    runs: Mapping[int, Measure],
    base: Mapping[int, Measure],
    wanted: int = 0,
    targets: Mapping[int, float] | None = None,
    method: str = "",
    variant: bool = False,
    **more: Any,
) -> TableRow:
    """The row of a label's runs, by seed; ``base``: the runs it is compared with.

    ``targets``: by seed, the accuracy whose cost in rounds and bytes is asked for.
    ``method`` and ``variant`` are for a label without runs; otherwise the runs know them.
    """
    if not runs:
        return TableRow(label, {}, wanted=wanted, method=method, variant=variant, **more)
    measures = list(runs.values())
    first = measures[0]
    # paired: the same seed has the same clients, samples and initial weights
    paired = [s for s in runs if s in base]
    differences = {
        c: Spread.of([runs[s].values[c] - base[s].values[c] for s in paired])
        for c in first.values
        if paired and all(c in base[s].values for s in paired)
    }
    spreads = {c: Spread.of([m.values[c] for m in measures]) for c in first.values}
    derived = {c: spreads.pop(c) for c in (WORST, SPREAD, SEEN) if c in spreads}
    aimed = [(m, targets[s]) for s, m in runs.items() if targets and s in targets and m.progress]
    reached = [found for m, target in aimed if (found := m.reaches(target))]
    return TableRow(
        label,
        spreads,
        fmean(m.megabytes for m in measures),
        fmean(m.seconds for m in measures),
        wanted or len(measures),
        differences,
        unseen=first.unseen,
        derived=derived,
        target=fmean(target for _, target in aimed) if aimed else None,
        reached=(Spread.of([r for r, _ in reached]), Spread.of([mb for _, mb in reached]))
        if reached
        else None,
        beside={n: Spread.of([m.beside[n] for m in measures]) for n in first.beside},
        method=first.settings["method"],
        variant=is_variant(first.settings),
        seed_list=tuple(runs),
        **more,
    )


def paired(one: TableRow, other: TableRow, column: str) -> Spread | None:
    """The difference of two rows in a column, on the seeds that both have; None without one."""
    own, theirs = one.accuracy.get(column), other.accuracy.get(column)
    if own is None or theirs is None:
        return None
    subtracted = dict(zip(other.seed_list, theirs.values, strict=True))
    both = zip(one.seed_list, own.values, strict=True)
    found = [value - subtracted[seed] for seed, value in both if seed in subtracted]
    return Spread.of(found) if found else None


def chosen(rows: Sequence[TableRow]) -> TableRow | None:
    """The row with the best validation accuracy, of those that have all their seeds."""
    there = [r for r in rows if VALIDATION in r.beside and r.seeds == r.wanted]
    return max(there, key=lambda r: r.beside[VALIDATION].mean, default=None)


def column_title(column: str, unseen: str | None) -> str:
    """The name of a column; ``unseen``: the domain that the runs left out, or ``each``."""
    if unseen == EACH and column == AVERAGE:
        return f"unseen {AVERAGE}"
    return f"{column} (unseen)" if column == unseen else column


def baseline_name(baseline: str) -> str:
    return "FedAvg" if baseline == BASELINE else baseline


def grid(
    table: Sequence[TableRow], columns: Sequence[str] = (), baseline: str = BASELINE
) -> tuple[list[str], list[TableLine]]:
    """Header and lines of the accuracies: a row's own and, where the paper prints numbers, those.

    A row without runs has no line of its own, unless it is known why. Best and second are marked
    once all rows have been run; where there is a validation accuracy, by that alone.
    """
    there = [r for r in table if r.accuracy]
    columns = _with_derived(table, columns or next((r.columns for r in there), [AVERAGE]))
    unseen = {r.unseen for r in there}
    shared = next(iter(unseen)) if len(unseen) == 1 else None
    beside = list(dict.fromkeys(n for r in table for n in r.beside))
    base = next((r for r in table if r.label == baseline), None)
    compared = any(r.differences or printed_difference(r, base) is not None for r in table)
    partial = any(r.seeds < r.wanted for r in there)
    delta = f"Δ {baseline_name(baseline)}{', unseen' if any(unseen) else ''}"
    header = ["method", *(column_title(c, shared) for c in columns)]
    header += [delta] * compared + beside + ["seeds"] * partial
    marked = [VALIDATION] if VALIDATION in beside else [c for c in columns if c != SPREAD]
    marks = {c: _marks(table, c) for c in marked if all(r.was_run for r in table)}

    def cell(r: TableRow, column: str, absent: str = "") -> TableCell:
        return TableCell(_spread(r.at(column)) or absent, marks.get(column, {}).get(r.label, ""))

    def line(cells: Sequence[TableCell], **kind: Any) -> TableLine:
        return TableLine((*cells, *[TableCell("")] * (len(header) - len(cells))), **kind)

    lines = []
    for r in table:
        own = [TableCell(r.label + (f" ({r.state})" if r.state else ""))]
        if r.accuracy:
            own += [cell(r, c, NO_VALUE * (c not in (WORST, SPREAD))) for c in columns]
            own += [TableCell(signed(r.differences.get(r.main)))] * compared
            own += [cell(r, n) for n in beside]
            own += [TableCell(f"{r.seeds}/{r.wanted}")] * partial
        empty = not (r.accuracy or r.state)
        if not empty:
            lines.append(line(own))
        if r.paper:
            name = f"{r.label}: paper ({NOT_RUN})" if empty else "paper (ours − paper)"
            printed = [name, *(_printed(r, c) for c in columns)]
            delta_paper = printed_difference(r, base)
            printed += ["" if delta_paper is None else sign(delta_paper, 2)] * compared
            label = r.label if empty else ""
            lines.append(line([*map(TableCell, printed)], paper=True, label=label))
    return header, lines


def printed_grid(
    table: Sequence[TableRow], columns: Sequence[str], baseline: str
) -> tuple[list[str], list[TableLine]]:
    """A grid of what the paper prints, for rows without runs."""
    header, lines = grid(table, columns, baseline)
    return header, [TableLine((TableCell(p.label), *p.cells[1:])) for p in lines]


def cost_grid(
    table: Sequence[TableRow], baseline: str = BASELINE
) -> tuple[list[str], list[TableLine]]:
    """Header and lines of the costs: traffic, time, and how much of each the target takes."""
    there = [r for r in table if r.accuracy]
    aimed = [r for r in there if r.target is not None]
    header = ["method", "MB", "s"]
    if aimed:
        named = next((r for r in aimed if r.label == baseline), aimed[0])
        header += [f"{what} to {named.target:.1f} %" for what in ("rounds", "MB")]
    lines = []
    for r in there:
        texts = [r.label, f"{r.megabytes:.0f}", f"{r.seconds:.0f}"]
        if aimed:
            texts += _price(r)
        lines.append(TableLine(tuple(map(TableCell, texts))))
    return header, lines


def _price(r: TableRow) -> tuple[str, str]:
    """Rounds and MB until the target; in brackets the seeds that reach it, if not all do."""
    if r.target is None:
        return "", ""
    if r.reached is None:
        return "not reached", ""
    rounds, megabytes = r.reached
    some = f" ({rounds.seeds} of {r.seeds} seeds)" if rounds.seeds < r.seeds else ""
    std = f" ± {rounds.std:.0f}" if rounds.std is not None else ""
    return f"{rounds.mean:.0f}{std}{some}", f"{megabytes.mean:.0f}"


def _with_derived(table: Sequence[TableRow], columns: Sequence[str]) -> list[str]:
    """The columns, with the worst domain and the spread next to the average."""
    found = [c for c in (WORST, SPREAD) if any(c in r.derived or _paper(r, c) for r in table)]
    at = list(columns).index(AVERAGE) + 1 if AVERAGE in columns else len(columns)
    return [*columns[:at], *found, *columns[at:]]


def _paper(r: TableRow, column: str) -> float | None:
    """What the paper prints in a column, or what its domains give."""
    return {**over_domains(r.paper), **r.paper}.get(column)


def _printed(r: TableRow, column: str) -> str:
    """What the paper prints in a column, and ours minus that."""
    value, own = _paper(r, column), r.at(column)
    if value is None:
        return ""
    text = "NaN" if math.isnan(value) else f"{value:.2f}"
    if column == AVERAGE and r.paper_std is not None:
        text += f" ± {r.paper_std:.2f}"
    if own is not None and not math.isnan(value):
        text += f" ({sign(own.mean - value)})"
    return text


def printed_difference(r: TableRow, base: TableRow | None) -> float | None:
    """The average that the paper prints for a row minus that for the baseline."""
    theirs = base.paper.get(AVERAGE) if base is not None and base is not r else None
    own = r.paper.get(AVERAGE, math.nan)
    return None if theirs is None or math.isnan(own - theirs) else own - theirs


def comparable(table: Sequence[TableRow]) -> list[TableRow]:
    """The rows that may be ranked: those with all the seeds, and the same unseen domain if any.

    Other seeds are other clients, and a domain is harder if no client has it.
    """
    there = [r for r in table if r.accuracy]
    most = max(there, key=lambda r: r.seeds, default=None)
    return [
        r for r in there
        if most and r.unseen == most.unseen and set(r.seed_list) == set(most.seed_list)
    ]  # fmt: skip


def _marks(table: Sequence[TableRow], column: str) -> dict[str, str]:
    """The best and the second in a column, as printed: equal texts are equally good."""
    found = {r.label: r.at(column) for r in comparable(table)}
    known = {label: s.mean for label, s in found.items() if s is not None}
    means = {label: round(mean, 1) for label, mean in known.items() if not math.isnan(mean)}
    if len(means) < 2:
        return {}
    names = dict(zip(sorted(set(means.values()), reverse=True), ("best", "second"), strict=False))
    return {label: names[v] for label, v in means.items() if v in names}


def _spread(value: Spread | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:.1f}" + (f" ± {value.std:.1f}" if value.std is not None else "")


def signed(value: Spread | None) -> str:
    """A difference with its standard error and interval; empty if there is none."""
    if value is None or value.half is None:
        return "" if value is None else sign(value.mean)
    noise = ", noise" if value.noise else ""
    return f"{sign(value.mean)} ± {value.error:.1f} (±{value.half:.1f}{noise})"


def sign(value: float, digits: int = 1) -> str:
    """A difference as text, never -0.0."""
    text = f"{value:+.{digits}f}"
    return text if float(text) else f"{0:+.{digits}f}"


# ---- captions -----------------------------------------------------------------------------------


def caption(results: Sequence[Result], baseline: str = BASELINE, last: int = LAST) -> str:
    """What the numbers are, in one paragraph: data, clients, seeds, precision, BatchNorm."""
    measures = [Measure.of_result(r, last) for r in results]
    return " ".join(describe(measures, baseline=baseline))


def describe(
    measures: Sequence[Measure],
    what: str = "Test accuracy",
    baseline: str = BASELINE,
    target: float | None = None,
) -> tuple[str, str]:
    """The caption of a table of these measures, and the note below it with all the rest.

    Rows that differ from most are named. ``target``: the accuracy that was asked for; else it is
    the baseline's.
    """
    first, summary = measures[0].settings, measures[0].summary
    seeds = sorted({m.seed for m in measures})
    labels = {m.label for m in measures}
    fewest = min(Counter(label for label, _ in {(m.label, m.seed) for m in measures}).values())
    sizes = {client_sizes(m.settings["clients"], m.settings["samples"]) for m in measures}
    clients = sizes.pop() if len(sizes) == 1 else "differ between runs"

    def one(name: str) -> str:
        found = list(dict.fromkeys(str(m.settings[name]) for m in measures))
        return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"

    every = [training_options(m.settings) for m in measures]
    options = [option for option in every[0] if all(option in used for used in every)]
    many = f"; mean ± standard deviation over {len(seeds)} seeds" * (len(seeds) > 1)
    head = f"{what} in %{_on_unseen(measures)}, {selection(measures[0].last)}{many}."
    parts = []
    if any(WORST in m.values for m in measures):
        parts.append("worst: the lowest domain; spread: standard deviation over the domains")
    if len(labels) > 1:
        parts.append("bold: best, underlined: second, once all rows have been run")
    if len(seeds) > 1 and len(labels) > 1:
        parts.append(
            f"Δ: paired by seed, ± standard error (± half the {CONFIDENCE:.0%} interval; noise: "
            "the interval contains 0)"
        )
    parts += [
        f"task {shown_task(first['task'])} ({summary.get('data', '?').rstrip('.')})",
        f"protocol {one('protocol')}, {', '.join([_rounds(one('rounds')), *options])}, "
        f"clients × samples: {clients}{_special(measures)}",
        f"seeds {', '.join(map(str, seeds))}{seed_warning(len(seeds), fewest)}",
        f"{one('precision')} on {one('device')}",
        _hyper_parameters(measures),
        *filter(None, [_tested(measures)]),
        f"BatchNorm: {_common(measures, 'batchnorm')}",
        _averaged(measures),
    ]
    note = "; ".join(parts)
    runs = "for all runs of a row" if first.get("leave_out") == EACH else "per run"
    return head, (
        f"{note[0].upper()}{note[1:]}. MB: total traffic, up and down; s: seconds {runs} "
        f"(concurrent runs slow each other down){_aim(labels, baseline, target, measures[0].last)}."
    )


def _aim(labels: Collection[str], baseline: str, target: float | None, last: int) -> str:
    """Which accuracy the costs are for, and when it counts as reached."""
    aim = f"the accuracy of {baseline_name(baseline)} on the same seed"
    if target is not None:
        aim = f"{target:g} %"
    elif baseline not in labels or len(labels) < 2:
        return ""
    reached = "a round" if last == 1 else f"the mean of the last {last} rounds"
    return f"; rounds and MB to {aim}: until {reached} reaches it"


def _shown(value: Any) -> str:
    """A hyper-parameter's value; of a path, the last part alone."""
    return f"{value:g}" if isinstance(value, float) else str(short_option(value))


def _hyper_parameters(measures: Sequence[Measure]) -> str:
    """Which methods have other hyper-parameters than their defaults, unless their label says it."""
    found: dict[str, str] = {}
    named = ""
    for m in measures:
        changed = changed_options(m.settings).items()
        words = [f"{k}={_shown(v)}" for k, v in changed]
        if any(word in m.label for word in words):
            named = " but for what a row's name says"
        if words := [word for word in words if word not in m.label]:
            found[m.label] = f"{m.label}: {', '.join(words)}"
    given = f" ({'; '.join(found.values())})" if found else ""
    return f"hyper-parameters: each method's defaults{named}{given}"


def _on_unseen(measures: Sequence[Measure]) -> str:
    """Which of the numbers belong to a domain that no client trained on."""
    if all(m.settings.get("leave_out") == EACH for m in measures):
        return " on the column's domain by a model trained without it"
    unseen = {m.unseen for m in measures}
    if unseen == {None}:
        return ""
    which = unseen.pop() if len(unseen) == 1 else "the row's unseen domain"
    return f" (Δ: on {which}, which no client trained on; {SEEN}: on the others)"


def _averaged(measures: Sequence[Measure]) -> str:
    if all(m.summary.get("weights") == NO_WEIGHTS for m in measures):
        return "no model is averaged"
    return f"weights of the average: {_common(measures, 'weights', WEIGHTS)}"


def _tested(measures: Sequence[Measure]) -> str:
    if all(m.summary.get("evaluated", "global") == "global" for m in measures):
        return ""
    return f"tested: {_common(measures, 'evaluated', TESTED)}"


def _common(measures: Sequence[Measure], key: str, words: Mapping[str, str] | None = None) -> str:
    """What the runs' summaries say under a key; rows that differ from most are named."""
    said: dict[str, list[str]] = {}
    for m in measures:
        # runs of earlier versions do not record their weights
        text = m.summary.get(key, f"{m.settings.get('average')} unless the method has its own")
        rows = said.setdefault((words or {}).get(text, text), [])
        rows += [m.label] * (m.label not in rows)
    most, *others = sorted(said, key=lambda words: -len(said[words]))
    named = "; ".join(f"{', '.join(said[words])}: {words}" for words in others)
    return most + (f" ({named})" if named else "")


def client_sizes(clients: Mapping[str, int], samples: Mapping[str, float]) -> str:
    """Clients × samples per domain: ``mnist 6 × 600``, or ``webcam 1 × 20 %``."""

    def amount(n: float) -> str:
        return f"{100 * n:g} %" if isinstance(n, float) else f"{n}"

    return ", ".join(f"{d} {n} × {amount(samples.get(d, 0))}" for d, n in clients.items() if n)


def seed_warning(seeds: int, fewest: int | None = None) -> str:
    """A warning if there are few seeds, or if the row with the ``fewest`` has few."""
    if seeds >= FEW_SEEDS:
        if fewest is None or fewest >= FEW_SEEDS:
            return ""
        return f" (some rows have fewer than {FEW_SEEDS}: their intervals are wide and rough)"
    if seeds == 1:
        return " (one seed: differences may be noise)"
    return f" (fewer than {FEW_SEEDS} seeds: intervals are wide and rough)"


def _rounds(n: str) -> str:
    return "1 round" if n == "1" else f"{n} rounds"


def _special(measures: Sequence[Measure]) -> str:
    """What is special about all runs, and in which of these things they differ."""
    validated = {str(m.summary.get("validated")) for m in measures}  # a seed may decide
    every = [_specials(m, len(validated) == 1) for m in measures]
    text, differing = "", []
    for name in dict.fromkeys(name for own in every for name in own):
        said = {own.get(name, "") for own in every}
        if len(said) == 1:
            text += f", {said.pop()}"
        else:
            differing.append(name)
    return text + f"; the runs differ in {' and '.join(differing)}" * bool(differing)


def _specials(m: Measure, counted: bool) -> dict[str, str]:
    """What is special about a run, by what it is; ``counted``: with its validation images."""
    settings, summary = m.settings, m.summary
    words = {}
    if len(names := model_names(settings["model"])) > 1:
        words["models"] = f"with different models ({' and '.join(names)})"
    if (start := summary.get("pretrained")) is not None:
        if start["digest"]:
            file = Path(settings.get("weights") or "a file").name
            words["initial weights"] = f"weights from {file} ({start['digest']})"
        if start["train"] == "head":
            words["what is trained"] = "backbone frozen"
    if (alpha := settings.get("dirichlet")) is not None:
        words["label skew"] = f"label skew Dirichlet({alpha:g})"
    if (beta := settings.get("quantity")) is not None:
        words["quantity skew"] = f"sizes Dirichlet({beta:g})"
    if settings.get("repair"):
        words["repair"] = "missing classes repaired"
    if (attack := settings.get("attack")) is not None:
        words["attacks"] = f"{100 * settings['attackers']:g} % of the clients lie ({attack})"
    if (robust := settings.get("robust", "none")) != "none":
        words["robust aggregation"] = f"robust aggregation ({robust})"
    if (bounds := settings.get("bounds", "refuse")) != "refuse":
        words["bounds"] = {"clip": "replies clipped to their bounds", "off": "no bounds"}[bounds]
    epsilons = {"prototypes": "proto_epsilon", "updates": "update_epsilon"}
    budgets = [f"{p} ε {settings[e]:g}" for p, e in epsilons.items() if settings.get(e) is not None]
    if budgets:
        words["privacy budgets"] = f"differential privacy ({', '.join(budgets)})"
    if (patience := settings.get("patience")) is not None:
        words["patience"] = (
            f"stopped early after {patience} rounds without a better validation average"
        )
    if (validate := settings.get("validate")) is not None:
        found = summary.get("validated", {}) if counted else {}
        counts = ", ".join(f"{d} {n}" for d, n in found.items())
        given = {UNUSED: "training images that no client holds", VAL_FOLDERS: "images in val/"}
        which = given.get(validate)
        if which is None:
            which = f"{100 * validate:g} % of each client's images, held out of its training"
        words["validation images"] = f"validated on {which}{f' ({counts})' * bool(counts)}"
    short = [
        f"{client['client']} only {client['samples']}: what was left"
        for client in summary.get("clients", ())
        if "what was left" in client.get("note", "")
    ]
    if short:
        words["clients that have only what was left"] = ", ".join(short)
    if (left_out := settings.get("leave_out")) == EACH:
        tested = ", ".join(f"{d} {n}" for d, n in summary.get("tested", {}).items())
        words["the unseen domain"] = f"without those of the unseen domain; test images: {tested}"
    elif left_out is not None:
        tested = summary.get("tested", {}).get(left_out, "?")
        words["the unseen domain"] = (
            f"{left_out} left out of training and tested on {tested} images"
        )
    return words
