"""Lanes agree with the loop. These tests need a GPU: ``pytest tests/engines/lanes``."""

from __future__ import annotations

import dataclasses
import gc
import warnings

import pytest
import torch
from tests.some_methods import made

from protofed import tree
from protofed.config import make_config
from protofed.data.task import Domain, Images, Task
from protofed.engines.lanes import engine
from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation
from protofed.method import Batch, Terms
from protofed.methods import METHODS, FedAvg, Method, create
from protofed.runs.result import Result
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task
from protofed.tree import Slot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="lanes run on a GPU")

CLIENTS = {"left": 2, "right": 3}
SAMPLES = {"left": 22, "right": 13}


def enlarged(task: Task, times: int) -> Task:
    """The task with each pixel as a square of that many pixels."""

    def larger(images: Images) -> Images:
        x = images.x.repeat_interleave(times, 2).repeat_interleave(times, 3)
        return dataclasses.replace(images, x=x)

    domains = {n: Domain(larger(d.train), larger(d.test)) for n, d in task.domains.items()}
    return dataclasses.replace(task, domains=domains)


def both(method: Method, times: int = 1, **settings: object) -> tuple[Result, Result]:
    """The same run by the loop on a CPU and by lanes on a GPU; see ``enlarged`` for ``times``."""
    common = {**TINY, "clients": CLIENTS, "samples": SAMPLES, **settings}
    task = enlarged(tiny_task(samples=22, clients=3, spare=12), times)
    loop = run(task, method, **{**common, "engine": "loop", "device": "cpu"})
    lanes = run(task, method, **{**common, "engine": "lanes", "device": "cuda"})
    return loop, lanes


def apart(loop: Result, lanes: Result) -> float:
    """The largest difference between the models, relative to an entry's largest value."""
    worst = 0.0
    assert loop.client_models.keys() == lanes.client_models.keys()
    # the server's part of the model, and the clients' own
    ours, theirs = ({"": r.model, **r.client_models} for r in (loop, lanes))
    for name, a, b in ((n, t, theirs[c][n]) for c, m in ours.items() for n, t in m.items()):
        if a.is_floating_point():
            scale = max(1e-3, float(a.abs().max()))
            worst = max(worst, float((a.double() - b.double()).abs().max()) / scale)
        else:
            assert torch.equal(a, b), name
    return worst


