"""Workers give the loop's numbers to the bit, for every method and however many they are."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import ref

import pytest
import torch

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

# clients of different length, fewer and more of them than workers
SETTINGS = {
    **TINY,
    "rounds": 2,
    "epochs": 1,
    "clients": {"left": 2, "right": 3},
    "samples": {"left": 22, "right": 13},
}
ABLE = ("local", "fedmd", "fedgh", "fedproto", "fedseproto")


def result(method: str, **settings: Any) -> Result:
    task = tiny_task(samples=22, clients=3, spare=12)
    return run(task, method, **{**SETTINGS, **settings})


def same(a: Result, b: Result) -> bool:
    models: list[Any] = [{"model": r.model, **r.clients} for r in (a, b)]
    return tree.equal(*models) and without_times(a.rounds) == without_times(b.rounds)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_the_loop_s_bit_for_bit(name: str) -> None:
    assert same(result(name), result(name, engine="workers", workers=2))


@pytest.mark.parametrize("name", ABLE)
def test_with_different_models_too(name: str) -> None:
    loop = result(name, model="cnn3,cnn2")
    for workers in (1, 3, 7):
        settings = {"engine": "workers", "workers": workers, "model": "cnn3,cnn2"}
        assert same(loop, result(name, **settings)), workers


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_the_number_of_workers_does_not_matter(workers: int) -> None:
    loop = result("fedbn", participation=0.5, rounds=3)
    more = {"engine": "workers", "workers": workers, "participation": 0.5, "rounds": 3}
    assert same(loop, result("fedbn", **more))


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "fedproto"])
@pytest.mark.parametrize("workers", [1, 2, 9])
def test_exams_are_scored_the_same_however_they_are_shared_out(name: str, workers: int) -> None:
    """One exam is cut into test sets; more exams than workers are taken whole."""
    task = tiny_task()
    model = "cnn3,cnn2" if name == "fedproto" else "cnn2"
    found = []
    for engine, count in (("loop", None), ("workers", workers)):
        settings = {**TINY, "engine": engine, "workers": count, "model": model}
        one = Federation(make_config(task, name, **settings), task)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            one.run_round()
            found.append(one.evaluate())
        finally:
            torch.set_num_threads(before)
    assert found[0] == found[1]


@dataclass(frozen=True)
class Breaks(Method):
    """Whoever is of the left domain fails, the first of them only after the others."""

    name: ClassVar[str] = "breaks"

    def loss(self, client: Client, batch: Batch) -> Terms:
        if client.name == "left-0":
            time.sleep(0.2)
        if client.name.startswith("left"):
            raise ProtofedError(f"{client.name} fails")
        return super().loss(client, batch)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_of_several_errors_the_same_one_is_told(workers: int) -> None:
    """Not the one that came first in time: nobody could tell a repeated run from a new fault."""
    clients = {"left": 3, "right": 3}
    settings = {**SETTINGS, "clients": clients, "engine": "workers", "workers": workers}
    with pytest.raises(ProtofedError, match="left-0 fails"):
        run(tiny_task(samples=22, clients=3), Breaks(), **settings)


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
