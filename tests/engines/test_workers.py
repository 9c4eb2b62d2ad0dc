"""Workers equal the loop bit for bit, for every method and any number of workers."""

from __future__ import annotations

import errno
import gc
import itertools
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from weakref import ref

import pytest
import torch
from tests.some_methods import SOME, made

from protofed import tree
from protofed.config import make_config
from protofed.engines import forked
from protofed.engines.forked import Memory, Parcel
from protofed.errors import ProtofedError
from protofed.federation.setup import ClientData
from protofed.federation.simulation import Federation, Observer
from protofed.method import Batch, Client, Method, Terms
from protofed.runs.records import without_times
from protofed.runs.result import Result
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

# more clients than workers, of different sizes
SETTINGS = {
    **TINY,
    "rounds": 2,
    "epochs": 1,
    "clients": {"left": 1, "right": 2},
    "samples": {"left": 18, "right": 10},
}


def result(method: str | Method, **settings: Any) -> Result:
    task = tiny_task(samples=18, clients=3, spare=12)
    return run(task, method, **{**SETTINGS, **settings})


def same(a: Result, b: Result) -> bool:
    models: list[Any] = [{"model": r.model, **r.client_models} for r in (a, b)]
    return tree.equal(*models) and without_times(a.rounds) == without_times(b.rounds)


@pytest.mark.parametrize("name", SOME)
def test_every_method_equals_the_loop_bit_for_bit(name: str) -> None:
    assert same(result(made(name)), result(made(name), engine="workers", workers=2))


@pytest.mark.parametrize("name", ["local", "fedmd", "fedgh", "fedproto", "fedseproto"])
def test_with_different_models_too(name: str) -> None:
    models = {"model": "cnn3,cnn2"}
    assert same(result(name, **models), result(name, engine="workers", workers=2, **models))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_with_options_of_training_too(optimizer: str) -> None:
    options = {"optimizer": optimizer, "schedule": "cosine", "warmup_rounds": 1, "clip_norm": 0.5,
               "label_smoothing": 0.1, "sampling": "balanced", "rounds": 3}  # fmt: skip
    assert same(result("fpl", **options), result("fpl", engine="workers", workers=2, **options))


def test_the_number_of_workers_does_not_matter() -> None:
    settings = {"clients": {"left": 2, "right": 3}, "participation": 0.5, "rounds": 3}
    loop = result("fedbn", **settings)
    for workers in (1, 3, 7):
        assert same(loop, result("fedbn", engine="workers", workers=workers, **settings)), workers


@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize("name", ["fedavg", "fedbn", "fedproto"])
def test_scores_do_not_depend_on_how_jobs_are_distributed(name: str) -> None:
    """Few jobs are split by test set; at least as many jobs as workers are not split."""
    task = tiny_task()
    settings = {**SETTINGS, "clients": 2, "model": "cnn3,cnn2" if name == "fedproto" else "cnn2"}

    def scores(**engine: Any) -> Any:
        federation = Federation(make_config(task, name, **{**settings, **engine}), task)
        federation.run_round()
        return federation.evaluate()

    loop = scores(engine="loop")
    for workers in (1, 2, 9):
        assert scores(engine="workers", workers=workers) == loop, workers


@dataclass(frozen=True)
class Breaks(Method):
    """Clients of the left domain fail, the first of them only after the others."""

    name: ClassVar[str] = "breaks"

    def loss(self, client: Client, batch: Batch) -> Terms:
        if client.name == "left-0":
            time.sleep(0.1)
        if client.name.startswith("left"):
            raise ProtofedError(f"{client.name} fails")
        return super().loss(client, batch)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_of_several_errors_always_the_same_one_is_raised(workers: int) -> None:
    """Not the first in time: the error of a repeated run would change by chance."""
    clients = {"left": 3, "right": 3}
    settings = {**SETTINGS, "clients": clients, "engine": "workers", "workers": workers}
    with pytest.raises(ProtofedError, match="left-0 fails"):
        run(tiny_task(samples=18, clients=3), Breaks(), **settings)


# ---- processes -----------------------------------------------------------------------------------


