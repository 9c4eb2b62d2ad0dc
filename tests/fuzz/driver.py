"""Runs batches of fuzzers in worker processes, and adds up what they tried over all runs.

A worker that dies, or hangs, is a fault of the batch it had. The state file has an entry for each
run of the job; batches are numbered on from it, so that no run repeats another's inputs.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import torch

from protofed.version import __version__
from tests.fuzz import folders, mutate, tiny
from tests.fuzz.harness import CURRENT, FUZZERS, SOURCE, Fault, Fuzzer, Tally, at_home

GOALS = {"inputs": 1_000_000, "kills": 1_000, "corruptions": 2_000}
"""What the long form tries; a shorter one tries the three in the same proportion."""
BATCH_SECONDS = 150
"""A batch that takes longer hangs."""
SAVE_SECONDS = 5.0
MEMORY = 6 << 30
"""What a worker may have in addition to what it starts with."""


@dataclass
class Count:
    """What a fuzzer tried in one run of the job, or in several; ``batches`` are those started."""

    batches: int = 0
    tried: int = 0
    ok: int = 0
    refused: int = 0
    faults: int = 0
    seconds: float = 0.0

    def __add__(self, other: Count) -> Count:
        a, b = asdict(self), asdict(other)
        return Count(**{name: a[name] + b[name] for name in a})


class State:
    """The counts of all runs of the job, in a file; without one, of this run alone."""

    def __init__(self, path: Path | None, jobs: int) -> None:
        self.path = path
        self.before: list[dict[str, Any]] = []
        if path is not None and path.is_file():
            self.before = json.loads(path.read_text())["runs"]
        self.about = {
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "protofed": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "hypothesis": hypothesis.__version__,
            "jobs": jobs,
        }
        self.counts = {name: Count() for name in FUZZERS}
        self.faults: dict[str, Fault] = {}
        self.began = time.monotonic()

    def total(self, name: str) -> Count:
        counts = [Count(**run["fuzzers"][name]) for run in self.before if name in run["fuzzers"]]
        return sum(counts, self.counts[name])

    def tried(self, kind: str) -> int:
        return sum(self.total(f.name).tried for f in FUZZERS.values() if f.kind == kind)

    def next_number(self, fuzzer: Fuzzer) -> int:
        """The number of the fuzzer's next batch, which is no other's."""
        number = self.total(fuzzer.name).batches
        self.counts[fuzzer.name].batches += 1
        return number

    def add(self, fuzzer: Fuzzer, tally: Tally, seconds: float) -> None:
        hits = sum(fault.hits for fault in tally.faults.values())
        self.counts[fuzzer.name] += Count(0, tally.tried, tally.ok, tally.refused, hits, seconds)
        for signature, fault in tally.faults.items():
            known = self.faults.setdefault(signature, fault)
            if known is not fault:
                known.hits += fault.hits

    def save(self) -> None:
        if self.path is None:
            return
        run = {
            **self.about,
            "seconds": round(time.monotonic() - self.began, 1),
            "fuzzers": {n: asdict(c) for n, c in self.counts.items() if c.batches},
            "faults": [asdict(fault) for fault in self.faults.values()],
        }
        totals = {kind: self.tried(kind) for kind in GOALS}
        faults = sum(self.total(name).faults for name in FUZZERS)
        whole = {"totals": {**totals, "faults": faults}, "runs": [*self.before, run]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f".{self.path.name}.tmp")
        new.write_text(json.dumps(whole, indent=1) + "\n")
        new.replace(self.path)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError):
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return found.stdout.strip()
    return ""


# ---- workers ------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A process, the batch it has, and since when."""

    process: Any
    pipe: multiprocessing.connection.Connection
    folder: Path
    fuzzer: Fuzzer | None = None
    number: int = 0
    since: float = field(default_factory=time.monotonic)


