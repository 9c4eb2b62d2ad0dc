"""Recorded epochs against the loop, on a CPU with stand-ins for streams and graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.engines.lanes.cpu_stand_in import RECORD, both, difference, in_lanes, nothing
from torch import Tensor

from protofed.data import Domain, Images, Task
from protofed.engines.lanes import lane
from protofed.engines.lanes.engine import Lanes
from protofed.engines.lanes.program import Program
from protofed.errors import NoSecondDerivative, ProtofedError
from protofed.method import Batch, Phase, Terms
from protofed.methods import METHODS, FedAvg, FedProto, FedSR
from protofed.testing.checks import tiny_task

pytestmark = pytest.mark.usefixtures("lanes_on_cpu")


# ---- agreement with the loop ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fpl", "fedseproto", "fedmd", "feddyn", "fedfa"])
def test_methods_agree_with_the_loop(name: str) -> None:
    assert difference(*both(METHODS[name](), rounds=3)) < 1e-8


OPTIONS: dict[str, dict[str, Any]] = {
    "cosine": {"schedule": "cosine", "warmup_rounds": 1},
    "cosine, no momentum": {"schedule": "cosine", "momentum": 0.0, "weight_decay": 0.0},
    "step, adam": {"schedule": "step", "step_every": 1, "optimizer": "adam", "clip_norm": 0.1},
    "cosine, adamw": {"schedule": "cosine", "optimizer": "adamw", "weight_decay": 0.1},
    "balanced": {"sampling": "balanced", "label_smoothing": 0.2, "clip_norm": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_training_agree_with_the_loop(name: str) -> None:
    assert difference(*both(METHODS["fpl"](), rounds=3, **OPTIONS[name])) < 1e-8


def test_control_variates_are_of_the_rounds_learning_rate() -> None:
    assert difference(*both(METHODS["scaffold"](), rounds=3, schedule="cosine")) < 1e-8


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_learning_rate_that_changes_needs_no_new_program(schedule: str) -> None:
    lanes = in_lanes(FedAvg(), schedule=schedule)
    assert isinstance(lanes.engine, Lanes)
    records = [lanes.run_round(), lanes.run_round()]
    programs = [p for lane in lanes.engine._lanes for p in lane["cnn2"]._programs.values()]
    assert len(programs) == 2, "one a lane"
    assert all(isinstance(p.lr, Tensor) == (schedule == "cosine") for p in programs)
    assert [r.get("lr") for r in records] == ([None] * 2 if schedule == "constant" else LRS)


LRS = [0.05, 0.05 * 0.75]


@pytest.mark.parametrize("settings", [{"train": "head"}, {"freeze_bn": True}])
@pytest.mark.parametrize("name", ["moon", "scaffold"])
def test_frozen_backbones_agree_with_the_loop(name: str, settings: dict[str, Any]) -> None:
    assert difference(*both(METHODS[name](), **settings)) < 1e-8


@dataclass(frozen=True)
class Changing(FedProto):
    """Phases differ from round to round in what they compute, and in their number."""

    name = "changing"

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        if round == 0:
            return (Phase(self.plain),)
        if round in (1, 2):
            scale = float(round)
            return (Phase(lambda client, batch: self.scaled(client, batch, scale)),)
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
    """A program is for one loss and one set of parameters; the last phase collects features."""
    assert difference(*both(Changing(), rounds=5)) < 1e-8


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
    """The lane's view of a client has since been used for clients of other sizes."""
    assert difference(*both(Drawing())) < 1e-8


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
    assert difference(*both(AllBatches())) < 1e-8