def children() -> set[int]:
    """The processes that this one has started and not yet seen end."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for found in lists for pid in found.read_text().split()}


def shared() -> list[str]:
    """The shared memory and the pipes that are open."""
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the listing itself
            links.append(str(file.readlink()))
    return [link for link in links if link.startswith(("/memfd:protofed", "socket:"))]


def federation(method: Method | str = "fedavg", **settings: Any) -> Federation:
    task = tiny_task(samples=18, clients=3)
    settings = {**SETTINGS, "engine": "workers", "workers": 2, **settings}
    return Federation(make_config(task, method, **settings), task)


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    gc.collect()
    before, files = children(), shared()
    yield
    gc.collect()
    assert children() <= before
    assert len(shared()) <= len(files)


linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="elsewhere workers are threads")


@linux
@pytest.mark.usefixtures("leaves_nothing")
def test_a_finished_run_leaves_neither_threads_nor_processes_nor_memory() -> None:
    """A notebook does many runs in one process."""
    threads, before, files = set(threading.enumerate()), children(), shared()
    running = federation()
    running.run_round()
    engine, threads = ref(running.engine), set(threading.enumerate()) - threads
    assert len(threads) == len(children() - before) == 2
    assert len(shared()) == len(files) + 8, "three for each worker, and two for all"
    del running
    gc.collect()
    assert engine() is None
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@linux
@pytest.mark.parametrize("error", [None, ValueError])
def test_processes_end_with_the_run(error: type[Exception] | None) -> None:
    """Not when Python collects what is left of it, which may be much later."""

    class Fails(Observer):
        def round(self, record: Any) -> None:
            if error is not None:
                raise error

    before, settings = children(), {**SETTINGS, "engine": "workers", "workers": 2}
    gc.disable()
    try:
        with pytest.raises(error) if error else nullcontext():
            run(tiny_task(samples=18, clients=3), "fedavg", observers=[Fails()], **settings)
        assert children() <= before
    finally:
        gc.enable()


@linux
def test_images_and_the_broadcast_go_as_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a worker has a client's rows and private state, and little else."""
    running, sizes, put = federation("fedbn"), list[tuple[Any, int]](), Memory.put

    def spy(memory: Memory, what: Any, known: Any) -> Parcel:
        parcel = put(memory, what, known)
        sizes.append((what, sum(parcel[1]) + len(parcel[0])))
        return parcel

    monkeypatch.setattr(Memory, "put", spy)
    running.run_round()
    posted = [(what, size) for what, size in sizes if isinstance(what, dict)]
    asked = [(what[1], size) for what, size in sizes if isinstance(what, tuple)]
    assert len(posted) == 2 and len(asked) == 6, "three clients are trained, and tested"
    assert all(size > tree.nbytes(what) > 50_000 for what, size in posted)
    for (client_or_job, _, mine, _), size in asked:
        rows = client_or_job.rows.nbytes if isinstance(client_or_job, ClientData) else 0
        assert size < rows + tree.nbytes(mine) + 5_000


@dataclass(frozen=True)
class Acts(Method):
    """Does something odd in the second round of a client of the right domain."""

    name: ClassVar[str] = "acts"
    act: ClassVar[Callable[[], object]]

    def loss(self, client: Client, batch: Batch) -> Terms:
        if client.name == "right-0" and int(client.round) == 1:
            type(self).act()
        return super().loss(client, batch)


@linux
@pytest.mark.usefixtures("leaves_nothing")
def test_a_worker_that_dies_is_an_error_in_words_and_the_run_resumes(tmp_path: Path) -> None:
    task, settings = tiny_task(samples=18, clients=3), {**SETTINGS, "rounds": 3}
    settings |= {"engine": "workers", "workers": 2}
    Acts.act = lambda: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ProtofedError, match=r"a worker process died of SIGKILL.*--resume"):
        run(task, Acts(), out=tmp_path, **settings)
    Acts.act = lambda: None
    assert same(
        run(task, Acts(), out=tmp_path, resume=True, **settings), run(task, Acts(), **settings)
    )


