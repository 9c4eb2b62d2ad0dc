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
from protofed.engines.lanes import engine
from protofed.engines.lanes.engine import Lanes
from protofed.engines.lanes.signatures import told_apart
from protofed.errors import NoSecondDerivative, ProtofedError
from protofed.federation import server as server_module
from protofed.federation.simulation import Federation
from protofed.method import Batch, Phase, Terms
from protofed.methods import METHODS, FedAvg, FedProto, FedSR, Method
from protofed.testing.checks import TINY, tiny_task

RECORD = engine.Program.record


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
    monkeypatch.setattr(engine.Program, "record", record)
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
    monkeypatch.setattr(engine.Program, "record", RECORD)
    with pytest.warns(UserWarning, match="cannot be recorded as a CUDA graph.*there is no GPU"):
        assert apart(*both(METHODS["fedproto"](), rounds=2)) < 1e-8


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("not while capturing\nmore"), "slower: not while capturing$"),
        (NotImplementedError(), "slower: NotImplementedError$"),
    ],
)
def test_the_reason_is_the_first_error_of_a_recording(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one that the end of a spoilt recording raises."""

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        steps.append(0)
        try:
            yield
        finally:
            steps.clear()
            raise RuntimeError("a previous error during capture")

    steps: list[int] = []
    inner = engine.Program._epoch

    def epoch(self: Any, *args: Any) -> None:
        if steps:
            raise error
        inner(self, *args)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(engine.Program, "record", RECORD)
    monkeypatch.setattr(engine.Program, "_epoch", epoch)
    with pytest.warns(UserWarning, match=words):
        assert apart(*both(FedAvg(), rounds=1)) < 1e-8


def test_memory_that_ends_while_recording_is_not_a_method_s_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("a previous error during capture")

    inner = engine.Program._epoch

    def epoch(self: Any, steps: Any) -> None:
        if isinstance(steps, range):  # the whole epoch, not the warm-up
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        inner(self, steps)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(engine.Program, "record", RECORD)
    monkeypatch.setattr(engine.Program, "_epoch", epoch)
    with (
        pytest.warns(UserWarning, match="going on with 1 lanes"),
        pytest.raises(ProtofedError, match="too little memory for one client"),
    ):
        both(FedAvg(), rounds=1)


class Once(torch.autograd.Function):
    """As the kernels are: differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise NoSecondDerivative
        return gradient


@dataclass(frozen=True)
class Penalty(FedAvg):
    """A method with a gradient in its loss."""

    name = "penalty"

    def loss(self, client: Any, batch: Batch) -> Terms:
        x = batch.x.detach().requires_grad_()
        ce = torch.nn.functional.cross_entropy(client.forward(x).logits, batch.y)
        (slope,) = torch.autograd.grad(ce, x, create_graph=True)
        return {"ce": ce, "slope": 0.1 * slope.square().sum()}


def test_a_gradient_in_the_loss_goes_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fuse(network: Any) -> None:
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                plain = type(module).forward
                module.forward = lambda x, m=module, f=plain: Once.apply(f(m, x))  # type: ignore

    monkeypatch.setattr(engine, "_fuse", fuse)
    monkeypatch.setattr(engine.Program, "record", RECORD)
    with pytest.warns(UserWarning, match="penalty has a gradient in its loss: BatchNorm runs"):
        assert apart(*both(Penalty(), rounds=2)) < 1e-8


@dataclass(frozen=True)
class ByDefaults(FedAvg):
    """The rounds' losses differ in nothing but the values of default arguments."""

    name = "defaults"
    named: bool = False

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        scale = 1.0 if round == 0 else 0.1

        def positional(client: Any, batch: Batch, s: float = scale) -> Terms:
            return {"ce": s * self.loss(client, batch)["ce"]}

        def keyword(client: Any, batch: Batch, *, s: float = scale) -> Terms:
            return {"ce": s * self.loss(client, batch)["ce"]}

        return (Phase(keyword if self.named else positional),)


@pytest.mark.parametrize("named", [False, True])
def test_default_arguments_tell_losses_apart(named: bool) -> None:
    assert apart(*both(ByDefaults(named=named), rounds=2)) < 1e-8


@dataclass(frozen=True)
class AllBatches(FedAvg):
    """Its BatchNorm averages over all batches so far."""

    name = "all_batches"

    def network(self, network: Any, sizes: Any) -> Any:
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None
        return network


def test_batchnorm_without_momentum_counts_all_batches() -> None:
    assert apart(*both(AllBatches(), rounds=2)) < 1e-8


def test_half_precision_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss with the weights' halves, without the kernel (which a machine with a GPU has)."""
    monkeypatch.setattr("protofed.engines.lanes.step.kernels", None)
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
    made: list[int] = []
    inner = getattr(engine.Lane, where)

    def living() -> int:
        return sum(r() is not None for r in alive)

    def short(self: Any, *args: Any) -> Any:
        if living() > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return inner(self, *args)

    start = engine.Lane.__init__

    def counted(self: Any, *args: Any) -> None:
        made.append(living())
        start(self, *args)
        alive.append(ref(self))

    monkeypatch.setattr(engine.Lane, where, short)
    monkeypatch.setattr(engine.Lane, "__init__", counted)
    with pytest.warns(UserWarning, match="going on with 1 lanes"):
        assert apart(*both(FedAvg(), rounds=2)) < 1e-8
    assert made == [0, 1, 0, 1, 0], "two, two anew, and then one"


@pytest.mark.parametrize("where", ["train", "evaluate"])
def test_memory_that_an_earlier_run_left_is_freed_first(
    where: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Nothing is given up for what the garbage collector has not come to yet."""
    task = tiny_task()
    earlier, later = (Federation(make_config(task, FedAvg(), **TINY), task) for _ in range(2))
    for federation in (earlier, later):
        cpu = torch.device("cpu")
        federation.engine = Lanes(federation.setup, federation.make_networks, cpu, lanes=1)
    circle = [earlier]
    circle.append(circle)  # type: ignore[arg-type]
    living = ref(earlier)
    module, name = (engine.Lane, "prepare") if where == "train" else (engine, "examine")
    inner = getattr(module, name)

    def short(*args: Any) -> Any:
        if living() is not None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return inner(*args)

    monkeypatch.setattr(module, name, short)
    gc.disable()
    try:
        del earlier, federation, circle
        later.run_round()
    finally:
        gc.enable()
    assert not [str(w.message) for w in recwarn], "with all its lanes"
    assert later.engine._at_once == engine.EVALUATION_BATCH  # type: ignore[attr-defined]


def test_too_little_memory_for_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine.Lane, "prepare", short)
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
    assert asked == [2048, 2048, 1024, 512, 512], "and it remembers"


def test_testing_takes_the_lanes_memory_before_it_tests_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    inner = engine.examine

    def short(*args: Any) -> Any:
        asked.append(args[-1])
        if lanes and lanes[0]._lanes:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return inner(*args)

    start, lanes = Lanes.__init__, list[Lanes]()

    def begun(self: Lanes, *args: Any, **more: Any) -> None:
        start(self, *args, **more)
        lanes.append(self)

    monkeypatch.setattr(Lanes, "__init__", begun)
    monkeypatch.setattr(engine, "examine", short)
    with pytest.warns(UserWarning, match="going on with 1 lanes"):
        assert apart(*both(FedAvg(), rounds=2)) < 1e-8
    first = [2048, 2048, 1024, 512, 256, 128, 128]
    assert asked == [*first, 128, 128, 128], "then once more for the second round's one lane"


def test_too_little_memory_to_test_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine, "examine", short)
    with (
        pytest.warns(UserWarning, match="going on with 1 lanes"),
        pytest.raises(torch.cuda.OutOfMemoryError),
    ):
        both(FedAvg(), rounds=1)


@pytest.mark.parametrize("after_aggregate", [False, True])
def test_the_server_takes_the_lanes_memory(
    after_aggregate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its average is on the GPU too; what failed is done again, and the next round has room."""
    fits: list[int] = []
    place, name = (
        (server_module.tree, "copy") if after_aggregate else (server_module, "weighted_mean")
    )
    inner = getattr(place, name)

    def short(*args: Any) -> Any:
        if busy:
            fits.append(len(busy[0]._lanes))
            if fits[-1] > 1:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return inner(*args)

    finish, busy = Federation._aggregate, list[Lanes]()

    def aggregate(self: Federation) -> None:
        if isinstance(self.engine, Lanes):
            busy.append(self.engine)
        finish(self)
        busy.clear()

    monkeypatch.setattr(Federation, "_aggregate", aggregate)
    monkeypatch.setattr(place, name, short)
    with pytest.warns(UserWarning, match="going on with 1 lanes"):
        loop, lanes = both(METHODS["fedopt"](), rounds=3)
        assert apart(loop, lanes) < 1e-8
    assert fits == [2, 0, 1, 1]


def test_testing_one_by_one_takes_the_memory_of_lanes_that_came_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = tiny_task()
    federation = Federation(make_config(task, FedAvg(), **TINY), task)
    lanes = Lanes(federation.setup, federation.make_networks, torch.device("cpu"), lanes=1)
    federation.engine, lanes._at_once = lanes, 1
    inner = engine.examine

    def short(*args: Any) -> Any:
        if lanes._lanes:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return inner(*args)

    monkeypatch.setattr(engine, "examine", short)
    federation.run_round()
    assert not lanes._lanes


def test_lanes_of_all_runs_have_the_same_streams() -> None:
    """What PyTorch keeps for a stream it would keep for every run's."""
    streams = []
    for _ in range(2):
        lanes = both(FedAvg(), rounds=1)[1].engine
        streams.append([lane["cnn2"].stream for lane in lanes._lanes])  # type: ignore[attr-defined]
    first, second = streams
    assert len(set(first)) == 2
    assert all(a is b for a, b in zip(first, second, strict=True))


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
    monkeypatch.setattr(engine.Program, "record", RECORD)
    task = tiny_task(samples=22, clients=3, spare=12)
    federation = Federation(make_config(task, FedAvg(), **TINY), task)
    lanes = Lanes(federation.setup, federation.make_networks, torch.device("cpu"), lanes=1)
    federation.engine = lanes
    monkeypatch.setattr(engine.Program, "run", nothing)
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
