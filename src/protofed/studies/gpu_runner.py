"""Runs that share this machine's GPUs: how many at a time, and which of them on which GPU.

A single run leaves a large GPU idle most of the time, and all of the time while it reads images and
writes files. How many runs fill it depends on the model, the batch, the GPU and the host, so it is
measured: a study starts with one or two runs per GPU, and adds more while that gives more
client-steps per second and memory allows. No run is stopped for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Self

import torch
from rich.console import Console

from protofed.cores import core_count
from protofed.errors import ProtofedError
from protofed.federation.facts import MANY_QUEUES, WORK_QUEUES
from protofed.federation.memory import free_memory
from protofed.observers.progress import print_plain
from protofed.studies.execution import Job, LocalRunner
from protofed.studies.mps import mps_daemon

START_CORES, START_BYTES = 4, 16 << 30
"""If each of two runs on every GPU has these, a study starts with two."""
ROUNDS = 3
"""How many rounds of each run are measured before a number of runs is judged."""
WORTHWHILE = 1.05
"""What more runs must gain; less than that is noise."""
RESERVE = 2
"""More runs are added only if there is this many times the memory that runs took so far."""
LARGER = 1.5
"""A run that takes this many times the memory of earlier ones makes a study start from few."""


@dataclass
class Measured:
    """What was measured of runs while ``count`` of them shared each GPU."""

    count: int
    starts: list[float] = field(default_factory=list)
    """Seconds from a run's start to the end of its first round."""
    steps: dict[str, list[float]] = field(default_factory=dict)
    """Client-steps per second of all runs on a GPU, measured in each of the other rounds; by the
    run's configuration without its seed."""
    sizes: list[int] = field(default_factory=list)
    """Client-steps of these rounds."""

    def gain(self, before: Measured, rounds: float) -> float:
        """How many times the client-steps per second of ``before``, in runs of that many rounds.

        Configurations that were seen both times are compared, if there are any: a step of one
        method may take twice as long as that of another.
        """
        both = self.steps.keys() & before.steps.keys()
        ratios = [median(self.steps[name]) / median(before.steps[name]) for name in both]
        faster = fmean(ratios) if both else median(_flat(self)) / median(_flat(before))
        alone = rounds * median(before.sizes) / median(_flat(before))  # if it had all of the GPU
        took = before.cycle(alone), self.cycle(alone / faster)
        return self.count / before.count * took[0] / took[1]

    def cycle(self, alone: float) -> float:
        """Seconds from a run's start to that of the run that follows it in its place.

        While some start, others have the GPU to themselves. So either the GPU always has work, and
        this is what it takes for all; or it is idle at times, and this is what each waits for.
        """
        return max(self.count * alone, fmean(self.starts) + alone)


def _flat(measured: Measured) -> list[float]:
    return [rate for each in measured.steps.values() for rate in each]


@dataclass
class Underway:
    """A run under way: which configuration it has, whatever its seed, and the rounds seen of it."""

    kind: str
    seen: int
    starting: bool = True
    """It has not completed a round yet."""


class RunsPerGpu:
    """How many runs share each of ``gpus`` GPUs, measured: from ``first`` up to ``most``.

    ``rounds`` is how many rounds a run has.
    """

    def __init__(self, gpus: int, first: int, most: int, rounds: float) -> None:
        self._gpus, self._first, self._most, self._rounds = gpus, first, most, rounds
        self._running: dict[Path, Underway] = {}
        self._tasks: set[str] = set()
        self._largest = 0
        self._try(first)

    @property
    def at_once(self) -> int:
        return self._now.count * self._gpus

    def _try(self, count: int, before: Measured | None = None) -> None:
        self._now, self._before = Measured(count), before
        self._settled = False

    def started(self, job: Job) -> None:
        size = job.memory.total if job.memory is not None else 0
        if size > LARGER * self._largest:
            self._largest = size
            self._try(self._first)
        elif job.config.task not in self._tasks:
            self._try(self._now.count)  # more of them may fill a GPU
        self._tasks.add(job.config.task)
        self._running[job.folder.path] = Underway(replace(job.config, seed=0).hash, job.before)

    def ended(self, job: Job) -> None:
        del self._running[job.folder.path]

    def observe(self, job: Job) -> None:
        """Note the rounds that a run has completed.

        A run that has ended is replaced by one that starts, so there is hardly a moment at which
        all train. It is enough if more than half do, and more than the number before had.
        """
        run = self._running[job.folder.path]
        new = job.records[run.seen :]
        if new and run.starting:
            self._now.starts.append(perf_counter() - job.started)
            run.starting = False
            new = new[1:]  # graphs are recorded in the first round
        run.seen = len(job.records)
        training = sum(not other.starting for other in self._running.values())
        known = self.at_once // 2 if self._before is None else self._before.count * self._gpus
        if len(self._running) == self.at_once and training > known:
            for record in new:
                seconds = max(1e-3, sum(record["seconds"].values()))
                size = max(1, record["steps"])
                self._now.sizes.append(size)
                rates = self._now.steps.setdefault(run.kind, [])
                rates.append(training / self._gpus * size / seconds)

    def judge(self, fit: Callable[[int], bool]) -> str:
        """Once enough is measured, try more runs or go back; returns what to say about it.

        ``fit`` says whether there is memory for that many more runs on each GPU.
        """
        now, before = self._now, self._before
        if self._settled or not now.starts or len(now.sizes) < ROUNDS * self.at_once:
            return ""
        said = ""
        if before is not None:
            gain = now.gain(before, self._rounds)
            said = f"{self.at_once} runs at a time do {gain:.2f} times the work of "
            said += f"{before.count * self._gpus}"
            if gain < WORTHWHILE:
                self._now, self._settled = before, True
                return f"{said}: back to {self.at_once}"
        choices = range(now.count, 0, -1)  # twice as many, if that fits
        fitting = (n for n in choices if now.count + n <= self._most and fit(n))
        if more := next(fitting, 0):
            self._try(now.count + more, now)
        else:
            self._settled = True
        return said


