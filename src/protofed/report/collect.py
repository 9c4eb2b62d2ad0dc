"""Finished runs from folders, in groups whose numbers may be compared.

A study says itself what is compared: its tasks are groups, its rows are labels, and its table has
the paper's numbers. Other runs are grouped by their settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from protofed.config import changes_numbers
from protofed.errors import ProtofedError
from protofed.report.palette import Look, looks_of
from protofed.runs import Result, RunFolder, load_run
from protofed.runs.folder import find_runs
from protofed.studies.definition import Study
from protofed.studies.folder import StudyFolder, TaskTable
from protofed.studies.history import RunHistory
from protofed.studies.tables import BASELINE, TableRow, rows

_MAY_DIFFER = ("method", "seed", "clients")
"""Settings in which the runs of a group may differ; a seed may draw its clients."""
_PASS = "pass folders of runs, comparisons or studies"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Group:
    """Runs that may be compared; the ``method`` in each run's summary is its label.

    The runs of a study have that ``study``, and the ``table`` of their task. Runs that left out
    different domains are groups of their own that share the table of all of them.
    """

    title: str
    results: tuple[Result, ...]
    study: Study | None = None
    table: TaskTable | None = None
    unseen: str | None = None

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
    def baseline(self) -> str:
        """The label that differences refer to."""
        return self.table.baseline if self.table is not None else BASELINE

    @cached_property
    def rows(self) -> list[TableRow]:
        """The rows of the group's table, with the paper's numbers if it has them."""
        if self.table is not None and self.unseen is None:
            return self.table.rows
        return rows(self.results, self.baseline)


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
            raise ProtofedError(f"'{path}' is not a folder", _PASS)
    files = (file for path in paths for file in sorted(path.rglob("study.toml")))
    studies = list(dict.fromkeys(file.parent for file in files))
    used: set[Path] = set()
    for folder in studies:
        found, runs = _of_study(StudyFolder.open(folder), len(studies) > 1, progress)
        groups += found
        used |= runs
    loose: dict[str, Result] = {}
    for run in {run.path: run for path in paths for run in find_runs(path)}.values():
        if run.path.resolve() not in used and (result := _load(run, skipped, progress)):
            loose.setdefault(result.summary["hash"], result)  # the same run twice is one run
    if loose:
        groups += _groups(list(loose.values()))
    if not groups:
        where = ", ".join(f"'{p}'" for p in paths)
        why = f"; '{skipped[0][0]}': {skipped[0][1]}" if skipped else ""
        raise ProtofedError(f"no finished run in {where}{why}", _PASS)
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


def _of_study(folder: StudyFolder, many: bool, progress: Progress) -> tuple[list[Group], set[Path]]:
    """A group for each task, or for each domain that was left out; and the runs' folders."""
    tables = {table.task: table for table in folder.tables()}
    found: dict[str, dict[str | None, list[Result]]] = {}
    used: set[Path] = set()
    for planned, stored in folder.runs.items():
        by_unseen = found.setdefault(planned.task, {})
        if stored is None:
            continue
        progress(f"reading {stored.name}")
        run = stored.result()
        named = replace(run, summary={**run.summary, "method": planned.line.label})
        by_unseen.setdefault(planned.unseen, []).append(named)
        if stored.folder is not None:
            used.add(stored.folder.path.resolve())
    groups = []
    for task, by_unseen in found.items():
        title = f"{folder.study.title}: {task}" if many else task
        several = len({p.unseen for p in folder.runs if p.task == task}) > 1
        for unseen, runs in by_unseen.items():
            part = unseen if several else None
            own = f"{title}, {part} left out" if part else title
            groups.append(Group(own, tuple(runs), folder.study, tables[task], part))
    return groups, used


# ---- other runs ---------------------------------------------------------------------------------


def _groups(results: list[Result]) -> list[Group]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(_text(_values(result)), []).append(result)
    settings = [_values(runs[0]) for runs in found.values()]
    differing = [k for k in settings[0] if len({_text(s[k]) for s in settings}) > 1]
    groups = []
    for runs, values in zip(found.values(), settings, strict=True):
        other = [k for k in differing if k not in ("task", "digest", "samples", "image_size")]
        more = [f"{k.replace('_', ' ')} {_text(values[k])}" for k in other if values[k] is not None]
        groups.append(Group(" · ".join([str(values["task"]), *more]), tuple(_labeled(runs))))
    return groups


def _values(result: Result) -> dict[str, Any]:
    """The settings and facts that runs share which may be compared."""
    names = [f.name for f in fields(result.config) if changes_numbers(f.name)]
    settings = {n: getattr(result.config, n) for n in names if n not in _MAY_DIFFER}
    return settings | {n: result.facts.get(n) for n in ("precision", "numerics", "digest")}


def _labeled(runs: Iterable[Result]) -> list[Result]:
    """The runs with labels that name the hyper-parameters in which runs of a method differ.

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
    # numbers before words, which cannot be compared with them
    options = tuple((0, v) if isinstance(v, (int, float)) else (1, str(v)) for v in values)
    return method.name != BASELINE, method.name, options


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
