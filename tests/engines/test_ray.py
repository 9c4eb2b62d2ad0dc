"""The ray engine equals the loop bit for bit, also on a cluster that loses actors and nodes."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.simulated_cluster import FAST, simulated_cluster, thaw
from tests.some_methods import made

from protofed import tree
from protofed.cluster import connected
from protofed.config import make_config
from protofed.engines import ray as ray_engine
from protofed.errors import ProtofedError
from protofed.federation.cpu import one_thread
from protofed.federation.simulation import Federation, Observer
from protofed.methods import METHODS, method_class
from protofed.runs.records import Record, without_times
from protofed.runs.result import Result
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

pytest.importorskip("ray")

SETTINGS = {
    **TINY,
    "rounds": 2,
    "epochs": 1,
    "clients": {"left": 1, "right": 2},
    "samples": {"left": 18, "right": 10},
}
FAILS = """
from dataclasses import dataclass
from protofed.errors import ProtofedError
from protofed.method import Method

@dataclass(frozen=True)
class Fails(Method):
    name = "fails"

    def loss(self, client, batch):
        if client.name.startswith("right"):
            raise ProtofedError(f"{client.name} fails", "on purpose")
        return super().loss(client, batch)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    nodes = ({"num_cpus": 2, "num_gpus": 2}, {"num_cpus": 1})
    with simulated_cluster(*nodes, config=FAST) as found, connected(found.address):
        yield found


def result(method: Any, observers: Sequence[Observer] = (), **settings: Any) -> Result:
    task = tiny_task(samples=18, clients=3, spare=12)
    return run(task, method, observers=observers, **{**SETTINGS, **settings})


def same(a: Result, b: Result) -> bool:
    models: list[Any] = [{"model": r.model, **r.client_models} for r in (a, b)]
    return tree.equal(*models) and without_times(a.rounds) == without_times(b.rounds)


CASES = {
    "fpl": {},
    "fedbn": {"participation": 0.5, "rounds": 3},  # private states, clients' own models are tested
    "fedmd": {"model": "cnn3,cnn2"},  # public images
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_loop_bit_for_bit(cluster: Any, name: str) -> None:
    assert same(result(name, **CASES[name]), result(name, engine="ray", workers=2, **CASES[name]))


def test_actors_end_with_the_run(cluster: Any) -> None:
    """Or the next run would wait for their cores, until Python collects what is left of this."""
    import ray

    gc.disable()
    try:
        result("fedavg", engine="ray", rounds=1)
        until = time.monotonic() + 20
        while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        gc.enable()


def test_an_engine_that_was_closed_starts_again(cluster: Any) -> None:
    task = tiny_task(samples=18, clients=3)
    settings = {**SETTINGS, "engine": "ray", "workers": 1}
    with one_thread():
        loop = Federation(make_config(task, "fedavg", **SETTINGS), task)
        running = Federation(make_config(task, "fedavg", **settings), task)
        for _ in range(2):
            assert without_times([running.run_round()]) == without_times([loop.run_round()])
            running.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS.keys() - CASES.keys()))
def test_every_other_method_does_too(cluster: Any, name: str) -> None:
    assert same(result(made(name)), result(made(name), engine="ray", workers=2))


