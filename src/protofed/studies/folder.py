"""A study's folder: its definition, its runs, and the tables and figures made of them.

    study.toml         the study as it was run, with what the command line changed
    index-*.json       which run answers which cell; one file for each plan, so that several
                       processes can write at once
    <run>/             the runs; <run>.claim while one is under way
    table.md .csv .tex, *.png, *.pdf

Tables need of a run its ``config.toml`` and ``summary.json``, curves its ``rounds.jsonl`` (or
``rounds.jsonl.gz``): a study can be read where neither images nor models are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from protofed.config import EACH
from protofed.errors import ProtofedError
from protofed.files import read_json, write_atomic
from protofed.runs.finished import read_finished, read_settings, read_summary
from protofed.studies import plan, render, tables
from protofed.studies.definition import Study, StudyTask, load
from protofed.studies.history import RunHistory, is_variant, join_left_out
from protofed.studies.plan import AVERAGE, Cell
from protofed.studies.tables import Measure, TableLine, TableRow
from protofed.studies.worker import failed_file


@dataclass(frozen=True)
class TaskTable:
    """The table of one task."""

    task: str
    columns: tuple[str, ...]
    rows: list[TableRow]
    baseline: str
    caption: str
    notes: tuple[str, ...]

    def grid(self) -> tuple[list[str], list[TableLine]]:
        """Header and cells."""
        return tables.grid(self.rows, self.columns, self.baseline)

    @property
    def runs(self) -> int:
        """How many seeds of all rows are there."""
        return sum(row.seeds for row in self.rows)


# ---- definition and index -----------------------------------------------------------------------


def open_study(folder: Path) -> Study:
    """The study that a folder holds, with every seed that it has runs of."""
    if not (folder / "study.toml").is_file():
        tried = sorted(file.parent for file in folder.parent.glob(f"{folder.name}-on-*/study.toml"))
        hint = f"there is {tried[0]}" if tried else "run one: protofed study run NAME"
        raise ProtofedError(f"'{folder}' holds no study", hint)
    return with_seeds_of(folder, load(str(folder / "study.toml")))


def with_seeds_of(folder: Path, study: Study) -> Study:
    """The study with the seeds, too, that the folder already has runs of.

    More seeds now, fewer for another task, or other seeds in a process beside this one leave the
    tables of what is there as they are.
    """
    index = read_index(folder)
    ends = (re.search(r"-(\d+)-[0-9a-f]+$", run.name) for runs in index.values() for run in runs)
    there = plan.Selection(seeds=tuple({int(end[1]) for end in ends if end}))
    if not there.seeds:
        return study
    done = {c.seed for c in plan.cells(study, there) if finished(index.get(c.key, ()))}
    seeds = sorted({*study.seeds, *done})
    return replace(study, seeds=tuple(seeds), raw={**study.raw, "seeds": seeds})


def write_study(study: Study, folder: Path, index: Mapping[str, Path]) -> None:
    """Write the definition, and which run answers which cell."""
    write_atomic(folder / "study.toml", study.toml())
    named = {k: os.path.relpath(p, folder) for k, p in sorted(index.items())}
    text = json.dumps(named, indent=0)
    name = hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
    write_atomic(folder / f"index-{name}.json", text)


def read_index(folder: Path) -> dict[str, list[Path]]:
    """The runs of each cell's key, from all that ever planned here; its own before others'."""
    index: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("index-*.json")):
        for key, path in read_json(file).items():
            index.setdefault(key, []).append(folder / path)
    return {key: sorted(paths, key=lambda p: p.parent != folder) for key, paths in index.items()}


def drop(folder: Path, stale: Mapping[str, Sequence[Path]]) -> None:
    """Take these runs out of the index: the cells of these keys ask for something else by now."""
    for file in folder.glob("index-*.json"):
        index = read_json(file)
        left = {k: p for k, p in index.items() if folder / p not in stale.get(k, ())}
        if left != index:
            write_atomic(file, json.dumps(left, indent=0))


def finished(paths: Sequence[Path]) -> Path | None:
    """The first of these runs that is complete."""
    return next((p for p in paths if (p / "summary.json").is_file()), None)


def run_folders(folder: Path, study: Study | None = None) -> dict[str, dict[str, list[Path]]]:
    """The finished runs of a study's folder: task → label of the row → folders of the runs."""
    study = study or open_study(folder)
    index = read_index(folder)
    found: dict[str, dict[str, list[Path]]] = {}
    for cell in plan.cells(study):
        labels = found.setdefault(cell.task, {})
        runs = labels.setdefault(cell.line.label, [])
        if (path := finished(index.get(cell.key, ()))) is not None:
            runs.append(path)
    return found


# ---- tables -------------------------------------------------------------------------------------


def make_tables(study: Study, folder: Path, tasks: Sequence[str] = ()) -> list[TaskTable]:
    """The tables of the study's tasks from what is in the folder by now."""
    index = read_index(folder)
    every: dict[tuple[str, str], list[Cell]] = {}
    for cell in plan.cells(study, plan.Selection(tasks=tuple(tasks))):
        every.setdefault((cell.task, cell.line.label), []).append(cell)
    made = []
    for task in plan.study_tasks(study):
        if not any(t == task.name for t, _ in every):
            continue
        found = {line.label: _measures(every[task.name, line.label], index) for line in study.lines}
        made.append(_table(study, task, found, _states(study, task.name, every, index)))
    return made


