"""Collects finished runs from folders into groups whose numbers may be compared.

A study defines what is compared: each of its tasks is a group, its rows are the labels, and its
table has the paper's numbers. Other runs are grouped by their settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from protofed.config import Config, is_hashed
from protofed.data.info import TASKS, describe, distribution
from protofed.errors import ProtofedError
from protofed.report.palette import Look, looks_of
from protofed.runs import Result, RunFolder, load_run
from protofed.runs.folder import find_runs
from protofed.runs.records import LAST
from protofed.studies.definition import Study
from protofed.studies.folder import StudyFolder, TaskTable
from protofed.studies.history import RunHistory
from protofed.studies.tables import BASELINE, TableRow, rows

_MAY_DIFFER = ("method", "seed")
"""Settings in which the runs of a group may differ."""
_HINT = "pass folders of runs, comparisons or studies"
Progress = Callable[[str], None]
"""Shows a text while runs are read."""


@dataclass(frozen=True)
class Group:
    """Runs that may be compared; the ``method`` in each run's summary is its label.

    If the runs belong to a study, ``study`` and ``table`` are the study and the table of their
    task. A study that leaves out several domains in turn has a group for each of them, and all
    these groups have the same table.
    """

    title: str
    results: tuple[Result, ...]
    study: Study | None = None
    table: TaskTable | None = None
    unseen: str | None = None
    """The domain left out, if it is one of several in the study; otherwise None."""

    @property
    def methods(self) -> dict[str, list[Result]]:
        """Label → runs in the order of their seeds."""
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.summary["method"], []).append(result)
        return {m: sorted(runs, key=lambda r: r.config.seed) for m, runs in found.items()}

    @cached_property
    def histories(self) -> list[RunHistory]:
        return [RunHistory.of_result(run) for runs in self.methods.values() for run in runs]

    @cached_property
    def looks(self) -> dict[str, Look]:
        return looks_of([*self.histories, *(row for row in self.rows if row.method)])

    @property
    def seeds(self) -> list[int]:
        return sorted({r.config.seed for r in self.results})

    @property
    def last_rounds(self) -> int:
        """How many last rounds the accuracies are means of."""
        return self.study.last_rounds if self.study is not None else LAST

    @property
    def baseline(self) -> str:
        """The label that differences refer to."""
        return self.table.baseline if self.table is not None else BASELINE

    @cached_property
    def rows(self) -> list[TableRow]:
        """The rows of the group's table, with the paper's numbers if it has them."""
        if self.table is not None and self.unseen is None:
            return self.table.rows
        return rows(self.results, self.baseline, self.last_rounds)


@dataclass(frozen=True)
class ReportInput:
    """What a report is about: groups of runs, and the folders skipped, with the reason."""

    groups: tuple[Group, ...]
    skipped: tuple[tuple[Path, str], ...]


def collect(paths: Sequence[Path], progress: Progress = lambda text: None) -> ReportInput:
    """All finished runs in the paths: run folders, or folders that contain them."""
    groups: list[Group] = []
    skipped: list[tuple[Path, str]] = []
    for path in paths:
        if not path.is_dir():
            raise ProtofedError(f"'{path}' is not a folder", _HINT)
    files = (file for path in paths for file in sorted(path.rglob("study.toml")))
    studies = list(dict.fromkeys(file.parent for file in files))
    in_studies: set[Path] = set()
    for folder in studies:
        found, runs = _study_groups(StudyFolder.open(folder), len(studies) > 1, progress)
        groups += found
        in_studies |= runs
    others: dict[str, Result] = {}
    for run in {run.path: run for path in paths for run in find_runs(path)}.values():
        if run.path.resolve() not in in_studies and (result := _load(run, skipped, progress)):
            others.setdefault(result.summary["hash"], result)  # copies of a run count once
    if others:
        groups += _groups_by_settings(list(others.values()))
    if not groups:
        where = ", ".join(f"'{p}'" for p in paths)
        why = f"; '{skipped[0][0]}': {skipped[0][1]}" if skipped else ""
        raise ProtofedError(f"no finished run in {where}{why}", _HINT)
    return ReportInput(tuple(groups), tuple(skipped))


def _load(run: RunFolder, skipped: list[tuple[Path, str]], progress: Progress) -> Result | None:
    """A run without its model: few models are needed, and they are large."""
    reason = "not finished"
    if run.is_finished():
        progress(f"reading {run.path.name}")
        try:
            return load_run(run.path, model=False)
        except ProtofedError as error:
            reason = error.message
    skipped.append((run.path, reason))
    return None


# ---- a study's runs ------------------------------------------------------------------------------


def _study_groups(
    folder: StudyFolder, name_study: bool, progress: Progress
) -> tuple[list[Group], set[Path]]:
    """A group for each task, or for each domain that was left out; and the runs' folders.

    With ``name_study``, the groups' titles contain the study's.
    """
    tables = folder.test_tables()
    shown = {(task, row.label) for task, table in tables.items() for row in table.rows}
    found: dict[str, dict[str | None, list[Result]]] = {}
    run_folders: set[Path] = set()
    for planned, stored in folder.runs.items():
        by_unseen = found.setdefault(planned.task, {})
        if stored is not None and stored.folder is not None:
            run_folders.add(stored.folder.path.resolve())
        if stored is None or (planned.task, planned.line.label) not in shown:
            continue
        progress(f"reading {stored.name}")
        run = stored.result()
        named = replace(run, summary={**run.summary, "method": planned.line.label})
        by_unseen.setdefault(planned.unseen, []).append(named)
    groups = []
    for task, by_unseen in found.items():
        task_title = f"{folder.study.title}: {task}" if name_study else task
        several = len({p.unseen for p in folder.runs if p.task == task}) > 1
        for unseen, runs in by_unseen.items():
            part = unseen if several else None
            title = f"{task_title}, {part} left out" if part else task_title
            groups.append(Group(title, tuple(runs), folder.study, tables[task], part))
    return groups, run_folders


# ---- other runs ---------------------------------------------------------------------------------


def _groups_by_settings(results: list[Result]) -> list[Group]:
    """Groups titled by their task and the settings in which they differ from others of it."""
    found: dict[str, tuple[dict[str, Any], list[Result]]] = {}
    for result, clients in zip(results, _clients(results), strict=True):
        values = _values(result) | {"clients": clients}
        found.setdefault(_text(values), (values, []))[1].append(result)
    groups = []
    for values, runs in found.values():
        peers = [other for other, _ in found.values() if other["task"] == values["task"]]
        differing = [k for k in values if len({_text(other[k]) for other in peers}) > 1]
        named = [k for k in differing if values[k] is not None]
        more = [f"{k.replace('_', ' ')} {_in_words(values[k])}" for k in named]
        groups.append(Group(" · ".join([str(values["task"]), *more]), tuple(_labeled(runs))))
    return groups


def _values(result: Result) -> dict[str, Any]:
    """The settings and facts that must be the same for runs to be compared."""
    names = [f.name for f in fields(result.config) if is_hashed(f.name)]
    settings = {n: getattr(result.config, n) for n in names if n not in _MAY_DIFFER}
    facts = {n: result.facts.get(n) for n in ("precision", "numerics")}
    digest = result.facts.get("digest")
    return settings | facts | {"images": digest[:8] if digest else None}


def _clients(results: Sequence[Result]) -> list[Any]:
    """The clients that each run was given, or ``random`` where each seed draws its own."""

    def key(config: Config) -> str:
        return _text([config.task, config.leave_out, config.clients])

    # a fixed number of clients may happen to be what some seed draws
    fixed = {key(r.config) for r in results if not _are_drawn(r.config)}
    return [r.config.clients if key(r.config) in fixed else "random" for r in results]


def _are_drawn(config: Config) -> bool:
    """Whether the clients are those that the config's seed draws."""
    if config.task not in TASKS:
        return config.clients == "random"
    drawn = distribution(describe(config.task), "random", config.seed)
    return config.clients == {d: n * (d != config.leave_out) for d, n in drawn.items()}


