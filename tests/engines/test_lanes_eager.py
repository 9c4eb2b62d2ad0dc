"""The lanes engine without a GPU: all of it but streams and graphs, against the loop.

What stands in for a graph computes the epoch anew, but as with a graph no Python of the method's
or the client's is touched by a replay: only tensors change.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from protofed.config import make_config
from protofed.engines import lanes as engine
from protofed.engines.lanes import Lanes
from protofed.engines.static import told_apart
from protofed.errors import ProtofedError
from protofed.federation.federation import Federation
from protofed.methods import METHODS, FedAvg, FedProto, FedSR, Method
from protofed.methods.base import Batch, Phase, Terms
from protofed.testing import TINY, tiny_task

RECORD = engine._Program.record


class Stream:
    def __init__(self, *_: object) -> None: ...
    def wait_stream(self, _: object) -> None: ...


@contextmanager
def nothing(*_: object) -> Iterator[None]:
    yield


class Replay:
    """In the place of a program's graph."""

    def __init__(self, program: Any) -> None:
        self.program = program
        program._epoch(range(program.steps))
        self.key = program.client.key

    def replay(self) -> None:
        program, client = self.program, self.program.client
        python = client._draws, client._main, client.drawn, client.key, program.draws
        program._epoch(range(program.steps))
        self.key.copy_(client.key)
        client._draws, client._main, client.drawn, client.key, program.draws = python


def record(program: Any) -> None:
    engine.load(program.lane.network, program.client.start)
    program.lane.network.train()
    program._epoch(range(program.steps))
    program._reset()
    program.graph = Replay(program)


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("there is no GPU")


@pytest.fixture(autouse=True)
def pretend(monkeypatch: pytest.MonkeyPatch, single_thread: None) -> None:
    """A CPU in the place of a GPU."""
    for name, fake in {
        "Stream": Stream,
        "stream": nothing,
        "current_stream": Stream,
        "synchronize": nothing,
        "empty_cache": nothing,
        "graph_pool_handle": nothing,
        "CUDAGraph": nothing,
        "graph": refuse,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Tensor, "pin_memory", lambda t: t)
    begin = partial(torch.set_num_threads, 1)
    monkeypatch.setattr(
        engine, "ThreadPoolExecutor", partial(ThreadPoolExecutor, initializer=begin)
    )
    monkeypatch.setattr(engine._Program, "record", record)
    monkeypatch.setattr(engine, "_fuse", nothing)  # its kernels are tested by themselves


def both(method: Method, rounds: int = 3, **settings: Any) -> tuple[Federation, Federation]:
    """The same run by the loop and by lanes, round by round."""
    common = {**TINY, "clients": {"left": 2, "right": 3}, "samples": {"left": 22, "right": 13}}
    given = {**common, "precision": "fp64", "rounds": rounds, **settings}
    task = tiny_task(samples=22, clients=3, spare=12)
    loop, lanes = (Federation(make_config(task, method, **given), task) for _ in range(2))
    lanes.engine = Lanes(lanes.setup, lanes.make_networks, torch.device("cpu"), lanes=2)
    for _ in range(rounds):
        a, b = loop.run_round(), lanes.run_round()
        assert a["loss"].keys() == b["loss"].keys()
        assert all(abs(a["loss"][k] - b["loss"][k]) < 1e-8 for k in a["loss"]), (a, b)
        assert (a["steps"], a["accuracy"]) == (b["steps"], b["accuracy"])
    return loop, lanes


def apart(loop: Federation, lanes: Federation) -> float:
    """The largest difference between the server's states, and between the clients'."""
    trees = [(loop.server.state, lanes.server.state)]
    trees += [(loop.store.get(n), lanes.store.get(n)) for n in loop.sites]
    worst = 0.0
    for a, b in trees:
        assert a.keys() == b.keys()
        for slot, entries in a.items():
            for name, t in entries.items():
                other = b[slot][name]
                if t.shape == other.shape:  # or what is ragged has been padded
                    worst = max(worst, float((t.double() - other.double()).abs().max()))
    return worst


@pytest.mark.parametrize("name", ["fpl", "fedseproto", "fedmd", "feddyn"])
def test_methods_agree_with_the_loop(name: str) -> None:
    assert apart(*both(METHODS[name]())) < 1e-8


def test_a_method_that_cannot_be_recorded_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._Program, "record", RECORD)
    with pytest.warns(UserWarning, match="cannot be recorded as a CUDA graph.*there is no GPU"):
        assert apart(*both(METHODS["fedproto"](), rounds=2)) < 1e-8


def test_half_precision_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss with the weights' halves, without the kernel (which a machine with a GPU has)."""
    monkeypatch.setattr("protofed.engines.descent.kernels", None)
    federation = Federation(
        make_config(task := tiny_task(), FedAvg(), **TINY, precision="bf16"), task
    )
    federation.engine = Lanes(federation.setup, federation.make_networks, torch.device("cpu"), 2)
    assert federation.run_round()["loss"]["ce"] < 3


