"""Many runs, each a ``protofed run`` in a process of its own, and what the user sees of them.

What passes between the processes is the run's folder. Several studies may use one pool at the same
time: a folder that another process has locked is waited for. A *runner* says where the processes
are: on this machine (``LocalRunner``), on its GPUs (``protofed.studies.gpu_runner``) or on a
cluster (``protofed.studies.ray_runner``).
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from protofed.config import Config, is_whole
from protofed.cores import core_count
from protofed.errors import Busy, ProtofedError
from protofed.federation.memory import Memory
from protofed.observers.progress import accuracies, duration, print_plain
from protofed.runs.artifacts import rounds_to_keep
from protofed.runs.folder import RunFolder
from protofed.runs.records import VALIDATION, Records, beside
from protofed.silence import Silence
from protofed.studies.render import natural_width

POLL_SECONDS = 0.3
RETRY_SECONDS = 2.0
"""How often to look at a run that another process has."""
PACKAGE = str(Path(__file__).parents[1])
_FRAME = re.compile(r'  File "(.*)", line (\d+), in ')
"""A line of a traceback."""
SHOWN = 16
"""More jobs than this are not shown one by one, only those that are running."""


@dataclass
class Job:
    """A run to be done: waiting, running (here), elsewhere (in another process), done or failed."""

    name: str
    config: Config
    folder: RunFolder
    hash: str
    state: str = "waiting"
    started: float = 0.0
    checked: float = float("-inf")
    before: int = 0
    stale: int = -1
    """When the rounds of a run that starts over were written: they are not this run's."""
    records: Records = field(default_factory=Records)
    printed: int = 0
    message: str = ""
    tensorboard: bool = False
    validated: bool = False
    """Show its validation accuracy alone: the run is one of those to choose from."""
    overwrite: bool = False
    """Run it again although it is finished: it has not kept what is asked for."""
    gpu: bool = False
    at_once: int = 1
    """How many runs share the cores with it, itself included."""
    memory: Memory | None = None
    """The memory it takes with one worker, if it is to be done."""

    def serve_also(self, other: Job) -> None:
        """Do what another study needs of the same run, too: the models of more rounds."""
        kept = (*(self.config.keep_rounds or ()), *(other.config.keep_rounds or ()))
        if kept:
            self.config = replace(self.config, keep_rounds=tuple(dict.fromkeys(kept)))
        self.memory = self.memory or other.memory
        self.validated |= other.validated

    def is_complete(self) -> bool:
        """Whether the run is finished and has kept the models of all rounds asked for."""
        if not self.folder.is_finished(self.hash):
            return False
        if not self.config.keep_rounds:
            return True
        done = self.folder.summary().get("rounds", self.config.rounds)  # it may have stopped early
        kept = self.folder.artifact_rounds("snapshots")
        return rounds_to_keep(replace(self.config, rounds=done)) <= set(kept)

    @cached_property
    def kind(self) -> str:
        """Its configuration, whatever the seed: runs of one kind take about equally long."""
        return replace(self.config, seed=0).hash

    def refresh(self) -> None:
        with contextlib.suppress(ProtofedError, OSError):
            if self.folder.rounds_written() != self.stale:
                self.records = self.folder.records()

    @cached_property
    def seconds_before(self) -> float | None:
        """Seconds per round of a run that was complete when the study started."""
        with contextlib.suppress(ProtofedError, OSError, KeyError):
            summary = self.folder.summary()
            return float(summary["seconds"]) / int(summary.get("rounds", self.config.rounds))
        return None

    @property
    def rounds(self) -> int:
        return self.config.rounds if self.state == "done" else len(self.records)

    @property
    def accuracies(self) -> str:
        if not self.records or self.validated:
            return f"{VALIDATION} {self.average}" if self.records else ""
        return accuracies(self.records[-1], self.config.leave_out)

    @property
    def average(self) -> str:
        if not self.records:
            return ""
        last = self.records[-1]
        return f"{beside(last)[VALIDATION] if self.validated else last['average']:.1f}"

    @property
    def seconds_left(self) -> float | None:
        """Estimated time until the run is complete; None before the first round is done."""
        done = len(self.records) - self.before
        if self.state != "running" or done < 1:
            return None
        spent = time.perf_counter() - self.started
        return spent / done * (self.config.rounds - len(self.records))


