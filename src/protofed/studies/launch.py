"""A study from its plan to its runs: what the pool has is taken, what is missing is run.

``protofed compare`` and ``protofed sweep`` are studies too, written on the spot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console

from protofed.config import Config, short_task, task_settings
from protofed.data import DataMissing, Task, load_task
from protofed.errors import ProtofedError
from protofed.federation.facts import Facts, discover
from protofed.federation.model_fit import require_fit
from protofed.observers.tensorboard import require_tensorboard
from protofed.runs.artifacts import rounds_to_keep
from protofed.runs.folder import RunFolder
from protofed.runs.pool import Pool, StoredRun
from protofed.studies.definition import Study, parse
from protofed.studies.execution import Job, default_jobs, run_all
from protofed.studies.plan import (
    PlannedRun,
    Selection,
    check_domains,
    plan,
    require_methods,
    study_tasks,
)


def run_study(
    study: Study,
    pool: Path,
    console: Console,
    *,
    jobs: int | None = None,
    selection: Selection = Selection(),  # noqa: B008 (frozen)
    shard: tuple[int, int] = (1, 1),
    tensorboard: bool = False,
) -> list[Job]:
    """Run what the pool does not have, ``jobs`` at a time; returns the runs that failed.

    Nothing is written before every config is known to be good. ``shard`` (i, n) is part i of n of
    the planned runs.
    """
    if tensorboard:
        require_tensorboard()
    require_methods(study, selection)
    planned = plan(study, selection)
    check_domains(study, selection)
    if not planned:
        raise ProtofedError(f"study '{study.name}' has no run for this choice")
    work: dict[str, Job] = {}  # one run may answer several lines of a table
    runs = Pool(pool)
    one = len(study_tasks(study)) == 1
    for run in shard_of(planned, *shard):
        name = run.name.removeprefix(f"{run.task}  ").replace("  ", " ") if one else run.name
        job = _job(run, runs, name)
        job.tensorboard = tensorboard
        work.setdefault(job.folder.path.name, job)
    gpu = any(job.gpu for job in work.values() if job.state == "waiting")
    return run_all(list(work.values()), jobs or default_jobs(gpu), console)


def shard_of(planned: Sequence[PlannedRun], part: int, parts: int) -> list[PlannedRun]:
    """Part ``part`` (from 1) of ``parts`` of the planned runs, sorted by their hashes."""
    hashes = sorted({run.config.hash for run in planned})
    mine = set(hashes[part - 1 :: parts])
    return [run for run in planned if run.config.hash in mine]


def _job(run: PlannedRun, pool: Pool, name: str) -> Job:
    config = run.config
    try:
        task = _task(config.task, tuple(sorted(task_settings(config).items())))
    except DataMissing:
        # where the images are not, what is complete is taken as it is
        for found in pool.candidates(config):
            if found.folder is not None and _serves(found.folder, found.hash, config):
                return Job(name, config, found.folder, found.hash, "done")
        raise
    complete = config.for_task(task.info)
    try:
        facts = discover(complete, task)
        sizes = (len(task.classes), task.image_size, config.width, config.norm)
        require_fit(config.method, config.models, *sizes)
    except ProtofedError as error:
        raise type(error)(f"{run.name}: {error.message}", error.hint) from None
    own = RunFolder(pool.path / facts.run_name(complete))
    hash = facts.run_hash(complete)
    done = _serves(own, hash, config)
    other = None if done else _elsewhere(pool, config, facts)
    if other is not None and other.folder is not None:
        return Job(name, config, other.folder, other.hash, "done")
    state = "done" if done else "waiting"
    again = not done and own.is_finished(hash)  # complete, but without what is to be kept
    return Job(name, config, own, hash, state, overwrite=again, gpu=facts.device == "cuda")


@lru_cache(maxsize=4)
def _task(name: str, options: tuple[tuple[str, Any], ...]) -> Task:
    return load_task(name, **dict(options))


def _elsewhere(pool: Pool, config: Config, facts: Facts) -> StoredRun | None:
    """A complete run of the same images, done on another device or in another precision.

    What was asked for of these is in the config; the rest was that machine's choice.
    """
    for run in pool.candidates(config):
        same = all(
            run.facts.get(name) == getattr(facts, name) for name in ("digest", "public_digest")
        )
        if same and run.folder is not None and _serves(run.folder, run.hash, config):
            return run
    return None


def _serves(folder: RunFolder, hash: str, config: Config) -> bool:
    """Whether the run is complete and has kept the models of single rounds that are asked for."""
    if not folder.is_finished(hash):
        return False
    there = folder.artifact_rounds("snapshots")
    return not config.keep_rounds or rounds_to_keep(config) <= set(there)


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
