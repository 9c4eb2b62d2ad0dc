"""From a study to its runs: which configurations fill which cells of its tables.

A cell is (task, line, seed, and the domain left out, if any). Its *key* stands for all that was
asked for; a study's folder has an index from keys to run folders, so that tables can be made where
the images are not, and so that another definition of a row never mixes with an older one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from protofed.config import EACH, TASK_OPTIONS, UNHASHED, Config, make_config
from protofed.data import DataMissing, Task, describe, distributions, load_task
from protofed.errors import ProtofedError, unknown
from protofed.methods import method_class
from protofed.models.mixed import model_names
from protofed.studies.definition import Line, Study, StudyTask

AVERAGE = "average"
OWN = ("model", "width", "norm", "rounds", "epochs", "batch", "lr", "momentum", "weight_decay",
       "image_size", "flip", "augment", "test_split", "leftover", "repair", "samples",
       "protocol", "data", "skip_bad")  # fmt: skip
"""Settings that belong to a task: on another one they would mean something else."""


@dataclass(frozen=True)
class Cell:
    """One run that the study asks for."""

    task: str
    line: Line
    seed: int
    unseen: str | None
    where: str
    settings: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """Stands for everything asked for that can change a number."""
        row = self.line.row
        asked = {k: v for k, v in self.settings.items() if k not in UNHASHED}
        method = row.method
        if ".py" in method:  # another text is another method
            file = Path(method.rpartition(":")[0])
            method += hashlib.blake2b(file.read_bytes()).hexdigest() if file.is_file() else ""
        parts = [self.where, method, row.options, asked, self.seed]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()

    @property
    def name(self) -> str:
        """For a person: task, row, seed."""
        left_out = f" without {self.unseen}" if self.unseen else ""
        return f"{self.task}  {self.line.label}{left_out}  seed {self.seed}"

    def config(self) -> Config:
        """The complete configuration; needs the task's images."""
        row = self.line.row
        options = {k: self.settings[k] for k in TASK_OPTIONS if k in self.settings}
        task = _loaded(self.where, tuple(sorted(options.items())))
        method = method_class(row.method).create(row.options, self.where)
        return make_config(task, method, seed=self.seed, **self.settings)


@lru_cache(maxsize=4)
def _loaded(name: str, options: tuple[tuple[str, Any], ...]) -> Task:
    return load_task(name, **dict(options))


@dataclass(frozen=True)
class Selection:
    """Which part of a study is meant: tasks, lines and seeds; empty: all."""

    tasks: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()


def study_tasks(study: Study) -> list[StudyTask]:
    """The tasks, or the one that ``[override] on`` puts in their place."""
    on = study.override.get("on")
    if on is None:
        return list(study.tasks.values())
    found: dict[str, StudyTask] = {}
    for task in study.tasks.values():
        settings = _moved({**study.settings, **task.settings}, task.task, on)
        moved = StudyTask(on, on, settings)
        if moved not in found.values():
            found[on if not found else f"{on} ({task.name})"] = moved
    return [replace(task, name=name) for name, task in found.items()]