@dataclass(frozen=True)
class Execution:
    """Where a study's runs are kept, which part of them is done, and on what.

    ``jobs`` runs are done at a time; None: as many as cores, or GPUs and memory, suggest.
    ``shard`` (i, n) is part i of n of the planned runs. ``mps``: whether they share GPUs through
    MPS. With ``ray`` they are done on that cluster, with ``gpus_per_run`` of a GPU each.
    """

    pool: Path = Path("runs")
    jobs: int | None = None
    mps: bool | None = None
    shard: tuple[int, int] | None = None
    ray: str | None = None
    gpus_per_run: float | None = None
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.jobs is not None and not (is_whole(self.jobs) and self.jobs > 0):
            raise ProtofedError(
                f"jobs must be a whole number of at least 1, got {self.jobs!r:.100}"
            )
        if self.ray is None and self.gpus_per_run is not None:
            raise ProtofedError("GPUs per run were given without a cluster", "add --ray auto")
        if self.ray is not None and self.mps:
            raise ProtofedError(
                "--mps is for runs on this machine",
                "start MPS on every machine of the cluster, before Ray",
            )


class Runner(Protocol):
    """Where runs are executed. Leaving it stops what still runs; each leaves a checkpoint."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def at_once(self) -> int:
        """How many runs may be under way; it may change."""

    def start(self, job: Job) -> None:
        """Start a run, or resume it."""

    def poll(self, job: Job, console: Console) -> None:
        """Note what has become of a run that was started."""


def run_all(jobs: Sequence[Job], runner: Runner, console: Console) -> list[Job]:
    """Do what is not done yet; returns the jobs that failed.

    A failing run does not stop the others.
    """
    for job in jobs:
        _settle(job)
    done = sum(job.state == "done" for job in jobs)
    todo = [job for job in jobs if job.state == "waiting"]
    if done:
        console.print(f"{done} of {len(jobs)} runs are already complete")
    if todo:
        with _stopped_by_sigterm(), runner:
            runs = f"{len(todo)} run{'s' * (len(todo) != 1)}"
            console.print(f"{runs}, {min(runner.at_once, len(todo))} at a time")
            _run(jobs, todo, runner, console)
    return [job for job in jobs if job.state == "failed"]


def default_jobs(jobs: Sequence[Job]) -> int:
    """Runs at a time on a CPU: one for each core, as far as memory allows."""
    cores = core_count()
    needs = [job.memory for job in jobs if job.memory is not None]
    largest = max((need.total for need in needs), default=0)
    free = min((need.free for need in needs if need.free is not None), default=0)
    return max(1, min(cores, free // largest)) if free and largest else cores


def raise_failures(failed: Sequence[Job]) -> None:
    if len(failed) == 1:
        raise ProtofedError(f"run {failed[0].name} failed: {failed[0].message}")
    if failed:
        listed = "; ".join(f"{job.name}: {job.message}" for job in failed[:3])
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        raise ProtofedError(f"{len(failed)} runs failed: {listed}{more}")


def _settle(job: Job) -> None:
    """Note whether the run is done, or diverged before: the same numbers would diverge again."""
    finished = job.folder.is_finished(job.hash)  # once: it may finish meanwhile
    if finished and job.is_complete():
        job.state = "done"
        return
    job.overwrite = finished
    if message := job.folder.diverged():
        job.state = "failed"
        job.message = f"{message} (to try again, delete {job.folder.path})"


def _run(jobs: Sequence[Job], todo: Sequence[Job], runner: Runner, console: Console) -> None:
    began, left, silence = time.perf_counter(), list(todo), Silence()
    live = Live(console=console, transient=True, refresh_per_second=4)
    with live if console.is_terminal else contextlib.nullcontext():
        while left:
            _start_some(jobs, left, len(todo), runner, console)
            if any(job.state in ("running", "elsewhere", "waiting") for job in left):
                time.sleep(POLL_SECONDS)
            for job in left:
                if job.state == "running":
                    job.refresh()
                    runner.poll(job, console)
            if console.is_terminal:
                live.update(display(jobs, began, runner.at_once, console))
            elif _print_rounds(left, console):
                silence.end()
            elif silence.too_long():
                print_plain(console, _so_far(jobs, began))
            left = [job for job in left if job.state not in ("done", "failed")]


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """As with Ctrl-C: batch systems and ``timeout`` send it, and no run must be left behind.

    They may send it twice. The second is ignored: it would interrupt the wait for the runs.
    """
    if threading.current_thread() is not threading.main_thread():  # where handlers may be set
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_some(
    jobs: Sequence[Job], left: Sequence[Job], total: int, runner: Runner, console: Console
) -> None:
    """Fill the free places; what other processes have is only checked now and then.

    ``left`` are the jobs that have not ended, of the ``total`` that were to be done.
    """
    at_once = runner.at_once
    free = at_once - sum(job.state == "running" for job in left)
    for job in starting_order(left, jobs, at_once) if free > 0 else ():
        if free <= 0:
            return
        if job.state == "running" or time.perf_counter() - job.checked < RETRY_SECONDS:
            continue
        job.checked = time.perf_counter()
        _settle(job)  # another process may have finished it meanwhile
        if job.state in ("done", "failed"):
            continue
        if job.folder.is_locked():
            job.state = "elsewhere"
            job.refresh()
            continue
        if job.folder.starts_over(job.config):  # rounds before a first checkpoint do not count
            job.stale, job.records = job.folder.rounds_written(), Records()
            text = "starts over, there is no checkpoint in its folder to resume from"
            print_plain(console, f"{job.name}: {text}")
        job.refresh()
        before = total - sum(not other.started for other in left if other is not job) - 1
        # the last ones, if they are fewer, share all cores
        job.at_once = min(at_once, total - before // at_once * at_once)
        job.started, job.before = time.perf_counter(), len(job.records)
        job.state = "running"
        runner.start(job)
        free -= 1


def expected_seconds(jobs: Sequence[Job]) -> dict[int, float]:
    """What each job that has not ended still takes, by its ``id``; empty if nothing is known.

    A round takes as long as rounds of the same configuration did so far, with whatever seed; or, if
    there are none yet, as those of the task, or as all.
    """
    took: dict[str, list[float]] = {}
    for job in jobs:
        seconds = [sum(record.get("seconds", {}).values()) for record in job.records]
        if not seconds and job.state == "done" and job.seconds_before is not None:
            seconds = [job.seconds_before]
        for key in (job.kind, job.config.task, "") if seconds else ():
            took.setdefault(key, []).append(fmean(seconds))
    if not took:
        return {}
    mean = {key: fmean(found) for key, found in took.items()}
    return {
        id(job): (job.config.rounds - job.rounds)
        * mean.get(job.kind, mean.get(job.config.task, mean[""]))
        for job in jobs
        if job.state not in ("done", "failed")
    }


def starting_order(left: Sequence[Job], jobs: Sequence[Job], at_once: int) -> list[Job]:
    """The jobs in their order, except that those that would end last come first.

    Such a job takes as long by itself as everything that is left takes in all places. If it waited
    for its turn, it would still run when nothing else is left to do. Sorting all jobs by length
    would not end sooner, and a study that is stopped would have all seeds of some rows and none of
    others.
    """
    seconds = expected_seconds(jobs)
    share = sum(seconds.values()) / at_once
    first = sorted(left, key=lambda job: -seconds.get(id(job), 0.0))
    first = [job for job in first if seconds and seconds[id(job)] >= share]
    return first + [job for job in left if all(job is not other for other in first)]


def run_arguments(job: Job, workers: int) -> list[str]:
    """What ``protofed`` is given to do a run; its config and its place are still to be added."""
    arguments = ["run", "--quiet", "--overwrite" if job.overwrite else "--resume"]
    if job.config.workers is None:
        arguments += ["--workers", str(workers)]
    arguments += ["--tensorboard"] * job.tensorboard
    return [*arguments, "--trust-code"]  # this process has made the config and loaded the method


def note_end(job: Job, code: int, errors: str, console: Console) -> None:
    """Note how a run's process ended, from its exit code and what it wrote to stderr."""
    lines = errors.strip().splitlines()
    for line in lines:
        if line.startswith("warning: "):
            print_plain(console, f"{job.name}: {line}")
    if code == 0:
        job.state = "done"
    elif code == Busy.exit_code:
        job.state = "waiting"
    else:
        job.state, job.message = "failed", _reason(lines) or f"exit code {code}"