@pytest.mark.slow
def test_an_actor_on_a_gpu_takes_a_group_of_clients(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With declared GPUs and the loop in place of lanes."""
    monkeypatch.setitem(ray_engine.ENGINES, "cuda", ("loop", "cpu"))
    groups: list[list[str]] = []

    class Looks(Observer):
        def start(self, federation: Federation, records: Sequence[Record]) -> None:
            groups.extend(federation.engine._groups([*federation.clients.values()]))  # type: ignore[attr-defined]

    settings = {"engine": "ray", "device": "cuda", "precision": "fp32"}
    found = result("fedavg", [Looks()], **settings)
    assert groups == [["left-0"], ["right-0", "right-1"]]
    assert found.facts["device"] == "cuda"
    assert same(found, result("fedavg", device="cpu"))


class InRound(Observer):
    """Does something to the engine when the first client of a round has finished."""

    def __init__(self, acts: dict[int, Callable[[ray_engine.Ray], object]]) -> None:
        self.acts = acts

    def start(self, federation: Federation, records: Sequence[Record]) -> None:
        self.engine = federation.engine

    def client(self, round: int, done: int, total: int) -> None:
        if done == 1 and round in self.acts:
            self.acts.pop(round)(self.engine)  # type: ignore[arg-type]


def test_an_answer_that_is_lost_with_its_node_is_asked_for_again(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one stays on the node that made it until somebody fetches it."""
    import ray

    get, lost = ray.get, list[Any]()

    def lose_one(answer: Any) -> Any:
        if not lost:
            lost.append(answer)
            raise ray.exceptions.ObjectLostError(answer.hex(), None, "")
        return get(answer)

    loses = InRound({2: lambda _: monkeypatch.setattr(ray, "get", lose_one)})
    found = result("fedavg", [loses], engine="ray", workers=1)
    assert lost and same(found, result("fedavg"))


def test_an_actor_that_hangs_in_an_earlier_round_is_replaced(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the only one, and nobody waits for its answer any more."""
    monkeypatch.setattr(ray_engine, "SLOW_SECONDS", 1.0)
    monkeypatch.setattr(ray_engine, "SLOWER", 0)
    task = tiny_task(samples=18, clients=3)
    settings = {**SETTINGS, "engine": "ray", "workers": 1}
    with one_thread():
        loop = Federation(make_config(task, "fedavg", **SETTINGS), task)
        running = Federation(make_config(task, "fedavg", **settings), task)
        engine: Any = running.engine
        received, clients = running.server.broadcast(), [*running.clients.values()]
        given_up = engine.train(clients, received, running.store.get, 0)
        next(given_up)
        hung = signal_actor(engine, signal.SIGSTOP)
        try:
            next(given_up)  # it is asked for the next client
            given_up.close()
            assert without_times([running.run_round()]) == without_times([loop.run_round()])
        finally:
            thaw(hung)
            engine.close()


def signal_actor(engine: ray_engine.Ray, number: int) -> int:
    """Send a signal to the first actor that is at work; returns its process."""
    import ray

    seat = next(seat for seat in engine._seats if seat.started and not engine._is_late(seat))
    pid: int = ray.get(seat.actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, number)
    return pid


@pytest.mark.slow
def test_lost_actors_and_nodes_change_nothing(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 2 an actor dies, in round 3 one freezes, in round 4 a node dies.

    The frozen one may have the only core that is left.
    """
    monkeypatch.setattr(ray_engine, "SLOW_SECONDS", 1.0)
    monkeypatch.setattr(ray_engine, "SLOWER", 0)
    frozen: list[int] = []

    def kill_larger_node(_: ray_engine.Ray) -> None:
        node = max(cluster.worker_nodes, key=lambda node: node._ray_params.num_cpus)
        cluster.remove_node(node, allow_graceful=False)

    settings = {"clients": {"left": 4, "right": 8}, "samples": 4, "rounds": 5}
    acts: dict[int, Callable[[ray_engine.Ray], object]] = {
        2: lambda engine: signal_actor(engine, signal.SIGKILL),
        3: lambda engine: frozen.append(signal_actor(engine, signal.SIGSTOP)),
        4: kill_larger_node,
    }
    broken = InRound(acts)
    try:
        found = result("fedbn", [broken], engine="ray", workers=3, **settings)
    finally:
        thaw(*frozen)  # or it keeps its core
    assert broken.acts == {}
    assert same(found, result("fedbn", **settings))


@pytest.mark.slow
def test_an_error_is_the_clients_own(cluster: Any, tmp_path: Path) -> None:
    """Of a method in a file that the nodes do not have."""
    (tmp_path / "fails.py").write_text(FAILS)
    method = method_class(f"{tmp_path / 'fails.py'}:Fails")()
    (tmp_path / "fails.py").unlink()
    with pytest.raises(ProtofedError, match=r"^right-0 fails \(on purpose\)$"):
        result(method, engine="ray", workers=1)