def _work(pipe: multiprocessing.connection.Connection, folder: Path) -> None:
    """What a worker does: one batch after another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    settle(folder)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    log = (folder / "log").open("w")
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    _limit_memory()
    while (task := pipe.recv()) is not None:
        name, number = task
        tally = FUZZERS[name].batch(number, folder)
        pipe.send(tally)


def settle(folder: Path) -> None:
    """Make this process one that fuzzes in a folder."""
    torch.set_num_threads(1)
    at_home(folder)
    folders.HOME[:] = [folder]
    mutate.plant(folder)
    mutate.plant(folder / "cwd")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _warm_up(root: Path) -> None:
    """What every worker and every process that they start would else do again."""
    import matplotlib.font_manager  # noqa: F401 (it looks for the fonts)

    import protofed.report.page  # noqa: F401

    tiny.pictures(root / "any")
    torch.set_num_threads(1)
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()  # the first step imports for seconds


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder in memory where there is such a place: most of the job is small files."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30
    place = str(memory) if roomy and os.access(memory, os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="protofed-fuzz-", dir=place)).resolve()
    (root / "shared").mkdir()
    try:
        yield root
    finally:
        for _ in range(3):  # a killed command's children may still write
            shutil.rmtree(root, ignore_errors=True)


class Crew:
    """The workers, and what to do with one that dies or hangs."""

    def __init__(self, jobs: int, root: Path) -> None:
        self.root, self.made = root, 0
        self.workers = [self._hire() for _ in range(jobs)]

    def _hire(self) -> Worker:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        self.made += 1
        folder = self.root / f"worker-{self.made}"
        folder.mkdir()
        process = context.Process(target=_work, args=(there, folder), daemon=False)
        process.start()
        there.close()
        return Worker(process, here, folder)

    def give(self, worker: Worker, fuzzer: Fuzzer, number: int) -> None:
        worker.fuzzer, worker.number, worker.since = fuzzer, number, time.monotonic()
        worker.pipe.send((fuzzer.name, number))

    def collect(self, timeout: float) -> list[tuple[Fuzzer, Tally, float]]:
        """The batches that have ended by now."""
        busy = [w for w in self.workers if w.fuzzer is not None]
        ready = multiprocessing.connection.wait([w.pipe for w in busy], timeout)
        ended = []
        for worker in busy:
            assert worker.fuzzer is not None
            seconds = time.monotonic() - worker.since
            if worker.pipe in ready:
                try:
                    tally = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    tally = self._replace(worker, f"died with {worker.process.exitcode}")
            elif seconds > BATCH_SECONDS:
                os.kill(worker.process.pid, signal.SIGABRT)  # its log gets the traceback
                worker.process.join(10)
                tally = self._replace(worker, "hangs")
            else:
                continue
            ended.append((worker.fuzzer, tally, seconds))
            worker.fuzzer = None
        return ended

    def _replace(self, worker: Worker, how: str) -> Tally:
        assert worker.fuzzer is not None
        name, tally = worker.fuzzer.name, Tally(tried=1)
        text = (worker.folder / "log").read_text(errors="replace")
        text = text[max(0, text.rfind("Fatal Python error")) :][:3000]
        where = next((s.strip() for s in text.splitlines() if str(SOURCE) in s), "")
        draw = worker.folder / CURRENT
        which = f"x{draw.read_bytes().hex()}" if draw.is_file() else f"{worker.number}"
        tally.add(Fault(name, f"{name}:{which}", f"the process {how} {where}", "", text))
        worker.process.kill()
        new = self._hire()
        worker.process, worker.pipe, worker.folder = new.process, new.pipe, new.folder
        return tally

    def dismiss(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()


# ---- the job ------------------------------------------------------------------------------------


def fuzz(
    *,
    jobs: int,
    seconds: float | None = None,
    state: Path | None = None,
    names: Sequence[str] = (),
    to_goals: bool = False,
    batches: Mapping[str, int] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> State:
    """Fuzz for some seconds, up to the goals, or a number of batches by the kind of the fuzzer."""
    chosen = [FUZZERS[name] for name in names or FUZZERS]
    counts = State(state, jobs)

    def next_batch(busy: Sequence[Fuzzer]) -> Fuzzer | None:
        """Of the kind that is furthest from its goal, the fuzzer that had the least time."""
        if seconds is not None and time.monotonic() - counts.began > seconds:
            return None
        if batches is not None:
            started = {f.name: counts.counts[f.name].batches for f in chosen}
            return next((f for f in chosen if started[f.name] < batches[f.kind]), None)
        under_way = Counter(f.kind for f in busy for _ in range(f.size))
        part = {kind: (counts.tried(kind) + under_way[kind]) / GOALS[kind] for kind in GOALS}
        left = [f for f in chosen if not to_goals or counts.tried(f.kind) < GOALS[f.kind]]
        now = Counter(f.name for f in busy)
        return min(
            left,
            key=lambda f: (part[f.kind], counts.counts[f.name].seconds + now[f.name]),
            default=None,
        )

    with workplace() as root:
        _warm_up(root)
        crew = Crew(jobs, root)
        saved = told = time.monotonic()
        try:
            while True:
                for worker in crew.workers:
                    busy = [w.fuzzer for w in crew.workers if w.fuzzer is not None]
                    if worker.fuzzer is None and (fuzzer := next_batch(busy)) is not None:
                        crew.give(worker, fuzzer, counts.next_number(fuzzer))
                if all(worker.fuzzer is None for worker in crew.workers):
                    break
                for fuzzer, tally, took in crew.collect(timeout=1.0):
                    for signature, fault in tally.faults.items():
                        if signature not in counts.faults:
                            tell(f"FAULT {signature}  (--repeat {fault.repeat[:200]})")
                    counts.add(fuzzer, tally, took)
                now = time.monotonic()
                if now - saved > SAVE_SECONDS:
                    counts.save()
                    saved = now
                if now - told > 30:
                    tell(", ".join(f"{counts.tried(k):,} {k}" for k in GOALS))
                    told = now
        except KeyboardInterrupt:
            tell("stopped; what was tried is counted, and the same command continues")
        finally:
            crew.dismiss()
            counts.save()
    return counts


def table(state: State) -> str:
    """What was tried, over all runs that the state has."""
    rows = [("", "tried", "accepted", "refused", "faults", "a second")]
    for kind in GOALS:
        own = [f.name for f in FUZZERS.values() if f.kind == kind]
        counts = {name: state.total(name) for name in own}
        if len(own) > 1:
            rows += [_row(f"  {name}", count) for name, count in counts.items() if count.batches]
        rows.append(_row(kind, sum(counts.values(), Count())))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = ([c.rjust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *cells[1:]])
        for row, cells in zip(rows, aligned, strict=True)
    )


def _row(name: str, count: Count) -> tuple[str, ...]:
    rate = f"{count.tried / count.seconds:,.1f}" if count.seconds else ""
    numbers = (count.tried, count.ok, count.refused, count.faults)
    return (name, *(f"{n:,}" for n in numbers), rate)
