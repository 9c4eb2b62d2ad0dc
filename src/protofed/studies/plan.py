"""From a study to its runs: which configs fill which cells of its tables.

No image is read: a plan can be made, and its runs found in a pool, anywhere. Only the domains of a
folder of your own have to be looked up, if each of them is left out in turn and the study has not
been run yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from protofed.config import EACH, TASK_SETTINGS, Config, make_config
from protofed.data import describe, distributions, load_task
from protofed.errors import ProtofedError, unknown
from protofed.methods import METHODS, known_class
from protofed.models.mixed import model_names
from protofed.studies.definition import Line, Study, StudyTask
from protofed.user_code import is_file

AVERAGE = "average"
TASK_OWNED = ("model", "width", "norm", "weights", "train", "freeze_bn", "rounds", "epochs",
              "batch", "lr", "momentum", "weight_decay", "step_every", "warmup_rounds",
              "image_size", "flip", "augment",
              "test_split", "leftover", "repair", "samples", "protocol", "data",
              "skip_bad")  # fmt: skip
"""Settings that belong to a task: on another one they would mean something else."""
ROW_OWNED = ("norm", "flip")
"""Those of them that a row keeps on another task: without them it would be another row."""


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run that the study asks for: one line of its table, on one task, with one seed.

    ``unseen`` is the domain that it leaves out, where the study leaves out each in turn.
    """

    task: str
    line: Line
    seed: int
    unseen: str | None
    config: Config

    @property
    def name(self) -> str:
        left_out = f" without {self.unseen}" if self.unseen else ""
        return f"{self.task}  {self.line.label}{left_out}  seed {self.seed}"


@dataclass(frozen=True)
class Selection:
    """Which part of a study is meant: tasks, lines and seeds; empty: all."""

    tasks: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()


def plan(study: Study, selection: Selection = Selection()) -> list[PlannedRun]:  # noqa: B008
    """Every run the study asks for, seed by seed, so that early results cover all rows.

    Rows whose method this version does not have are left out.
    """
    tasks, lines = _chosen_tasks(study, selection), _chosen_lines(study, selection)
    found: list[PlannedRun] = []
    for task in tasks:
        own = [line for line in study.lines_on(task) if line in lines]
        for seed in selection.seeds or study.seeds_on(task):
            for line in own:
                if not line.row.missing:
                    found += _runs(study, task, line, seed)
    return found


def require_methods(study: Study, selection: Selection) -> None:
    """Raise an error if a chosen row's method is not in this version."""
    for row in (line.row for line in _chosen_lines(study, selection)):
        if known_class(row.method) is not None:
            continue
        if is_file(row.method):  # its runs may still be found
            raise ProtofedError(
                f"study '{study.name}': row {row.label} names code as its method: {row.method}",
                "if you trust it: --trust-code",
            )
        # a table of what is there shows such a row as missing
        error = unknown(f"method of row {row.label}:", row.method, METHODS)
        hint = f"{error.hint} --methods runs only the other rows"
        raise ProtofedError(f"study '{study.name}': {error.message}", hint)


def study_tasks(study: Study) -> list[StudyTask]:
    """The tasks, or the one that ``[override] on`` replaces them with."""
    on = study.override.get("on")
    if on is None:
        return list(study.tasks.values())
    found: dict[str, StudyTask] = {}
    for task in study.tasks.values():
        settings = {**study.settings, **task.settings}
        moved = replace(task, name=on, task=on, settings=_moved(study, settings, task.task, on))
        moved = replace(moved, notes=())
        if moved not in found.values():
            found[on if not found else f"{on} ({task.name})"] = moved
    return [replace(task, name=name) for name, task in found.items()]


def columns(study: Study, task: StudyTask) -> tuple[str, ...]:
    """The columns of a task's table: its domains, if they are known, and their average."""
    images = study.images.get(task.task)
    domains = images.domains if images is not None else describe(task.task).domains or ()
    return study.columns.get(task.name) or (*domains, AVERAGE)