@pytest.mark.parametrize("name", METHODS)
def test_every_method_agrees_in_float64(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of ours may fall back to eager execution
        loop, lanes = both(made(name), rounds=3, precision="fp64")
    # 6 steps a client and round; a τ of 0.02 multiplies rounding by 50 in each
    assert apart(loop, lanes) < 1e-8
    for a, b in zip(loop.rounds, lanes.rounds, strict=True):
        assert a["accuracy"] == b["accuracy"]
        assert a["loss"].keys() == b["loss"].keys()
        assert all(abs(a["loss"][k] - b["loss"][k]) < 1e-8 for k in a["loss"])
        assert (a["bytes_up"], a["bytes_down"]) == (b["bytes_up"], b["bytes_down"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fpl", {"reading": "printed"}),
        ("i2pfl", {"reading": "printed", "lambda_intra": 0.01}),
        ("fedseproto", {"reading": "printed", "lam": 0.01, "decoder_step": 10}),
    ],
)
def test_printed_readings_agree_in_float64(name: str, options: dict[str, object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop, lanes = both(create(name, options), rounds=3, precision="fp64")
    assert apart(loop, lanes) < 1e-8


AMPLIFIED = {
    "dsu": 1e-2,  # divides by the deviation of maps of one pixel, 10⁻³
    "fedccrl": 5e-2,  # rounds pixels to 8 bits: some fall on the other side
}


@pytest.mark.parametrize("name", METHODS)
def test_the_first_steps_agree_in_float32(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop, lanes = both(made(name), rounds=1, epochs=1, batch=5, precision="fp32")
    assert apart(loop, lanes) < AMPLIFIED.get(name, 1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_bfloat16_runs_and_stays_finite(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, lanes = both(made(name), rounds=6, precision="bf16")
    models = (lanes.model, *lanes.client_models.values())
    assert all(torch.isfinite(t).all() for model in models for t in model.values())


@pytest.mark.parametrize("batch", [8, 13])
def test_runs_in_bfloat16_repeat_to_the_bit(batch: int) -> None:
    """With kernels of our own for convolutions, many steps and several lanes: a race would show."""
    settings = {**TINY, "clients": {"left": 5, "right": 5}, "samples": 20, "batch": batch}
    settings |= {"model": "resnet10", "width": 64, "norm": None, "rounds": 3, "epochs": 10}
    settings |= {"engine": "lanes", "device": "cuda", "precision": "bf16"}
    task = enlarged(tiny_task(samples=20, clients=5), 4)
    first, *others = [run(task, FedAvg(), **settings) for _ in range(4)]
    for other in others:
        assert [r["loss"] for r in other.rounds] == [r["loss"] for r in first.rounds]
        assert all(torch.equal(t, other.model[name]) for name, t in first.model.items())


@pytest.mark.parametrize("settings", [{"train": "head"}, {"freeze_bn": True}, {}])
@pytest.mark.parametrize("name", ["fpl", "scaffold", "fedseproto"])
def test_large_models_and_frozen_parts_agree(name: str, settings: dict[str, object]) -> None:
    large = {"model": "resnet18_imagenet", "width": 8, "norm": None, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop, lanes = both(made(name), 8, rounds=1, epochs=1, precision="fp64", **large)
        both(made(name), 8, rounds=2, epochs=1, precision="bf16", **large)
    assert apart(loop, lanes) < 1e-7
    for a, b in zip(loop.rounds, lanes.rounds, strict=True):
        assert (a["bytes_up"], a["bytes_down"]) == (b["bytes_up"], b["bytes_down"])


@pytest.mark.parametrize("name", ["local", "fedmd", "fedgh", "fedproto", "fedseproto"])
def test_clients_with_different_models_agree(name: str) -> None:
    """Each stream has a network and graphs for each model, and takes clients of both."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop, lanes = both(made(name), rounds=3, precision="fp64", model="cnn3,cnn2")
    assert apart(loop, lanes) < 1e-8
    for a, b in zip(loop.rounds, lanes.rounds, strict=True):
        assert a["accuracy"] == b["accuracy"]
        assert a["beside"] == b["beside"]
        assert (a["bytes_up"], a["bytes_down"]) == (b["bytes_up"], b["bytes_down"])


@pytest.mark.parametrize("name", ["fedavg", "fpl", "fedseproto", "protostyle"])
def test_residual_networks_agree(name: str) -> None:
    """Here BatchNorm, the shortcut's addition and ReLU are one kernel."""
    settings = {"model": "resnet10", "width": 8, "rounds": 2, "precision": "fp64"}
    loop, lanes = both(made(name), **settings)
    assert apart(loop, lanes) < 1e-8


@pytest.mark.parametrize("name", ["fedavg", "fpl", "i2pfl"])
def test_longer_runs_end_at_the_same_accuracy(name: str) -> None:
    """Rounding errors grow, so models drift apart; their accuracy must not."""
    common = {"rounds": 12, "seed": 0}
    loop = run("glyphs", made(name), engine="workers", device="cpu", **common)
    lanes = run("glyphs", made(name), engine="lanes", device="cuda", **common)
    last = [[r["average"] for r in result.rounds[-5:]] for result in (loop, lanes)]
    assert abs(sum(last[0]) - sum(last[1])) / 5 < 3, last


@pytest.mark.parametrize(
    "settings",
    [
        {"participation": 0.5},
        {"norm": "group"},
        {"norm": "group", "model": "resnet10", "width": 8},
        {"batch": 64},
        {"schedule": "cosine", "warmup_rounds": 1, "label_smoothing": 0.1, "sampling": "balanced"},
        {"schedule": "step", "step_every": 1, "optimizer": "adam", "clip_norm": 0.5},
        {"schedule": "cosine", "optimizer": "adamw", "weight_decay": 0.1},
    ],
    ids=repr,
)
def test_settings_agree(settings: dict[str, object]) -> None:
    loop, lanes = both(METHODS["i2pfl"](), rounds=4, precision="fp64", **settings)
    assert apart(loop, lanes) < 1e-8


@dataclasses.dataclass(frozen=True)
class LooksAtValues(FedAvg):
    """A method that cannot be recorded."""

    name = "looks"

    def loss(self, client, batch: Batch) -> Terms:  # type: ignore[no-untyped-def]
        terms = super().loss(client, batch)
        return {"ce": terms["ce"] * (1.0 if float(terms["ce"].detach()) < 1e9 else 0.0)}


def test_a_method_that_cannot_be_recorded_runs_eagerly_and_says_why() -> None:
    with pytest.warns(UserWarning, match="cannot be recorded as a CUDA graph"):
        loop, lanes = both(LooksAtValues(), rounds=2, precision="fp64")
    assert apart(loop, lanes) < 1e-8


@dataclasses.dataclass(frozen=True)
class TimeToCollect(FedAvg):
    """A method that triggers the garbage collector while it is recorded."""

    name = "collect"

    def loss(self, client, batch: Batch) -> Terms:  # type: ignore[no-untyped-def]
        if torch.cuda.is_current_stream_capturing():
            gc.set_threshold(1)
            RECORDED.append([[] for _ in range(1000)])
            gc.set_threshold(NEVER)
        return super().loss(client, batch)


NEVER = 10**9
RECORDED: list[object] = []


def test_graphs_of_an_earlier_run_are_not_collected_while_others_are_recorded() -> None:
    """Destroying a graph during a recording is forbidden and would make it fall back to eager."""
    task = tiny_task(samples=22, clients=3, spare=12)
    where = {"device": "cuda", "engine": "lanes"}
    common = {**TINY, "clients": CLIENTS, "samples": SAMPLES, **where}
    thresholds = gc.get_threshold()
    gc.set_threshold(NEVER)
    try:
        earlier = [Federation(make_config(task, FedAvg(), **common), task)]
        earlier[0].run_round()
        earlier.append(earlier)  # type: ignore[arg-type]  # only the collector frees it
        del earlier
        later = Federation(make_config(task, TimeToCollect(), **common), task)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            later.run_round()
        assert RECORDED
    finally:
        gc.set_threshold(*thresholds)


@dataclasses.dataclass(frozen=True)
class Penalty(FedAvg):
    """A method with a gradient in its loss."""

    name = "penalty"

    def loss(self, client, batch: Batch) -> Terms:  # type: ignore[no-untyped-def]
        x = batch.x.detach().requires_grad_()
        ce = torch.nn.functional.cross_entropy(client.forward(x).logits, batch.y)
        (slope,) = torch.autograd.grad(ce, x, create_graph=True)
        return {"ce": ce, "slope": 0.1 * slope.square().sum()}


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_gradient_in_the_loss_is_differentiated(precision: str) -> None:
    """BatchNorm's kernels have no second derivative; the method is recorded without them."""
    settings = {"model": "resnet10", "width": 8, "rounds": 2, "lr": 0.01, "precision": precision}
    with pytest.warns(UserWarning) as caught:
        loop, lanes = both(Penalty(), **settings)
    words = {str(w.message) for w in caught if issubclass(w.category, UserWarning)}
    assert len(words) == 1 and "penalty has a gradient in its loss" in words.pop()
    if precision == "fp64":
        assert apart(loop, lanes) < 1e-8
    else:  # a batch of 8 and a penalty on it multiply bfloat16's rounding
        pairs = [(r.rounds[0]["loss"][k] for r in (loop, lanes)) for k in ("ce", "slope")]
        assert all(abs(a - b) < 0.3 * a for a, b in pairs)


def test_with_little_memory_there_are_fewer_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somewhere between enough memory and too little for one client, fewer lanes train the same.

    How much memory that is depends on the allocator, so the limit is found by bisection.
    """
    monkeypatch.setattr(engine, "LANES", range(5, 6))
    task = tiny_task(samples=22, clients=3)
    settings = {**TINY, "clients": CLIENTS, "samples": SAMPLES, "model": "resnet10", "width": 64}
    settings |= {"epochs": 1, "device": "cuda", "engine": "lanes", "precision": "fp64"}
    config = make_config(task, FedAvg(), **settings)

    def train(limit: float = 1.0) -> tuple[dict[str, Slot], list[str]]:
        """The clients' models after a round with this part of the memory, and the warnings."""
        federation = Federation(config, task)
        clients, received = list(federation.clients.values()), federation.server.broadcast()
        torch.cuda.set_per_process_memory_fraction(limit)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                replies = dict(federation.engine.train(clients, received, federation.store.get, 0))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        words = [str(w.message) for w in caught if "memory" in str(w.message)]
        return {name: tree.copy(reply.message)["model"] for name, reply in replies.items()}, words

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    unlimited, words = train()
    assert not words
    total = torch.cuda.get_device_properties(0).total_memory
    too_little, enough = 0.0, torch.cuda.max_memory_reserved() / total
    models: dict[str, Slot] = {}
    while not words:
        assert (enough - too_little) * total > 1 << 20, "no limit at which there are fewer lanes"
        limit = (too_little + enough) / 2
        try:
            models, words = train(limit)
        except ProtofedError as error:
            assert "out of GPU memory with one client at a time" in str(error)
            too_little = limit
        else:
            enough = limit
    assert words[0] == "out of GPU memory: continuing with 2 lanes"
    torch.testing.assert_close(models, unlimited)
