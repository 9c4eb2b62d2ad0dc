"""A study's folder: its definition, and the tables and figures made from the runs in its pool.

    study.toml               the study as it was run, with what the command line changed
    table.md .csv .tex       its tables
    *.png, *.pdf             its figures
    runs.jsonl.gz            only in a packed study: its runs (see ``protofed.runs.pool``)

The runs themselves are in the pool. Tables can be made where neither images nor models are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from statistics import fmean

from protofed.config import EACH
from protofed.errors import ProtofedError
from protofed.files import write_atomic
from protofed.runs.pool import PACKED, Pool, StoredRun
from protofed.runs.records import VALIDATION, Records, joined
from protofed.runs.result import Result
from protofed.studies import render, tables
from protofed.studies.definition import TUNE, Line, Study, StudyTask, load
from protofed.studies.effects import Effects, effect_caption, effect_grid, effects
from protofed.studies.history import RunHistory, join_left_out
from protofed.studies.origin import Origin
from protofed.studies.plan import AVERAGE, PlannedRun, Selection, columns, plan, study_tasks
from protofed.studies.tables import Measure, Spread, TableLine, TableRow

FORMATS = {"markdown": "md", "csv": "csv", "latex": "tex"}
"""The formats of the tables that are written, and the endings of their files."""


UNCHOSEN = (
    "The sweep shows test accuracies and chooses no value: a choice by them would have seen the "
    "test images (--validate sets others aside)."
)


@dataclass(frozen=True)
class TaskTable:
    """The table of one task."""

    task: str
    columns: tuple[str, ...]
    rows: list[TableRow]
    baseline: str
    head: str
    """The caption: what the numbers are, in two lines."""
    details: str
    """All the rest that a reader of the numbers may ask, in one paragraph."""
    notes: tuple[str, ...]
    effects: Sequence[Effects] = ()
    """Those of a sweep over parameters with two values each."""

    def grid(self) -> tuple[list[str], list[TableLine]]:
        return tables.grid(self.rows, self.columns, self.baseline)

    def costs(self) -> tuple[list[str], list[TableLine]]:
        return tables.cost_grid(self.rows, self.baseline)

    def beside_paper(self) -> dict[str, tuple[Spread, float]]:
        """By row: our difference to the baseline on average, and the paper's, if both are known."""
        base = next((r for r in self.rows if r.label == self.baseline), None)
        both = (
            (r, r.differences.get(AVERAGE), tables.printed_difference(r, base)) for r in self.rows
        )
        return {r.label: (ours, paper) for r, ours, paper in both if ours and paper is not None}

    def effect_grid(self) -> tuple[list[str], list[TableLine]]:
        return effect_grid(self.effects)

    @property
    def effect_caption(self) -> str:
        return effect_caption(self.effects)

    @property
    def caption(self) -> str:
        return f"{self.head} {self.details}".strip()

    @property
    def runs(self) -> int:
        return sum(row.seeds for row in self.rows)