@linux
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("where", ["waiting", "between"])
def test_ctrl_c_ends_the_processes_at_once(where: str) -> None:
    """Whether the run waits for a worker, or is at work itself."""

    class Interrupts(Observer):
        def client(self, round: int, done: int, total: int) -> None:
            if round == 2 and where == "between":
                raise KeyboardInterrupt

    def act() -> None:
        if where == "waiting":
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    Acts.act = act
    others = children()
    running = federation(Acts())
    mine = children() - others
    running.run_round()
    began, before = time.monotonic(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            running.run_round([Interrupts()])
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 20
    assert not children() & mine
    Acts.act = lambda: None
    running.run_round()  # with others


@linux
@pytest.mark.usefixtures("leaves_nothing")
def test_signals_to_all_processes_are_for_the_run_to_answer() -> None:
    """A terminal sends Ctrl-C to all of them, and a batch system SIGTERM."""
    others = children()
    running = federation()
    for pid in children() - others:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    running.run_round()


@pytest.mark.usefixtures("leaves_nothing")
def test_workers_do_not_end_with_the_thread_that_makes_them() -> None:
    """As a process would."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(federation).result()
    running.run_round()


def test_two_runs_in_two_threads_do_not_disturb_each_other() -> None:
    """PyTorch has one generator for all threads, from which initial weights are drawn."""
    loop, settings = result("fedavg", rounds=1), {"engine": "workers", "workers": 2, "rounds": 1}
    with ThreadPoolExecutor(4) as pool:
        for found in [pool.submit(result, "fedavg", **settings) for _ in range(8)]:
            assert same(loop, found.result())


@linux
@pytest.mark.usefixtures("leaves_nothing")
def test_a_fork_of_the_run_leaves_its_workers_alone() -> None:
    """A pool of processes, say, in a notebook that has a federation."""
    running = federation()
    if not (fork := os.fork()):
        running.engine._end()  # type: ignore[attr-defined]
        os._exit(0)
    os.waitpid(fork, 0)
    running.run_round()


@linux
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("what", ["memfd_create", "fork"])
def test_threads_where_the_system_has_no_more_files_or_processes(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, function, calls = result("fedavg"), getattr(os, what), itertools.count()

    def limited(*args: str) -> int:
        if next(calls) % 2:
            raise OSError(errno.EAGAIN, "no more of them")
        return function(*args)  # type: ignore[no-any-return]

    monkeypatch.setattr(os, what, limited)
    with pytest.warns(UserWarning, match="workers are threads, not processes: no more of them"):
        assert same(loop, result("fedavg", engine="workers", workers=2))


@linux
@pytest.mark.usefixtures("leaves_nothing")
def test_threads_where_a_fork_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a lock that another thread had."""
    monkeypatch.setattr(forked, "START_SECONDS", 0.2)
    monkeypatch.setattr(forked, "_has_gradients", lambda: time.sleep(60))
    federation().run_round()


@linux
@pytest.mark.usefixtures("leaves_nothing")
def test_an_error_of_the_system_is_not_a_dead_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor waited for as one, which would take forever."""
    running, put = federation(), Memory.put

    def full(memory: Memory, what: Any, known: Any) -> Parcel:
        if threading.current_thread() is not threading.main_thread():  # of a client, not for all
            raise OSError(errno.ENOMEM, "no memory")
        return put(memory, what, known)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no memory"):
        patched.setattr(Memory, "put", full)
        running.run_round()
    running.run_round()


@linux
def test_a_run_without_an_output_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of ``protofed run >&-``."""
    monkeypatch.setattr(sys, "stdout", None)
    federation().run_round()


@linux
def test_workers_end_with_a_killed_run() -> None:
    """Nobody is left to end them."""
    reading, writing = os.pipe()
    parent = os.fork()
    if not parent:
        engine: Any = federation().engine
        os.write(writing, " ".join(str(p.pid) for p in engine._processes.each).encode())
        time.sleep(60)
    workers = [Path(f"/proc/{pid.decode()}/stat") for pid in os.read(reading, 100).split()]
    assert len(workers) == 2
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)

    def is_there(worker: Path) -> bool:
        with suppress(OSError):
            return " Z " not in worker.read_text()  # one that nobody waits for
        return False

    until = time.monotonic() + 10
    while any(map(is_there, workers)):
        assert time.monotonic() < until
        time.sleep(0.01)


@linux
def test_warnings_prints_and_errors_of_a_worker_arrive(capfd: pytest.CaptureFixture[str]) -> None:
    class Odd(Exception):
        """Nobody else knows this class."""

    class Strange(UserWarning):
        """Nor this one."""

    def act() -> None:
        print("a word")
        warnings.warn("look here", stacklevel=1)
        warnings.warn("and there", Strange, stacklevel=1)
        raise Odd("an odd one")

    Acts.act = act
    running = federation(Acts())
    running.run_round()
    with (
        pytest.warns(UserWarning, match="look here"),
        pytest.warns(UserWarning, match="Strange: and there"),
        pytest.raises(RuntimeError, match="Odd: an odd one") as raised,
    ):
        running.run_round()
    assert "in act" in str(raised.value.__cause__), "where it was raised"
    assert "a word" in capfd.readouterr().out


@linux
def test_a_method_that_exits_ends_the_run_as_in_the_loop() -> None:
    Acts.act = lambda: sys.exit("enough")
    running = federation(Acts())
    running.run_round()
    with pytest.raises(SystemExit, match="enough"):
        running.run_round()


@linux
def test_an_error_of_a_workers_start_arrives() -> None:
    def make() -> NoReturn:
        raise FileNotFoundError("no weights")

    processes = forked.fork(1, make, [])
    assert processes is not None
    try:
        for _ in range(2):
            with pytest.raises(FileNotFoundError, match="no weights"):
                processes.each[0].ask(repr)
    finally:
        processes.end()


@pytest.mark.parametrize("name", ["fpl", "scaffold"])
def test_threads_where_a_process_cannot_be_forked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PyTorch refuses gradients in a fork of a process that has used a GPU."""
    loop, before = result(name), children()
    monkeypatch.setattr(forked, "_has_gradients", lambda: False)
    running = federation(name)
    assert children() <= before and running.engine
    assert same(loop, result(name, engine="workers", workers=2))


def test_what_travels_keeps_every_bit() -> None:
    sent = {
        "a": torch.tensor([0.0, -0.0, math.nan, math.inf]),
        "b": torch.arange(3, dtype=torch.bfloat16),
        "c": torch.tensor(7),
        "d": torch.zeros(0, 3),
        "e": torch.tensor([True, False]),
        "f": torch.arange(6.0).view(2, 3).T,
    }
    memory = Memory()
    memory.put(sent["d"], {})  # nothing but an empty one
    for times in (1, 100_000):  # and then more than it had room for
        tall = {n: t.repeat(times, *[1] * (t.ndim - 1)) if t.ndim else t for n, t in sent.items()}
        found = memory.get(memory.put({"sent": tall}, {}), lambda _: None)
        assert tree.equal(found, {"sent": tall})
