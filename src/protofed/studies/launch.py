"""From a study to the runs it needs: those that the pool has, and those to be done."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from protofed.config import Config, require_rounds_to_keep, short_task, task_settings
from protofed.data import DataMissing, Task, load_task
from protofed.data.info import FOLDER
from protofed.errors import ProtofedError
from protofed.federation.facts import DIGESTS, discover
from protofed.federation.memory import estimate
from protofed.federation.model_fit import require_fit
from protofed.federation.simulation import make_shares, rows_to_validate
from protofed.observers.preview import preview
from protofed.observers.tensorboard import require_tensorboard
from protofed.runs.folder import RunFolder
from protofed.runs.pool import Pool, StoredRun
from protofed.studies.definition import TUNE, FolderImages, Study
from protofed.studies.execution import Execution, Job
from protofed.studies.plan import (
    PlannedRun,
    Selection,
    check_domains,
    plan,
    require_methods,
    study_tasks,
)


@dataclass(frozen=True)
class Asked:
    """A study that is to be run, or a part of it; ``says`` is what to print before it starts."""

    study: Study
    name: str
    """That of its folder."""
    says: tuple[str, ...] = ()
    selection: Selection = Selection()


def prepare_all(asked: Sequence[Asked], execution: Execution) -> list[tuple[Study, list[Job]]]:
    """``prepare`` for each; a run that several studies have is one job in all of them."""
    found: dict[str, Job] = {}
    prepared = []
    for each in asked:
        study, work = prepare(
            each.study,
            execution.pool,
            selection=each.selection,
            shard=execution.shard,
            tensorboard=execution.tensorboard,
            elsewhere=execution.ray is not None,
        )
        for job in work:
            if len(asked) > 1:
                job.name = f"{each.name}: {job.name}"
            if (known := found.setdefault(job.folder.path.name, job)) is not job:
                known.serve_also(job)
        prepared.append((study, [found[job.folder.path.name] for job in work]))
    return prepared


def prepare(
    study: Study,
    pool: Path,
    *,
    selection: Selection = Selection(),  # noqa: B008 (frozen)
    shard: tuple[int, int] | None = None,
    tensorboard: bool = False,
    elsewhere: bool = False,
) -> tuple[Study, list[Job]]:
    """The study with what its folders of images hold, and the runs that fill its tables.

    Nothing is written, and every config is known to be good. ``shard`` (i, n) is part i of n of
    the planned runs. Runs that are done ``elsewhere`` need neither images nor a GPU here, and what
    is wrong with them is found there.
    """
    if tensorboard:
        require_tensorboard()
    runs = Pool(pool)
    if runs.packed:
        raise ProtofedError(f"'{pool}' is a packed study, not a pool", "choose another --runs")
    require_methods(study, selection)
    planned = plan(study, selection)
    check_domains(study, selection)
    if not planned:
        raise ProtofedError(f"study '{study.name}' has no run for this selection")
    work: dict[str, Job] = {}  # one run may answer several lines of a table
    one = len(study_tasks(study)) == 1
    for run in shard_of(planned, *shard) if shard is not None else planned:
        name = run.name.removeprefix(f"{run.task}  ").replace("  ", " ") if one else run.name
        make = _job_elsewhere if elsewhere else _job
        job = make(run, runs, study.digests(run.config.task), name)
        job.tensorboard, job.validated = tensorboard, study.kind == TUNE
        work.setdefault(job.folder.path.name, job)
    return study.with_images({**study.images, **_folder_images(planned)}), list(work.values())


def folder_preview(work: Sequence[Job]) -> list[str]:
    """What is chosen for the folders of images on which something is left to run, and why."""
    lines, seen = list[str](), set[tuple[str, int]]()
    for job in work:
        if job.memory is None:  # it is complete
            continue
        task = loaded_task(job.config)
        if task.survey is not None and (task.name, task.image_size) not in seen:
            seen.add((task.name, task.image_size))
            lines += preview(job.config, task)
    return lines


def shard_of(planned: Sequence[PlannedRun], part: int, parts: int) -> list[PlannedRun]:
    """Part ``part`` (from 1) of ``parts`` of the planned runs, sorted by their hashes."""
    hashes = sorted({run.config.hash for run in planned})
    mine = set(hashes[part - 1 :: parts])
    return [run for run in planned if run.config.hash in mine]


def _job(run: PlannedRun, pool: Pool, digests: Collection[str], name: str) -> Job:
    config = run.config
    try:
        task = loaded_task(config)
    except DataMissing:
        # if the images are not here, a complete run is taken as it is
        if found := _complete(name, config, pool.candidates(config, digests)):
            return found
        raise
    asked = config.for_task(task.info)
    try:
        facts = discover(asked, task)
        sizes = (len(task.classes), task.image_size, config.width, config.norm)
        require_rounds_to_keep(config)
        require_fit(config.method, asked.models, *sizes)
        if config.validate is not None:
            rows_to_validate(asked, task, make_shares(asked, task))
    except ProtofedError as error:
        raise type(error)(f"{run.name}: {error.message}", error.hint) from None
    folder = RunFolder(pool.path / facts.run_name(asked))
    own = Job(name, config, folder, facts.run_hash(asked))
    own.gpu = facts.device == "cuda" and facts.engine != "ray"
    if own.is_complete():
        return own
    # a device or precision that was not asked for was that machine's choice
    same_images = [
        stored
        for stored in pool.candidates(config)
        if all(stored.facts.get(n) == getattr(facts, n) for n in DIGESTS)
    ]
    if found := _complete(name, config, same_images):
        return found
    # what it takes alone: runs side by side share the workers
    memory = estimate(replace(facts.applied(asked), workers=config.workers or 1), task)
    try:
        memory.require()
    except ProtofedError as error:
        raise type(error)(f"{run.name}: {error.message}", error.hint) from None
    own.memory = memory
    return own


def _job_elsewhere(run: PlannedRun, pool: Pool, digests: Collection[str], name: str) -> Job:
    config = run.config
    require_rounds_to_keep(config)
    stored = pool.candidates(config, digests)
    if found := _complete(name, config, stored):
        return found
    for unfinished in stored:
        if unfinished.folder is not None:
            return Job(name, config, unfinished.folder, unfinished.hash)
    # the folder's name until the machine that does the run has seen its images and its GPU
    short = f"{short_task(config.task)}-{config.method.name}-{config.seed}-{config.hash}"
    return Job(name, config, RunFolder(pool.path / short), "")


def _complete(name: str, config: Config, stored: Sequence[StoredRun]) -> Job | None:
    found = (Job(name, config, s.folder, s.hash) for s in stored if s.folder is not None)
    return next((job for job in found if job.is_complete()), None)


def _folder_images(planned: Sequence[PlannedRun]) -> dict[str, FolderImages]:
    found: dict[str, FolderImages] = {}
    for config in (run.config for run in planned):
        if config.task.startswith(FOLDER):
            with suppress(DataMissing):
                task = loaded_task(config)
                known = found[config.task].digests if config.task in found else ()
                digests = tuple(sorted({*known, task.digest}))
                found[config.task] = FolderImages(tuple(task.domains), digests)
    return found


def loaded_task(config: Config) -> Task:
    """The config's task; that of one config after another is loaded once."""
    return _load(config.task, tuple(sorted(task_settings(config).items())))


@lru_cache(maxsize=4)
def _load(name: str, settings: tuple[tuple[str, Any], ...]) -> Task:
    return load_task(name, **dict(settings))