def _table(
    study: Study,
    task: StudyTask,
    found: Mapping[str, Mapping[int, Measure]],
    states: Mapping[str, str],
) -> TaskTable:
    base = study.baseline or ""
    printed = {} if "on" in study.override else study.printed.get(task.name, {})
    lines = []
    for line in study.lines:
        paper = printed.get(line.label)
        lines.append(
            tables.row(
                line.label,
                found[line.label],
                found.get(base, {}) if line.label != base else {},
                len(study.seeds),
                line.row.method,
                is_variant(
                    {"method": line.row.method, "options": line.row.options, "task": task.task}
                ),
                paper=paper.values if paper else {},
                paper_std=paper.std if paper else None,
                state=states[line.label],
            )
        )
    columns = plan.columns(study, task)
    measured = dict.fromkeys(c for line in lines for c in line.columns)
    if measured and set(measured) != set(columns):
        columns = tuple(measured)
    every = [
        replace(m, summary={**m.summary, "method": label})
        for label, runs in found.items()
        for m in runs.values()
    ]
    caption = tables.describe(every) if every else "No run is there yet."
    notes = (*study.notes, *task.notes) if "on" not in study.override else ()
    return TaskTable(task.name, columns, lines, base or "FedAvg", caption, notes)


def _measures(cells: Sequence[Cell], index: Mapping[str, Sequence[Path]]) -> dict[int, Measure]:
    """What the runs of a line gave, by seed; a seed counts when all of its runs are there."""
    by_seed: dict[int, list[Cell]] = {}
    for cell in cells:
        by_seed.setdefault(cell.seed, []).append(cell)
    found = {}
    for seed, parts in by_seed.items():
        paths = [finished(index.get(cell.key, ())) for cell in parts]
        runs = [read_measure(path) for path in paths if path is not None]
        if len(runs) == len(parts):
            each = len(parts) > 1
            found[seed] = _joined(parts, runs) if each else runs[0]
    return found


def _joined(parts: Sequence[Cell], runs: Sequence[Measure]) -> Measure:
    """One column from each run: the domain that it did not train on."""
    of = {cell.unseen or "": run for cell, run in zip(parts, runs, strict=True)}
    accuracy = {domain: run.accuracy[domain] for domain, run in of.items()}
    # the clients of all domains, of which each run was without one's
    every = {d: max(run.settings["clients"].get(d, 0) for run in runs) for d in of}
    tested = {domain: run.summary["tested"][domain] for domain, run in of.items()}
    return Measure(
        runs[0].seed,
        {**accuracy, AVERAGE: fmean(accuracy.values())},
        sum(run.megabytes for run in runs),
        sum(run.seconds for run in runs),
        {**runs[0].summary, "tested": tested, "beside": {}},
        {**runs[0].settings, "leave_out": EACH, "clients": every},
    )


def _states(
    study: Study, task: str, every: Mapping[Any, list[Cell]], index: Mapping[str, Sequence[Path]]
) -> dict[str, str]:
    states = {}
    for line in study.lines:
        paths = [p for cell in every[task, line.label] for p in index.get(cell.key, ())]
        diverged = any(failed_file(p).is_file() for p in paths)
        states[line.label] = line.row.missing or ("diverged" if diverged else "")
    return states


def read_measure(folder: Path) -> Measure:
    """What a table needs of a run's folder."""
    summary = read_summary(folder)
    return Measure.of(summary, {**read_settings(folder), "method": summary["method"]})


# ---- what is written ----------------------------------------------------------------------------


def to_text(study: Study, made: Sequence[TaskTable], form: str) -> str:
    """The tables in one of the formats of ``render``, but for the terminal's."""
    if form == "csv":
        return render.to_csv({t.task: t.rows for t in made}, {t.task: t.columns for t in made})
    if form == "latex":
        parts = [render.to_latex(*t.grid(), f"{study.title}: {t.task}. {t.caption}") for t in made]
        return "\n".join(parts)
    parts = []
    for t in made:
        head = f"## {t.task}\n\n" if len(made) > 1 else ""
        notes = "".join(f"- {note}\n" for note in t.notes)
        parts.append(head + render.to_markdown(*t.grid(), t.caption) + ("\n" + notes) * bool(notes))
    head = f"# {study.title}\n\n" + f"{study.paper}\n\n" * bool(study.paper)
    return head + "\n".join(parts)


def write_outputs(study: Study, folder: Path) -> list[str]:
    """Tables in every format and the study's figures; returns the names of the files."""
    made = make_tables(study, folder)
    if not any(t.runs for t in made):
        return []
    return write_tables(study, folder, made) + _figures(study, folder, made)


def write_tables(study: Study, folder: Path, made: Sequence[TaskTable]) -> list[str]:
    """The tables in every format; returns the names of the files."""
    names = []
    for form, suffix in (("markdown", "md"), ("csv", "csv"), ("latex", "tex")):
        write_atomic(folder / f"table.{suffix}", to_text(study, made, form))
        names.append(f"table.{suffix}")
    return names


def _figures(study: Study, folder: Path, made: Sequence[TaskTable]) -> list[str]:
    from protofed.report.study_figures import study_figures  # matplotlib is slow to import

    runs = {} if study.sweeps else histories(study, folder)
    return study_figures(study, made, runs, folder)


def histories(study: Study, folder: Path) -> dict[str, list[RunHistory]]:
    """The runs of each task as figures draw them; runs that left out a domain each are joined."""
    found: dict[str, list[RunHistory]] = {}
    for task, lines in run_folders(folder, study).items():
        runs = [_history(path, label) for label, paths in lines.items() for path in paths]
        if len({c.unseen for c in plan.cells(study) if c.task == task and c.unseen}) > 1:
            runs = join_left_out(runs)
        found[task] = runs
    return found


def _history(folder: Path, label: str) -> RunHistory:
    settings = {**read_settings(folder), "method": read_summary(folder)["method"]}
    return RunHistory.of(label, settings, read_finished(folder))
