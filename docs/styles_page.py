"""docs/styles.md, from results/styles and results/styles-tune: written by ``docs/generate.py``.

Every number comes from the packed runs. What they mean is written by hand, in
``results/styles/notes.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from protofed.report.figures import differences, gains
from protofed.runs.pool import PACKED
from protofed.studies.definition import TUNED
from protofed.studies.folder import StudyFolder, TaskTable
from protofed.studies.tables import AVERAGE, Spread, TableRow, paired, signed

OURS, BASE = "ProtoStyle", "I²PFL"
JITTER = "color jitter"
CONTROLS = {
    JITTER: "Color jitter alone (FedAvg with it)",
    "color jitter, uniform": "The same with a uniform average",
    "FedAvg, uniform": "FedAvg with a uniform average",
    "resized crop": "A stronger augmentation without color (FedAvg with resized crops)",
    "GroupNorm": "GroupNorm alone (FedAvg with it)",
}
JITTERED = f", {JITTER}"
"""Ends the labels of rows that have a method and the control."""
UNBALANCED = f"{OURS}, by samples"
ASKED = {"office_caltech": 8.0, "pacs": 4.0, "digits": 2.0}
"""Points above I²PFL that were asked for before the runs, by task."""
WORSE = 2.0
"""So many points, and its standard error, may a domain be worse."""
NOT_RUN = "not run"


@dataclass(frozen=True)
class Check:
    """Something that was asked for before the runs; ``met`` is None as long as runs are missing."""

    asked: str
    found: str
    met: bool | None

    @property
    def verdict(self) -> str:
        return "not yet known" if self.met is None else "met" if self.met else "**not met**"


def checks(tables: Mapping[str, TaskTable]) -> list[Check]:
    """What the method had to show, as it came out; ``tables`` by task."""
    found = [_gain(tables.get(task), task, points) for task, points in ASKED.items()]
    found.append(_domains({task: tables[task] for task in ASKED if task in tables}))
    own = {task: tables[task] for task in ASKED if task in tables}
    found.append(_above_rivals(own))
    return found + [_above_rivals(own, TUNED)] * bool(rivals(own, OURS + TUNED, tuned=True))


def _gain(table: TaskTable | None, task: str, points: float) -> Check:
    asked = f"{task}: at least +{points:g} over {BASE}, with an interval without 0"
    value = gains(table).get(OURS) if table is not None else None
    if value is None:
        return Check(asked, NOT_RUN, None)
    met = None if value.half is None else value.mean >= points and not value.noise
    return Check(asked, signed(value), met)


def by_domain(table: TaskTable) -> dict[str, Spread]:
    """Ours minus I²PFL in each domain."""
    rows = {row.label: row for row in table.rows}
    ours, base = rows.get(OURS), rows.get(BASE)
    if ours is None or base is None:
        return {}
    each = {c: paired(ours, base, c) for c in ours.accuracy if c != AVERAGE}
    return {domain: value for domain, value in each.items() if value is not None}


def _domains(tables: Mapping[str, TaskTable]) -> Check:
    asked = f"no domain worse than with {BASE} by more than {WORSE:g} points plus standard error"
    every = {f"{d} ({t})": s for t, table in tables.items() for d, s in by_domain(table).items()}
    if not every:
        return Check(asked, NOT_RUN, None)
    below = {d: s for d, s in every.items() if s.mean < -(WORSE + (s.error or 0.0))}
    least = min(every, key=lambda d: every[d].mean)
    words = "; ".join(f"{d} {signed(s)}" for d, s in below.items())
    whole = all(by_domain(tables[t]) if t in tables else False for t in ASKED)
    met = False if below else True if whole else None
    return Check(asked, words or f"the least is {least}, {signed(every[least])}", met)


@dataclass(frozen=True)
class Rival:
    """Ours minus another row on the average over the tasks that both have."""

    label: str
    mean: float
    by_task: Mapping[str, Spread]


def rivals(tables: Mapping[str, TaskTable], ours: str = OURS, tuned: bool = False) -> list[Rival]:
    """Of every other row, or of those that are tuned, the closest first."""
    found: dict[str, dict[str, Spread]] = {}
    for task, table in tables.items():
        rows = {row.label: row for row in table.rows if row.accuracy}
        for label, row in rows.items():
            own = rows.get(ours)
            if own is None or label == ours or label.endswith(TUNED) != tuned:
                continue
            if label.endswith(JITTERED) or label == UNBALANCED:  # see ``variants``
                continue
            if (value := paired(own, row, AVERAGE)) is not None:
                found.setdefault(label, {})[task] = value
    made = [Rival(n, fmean(s.mean for s in own.values()), own) for n, own in found.items()]
    return sorted(made, key=lambda rival: rival.mean)


def _above_rivals(tables: Mapping[str, TaskTable], tuned: str = "") -> Check:
    asked = "above every rival and control on the average over the tasks that both have"
    asked += ", all of them tuned" * bool(tuned)
    every = rivals(tables, OURS + tuned, bool(tuned))
    if not every:
        return Check(asked, NOT_RUN, None)
    above = [rival.label for rival in every if rival.mean <= 0]
    closest = f"closest: {every[0].label}, {OURS} {every[0].mean:+.1f} above it"
    compared = [
        r for t in tables.values() for r in t.rows if r.label.endswith(TUNED) == bool(tuned)
    ]
    whole = all(row.was_run for row in compared) and (bool(tuned) or set(tables) == set(ASKED))
    met = False if above else True if whole else None
    return Check(asked, f"not above {', '.join(above)}" if above else closest, met)


def controls(table: TaskTable) -> Iterator[str]:
    """What the controls explain: said before anything else."""
    rows = {row.label: row for row in table.rows if row.accuracy}
    for label, name in CONTROLS.items():
        if label not in rows or OURS not in rows or BASE not in rows:
            continue
        gain, gap = (
            paired(rows[label], rows[BASE], AVERAGE),
            paired(rows[OURS], rows[label], AVERAGE),
        )
        if gain is None or gap is None:
            continue
        verdict = f"{OURS} is {signed(gap)} above it"
        if gap.noise or gap.mean < 0:
            verdict = f"**it explains {OURS}'s gain**: {OURS} minus it is {signed(gap)}"
        if "FedAvg" in rows and (own := paired(rows[label], rows["FedAvg"], AVERAGE)) is not None:
            whole = own.mean + gap.mean  # of ours, on the seeds that the control has
            share = own.mean / whole if whole else 0.0
            verdict += f". Of {OURS}'s {whole:+.1f} against FedAvg, it has {100 * share:.0f} %"
        on = _on(table, rows[label])
        yield f"- {name} is {signed(gain)} against {BASE} on {on}; {verdict}."


def _on(table: TaskTable, row: TableRow) -> str:
    """The task, and how many seeds a row has of it if others have more."""
    most = max(len(other.seed_list) for other in table.rows)
    own = len(row.seed_list)
    return table.task if own == most else f"{table.task} ({own} of {most} seeds)"


def variants(table: TaskTable) -> Iterator[str]:
    """What ours gains without its average, and where every row has color jitter."""
    rows = {row.label: row for row in table.rows if row.accuracy}
    if UNBALANCED in rows and BASE in rows:
        gain = paired(rows[UNBALANCED], rows[BASE], AVERAGE)
        more = paired(rows[OURS], rows[UNBALANCED], AVERAGE) if OURS in rows else None
        if gain is not None:
            words = "Averaged by samples, as most rows are"
            also = f"; its own average gives {signed(more)}" if more is not None else ""
            on = _on(table, rows[UNBALANCED])
            yield f"- {words}, {OURS} is {signed(gain)} against {BASE} on {on}{also}."
    others = {BASE: rows.get(BASE + JITTERED), "FedAvg": rows.get(JITTER)}
    if (own := rows.get(OURS + JITTERED)) is None:
        return
    pairs = {n: paired(own, row, AVERAGE) for n, row in others.items() if row is not None}
    words = " and ".join(f"{signed(v)} against {n}" for n, v in pairs.items() if v is not None)
    if words:
        yield f"- If all have color jitter, {OURS} is {words} on {_on(table, own)}."


class StylesPage:
    """The page, if results/styles is there."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.folder = StudyFolder.open(results / "styles")
        self.tables = {table.task: table for table in self.folder.tables()}

    @staticmethod
    def is_there(results: Path) -> bool:
        return (results / "styles" / PACKED).is_file()

    def text(self) -> str:
        there = [table for table in self.tables.values() if table.runs]
        figure = differences(there)
        notes = self.results / "styles" / "notes.md"
        parts = [
            "<!-- Generated by docs/generate.py from results/styles. Edit results/styles/notes.md "
            "instead. -->",
            f"# {self.folder.study.title}",
            "How much is true of the gains that styles bring? All methods run under one "
            f"protocol with the same seeds, and every number is a difference to {BASE} on the same "
            "seed, ± standard error (± half the 95 % interval; noise: the interval contains 0). "
            "[ProtoStyle](methods/protostyle.md), this package's own, was "
            "[chosen on validation images](../benchmarks/styles/README.md) of other seeds and "
            "frozen before.",
            *self._controls(),
            "## What it had to show",
            _table(
                ["asked for before the runs", "found", ""],
                [[c.asked, c.found, c.verdict] for c in checks(self.tables)],
                left=3,
            ),
            "## Every method",
            f"![{' '.join(panel.alt for panel in figure.panels)}]"
            "(../results/styles/differences.png)",
            figure.caption,
            *(text for table in there for text in self._gains(table)),
            "## Domain by domain",
            *self._domains(),
            "## Against each rival",
            *self._rivals(),
            *self._tuning(),
            *([notes.read_text("utf-8").strip()] if notes.is_file() else []),
            "[results/styles](../results/styles/table.md) has every domain, the costs, and how it "
            "was run.",
        ]
        return "\n\n".join(parts) + "\n"

    def _controls(self) -> list[str]:
        tables = self.tables.values()
        lines = [line for t in tables for line in (*controls(t), *variants(t))]
        return ["\n".join(["Controls first:", "", *lines])] if lines else []

    def _gains(self, table: TaskTable) -> list[str]:
        found = gains(table)
        tuned = any(label.endswith(TUNED) for label in found)
        names = list(dict.fromkeys(label.removesuffix(TUNED) for label in found))
        lines = []
        for name in names:
            cells = []
            for value in (found.get(name), found.get(name + TUNED))[: 1 + tuned]:
                cells += [signed(value), "" if value is None else str(value.seeds)]
            lines.append([name, *cells])
        header = ["row", f"− {BASE}", "seeds", f"tuned, − {BASE} tuned", "seeds"][: 3 + 2 * tuned]
        return [f"### {table.task}", _table(header, lines)]

    def _domains(self) -> list[str]:
        lines = [
            [task, domain, signed(value)]
            for task, table in self.tables.items()
            for domain, value in by_domain(table).items()
        ]
        return [_table(["task", "domain", f"{OURS} − {BASE}"], lines, left=2)]

    def _rivals(self) -> list[str]:
        own = {task: table for task, table in self.tables.items() if task in ASKED}
        said = [f"{OURS} minus the row, averaged over the tasks that both have; the closest first."]
        for ours, tuned, title in (
            (OURS, False, "default settings"),
            (OURS + TUNED, True, "both tuned"),
        ):
            found = rivals(own, ours, tuned)
            if found:
                header = [title, "mean over tasks", *own]
                lines = [
                    [r.label.removesuffix(TUNED), f"{r.mean:+.1f}"]
                    + [signed(r.by_task.get(task)) for task in own]
                    for r in found
                ]
                said.append(_table(header, lines))
        return said

    def _tuning(self) -> list[str]:
        path = self.results / "styles-tune"
        if not (path / PACKED).is_file():
            return []
        folder = StudyFolder.open(path)
        notes = [n for t in folder.tables() for n in t.notes if n.startswith("Chosen by")]
        seeds = ", ".join(map(str, folder.study.seeds))
        return [
            "## What tuning chose",
            " ".join([*folder.study.notes, f"Seeds: {seeds}.", *dict.fromkeys(notes)])
            + " [results/styles-tune](../results/styles-tune/table.md) has every point.",
        ]


def _table(header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    rows = [header, ["---"] * left + ["---:"] * (len(header) - left), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