def _labeled(runs: Iterable[Result]) -> list[Result]:
    """The runs with labels: the method, and the hyper-parameters in which its runs differ.

    FedAvg comes first, then the others by name and by the values of their hyper-parameters.
    """
    runs = sorted(runs, key=_order)
    variants: dict[str, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        options = run.config.method.options()
        variants.setdefault(run.config.method.name, {})[_text(options)] = options
    labeled = []
    taken: set[tuple[str, int]] = set()
    for run in runs:
        name, options = run.config.method.name, run.config.method.options()
        own = variants[name].values()
        differing = [k for k in options if len({_text(o.get(k)) for o in own}) > 1]
        label = " ".join([name, *(f"{k}={_text(options[k])}" for k in differing)])
        if (label, run.config.seed) in taken:  # e.g. the method's file has changed
            label = f"{label} ({run.summary['hash']})"
        taken.add((label, run.config.seed))
        labeled.append(replace(run, summary={**run.summary, "method": label}))
    return labeled


def _order(run: Result) -> tuple[Any, ...]:
    method = run.config.method
    values = method.options().values()
    # numbers before words: Python cannot compare the two
    options = tuple((0, v) if isinstance(v, (int, float)) else (1, str(v)) for v in values)
    return method.name != BASELINE, method.name, options


def _in_words(value: Any) -> str:
    """A value in a title: ``scan 2, print 1`` for one of each domain."""
    each = value.items() if isinstance(value, Mapping) else ()
    return ", ".join(f"{name} {_text(own)}" for name, own in each) or _text(value)


def _text(value: Any) -> str:
    """A value as text for titles and labels, and as a key for values that cannot be hashed."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