def _reason(lines: Sequence[str]) -> str:
    """Why a process failed: its error, or the exception with its notes.

    Of a traceback, the last line that is in neither this package nor a library is named.
    """
    frames = {i: found.groups() for i, line in enumerate(lines) if (found := _FRAME.match(line))}
    if not frames:
        return lines[-1].removeprefix("error: ") if lines else ""
    raised = "; ".join(line for line in lines[max(frames) + 1 :] if line and line[0] != " ")
    libraries = ("<frozen", sysconfig.get_path("stdlib"), "site-packages", PACKAGE)
    own = [f for f in frames.values() if not any(place in f[0] for place in libraries)]
    file, number = own[-1] if own else frames[max(frames)]
    return f"{Path(file).name}:{number}: {raised}"


class LocalRunner:
    """Runs as processes of this machine, which write their folders themselves."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once

    def __enter__(self) -> Self:
        self._scratch = tempfile.TemporaryDirectory(prefix="protofed-")
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():  # let them write a checkpoint
            process.terminate()
        for process in self._processes.values():
            process.wait()
        self._scratch.cleanup()

    def start(self, job: Job) -> None:
        config = self._file(job, "toml")
        config.write_text(job.config.toml(), encoding="utf-8")
        workers = max(1, core_count() // job.at_once)  # runs side by side share the cores
        command = [sys.executable, "-m", "protofed", *run_arguments(job, workers)]
        with self._file(job, "err").open("wb") as file:
            self._processes[job.folder.path] = subprocess.Popen(
                [*command, "--config", str(config), "--out", str(job.folder.path)],
                stdin=subprocess.DEVNULL,
                stderr=file,
                env=self.environment(job),
            )

    def environment(self, job: Job) -> dict[str, str] | None:
        """The environment variables of a run; None: those of this process."""
        return None

    def poll(self, job: Job, console: Console) -> None:
        code = self._processes[job.folder.path].poll()
        if code is not None:
            del self._processes[job.folder.path]
            errors = self._file(job, "err").read_text("utf-8", errors="replace")
            note_end(job, code, errors, console)

    def _file(self, job: Job, suffix: str) -> Path:
        return Path(self._scratch.name) / f"{job.folder.path.name}.{suffix}"


# ---- what a person sees -------------------------------------------------------------------------


def display(jobs: Sequence[Job], began: float, at_once: int, console: Console) -> Table:
    """The runs (all, or those under way if they are many), and how long all will take.

    In a narrow terminal only the average accuracy is shown, or none at all.
    """
    full, average, none = (_display(jobs, began, at_once, kind) for kind in ("full", "average", ""))
    fits = (t for t in (full, average) if natural_width(t) <= console.width)
    return next(fits, none)


def _display(jobs: Sequence[Job], began: float, at_once: int, accuracy: str) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("run", overflow="fold")
    for column in ("round", "left", *(("accuracy, %",) if accuracy else ())):
        table.add_column(column, no_wrap=True)
    under_way = [job for job in jobs if job.state in ("running", "elsewhere")]
    for job in jobs if len(jobs) <= SHOWN else under_way[:SHOWN]:
        left = job.seconds_left
        running = duration(left) if left is not None else f"in round {job.rounds + 1}"
        state = {"running": running, "elsewhere": "in another process"}
        table.add_row(
            escape(job.name),
            f"{job.rounds}/{job.config.rounds}",
            escape(state.get(job.state, job.state)),
            *({"full": (job.accuracies,), "average": (job.average,)}.get(accuracy, ())),
        )
    left_all = time_left(jobs, at_once)
    table.add_row(
        _so_far(jobs, began),
        f"{sum(j.rounds for j in jobs)}/{sum(j.config.rounds for j in jobs)}",
        f"{duration(left_all)} left" if left_all is not None else "",
        *[""] * bool(accuracy),
        style="dim",
    )
    return table


def _so_far(jobs: Sequence[Job], began: float) -> str:
    """``3 of 8 done, 2 running, 4:10 min so far``."""
    count = Counter(job.state for job in jobs)
    words = [f"{count['done']} of {len(jobs)} done"]
    words += [f"{count[s]} {s}" for s in ("running", "elsewhere", "failed") if count[s]]
    return f"{', '.join(words)}, {duration(time.perf_counter() - began)} so far"


def time_left(jobs: Sequence[Job], at_once: int) -> float | None:
    """Seconds until all are done."""
    seconds = expected_seconds(jobs)
    return sum(seconds.values()) / max(1, min(at_once, len(seconds))) if seconds else None


def _print_rounds(jobs: Sequence[Job], console: Console) -> bool:
    """Print the latest round of each run that has a new one; whether there was any."""
    printed = False
    for job in jobs:
        if job.started and len(job.records) > job.printed:  # not of another process
            left = job.seconds_left
            text = f"{job.name}  round {len(job.records)}/{job.config.rounds}  {job.accuracies}"
            print_plain(console, text + (f"  {duration(left)} left" if left else ""))
            job.printed, printed = len(job.records), True
    return printed
