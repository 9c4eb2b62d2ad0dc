"""Runs from folders, put into groups whose numbers may be compared.

A study says itself what is compared: its tasks are groups, its rows the labels, its table has the
paper's numbers. Runs that lie loose are grouped by their settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from protofed.config import UNHASHED, Config
from protofed.errors import ProtofedError
from protofed.runs.folder import RunFolder, find_runs
from protofed.runs.result import Result, load_run
from protofed.studies import plan
from protofed.studies.definition import Study
from protofed.studies.folder import TaskTable, make_tables, open_study, run_folders
from protofed.studies.tables import BASELINE, Row, rows

_OWN = ("method", "public_digest", "seed", "clients", "device", *UNHASHED)
"""Settings in which the runs of a comparison may differ: a distribution may draw its clients."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Group:
    """Runs that may be compared; each run's summary has its label as method.

    Of a study: ``study`` is that, and ``table`` its task's table. Runs that left out different
    domains are groups of their own, and ``table`` is then that of all of them together.
    """

    title: str
    results: tuple[Result, ...]
    study: Study | None = None
    table: TaskTable | None = None
    unseen: str | None = None

    @property
    def methods(self) -> dict[str, list[Result]]:
        """The runs of each method by its label, in order of their seeds."""
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.summary["method"], []).append(result)
        return {m: sorted(runs, key=lambda r: r.config.seed) for m, runs in found.items()}

    @property
    def seeds(self) -> list[int]:
        """All seeds."""
        return sorted({r.config.seed for r in self.results})

    @property
    def baseline(self) -> str:
        """The label of the method that differences refer to."""
        return self.table.baseline if self.table is not None else BASELINE

    @cached_property
    def rows(self) -> list[Row]:
        """The lines of the group's own table, with the paper's numbers where it has them."""
        if self.table is not None and self.unseen is None:
            return self.table.rows
        return rows(self.results, self.baseline)


@dataclass(frozen=True)
class Gathered:
    """What was found: groups of runs, and folders whose run could not be taken, with the reason."""

    groups: tuple[Group, ...]
    left_out: tuple[tuple[Path, str], ...]


def gather(paths: Sequence[Path], tell: Tell = lambda text: None) -> Gathered:
    """All finished runs in and under the paths: run folders, or folders that hold them."""
    groups: list[Group] = []
    left_out: list[tuple[Path, str]] = []
    studies = list(dict.fromkeys(f for path in paths for f in _studies(path)))
    for folder in studies:
        found, left = _of_study(folder, len(studies) > 1, tell)
        groups += found
        left_out += left
    loose: dict[str, Result] = {}
    for folder in dict.fromkeys(f for path in paths for f in _folders(path)):
        if any(study in folder.parents for study in studies):
            continue
        if (result := _load(folder, left_out, tell)) is not None:
            loose.setdefault(result.config.hash, result)  # the same run twice is one run
    if loose:
        groups += _groups(list(loose.values()))
    if not groups:
        where = ", ".join(f"'{p}'" for p in paths)
        why = f"; '{left_out[0][0]}': {left_out[0][1]}" if left_out else ""
        raise ProtofedError(
            f"no finished run in {where}{why}", "give run, compare or study folders"
        )
    return Gathered(tuple(groups), tuple(left_out))


def _studies(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ProtofedError(f"'{path}' is no folder", "give run, compare or study folders")
    return sorted(file.parent for file in path.rglob("study.toml"))


def _folders(path: Path) -> list[Path]:
    return [run.path for run in find_runs(path)]


def _load(folder: Path, left_out: list[tuple[Path, str]], tell: Tell) -> Result | None:
    """The run in a folder, without its model: few of them are needed, and they are large."""
    if not RunFolder(folder).is_finished():
        left_out.append((folder, "not finished"))
        return None
    tell(f"reading {folder.name}")
    try:
        return load_run(folder, model=False)
    except ProtofedError as error:
        left_out.append((folder, error.message))
        return None


# ---- of a study ---------------------------------------------------------------------------------


def _of_study(folder: Path, many: bool, tell: Tell) -> tuple[list[Group], list[tuple[Path, str]]]:
    """A group for each task of the study; for each domain that was left out, if several were."""
    study = open_study(folder)
    tables = {table.task: table for table in make_tables(study, folder)}
    left_out: list[tuple[Path, str]] = []
    groups = []
    used: set[Path] = set()
    for task, lines in run_folders(folder, study).items():
        by_unseen: dict[str | None, list[Result]] = {}
        for label, paths in lines.items():
            used |= {path.resolve() for path in paths}
            for path in paths:
                if (run := _load(path, left_out, tell)) is not None:
                    named = replace(run, summary={**run.summary, "method": label})
                    by_unseen.setdefault(run.config.leave_out, []).append(named)
        title = f"{study.title}: {task}" if many else task
        several = len({c.unseen for c in plan.cells(study) if c.task == task}) > 1
        for unseen, runs in by_unseen.items():
            own = f"{title}, {unseen} left out" if several and unseen else title
            part = unseen if several else None
            groups.append(Group(own, tuple(runs), study, tables[task], part))
    for path in _folders(folder):
        if path.resolve() not in used:
            done = RunFolder(path).is_finished()
            left_out.append((path, "not of the study as it is now" if done else "not finished"))
    return groups, left_out


# ---- loose runs ---------------------------------------------------------------------------------


def _groups(results: list[Result]) -> list[Group]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(_setting(result.config), []).append(result)
    settings = [_values(runs[0].config) for runs in found.values()]
    differing = [k for k in settings[0] if len({_text(s[k]) for s in settings}) > 1]
    groups = []
    for runs, values in zip(found.values(), settings, strict=True):
        title = str(values["task"])
        other = [k for k in differing if k not in ("task", "digest", "samples", "image_size")]
        more = [f"{k.replace('_', ' ')} {_text(values[k])}" for k in other if values[k] is not None]
        groups.append(Group(" · ".join([title, *more]), tuple(_labeled(runs))))
    return groups


def _values(config: Config) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _OWN}


def _setting(config: Config) -> str:
    return json.dumps(_values(config), sort_keys=True, default=str)


def _labeled(runs: Iterable[Result]) -> list[Result]:
    """The runs with labels that tell a method's hyper-parameters where these differ.

    FedAvg comes first; then the order of names.
    """
    runs = sorted(runs, key=lambda r: (r.config.method.name != BASELINE, r.config.method.name))
    variants: dict[str, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        options = run.config.method.options()
        variants.setdefault(run.config.method.name, {})[_text(options)] = options
    labeled = []
    taken: set[tuple[str, int]] = set()
    for run in runs:
        name, options = run.config.method.name, run.config.method.options()
        own = list(variants[name].values())
        differing = [k for k in options if len({_text(o.get(k)) for o in own}) > 1]
        label = " ".join([name, *(f"{k}={_text(options[k])}" for k in differing)])
        if (label, run.config.seed) in taken:  # e.g. a method's file that was changed
            label = f"{label} ({run.config.hash})"
        taken.add((label, run.config.seed))
        labeled.append(replace(run, summary={**run.summary, "method": label}))
    return labeled


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