@dataclass(frozen=True)
class StudyFolder:
    """A study with the pool its runs are in."""

    path: Path
    study: Study
    pool: Pool

    @classmethod
    def open(cls, path: Path) -> StudyFolder:
        if not (path / "study.toml").is_file():
            near = sorted(f.parent for f in path.parent.glob(f"{path.name}-*/study.toml"))
            hint = f"there is {near[0]}" if near else "run one: protofed study run NAME"
            raise ProtofedError(f"'{path}' holds no study", hint)
        study = load(str(path / "study.toml"))
        pool = path if (path / PACKED).is_file() else path / study.raw.get("pool", "..")
        return cls(path, study, Pool(Path(os.path.normpath(pool))))

    @classmethod
    def create(cls, path: Path, study: Study, pool: Path) -> StudyFolder:
        """Write the definition of a study whose runs are in the pool.

        Seeds that the folder already has are kept; another study's tables are never replaced.
        """
        for name, what in ((PACKED, "holds a packed study"), ("config.toml", "is a run's folder")):
            if (path / name).is_file():
                raise ProtofedError(f"'{path}' {what}", "choose another --out")
        if not (path / "study.toml").is_file() and path.is_dir() and any(path.iterdir()):
            raise ProtofedError(f"'{path}' holds files and no study", "choose another --out")
        if (path / "study.toml").is_file():
            there = load(str(path / "study.toml"))
            why = "other settings" if there.hash != study.hash else _other_images(there, study)
            if why:
                raise ProtofedError(
                    f"'{path}' holds another study: '{there.title}', with {why}",
                    "choose another --out, or delete that folder; its runs stay in the pool",
                )
            study = study.with_seeds(
                {
                    name: sorted({*there.seeds_on(there.tasks[name]), *study.seeds_on(task)})
                    for name, task in study.tasks.items()
                }
            )
            study = study.with_images({**there.images, **study.images})
        study = study.with_methods([task.task for task in study_tasks(study)])
        study = replace(study, raw={**study.raw, "pool": os.path.relpath(pool, path)})
        write_atomic(path / "study.toml", study.toml())
        return cls(path, study, Pool(pool))

    @cached_property
    def runs(self) -> dict[PlannedRun, StoredRun | None]:
        planned = plan(self.study)
        asked = [(run.config, self.study.digests(run.config.task)) for run in planned]
        return dict(zip(planned, self.pool.select(asked), strict=True))

    def _of_line(self, task: str, label: str) -> dict[PlannedRun, StoredRun | None]:
        wanted = (task, label)
        return {run: s for run, s in self.runs.items() if (run.task, run.line.label) == wanted}

    # ---- tables --------------------------------------------------------------------------------

    def tables(self, tasks: Sequence[str] = ()) -> list[TaskTable]:
        """The tables of the study's tasks from what is in the pool by now.

        Those of a study that tunes are of validation accuracies; a second one for each task has the
        test accuracy of what they choose.
        """
        wanted = {run.task for run in plan(self.study, Selection(tasks=tuple(tasks)))}
        tested = self.test_tables()
        if self.study.kind != TUNE:
            return [table for task, table in tested.items() if task in wanted]
        found = []
        for task in study_tasks(self.study):
            if task.name in wanted:
                found.append(self._table(task, self.study.lines_on(task), validated=True))
            if task.name in wanted and (test := tested.get(task.name)):
                found.append(replace(test, task=f"{task.name}, test accuracy of the choice"))
        return found

    def test_tables(self) -> dict[str, TaskTable]:
        """By task, the tables of test accuracies: of a study that tunes, only of its choice."""
        found = {}
        for task in study_tasks(self.study):
            tunes = self.study.kind == TUNE
            lines = self.choices(task.name) if tunes else self.study.lines_on(task)
            if lines:
                found[task.name] = self._table(task, lines)
        return found

    def chosen(self, task: str = "") -> Line | None:
        """What a study that tunes chooses for its first row on a task (the first, unless named)."""
        return next(iter(self.choices(task)), None)

    def choices(self, task: str = "") -> list[Line]:
        """What a study that tunes chooses on a task (the first, unless named), for each row.

        That is the line with the best validation accuracy, among those that have all seeds.
        """
        asked = next((t for t in study_tasks(self.study) if task in ("", t.name)), None)
        if self.study.kind != TUNE or asked is None:
            return []
        best: dict[str, tuple[float, Line]] = {}
        for line in self.study.lines_on(asked):
            runs = [m.on_validation() for m in self._measures(asked.name, line.label).values()]
            if len(runs) == len(self.study.seeds_on(asked)):
                mean = fmean(run.accuracy[AVERAGE] for run in runs)
                known = best.setdefault(line.row.label, (mean, line))
                if mean > known[0]:
                    best[line.row.label] = (mean, line)
        return [line for _, line in best.values()]

    def chosen_runs(self) -> list[Path]:
        """The folders of the runs that a study that tunes chooses."""
        labels = {t.name: {line.label for line in self.choices(t.name)}
                  for t in study_tasks(self.study)}  # fmt: skip
        found = [s for run, s in self.runs.items() if run.line.label in labels[run.task]]
        return [run.folder.path for run in found if run is not None and run.folder is not None]

    def results(self) -> list[Result]:
        """The runs that are there, without their models."""
        return [stored.result() for stored in self.runs.values() if stored is not None]

    def __repr__(self) -> str:
        there = sum(stored is not None for stored in self.runs.values())
        return f"<{self.path}: {self.study.title}; {there} of {len(self.runs)} runs>"

    def __str__(self) -> str:
        return to_text(self.study, self.tables(), "markdown")

    def _repr_html_(self) -> str:
        return to_text(self.study, self.tables(), "html")

    def _table(self, task: StudyTask, lines: Sequence[Line], validated: bool = False) -> TaskTable:
        """The table of some lines; ``validated``: of their accuracies on validation images."""
        study = self.study
        found = {line.label: self._measures(task.name, line.label) for line in lines}
        if validated:
            found = {
                label: {seed: m.on_validation() for seed, m in runs.items()}
                for label, runs in found.items()
            }
        base = study.baseline or ""
        several = sum(map(bool, found.values())) > 1
        aims = tables.targets_of(found.get(base, {})) if several else {}
        if study.target is not None:
            aims = dict.fromkeys(study.seeds_on(task), study.target)
        printed = study.printed.get(task.name, {})
        if validated or "on" in study.override:  # a paper prints test accuracies, on its own tasks
            printed = {}
        rows = []
        for line in lines:
            paper = printed.get(line.label)
            rows.append(
                tables.row(
                    line.label,
                    found[line.label],
                    found.get(base, {}) if line.label != base else {},
                    len(study.seeds_on(task)),
                    aims,
                    paper=paper.values if paper else {},
                    paper_std=paper.std if paper else None,
                    state=line.row.missing or self._diverged(task.name, line.label),
                )
            )
        shown = columns(study, task)
        measured = dict.fromkeys(c for row in rows for c in row.columns)
        if measured and set(measured) != set(shown):
            shown = tuple(measured)
        every = [
            replace(m, summary={**m.summary, "method": label})
            for label, runs in found.items()
            for m in runs.values()
        ]
        stored = self._stored(task.name, found)
        head, details = "No run is there yet.", ""
        if every:
            what = "Validation accuracy" if validated else "Test accuracy"
            head, details = tables.describe(every, what, base, study.target)
            details += f" {Origin.of(stored)}"
        notes = (*study.notes, *task.notes) if "on" not in study.override else ()
        absent = [r.label for r in rows if not r.was_run] if every else []
        if absent:
            text = f"{len(absent)} of {len(rows)} rows were not run: {'; '.join(absent)}."
            notes = (*notes, text)
        choices = self._choices(lines, rows) if study.kind != TUNE else self._choice(task)
        left_out = (f"A run of the pool was left out: {text}." for text in self.pool.damaged)
        notes = (*notes, *_mixed(stored), *self._equal(task.name), *choices, *left_out)
        found_effects = effects(study, rows)
        return TaskTable(
            task.name, shown, rows, base or "FedAvg", head, details, notes, found_effects
        )

    def _measures(self, task: str, label: str) -> dict[int, Measure]:
        """What the runs of a line gave, by seed; a seed counts when all of its runs are there."""
        by_seed: dict[int, dict[PlannedRun, StoredRun | None]] = {}
        for run, stored in self._of_line(task, label).items():
            by_seed.setdefault(run.seed, {})[run] = stored
        found = {}
        for seed, parts in by_seed.items():
            done = {
                run.unseen or "": Measure.of(
                    stored.summary, stored.settings, stored.records, self.study.last_rounds
                )
                for run, stored in parts.items()
                if stored is not None
            }
            if len(done) == len(parts):
                found[seed] = next(iter(done.values()))
                if len(parts) > 1:
                    rounds = {run.unseen or "": s.records for run, s in parts.items() if s}
                    found[seed] = _joined(done, joined(rounds))
        return found

    def _diverged(self, task: str, label: str) -> str:
        stopped = (
            found
            for run, stored in self._of_line(task, label).items()
            if stored is None
            for found in self.pool.candidates(run.config, self.study.digests(run.config.task))
        )
        known = label in self.study.diverged.get(task, ())
        return tables.DIVERGED if known or any(found.diverged for found in stopped) else ""

    def origin(self) -> Origin:
        """What the study's runs were made with and what they took."""
        return Origin.of([stored for stored in self.runs.values() if stored is not None])

    def _stored(self, task: str, labels: Collection[str]) -> list[StoredRun]:
        """The runs of some lines on a task that are there."""
        return [
            stored
            for run, stored in self.runs.items()
            if stored is not None and run.task == task and run.line.label in labels
        ]

    def _equal(self, task: str) -> list[str]:
        """The rows that a frozen backbone made equal."""
        groups: dict[str, list[str]] = {}
        for label in dict.fromkeys(run.line.label for run in self.runs if run.task == task):
            runs = [s for s in self._of_line(task, label).values() if s is not None]
            # a server's rule shows in the losses from the second round on
            if runs and all(s.settings.get("train") == "head" and len(s.records) > 1 for s in runs):
                seen = [[(r["accuracy"], r["loss"].get("ce")) for r in s.records] for s in runs]
                groups.setdefault(repr(seen), []).append(label)
        return [
            f"{', '.join(labels)}: equal losses and accuracies in every round. With the backbone "
            "frozen (train = head), a loss on features changes nothing."
            for labels in groups.values()
            if len(labels) > 1
        ]

    def _choices(self, lines: Sequence[Line], rows: Sequence[TableRow]) -> list[str]:
        """Which values of each sweep, or else which row, the validation accuracy chooses."""
        groups: dict[tuple[int | None, str], list[TableRow]] = {}
        for line, row in zip(lines, rows, strict=True):
            swept = line.row.label if line.sweep is not None else ""
            groups.setdefault((line.sweep, swept), []).append(row)
        if self.study.sweeps:
            groups.pop((None, ""), None)  # rows that are not swept are there to compare with
        found = [tables.chosen(own) for own in groups.values() if len(own) > 1]
        if self.study.sweeps and not any(VALIDATION in row.beside for row in rows):
            return [UNCHOSEN]
        return [f"Chosen by validation accuracy: {row.label}." for row in found if row is not None]

    def _choice(self, task: StudyTask) -> list[str]:
        tried = Counter(line.row.label for line in self.study.lines_on(task))
        chosen = [line for line in self.choices(task.name) if line.sweep is not None]
        if not chosen:
            return []
        how = f", of {tried[chosen[0].row.label]} tried: {chosen[0].label}"
        if len(tried) > 1:
            found = (f"{line.label} (of {tried[line.row.label]} tried)" for line in chosen)
            how = f": {'; '.join(found)}"
        return [f"Chosen by validation accuracy{how}. Test images had no part in it."]

    def write_tables(self) -> list[str]:
        """The tables in every format; returns the names of the files."""
        made = self.tables()
        names = {form: f"table.{suffix}" for form, suffix in FORMATS.items()}
        for form, name in names.items():
            write_atomic(self.path / name, to_text(self.study, made, form))
        return list(names.values())

    # ---- rounds --------------------------------------------------------------------------------

    def histories(self, task: str) -> list[RunHistory]:
        """The runs of a task as curves need them.

        Only rows that left out the same domain, or none, can be drawn over each other: those like
        the first one. Runs that left out each domain in turn are joined.
        """
        chosen = {run: s for run, s in self.runs.items() if run.task == task}
        found = [
            RunHistory.of(run.line.label, stored.settings, stored.records)
            for run, stored in chosen.items()
            if stored is not None
        ]
        unseen: dict[str, set[str | None]] = {}
        for run in chosen:
            unseen.setdefault(run.line.label, set()).add(run.unseen)
        if any(len(domains) > 1 for domains in unseen.values()):
            found = join_left_out(found)
        return [run for run in found if run.unseen == found[0].unseen]