def check_domains(study: Study, selection: Selection) -> None:
    """Raise an error if [printed] or [tsne] name other domains than the tasks': none would show."""
    if "on" in study.override:  # they name those of the study's own tasks
        return
    tasks = _chosen_tasks(study, selection)
    known = {task.name: _domains(study, task.task, _settings(study, task)) for task in tasks}
    asked = [
        (f"column in [printed.{name}]", column, (*found, AVERAGE))
        for name, found in known.items()
        for column in study.columns.get(name, ())
    ]
    if len(tasks) == len(study.tasks):
        every = tuple(dict.fromkeys(d for found in known.values() for d in found))
        asked += [("domain in [tsne]", d, every) for d in study.tsne.get("domains", ())]
    for what, name, valid in asked:
        if name not in valid:
            error = unknown(what, name, valid)
            raise ProtofedError(f"study '{study.name}': {error.message}", error.hint)


def _domains(study: Study, task: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """A task's domains; those of a folder of your own are looked up before its first run."""
    known = describe(task).domains
    if known is not None:
        return known
    if task in study.images:
        return study.images[task].domains
    options = {k: settings[k] for k in TASK_SETTINGS if k in settings}
    return _folder_domains(task, tuple(sorted(options.items())))


@lru_cache(maxsize=8)
def _folder_domains(name: str, options: tuple[tuple[str, Any], ...]) -> tuple[str, ...]:
    return tuple(load_task(name, **dict(options)).domains)


def _runs(study: Study, task: StudyTask, line: Line, seed: int) -> list[PlannedRun]:
    own = line.row.settings
    if "on" in study.override:
        kept = {name: own[name] for name in (*line.point, *ROW_OWNED) if name in own}
        own = {**_moved(study, own, next(iter(study.tasks.values())).task, task.task), **kept}
    settings = {**_settings(study, task), **own, **study.override.get("settings", {})}
    drawn = study.tsne.get("rounds", []) if "keep_rounds" not in settings else []
    left_out = settings.get("leave_out")
    unseen = _domains(study, task.task, settings) if left_out == EACH else (left_out,)
    found = []
    for domain in unseen:
        given = _without(settings, domain) if domain else settings
        try:
            method = line.row.make(task.task)
            config = make_config(task.task, method, **{**given, "seed": seed})
        except ProtofedError as error:
            name = f"{task.name}  {line.label}  seed {seed}"
            raise type(error)(f"{name}: {error.message}", error.hint) from None
        if drawn:
            there = [r for r in drawn if r <= config.rounds]
            config = replace(config, keep_rounds=(*there, "last"))
        found.append(PlannedRun(task.name, line, seed, domain, config))
    return found


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


def _moved(study: Study, settings: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Settings of one task as they are on another: without what means nothing there."""
    kept = {k: v for k, v in settings.items() if k not in TASK_OWNED}
    if len(model_names(models := settings.get("model", ""))) > 1:
        kept["model"] = models  # that clients' models differ is the study's, not the task's
    clients, left_out = kept.get("clients"), kept.get("leave_out")
    if isinstance(clients, str) and clients not in distributions(describe(new)):
        del kept["clients"]
    if isinstance(clients, Mapping) or left_out not in (None, EACH):
        # the first domain stands for the first, and so on
        there = _domains(study, new, {})
        names = dict(zip(_domains(study, old, {}), there, strict=False))
        if isinstance(clients, Mapping):
            kept["clients"] = {names[d]: n for d, n in clients.items() if d in names}
        if left_out not in (None, EACH):
            kept["leave_out"] = names.get(left_out, there[0])
    return kept


def _chosen_tasks(study: Study, selection: Selection) -> list[StudyTask]:
    return _chosen(study_tasks(study), selection.tasks, "task", lambda t: (t.name, t.task))


def _chosen_lines(study: Study, selection: Selection) -> list[Line]:
    names = attrgetter("label", "row.label", "row.method")
    return _chosen(study.lines, selection.rows, "row", names)


def _chosen(found: Sequence[Any], wanted: Iterable[str], what: str, names: Any) -> list[Any]:
    """Those that a name means: the one with that name, or else those of that row, task or method.

    Case is ignored if nothing is spelled exactly like that. No name: all.
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