@pytest.mark.parametrize("settings", [{}, {"schedule": "cosine", "warmup_rounds": 1}], ids=repr)
def test_bfloat16_runs(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With bfloat16 copies of the weights, and without the kernel (which needs Triton)."""
    monkeypatch.setattr("protofed.engines.lanes.step.kernels", None)
    assert in_lanes(FedAvg(), precision="bf16", **settings).run_round()["loss"]["ce"] < 3


def test_crops_and_steps_are_computed_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jitter before the steps of an epoch, random numbers in them."""
    called: list[str] = []

    def left_to_the_expression(name: str) -> Any:
        return lambda *args, **kwargs: called.append(name)

    def task(**sizes: Any) -> Task:
        plain = tiny_task(**sizes)
        return replace(plain, augment=replace(plain.augment, jitter=(0.4, 0.4, 0.4, 0.1)))

    monkeypatch.setattr("tests.engines.lanes.cpu_stand_in.tiny_task", task)
    kernels = {name: left_to_the_expression(name) for name in ("jittered", "normal")}
    monkeypatch.setattr("protofed.engines.lanes.program._kernels", lambda device: kernels)
    assert difference(*both(METHODS["fedsr"](), rounds=1)) < 1e-8
    assert set(called) == {"jittered", "normal"}


# ---- recording -----------------------------------------------------------------------------------


@pytest.fixture
def real_record(lanes_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real recording, which fails at the graph unless the test brings one."""
    monkeypatch.setattr(Program, "record", RECORD)


@pytest.mark.usefixtures("real_record")
def test_a_method_that_cannot_be_recorded_runs_eagerly() -> None:
    with pytest.warns(UserWarning, match="cannot be recorded as a CUDA graph.*there is no GPU"):
        assert difference(*both(METHODS["fedproto"]())) < 1e-8


@pytest.mark.usefixtures("real_record")
@pytest.mark.parametrize(("side", "batch", "steps"), [(8, 3, 2), (9, 3, 5), (9, 2, 5), (9, 4, 2)])
def test_the_warm_up_has_batches_of_every_alignment(
    side: int, batch: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles for each, which it cannot do while a graph is recorded."""
    inner, seen = Program._epoch, list[list[int]]()

    def epoch(self: Any, steps: Any) -> None:
        seen.append(list(steps))
        inner(self, steps)

    def enlarged(images: Images) -> Images:
        return replace(images, x=torch.nn.functional.pad(images.x, (0, side - 8, 0, side - 8)))

    def task(**sizes: Any) -> Task:
        plain = tiny_task(**sizes)
        larger = {n: Domain(enlarged(d.train), enlarged(d.test)) for n, d in plain.domains.items()}
        return replace(plain, domains=larger)

    monkeypatch.setattr("tests.engines.lanes.cpu_stand_in.tiny_task", task)
    monkeypatch.setattr(Program, "_epoch", epoch)
    with pytest.warns(UserWarning, match="there is no GPU"):
        settings = {"model": "resnet10", "width": 4, "precision": "fp32"}  # for sides that are odd
        in_lanes(FedAvg(), lanes=1, batch=batch, samples=20, **settings).run_round()
    start = batch * 3 * side**2 * 4
    alignments = [{step * start % 16 for step in steps} for steps in (seen[0], max(seen, key=len))]
    assert alignments[0] == alignments[1]
    assert len(seen[0]) == steps


def fail_while_recording(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that raises an error while it is recorded, and a graph that raises another."""
    recording = []

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        recording.append(True)
        try:
            yield
        finally:
            recording.clear()
            raise RuntimeError("a previous error during capture")

    inner = Program._epoch

    def epoch(self: Any, *args: Any) -> None:
        if recording:
            raise error
        inner(self, *args)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(Program, "_epoch", epoch)


@pytest.mark.usefixtures("real_record")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("not while capturing\nmore"), "slower: not while capturing$"),
        (NotImplementedError(), "slower: NotImplementedError$"),
    ],
)
def test_the_reason_given_is_the_first_error_of_a_recording(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the error that ending a failed recording raises."""
    fail_while_recording(error, monkeypatch)
    with pytest.warns(UserWarning, match=words):
        in_lanes(FedAvg()).run_round()


@pytest.mark.usefixtures("real_record")
def test_running_out_of_memory_while_recording_is_not_the_method_s_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_while_recording(torch.cuda.OutOfMemoryError("CUDA out of memory"), monkeypatch)
    with (
        pytest.warns(UserWarning, match="continuing with 1 lane"),
        pytest.raises(ProtofedError, match="out of GPU memory with one client"),
    ):
        in_lanes(FedAvg()).run_round()


class Once(torch.autograd.Function):
    """Differentiable once, like the kernels."""

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


@pytest.mark.usefixtures("real_record")
def test_a_gradient_in_the_loss_runs_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fuse(network: Any) -> None:
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                plain = type(module).forward
                module.forward = lambda x, m=module, f=plain: Once.apply(f(m, x))  # type: ignore

    monkeypatch.setattr(lane, "_fuse", fuse)
    with pytest.warns(UserWarning, match="penalty has a gradient in its loss: it runs"):
        assert difference(*both(Penalty(), epochs=1)) < 1e-8


@pytest.mark.usefixtures("real_record")
@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_recorded(
    was_on: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collecting a graph during the recording of another makes the recording fail."""
    during = []

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        during.append(gc.isenabled())
        yield
        if fails:
            raise RuntimeError("no luck")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(Program, "run", nothing)
    federation = in_lanes(FedAvg(), lanes=1)
    try:
        if not was_on:
            gc.disable()
        if fails:
            with pytest.warns(UserWarning, match="runs eagerly.*no luck"):
                federation.run_round()
        else:
            federation.run_round()
        assert during and not any(during)
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