def _other_images(there: Study, study: Study) -> str:
    """The tasks whose images are not those that the study in a folder had."""
    both = there.images.keys() & study.images.keys()
    other = [t for t in both if not {*there.digests(t)} & {*study.digests(t)}]
    return f"other images of {', '.join(sorted(other))}" if other else ""


FACTS_IN_WORDS = {
    "numerics": "the version of the arithmetic (numerics)",
    "device": "device",
    "precision": "precision",
    "digest": "images (digest)",
    "weights_digest": "weights (digest)",
    "model_digest": "the model's code (digest)",
    "files_digest": "the method's files (digest)",
}


def _mixed(stored: Sequence[StoredRun]) -> list[str]:
    """Which of the runs' facts differ although the runs share one table."""
    notes = []
    for name, words in FACTS_IN_WORDS.items():
        values = sorted({str(s.facts.get(name)) for s in stored})
        if len(values) > 1:
            shown = " and ".join(v[:12] for v in values)
            notes.append(f"The runs of this table differ in {words}: {shown}.")
    return notes


def _joined(runs: Mapping[str, Measure], rounds: Records) -> Measure:
    """One column from each run: the domain that it did not train on."""
    first = next(iter(runs.values()))
    accuracy = {domain: run.accuracy[domain] for domain, run in runs.items()}
    # the clients of all domains, of which each run was without one's
    every = {d: max(run.settings["clients"].get(d, 0) for run in runs.values()) for d in runs}
    tested = {d: run.summary.get("tested", {}).get(d, 0) for d, run in runs.items()}
    # each run was validated on the domains that it did train on
    averages = [run.beside[VALIDATION] for run in runs.values() if VALIDATION in run.beside]
    beside = {"validation": {AVERAGE: fmean(averages)}} if averages else {}
    counts = [run.summary.get("validated", {}) for run in runs.values()]
    validated = {d: max(own.get(d, 0) for own in counts) for d in runs}
    return Measure(
        first.seed,
        {**accuracy, AVERAGE: fmean(accuracy.values())},
        sum(run.megabytes for run in runs.values()),
        sum(run.seconds for run in runs.values()),
        {**first.summary, "tested": tested, "validated": validated, "beside": beside},
        {**first.settings, "leave_out": EACH, "clients": every},
        tuple(
            (mean, sum(run.progress[i][1] for run in runs.values()))
            for i, (mean, _) in enumerate(tables.progress(rounds, EACH, first.last))
        ),
        first.last,
    )


