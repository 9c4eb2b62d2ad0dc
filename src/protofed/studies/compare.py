"""A study from beginning to end: plan, run what is not there, tables and figures.

``protofed compare`` and ``protofed sweep`` are studies too, written on the spot.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from protofed.config import Config
from protofed.errors import ProtofedError, unknown
from protofed.files import Damaged
from protofed.methods import METHODS
from protofed.observers.tensorboard import require_tensorboard
from protofed.runs.artifacts import rounds_to_keep
from protofed.runs.folder import RunFolder
from protofed.studies import folder as folders
from protofed.studies import plan
from protofed.studies.definition import Study, parse
from protofed.studies.execution import Job, run_all
from protofed.studies.plan import Selection


def run_study(
    study: Study,
    folder: Path,
    jobs: int | None,
    console: Console,
    selection: Selection = Selection(),  # noqa: B008 (frozen)
    tensorboard: bool = False,
) -> tuple[list[str], list[Job]]:
    """Run what is not complete, ``jobs`` at a time; write tables and figures.

    Returns their names, and the runs that failed. Nothing is written before every configuration is
    known to be good. With ``tensorboard`` each run also writes what that shows live.
    """
    if tensorboard:
        require_tensorboard()
    cells = plan.cells(study, selection)
    for row in (cell.line.row for cell in cells):
        if row.missing:  # a table of what is there shows such a row as missing
            error = unknown(f"method of row {row.label}:", row.method, METHODS)
            hint = f"{error.hint} --methods runs other rows alone"
            raise ProtofedError(f"study '{study.name}': {error.message}", hint)
    configs = plan.configs(cells)
    plan.check_domains(study, cells)
    _drop_stale(folder, configs, console)
    known = folders.read_index(folder)
    work: dict[str, Job] = {}
    index: dict[str, Path] = {}
    for cell in cells:
        config = configs[cell.key]
        usable = [run for run in known.get(cell.key, ()) if _serves(run, folder, config)]
        done = folders.finished(usable) or _elsewhere(folder, config)
        index[cell.key] = done or folder / config.label
        if config.label not in work:  # one run may answer several cells
            state = "done" if done else "waiting"
            name, place = _name(study, cell), index[cell.key]
            work[config.label] = Job(name, config, place, state, tensorboard=tensorboard)
    folders.write_study(study, folder, index)
    at_once = jobs or default_jobs(any(c.device == "cuda" for c in configs.values()))
    failed = run_all(list(work.values()), at_once, console)
    # what others have run in the same folder meanwhile belongs to its tables
    return folders.write_outputs(folders.with_seeds_of(folder, study), folder), failed


def outside(study: Study, folder: Path) -> int:
    """How many finished runs of the folder the study as it is now does not ask for."""
    index = folders.read_index(folder)
    asked = {run for c in plan.cells(study) for run in index.get(c.key, ())}
    every = {run for runs in index.values() for run in runs}
    return sum(folders.finished([run]) is not None for run in every - asked)


def _elsewhere(folder: Path, config: Config) -> Path | None:
    """This very run, complete in this folder or in that of another study beside it."""
    if RunFolder(folder / config.label).is_finished(config.hash):
        return folder / config.label
    beside = sorted(folder.parent.glob("*/study.toml"))
    runs = (file.parent / config.label for file in beside)
    found = (run for run in runs if RunFolder(run).is_finished(config.hash))
    return next((run for run in found if _serves(run, folder, config)), None)


def _drop_stale(folder: Path, configs: Mapping[str, Config], console: Console) -> None:
    """Runs that answered these cells before the images, or a version's defaults, were others."""
    stale = {
        key: [run for run in runs if folders.finished([run]) and not _is_of(run, configs[key])]
        for key, runs in folders.read_index(folder).items()
        if key in configs
    }
    count = len({run for runs in stale.values() for run in runs})
    if count:
        folders.drop(folder, stale)
        console.print(
            f"finished, but of other images or of another version's defaults: {count} of the runs; "
            "they stay in the folder, are in no table any more, and are done again"
        )


def _is_of(run: Path, config: Config) -> bool:
    """Whether a finished run is of this configuration, on whatever device it was done.

    What was asked for of device and precision is in a cell's key; the rest is the machine's choice.
    """
    try:
        summary = RunFolder(run).summary()
    except Damaged:
        return False
    chosen = {k: summary[k] for k in ("device", "precision") if k in summary}
    return bool(replace(config, **chosen).hash == summary.get("hash"))


def _serves(run: Path, folder: Path, config: Config) -> bool:
    """Whether a run of another study also kept the models of single rounds that are asked for."""
    if run.parent == folder or not config.keep_rounds:
        return True
    return rounds_to_keep(config) <= set(RunFolder(run).artifact_rounds("snapshots"))


GPU_JOBS, GPU_CORES, GPU_BYTES = 2, 4, 16 << 30


def default_jobs(gpu: bool) -> int:
    """Runs at a time: one for each core; on a GPU two, if there is room for a second.

    A run alone leaves a GPU idle while it reads images, records its first epochs and writes files.
    Each run has a process, and so a CUDA context, of its own.
    """
    cores = os.cpu_count() or 1
    if not gpu:
        return cores
    import torch

    free, _ = torch.cuda.mem_get_info()
    return max(1, min(GPU_JOBS, cores // GPU_CORES, free // GPU_BYTES))


def _name(study: Study, cell: plan.Cell) -> str:
    one = len(plan.study_tasks(study)) == 1
    return cell.name.removeprefix(f"{cell.task}  ").replace("  ", " ") if one else cell.name


def adhoc(
    name: str,
    title: str,
    task: str,
    rows: Mapping[str, tuple[str, Mapping[str, Any]]],
    seeds: Sequence[int],
    settings: Mapping[str, Any],
    sweeps: Sequence[Mapping[str, Any]] = (),
) -> Study:
    """A study written on the spot: one task, rows as label → (method, hyper-parameters)."""
    from protofed.config import short_task

    raw: dict[str, Any] = {
        "title": title,
        "kind": "sweep" if sweeps else "table",
        "seeds": list(seeds),
        "settings": dict(settings),
        "tasks": {short_task(task): {"task": task}},
        "rows": {
            label: {"method": method, "options": dict(options)}
            for label, (method, options) in rows.items()
        },
    }
    if sweeps:
        raw["sweep"] = [dict(s) for s in sweeps]
    return parse(raw, name)