def domains(task: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """A task's domains, known without its images unless it is a folder of one's own."""
    if (known := describe(task).domains) is not None:
        return known
    options = {k: settings[k] for k in TASK_OPTIONS if k in settings}
    return tuple(_loaded(task, tuple(sorted(options.items()))).domains)


def columns(study: Study, task: StudyTask) -> tuple[str, ...]:
    """The columns of a task's table: its domains and their average."""
    if named := study.columns.get(task.name):
        return named
    try:
        return (*domains(task.task, _settings(study, task)), AVERAGE)
    except DataMissing:
        return (AVERAGE,)


def check_domains(study: Study, cells: Sequence[Cell]) -> None:
    """Domains that [printed] and [tsne] name are the tasks' own; otherwise nothing would show."""
    if "on" in study.override:  # they name those of the study's own tasks
        return
    chosen = [task for task in study.tasks.values() if task.name in {c.task for c in cells}]
    known = {task.name: domains(task.task, _settings(study, task)) for task in chosen}
    asked = [
        (f"column in [printed.{name}]", column, (*found, AVERAGE))
        for name, found in known.items()
        for column in study.columns.get(name, ())
    ]
    if len(chosen) == len(study.tasks):
        every = tuple(dict.fromkeys(d for found in known.values() for d in found))
        asked += [("domain in [tsne]", d, every) for d in study.tsne.get("domains", ())]
    for what, name, valid in asked:
        if name not in valid:
            error = unknown(what, name, valid)
            raise ProtofedError(f"study '{study.name}': {error.message}", error.hint)


def cells(study: Study, selection: Selection = Selection()) -> list[Cell]:  # noqa: B008 (frozen)
    """Every run the study asks for, seed by seed, so that early results cover all rows."""
    tasks = _chosen(study_tasks(study), selection.tasks, "task", lambda t: (t.name, t.task))
    lines = _chosen(
        study.lines, selection.rows, "row", lambda r: (r.label, r.row.label, r.row.method)
    )
    found = []
    for task in tasks:
        for seed in selection.seeds or study.seeds:
            for line in lines:
                found += _cells(study, task, line, seed)
    return found


def _cells(study: Study, task: StudyTask, line: Line, seed: int) -> list[Cell]:
    settings = _settings(study, task)
    own = line.row.settings
    if "on" in study.override:
        own = _moved(own, next(iter(study.tasks.values())).task, task.task)
    settings |= own
    settings |= study.override.get("settings", {})
    if rounds := study.tsne.get("rounds"):
        settings.setdefault("keep_rounds", [*rounds, "last"])
    left_out = settings.get("leave_out")
    unseen = domains(task.task, settings) if left_out == EACH else (left_out,)
    return [
        Cell(task.name, line, seed, u, task.task, _without(settings, u) if u else settings)
        for u in unseen
    ]


def _without(settings: Mapping[str, Any], unseen: str) -> dict[str, Any]:
    """The settings of the run without a domain; clients given in numbers are meant for all runs."""
    clients = settings.get("clients")
    if settings["leave_out"] == EACH and isinstance(clients, Mapping):
        return {**settings, "leave_out": unseen, "clients": {**clients, unseen: 0}}
    return {**settings, "leave_out": unseen}


def _settings(study: Study, task: StudyTask) -> dict[str, Any]:
    if "on" in study.override:  # already without what belongs to the study's own tasks
        return dict(task.settings)
    return {**study.settings, **task.settings}


def _moved(settings: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Settings of one task as they are on another: without what means nothing there."""
    kept = {k: v for k, v in settings.items() if k not in OWN}
    if len(model_names(models := settings.get("model", ""))) > 1:
        kept["model"] = models  # that clients' models differ is the study's, not the task's
    clients = kept.get("clients")
    if isinstance(clients, Mapping):  # the first domain stands for the first, and so on
        names = dict(zip(domains(old, {}), domains(new, {}), strict=False))
        kept["clients"] = {names[d]: n for d, n in clients.items() if d in names}
    elif isinstance(clients, str):
        known = distributions(describe(new))
        if clients not in known:
            del kept["clients"]
    if kept.get("leave_out") not in (None, EACH):
        names = dict(zip(domains(old, {}), domains(new, {}), strict=False))
        kept["leave_out"] = names.get(kept["leave_out"], domains(new, {})[0])
    return kept


def _chosen(found: Sequence[Any], wanted: Iterable[str], what: str, names: Any) -> list[Any]:
    """Those that a name means: the one called so before those of that row, task or method.

    In any case of letters, where nothing is spelled exactly so. No name: all.
    """
    chosen: list[Any] = []
    for name in wanted:
        spelled = ((s, level) for s in (str, str.casefold) for level in range(len(names(found[0]))))
        for spell, level in spelled:
            if same := [f for f in found if spell(names(f)[level]) == spell(name)]:
                chosen += same
                break
        else:
            known = dict.fromkeys(n for f in found for n in names(f))
            raise unknown(f"{what} of this study", name, known)
    return [f for f in found if f in chosen] if chosen else list(found)


def configs(cells: Sequence[Cell]) -> dict[str, Config]:
    """The configuration of each cell, by key; an error names the cell."""
    made = {}
    for cell in cells:
        try:
            made[cell.key] = cell.config()
        except DataMissing:
            raise
        except ProtofedError as error:
            raise type(error)(f"{cell.name}: {error.message}", error.hint) from None
    return made