def to_text(study: Study, made: Sequence[TaskTable], form: str) -> str:
    if form == "csv":
        return render.to_csv({t.task: t.rows for t in made}, {t.task: t.columns for t in made})
    if form == "latex":
        parts = []
        for t in made:
            note = " ".join((t.details, *t.notes))
            parts.append(render.to_latex(*t.grid(), f"{study.title}: {t.task}. {t.head}", note))
            if t.effects:
                caption = f"{study.title}: {t.task}, effects."
                parts.append(render.to_latex(*t.effect_grid(), caption, t.effect_caption))
            parts.append(render.to_latex(*t.costs(), f"{study.title}: {t.task}, costs."))
        return "\n".join(parts)
    if form == "html":
        heads = (f"<h4>{escape(t.task)}</h4>" for t in made)
        texts = (
            render.to_html(*t.grid())
            + (render.to_html(*t.effect_grid(), t.effect_caption) if t.effects else "")
            + render.to_html(*t.costs(), " ".join((t.caption, *t.notes)))
            for t in made
        )
        return "\n".join(head + text for head, text in zip(heads, texts, strict=True))
    parts = []
    for t in made:
        head = f"## {t.task}\n\n" if len(made) > 1 else ""
        notes = "".join(f"- {note}\n" for note in t.notes)
        text = render.to_markdown(*t.grid(), t.head)
        if t.effects:
            text += f"\n{render.to_markdown(*t.effect_grid(), t.effect_caption)}"
        text += f"\n{render.to_markdown(*t.costs(), t.details)}" if t.runs else ""
        parts.append(head + text + ("\n" + notes) * bool(notes))
    head = f"# {study.title}\n\n" + f"{study.paper}\n\n" * bool(study.paper)
    return head + "\n".join(parts)
