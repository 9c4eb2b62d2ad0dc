"""Workers equal the loop bit for bit, for every method and any number of workers."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import ref

import pytest
from tests.some_methods import SOME

from protofed import tree
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation
from protofed.method import Batch, Client, Method, Terms
from protofed.methods import METHODS
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


def result(method: str, **settings: Any) -> Result:
    task = tiny_task(samples=18, clients=3, spare=12)
    return run(task, method, **{**SETTINGS, **settings})


def same(a: Result, b: Result) -> bool:
    models: list[Any] = [{"model": r.model, **r.client_models} for r in (a, b)]
    return tree.equal(*models) and without_times(a.rounds) == without_times(b.rounds)


@pytest.mark.parametrize("name", SOME)
def test_every_method_equals_the_loop_bit_for_bit(name: str) -> None:
    assert same(result(name), result(name, engine="workers", workers=2))


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


def test_a_finished_run_leaves_neither_threads_nor_networks() -> None:
    """A notebook does many runs in one process."""
    task = tiny_task()
    settings = {**TINY, "engine": "workers", "workers": 2}
    before = set(threading.enumerate())
    federation = Federation(make_config(task, METHODS["fedavg"](), **settings), task)
    federation.run_round()
    engine, threads = ref(federation.engine), set(threading.enumerate()) - before
    assert len(threads) == 2
    del federation
    gc.collect()
    assert engine() is None
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