class GpuRunner(LocalRunner):
    """Runs as processes of this machine, evenly distributed over its GPUs.

    ``most`` runs are under way at a time; None: as many as measurements suggest. ``mps`` is whether
    they share GPUs through MPS; None: if it works and there are several runs at a time.
    """

    def __init__(
        self,
        todo: Sequence[Job],
        console: Console,
        most: int | None = None,
        mps: bool | None = None,
    ) -> None:
        super().__init__(most or 1)
        self._console, self._most = console, most
        self._rounds = fmean(job.config.rounds for job in todo)
        self._mps_wanted = mps if mps is not None else len(todo) > 1 and most != 1
        self._gpu_of: dict[Path, int] = {}
        self._variables: dict[str, str] = {}
        self._shared = False  # through MPS
        self._count: RunsPerGpu | None = None

    def __enter__(self) -> Self:
        self._gpus = visible_gpus()
        self._idle = self._free()
        self._peaks = [0.0 for _ in self._idle]
        if self._most is None:
            cores = core_count() // len(self._gpus)
            room = min(cores // START_CORES, min(self._idle[1:]) // START_BYTES)
            first = max(1, min(2, room))
            self._count = RunsPerGpu(len(self._gpus), first, max(1, cores), self._rounds)
            self.at_once = self._count.at_once
        with ExitStack() as stack:
            self._share(stack)
            super().__enter__()
            self._mps = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._mps:  # the runs end first
            super().__exit__()

    def _share(self, stack: ExitStack) -> None:
        """Start MPS if it is wanted, and say what came of it."""
        said = f"{len(self._gpus)} GPU{'s' if len(self._gpus) > 1 else ''}"
        if self._mps_wanted:
            try:
                self._variables = stack.enter_context(mps_daemon(self._gpus))
                self._shared = True
                said += ", shared through " + ("MPS" if self._variables else "the running MPS")
            except ProtofedError as error:
                said += f", without MPS: {error.message}"
        print_plain(self._console, said)

    def environment(self, job: Job) -> dict[str, str]:
        """With the variables of MPS, and of the GPU that has the fewest runs."""
        busy = [*self._gpu_of.values()]
        gpu = self._gpu_of[job.folder.path] = min(range(len(self._gpus)), key=busy.count)
        variables = {**os.environ, **self._variables}
        if self._shared and variables.get(WORK_QUEUES) == MANY_QUEUES:  # for a process alone
            del variables[WORK_QUEUES]
        if len(self._gpus) > 1:
            variables["CUDA_VISIBLE_DEVICES"] = self._gpus[gpu]
        return variables

    def start(self, job: Job) -> None:
        super().start(job)
        if self._count is not None:
            self._count.started(job)

    def poll(self, job: Job, console: Console) -> None:
        super().poll(job, console)
        if job.state != "running":
            del self._gpu_of[job.folder.path]
        if self._count is not None:
            self._adapt(job, self._count)

    def _adapt(self, job: Job, count: RunsPerGpu) -> None:
        count.observe(job)
        if job.state != "running":
            count.ended(job)
        room = self._room()
        if said := count.judge(lambda more: RESERVE * more * len(self._gpus) <= room):
            print_plain(self._console, said)
        self.at_once = max(1, min(count.at_once, len(self._processes) + room))

    def _room(self) -> int:
        """How many more runs fit into memory, if they take as much as any did before."""
        busy, gpus = [*self._gpu_of.values()], range(len(self._gpus))
        runs = [len(busy), *(busy.count(gpu) for gpu in gpus)]
        rooms = []
        for i, (idle, free) in enumerate(zip(self._idle, self._free(), strict=True)):
            if runs[i]:
                self._peaks[i] = max(self._peaks[i], (idle - free) / runs[i])
            rooms.append(int(free / self._peaks[i]) if self._peaks[i] else sys.maxsize)
        return min(rooms[0], min(rooms[1:]) * len(self._gpus))

    def _free(self) -> list[int]:
        """Free bytes of the host, then of each GPU."""
        gpus = range(torch.cuda.device_count())
        return [free_memory() or sys.maxsize, *(torch.cuda.mem_get_info(i)[0] for i in gpus)]


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this process sees.

    They are named by their UUIDs: MPS renumbers what it is given by number.
    """
    count = torch.cuda.device_count()
    named = [n.strip() for n in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if not any(name == "" or name.isdigit() for name in named):
        return named[:count]
    return [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(count)]
