"""Several runs side by side, each in a process of its own, and what they say together.

A process per run is the plain command line (``protofed run --config ...``): a run here is the run
a person would start, and nothing but its folder passes between the processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from protofed.config import Config
from protofed.errors import ProtofedError
from protofed.federation.records import Records, read_records
from protofed.federation.run import Result, is_finished, load_run
from protofed.files import write_atomic
from protofed.progress import accuracies, duration
from protofed.report.curves import curves
from protofed.study.tables import markdown

POLL_SECONDS = 0.3


@dataclass
class _Job:
    config: Config
    folder: Path
    name: str
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    rounds_before: int = 0
    done: bool = False
    told: int = 0

    def records(self) -> Records:
        with contextlib.suppress(ProtofedError):
            return read_records(self.folder / "rounds.jsonl")
        return Records()


def compare(configs: Sequence[Config], folder: Path, jobs: int, console: Console) -> list[Result]:
    """Run what is not complete, ``jobs`` at a time; write table and figure; return all results."""
    work = [_Job(c, folder / c.label, f"{c.method.name} seed {c.seed}") for c in configs]
    for job in work:
        job.done = is_finished(job.folder, job.config)
    todo = [job for job in work if not job.done]
    if len(todo) < len(work):
        console.print(f"{len(work) - len(todo)} of {len(work)} runs are already complete")
    if todo:
        console.print(f"{len(todo)} runs, {min(jobs, len(todo))} at a time")
        _run_all(work, todo, jobs, console)
    results = [load_run(job.folder) for job in work]
    write_atomic(folder / "table.md", markdown(results))
    curves(results, folder / "curves.png")
    return results


def _run_all(work: list[_Job], todo: list[_Job], jobs: int, console: Console) -> None:
    waiting: list[_Job] = list(todo)
    running: list[_Job] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="protofed-") as scratch:
        live = Live(console=console, transient=True, refresh_per_second=4)
        with live if console.is_terminal else contextlib.nullcontext():
            try:
                while waiting or running:
                    while waiting and len(running) < jobs:
                        running.append(_start(waiting.pop(0), Path(scratch), jobs))
                    time.sleep(POLL_SECONDS)
                    for job in [j for j in running if j.process and j.process.poll() is not None]:
                        running.remove(job)
                        _finish(job, Path(scratch))
                    if console.is_terminal:
                        live.update(_display(work, began, jobs))
                    else:
                        _tell(todo, console)
            finally:
                for job in running:  # Ctrl-C or a failed run: let the others write a checkpoint
                    assert job.process is not None
                    job.process.send_signal(signal.SIGINT)
                for job in running:
                    assert job.process is not None
                    job.process.wait()


def _start(job: _Job, scratch: Path, jobs: int) -> _Job:
    config = scratch / f"{job.config.label}.toml"
    config.write_text(job.config.toml(), encoding="utf-8")
    errors = scratch / f"{job.config.label}.err"
    command = [sys.executable, "-m", "protofed", "run", "--quiet", "--resume"]
    if job.config.workers is None:  # runs side by side share the cores
        command += ["--workers", str(max(1, (os.cpu_count() or 1) // jobs))]
    with errors.open("wb") as file:
        job.process = subprocess.Popen(
            [*command, "--config", str(config), "--out", str(job.folder)],
            stdin=subprocess.DEVNULL,
            stderr=file,
        )
    job.started, job.rounds_before = time.perf_counter(), len(job.records())
    return job


def _finish(job: _Job, scratch: Path) -> None:
    assert job.process is not None
    if job.process.returncode:
        text = (scratch / f"{job.config.label}.err").read_text("utf-8", errors="replace").strip()
        last = text.splitlines()[-1] if text else f"exit code {job.process.returncode}"
        raise ProtofedError(f"run {job.name} failed: {last.removeprefix('error: ')}")
    job.done = True


def _seconds_left(job: _Job) -> float | None:
    done = len(job.records()) - job.rounds_before
    if job.done or not job.process or done < 1:
        return None
    return (
        (time.perf_counter() - job.started) / done * (job.config.rounds - job.rounds_before - done)
    )


def _display(work: list[_Job], began: float, jobs: int) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("run", "round", "accuracy, %", "left"):
        table.add_column(column, no_wrap=True)
    for job in work:
        records = job.records()
        left = _seconds_left(job)
        state = "done" if job.done else ("waiting" if job.process is None else "")
        table.add_row(
            job.name,
            f"{len(records)}/{job.config.rounds}",
            accuracies(records[-1]) if records else "",
            state or (duration(left) if left is not None else "starting"),
        )
    rounds = sum(j.config.rounds for j in work)
    done = sum(len(j.records()) for j in work)
    ran = done - sum(
        j.config.rounds if j.process is None and j.done else j.rounds_before for j in work
    )
    spent = time.perf_counter() - began
    left_all = f"{duration(spent / ran * (rounds - done))} left" if ran > 0 else ""
    table.add_row("all", f"{done}/{rounds}", f"{duration(spent)} so far", left_all, style="dim")
    return table


def _tell(todo: list[_Job], console: Console) -> None:
    """A line for each new round, where there is no terminal."""
    for job in todo:
        records = job.records()
        if len(records) > job.told:
            left = _seconds_left(job)
            console.print(
                f"{job.name}  round {len(records)}/{job.config.rounds}  {accuracies(records[-1])}"
                + (f"  {duration(left)} left" if left else ""),
                highlight=False,
                soft_wrap=True,
            )
            job.told = len(records)
