"""What a script or a notebook calls: the commands as functions, with their progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from protofed.cluster import require_ray
from protofed.config import Config
from protofed.data import Task
from protofed.errors import ProtofedError
from protofed.federation.simulation import Observer
from protofed.method import Method
from protofed.methods import WITHOUT_FILES
from protofed.observers.progress import RunProgress, print_plain, protocol_line
from protofed.runs.result import Result
from protofed.runs.run import run as run_federation
from protofed.studies.adhoc import comparison, parameter_sweep, tuning
from protofed.studies.definition import TUNE, Study
from protofed.studies.execution import (
    Execution,
    Job,
    LocalRunner,
    Runner,
    default_jobs,
    raise_failures,
    run_all,
)
from protofed.studies.folder import StudyFolder
from protofed.studies.gpu_runner import GpuRunner
from protofed.studies.launch import Asked, folder_preview, prepare_all
from protofed.studies.ray_runner import RayRunner
from protofed.studies.search import Values


def run(
    task: str | Task | None = None,
    method: str | Method | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    config: Config | str | Path | None = None,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Run a federation and return its result.

    ``run(task="glyphs", method=protofed.methods.FPL(tau=0.05), rounds=20)``. ``settings`` are the
    fields of ``protofed.Config`` (rounds, seed, lr, clients, ...); what is not given comes from
    the task's protocol. ``config`` is a ready ``Config``, or a TOML file; everything given here
    overrides the file. With ``out`` the run keeps a folder, from which ``resume`` continues after
    a crash, or with more ``rounds`` than before. ``observers`` are called as the run proceeds.
    ``progress`` shows its rounds, by default in a notebook and on a terminal.
    """
    console = _console(progress)
    return run_federation(
        task,
        method,
        options=options,
        out=out,
        resume=resume,
        overwrite=overwrite,
        config=config,
        observers=[*observers] if console.quiet else [RunProgress(console), *observers],
        **settings,
    )