@dataclass(frozen=True)
class Warming(FedProto):
    """Its phases differ from round to round in nothing but what they compute, and how many."""

    name = "warming"

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        if round == 0:
            return (Phase(self.plain),)
        if round == 1:
            return (Phase(lambda client, batch: self.scaled(client, batch, 2.0)),)
        return (
            Phase(partial(self.scaled, scale=0.5), epochs=1, trainable=lambda n: "head" not in n),
            Phase(self.loss, epochs=0),
            Phase(self.loss, epochs=1),
        )

    def plain(self, client: Any, batch: Batch) -> Terms:
        return FedAvg.loss(self, client, batch)  # type: ignore[arg-type]

    def scaled(self, client: Any, batch: Batch, scale: float) -> Terms:
        return {"scaled": scale * self.plain(client, batch)["ce"]}


def test_phases_that_change_from_round_to_round() -> None:
    """A program is for one loss, one set of parameters, and the last phase collects features."""
    assert apart(*both(Warming(), rounds=4)) < 1e-8


@dataclass(frozen=True)
class Drawing(FedSR):
    """Draws in a pass after training: the features it sends up are samples."""

    name = "drawing"

    def upload(self, client: Any) -> Any:
        return {"sampled": {"mean": client.features()[0].mean(0)}}, {}

    def aggregate(self, server: Any, mean: Any, updates: Any) -> Any:
        total = torch.stack([u["sampled"]["mean"] for u in updates]).sum(0)
        return {"model": mean, "sampled": {"mean": total}}


def test_draws_after_training_are_those_of_the_client_that_trained() -> None:
    """A lane's view of a client has served clients of other sizes since."""
    assert apart(*both(Drawing())) < 1e-8


def test_a_loss_is_told_by_what_it_computes() -> None:
    method, other = Warming(), Warming(weight=2.0)
    assert told_apart(method.loss) == told_apart(Warming().loss) != told_apart(method.plain)
    assert told_apart(method.loss) != told_apart(other.loss)
    a, b = method.phases(1, 2)[0].loss, method.phases(1, 2)[0].loss
    assert a is not b and told_apart(a) == told_apart(b)

    def made(scale: object) -> Any:
        return lambda client, batch: scale

    assert told_apart(made(1)) == told_apart(made(1)) != told_apart(made(2))
    one, two = (partial(method.scaled, scale=s) for s in (1.0, 2.0))
    assert told_apart(one) == told_apart(partial(method.scaled, scale=1.0)) != told_apart(two)
    assert told_apart(made([1])) != told_apart(made([1])), "cannot be compared: recorded anew"


@pytest.mark.parametrize("where", ["prepare", "train"])
def test_short_of_memory_it_goes_on_with_fewer_lanes(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of the lanes that were too many stays in memory while others are made."""
    alive: list[ref[Any]] = []
    told: list[int] = []
    inner = getattr(engine._Lane, where)

    def short(self: Any, *args: Any) -> Any:
        if sum(r() is not None for r in alive) > 1 and len(told) == 0:
            told.append(0)
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return inner(self, *args)

    start = engine._Lane.__init__

    def counted(self: Any, *args: Any) -> None:
        if told:
            told[0] = max(told[0], sum(r() is not None for r in alive))
        start(self, *args)
        alive.append(ref(self))

    monkeypatch.setattr(engine._Lane, where, short)
    monkeypatch.setattr(engine._Lane, "__init__", counted)
    with pytest.warns(UserWarning, match="going on with 1 lanes"):
        assert apart(*both(FedAvg(), rounds=2)) < 1e-8
    assert told == [0], "lanes that were given up are gone before others are made"


def test_too_little_memory_for_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine._Lane, "prepare", short)
    with (
        pytest.warns(UserWarning, match="going on with 1 lanes"),
        pytest.raises(ProtofedError, match="too little memory for one client"),
    ):
        both(FedAvg(), rounds=1)


def test_short_of_memory_it_tests_fewer_images_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    inner = engine.examine

    def short(*args: Any) -> Any:
        asked.append(args[-1])
        if args[-1] > 600:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return inner(*args)

    monkeypatch.setattr(engine, "examine", short)
    both(FedAvg(), rounds=2)
    assert asked == [2048, 1024, 512, 512], "and it remembers"


@pytest.mark.parametrize("kind", ["loop", "lanes"])
def test_a_last_batch_of_one_image_is_told_in_words(kind: str) -> None:
    """A ResNet makes one pixel of these images: with one image BatchNorm has one value."""
    given = {**TINY, "model": "resnet10", "batch": 8, "samples": {"left": 9, "right": 10}}
    task = tiny_task(samples=10)
    federation = Federation(make_config(task, FedAvg(), **given), task)
    if kind == "lanes":
        lanes = Lanes(federation.setup, federation.make_networks, torch.device("cpu"), 2)
        federation.engine = lanes
    with pytest.raises(ProtofedError, match=r"client left-\d: a batch of one image.*--batch"):
        federation.run_round()


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_collected_while_a_graph_is_recorded(
    was_on: bool, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph collected during the recording of another spoils it."""
    during = []

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        during.append(gc.isenabled())
        yield
        if breaks:
            raise RuntimeError("spoilt")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(engine._Program, "record", RECORD)
    task = tiny_task(samples=22, clients=3, spare=12)
    federation = Federation(make_config(task, FedAvg(), **TINY), task)
    lanes = Lanes(federation.setup, federation.make_networks, torch.device("cpu"), lanes=1)
    federation.engine = lanes
    monkeypatch.setattr(engine._Program, "run", nothing)
    try:
        if not was_on:
            gc.disable()
        if breaks:
            with pytest.warns(UserWarning, match="runs eagerly.*spoilt"):
                federation.run_round()
        else:
            federation.run_round()
        assert during and not any(during)
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