def compare(
    task: str = "glyphs",
    methods: Iterable[str | Method] | Mapping[str, str | Method] = WITHOUT_FILES,
    *,
    seeds: int = 1,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    runs: str | Path = "runs",
    out: str | Path | None = None,
    jobs: int | None = None,
    mps: bool | None = None,
    ray: str | None = None,
    gpus_per_run: float | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> StudyFolder:
    """Run methods on the same clients, as ``protofed compare`` does.

    ``methods`` are names, ``"path/to/file.py:Class"`` or method objects; a mapping gives the rows
    labels of their own. By default, they are all that need no files. ``options`` has
    hyper-parameters by row: ``{"fpl": {"tau": 0.05}}``. The runs are kept in the pool ``runs``;
    those that are already there are not repeated. ``jobs`` of them run at a time; None: one per
    core, and on GPUs as many as measurements suggest. ``mps`` is whether they share GPUs through
    NVIDIA's MPS; None: if it works. With ``ray`` (``"local"``, ``"auto"`` or ``"HOST:PORT"``) they
    run on a cluster, each with ``gpus_per_run``.

    >>> table = protofed.compare("glyphs", ["fedavg", "fpl"], rounds=5)
    >>> print(table)
    """
    asked = comparison(task, methods, seeds, options or {}, settings)
    execution = Execution(Path(runs), jobs, mps, ray=ray, gpus_per_run=gpus_per_run)
    return _run_asked(asked, execution, out, progress)


def sweep(
    task: str = "glyphs",
    method: str | Method = "fedavg",
    *,
    over: Mapping[str, Sequence[Any]],
    against: str | Method | None = None,
    seeds: int = 1,
    options: Mapping[str, Any] | None = None,
    runs: str | Path = "runs",
    out: str | Path | None = None,
    jobs: int | None = None,
    mps: bool | None = None,
    ray: str | None = None,
    gpus_per_run: float | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> StudyFolder:
    """Run a method over all combinations of parameter values, as ``protofed sweep`` does.

    ``over`` has the values of hyper-parameters and settings: ``{"tau": [0.02, 0.05]}``. ``against``
    is another method, which is not swept.
    """
    asked = parameter_sweep(task, method, over, seeds, options or {}, settings, against)
    execution = Execution(Path(runs), jobs, mps, ray=ray, gpus_per_run=gpus_per_run)
    return _run_asked(asked, execution, out, progress)


def tune(
    task: str = "glyphs",
    method: str | Method = "fedavg",
    *,
    over: Mapping[str, Values],
    budget: int = 20,
    seeds: int = 1,
    options: Mapping[str, Any] | None = None,
    runs: str | Path = "runs",
    out: str | Path | None = None,
    jobs: int | None = None,
    mps: bool | None = None,
    ray: str | None = None,
    gpus_per_run: float | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> StudyFolder:
    """Choose hyper-parameters by validation accuracy, as ``protofed tune`` does.

    ``over`` has lists of values or ranges: ``{"tau": [0.02, 0.05], "lr": "log:0.001..0.1"}``. At
    most ``budget`` points are tried. ``validate`` names the images to choose by: by default
    training images that no client holds, or a part of each client's if those do not suffice.

    >>> tuned = protofed.tune("glyphs", "fpl", over={"tau": [0.02, 0.05, 0.1]}, rounds=5)
    >>> tuned.chosen().point
    {'tau': 0.05}
    """
    asked = tuning(task, method, over, budget, seeds, options or {}, settings)
    execution = Execution(Path(runs), jobs, mps, ray=ray, gpus_per_run=gpus_per_run)
    return _run_asked(asked, execution, out, progress)


@dataclass(frozen=True)
class Finished:
    """What running a study produced: its folder (None for a part of it), files, and failed runs."""

    folder: StudyFolder | None
    files: list[str]
    failed: list[Job]


def run_studies(
    asked: Sequence[Asked], execution: Execution, console: Console, out: Path | None = None
) -> list[Finished]:
    """Run what the pool lacks of all studies at once, then write their tables and figures.

    With a shard, only run that part. The studies' folders (``out``, if there is one study) are made
    before the runs: `protofed study table` can show what is there so far, and a folder that holds
    another study is an error now, not after hours.
    """
    ray, pool = execution.ray, execution.pool
    if ray is not None:
        require_ray()
    prepared = prepare_all(asked, execution)
    work = list({id(job): job for _, own in prepared for job in own}.values())
    if ray is not None and any(job.config.engine == "ray" for job in work):
        raise ProtofedError("--ray and --engine ray exclude each other", "give only one of them")
    todo = [job for job in work if job.memory is not None]
    on_gpu = any(job.gpu for job in todo)
    if execution.mps and todo and not on_gpu:
        raise ProtofedError("--mps is for runs on a GPU, and these are on the CPU")
    folders: list[StudyFolder | None] = [
        StudyFolder.create(out or pool / each.name, study, pool)
        if execution.shard is None
        else None
        for each, (study, _) in zip(asked, prepared, strict=True)
    ]
    protocols = dict.fromkeys(f"{job.config.task}, {protocol_line(job.config)}" for job in work)
    says = [text for each in asked for text in each.says]
    for line in (*protocols, *folder_preview(work), *says):
        print_plain(console, line)
    runner: Runner
    if ray is None:
        on_cpu = LocalRunner(execution.jobs or default_jobs(work))
        runner = GpuRunner(todo, console, execution.jobs, execution.mps) if on_gpu else on_cpu
    else:
        cpus = max(job.config.workers or 1 for job in work)
        gpus = execution.gpus_per_run
        runner = RayRunner(ray, pool, console, most=execution.jobs, cpus=cpus, gpus=gpus)
    run_all(work, runner, console)
    both = zip(prepared, folders, strict=True)
    return [_finished(study, own, folder) for (study, own), folder in both]


def _finished(study: Study, work: Sequence[Job], folder: StudyFolder | None) -> Finished:
    """Write the tables and figures; a point of a search that diverged has not failed."""
    from protofed.report.study_figures import write_figures  # it imports matplotlib

    files, made = list[str](), folder.tables() if folder is not None else []
    if folder is not None and any(table.runs for table in made):
        files = folder.write_tables() + write_figures(folder, made)
    failed = [job for job in work if job.state == "failed"]
    if study.kind == TUNE:  # its row says so
        failed = [job for job in failed if not job.folder.diverged()]
    return Finished(folder, files, failed)


def _run_asked(
    asked: Asked, execution: Execution, out: str | Path | None, progress: bool | None
) -> StudyFolder:
    path = None if out is None else Path(out)
    (done,) = run_studies([asked], execution, _console(progress), path)
    raise_failures(done.failed)
    assert done.folder is not None
    return done.folder


def _console(progress: bool | None) -> Console:
    """Plain lines in a notebook, which shows marked-up lines as paragraphs and cannot redraw."""
    notebook = Console().is_jupyter
    terminal = False if notebook else None
    console = Console(force_jupyter=False, force_terminal=terminal, emoji=False)
    shown = console.is_terminal or notebook if progress is None else progress
    console.quiet = not shown
    return console
