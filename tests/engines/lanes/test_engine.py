"""The lanes engine when memory runs out, on a CPU with stand-ins for streams and graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from tests.engines.lanes import cpu_stand_in
from tests.engines.lanes.cpu_stand_in import both, difference, in_lanes

from protofed.data import Task
from protofed.engines.lanes import engine
from protofed.engines.lanes.engine import Lanes
from protofed.engines.lanes.lane import Lane
from protofed.errors import ProtofedError
from protofed.federation import server as server_module
from protofed.federation.simulation import Federation
from protofed.methods import METHODS, FedAvg
from protofed.testing.checks import tiny_task

pytestmark = pytest.mark.usefixtures("lanes_on_cpu")


def out_of_memory_if(condition: Callable[..., bool], inner: Any) -> Any:
    """``inner``, which runs out of memory if the condition holds for its arguments."""

    def limited(*args: Any) -> Any:
        if condition(*args):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return inner(*args)

    return limited


@pytest.mark.parametrize("where", ["prepare", "train"])
def test_out_of_memory_it_continues_with_fewer_lanes(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of the dropped lanes stays in memory while others are made."""
    alive: list[ref[Any]] = []
    made: list[int] = []

    def living() -> int:
        return sum(r() is not None for r in alive)

    start = Lane.__init__

    def counted(self: Any, *args: Any) -> None:
        made.append(living())
        start(self, *args)
        alive.append(ref(self))

    limited = out_of_memory_if(lambda *_: living() > 1, getattr(Lane, where))
    monkeypatch.setattr(Lane, where, lambda *args: limited(*args))
    monkeypatch.setattr(Lane, "__init__", counted)
    with pytest.warns(UserWarning, match="out of GPU memory: continuing with 1 lane$"):
        assert difference(*both(FedAvg(), epochs=1)) < 1e-8
    assert made == [0, 1, 0, 1, 0], "two, two again, and then one"


@pytest.mark.parametrize("where", ["train", "evaluate"])
def test_memory_left_by_an_earlier_run_is_freed_first(
    where: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Nothing is given up for what the garbage collector has not freed yet."""
    earlier, later = in_lanes(FedAvg(), lanes=1), in_lanes(FedAvg(), lanes=1)
    cycle = [earlier]
    cycle.append(cycle)  # type: ignore[arg-type]
    living = ref(earlier)
    place, name = (Lane, "prepare") if where == "train" else (engine, "evaluate_job")
    limited = out_of_memory_if(lambda *_: living() is not None, getattr(place, name))
    monkeypatch.setattr(place, name, lambda *args: limited(*args))
    gc.disable()
    try:
        del earlier, cycle
        later.run_round()
    finally:
        gc.enable()
    assert not [str(w.message) for w in recwarn], "with all its lanes"
    assert later.engine._evaluation_batch == engine.LARGEST_EVALUATION_BATCH  # type: ignore[attr-defined]


def test_too_little_memory_for_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "prepare", out_of_memory_if(lambda *_: True, None))
    with (
        pytest.warns(UserWarning, match="continuing with 1 lane"),
        pytest.raises(ProtofedError, match="out of GPU memory with one client at a time"),
    ):
        in_lanes(FedAvg()).run_round()


def test_out_of_memory_it_evaluates_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def too_large(*args: Any) -> bool:
        asked.append(args[-1])
        return asked[-1] > 600

    monkeypatch.setattr(engine, "evaluate_job", out_of_memory_if(too_large, engine.evaluate_job))
    both(FedAvg(), epochs=1)
    assert asked == [2048, 2048, 1024, 512, 512], "and it remembers"


@pytest.mark.slow
def test_evaluation_takes_the_lanes_memory_before_its_batches_get_tiny(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "LARGEST_EVALUATION_BATCH", 256)
    asked: list[int] = []
    federation = in_lanes(FedAvg())
    lanes: Any = federation.engine

    def lanes_exist(*args: Any) -> bool:
        asked.append(args[-1])
        return bool(lanes._lanes)

    monkeypatch.setattr(engine, "evaluate_job", out_of_memory_if(lanes_exist, engine.evaluate_job))
    with pytest.warns(UserWarning, match="continuing with 1 lane"):
        federation.run_round()
        federation.run_round()
    assert asked == [256, 256, 128, 128, 128, 128, 128], (
        "then once more for the second round's one lane"
    )
    federation.run_round()
    lanes._evaluation_batch = 1
    federation.run_round()
    assert not lanes._lanes, "a batch of one takes it too"


def test_too_little_memory_to_evaluate_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LARGEST_EVALUATION_BATCH", 2)
    monkeypatch.setattr(engine, "evaluate_job", out_of_memory_if(lambda *_: True, None))
    with (
        pytest.warns(UserWarning, match="continuing with 1 lane"),
        pytest.raises(torch.cuda.OutOfMemoryError),
    ):
        in_lanes(FedAvg()).run_round()


@pytest.mark.parametrize("after_aggregate", [False, True])
def test_the_server_takes_the_lanes_memory(
    after_aggregate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It averages on the GPU too; what failed is repeated, and the next round has room."""
    left: list[int] = []
    place, name = (
        (server_module.tree, "copy") if after_aggregate else (server_module, "weighted_mean")
    )
    finish, busy = Federation._aggregate, list[Lanes]()

    def too_many_lanes(*_: Any) -> bool:
        if not busy:
            return False
        left.append(len(busy[0]._lanes))
        return left[-1] > 1

    def aggregate(self: Federation) -> None:
        if isinstance(self.engine, Lanes):
            busy.append(self.engine)
        finish(self)
        busy.clear()

    monkeypatch.setattr(Federation, "_aggregate", aggregate)
    monkeypatch.setattr(place, name, out_of_memory_if(too_many_lanes, getattr(place, name)))
    with pytest.warns(UserWarning, match="continuing with 1 lane"):
        assert difference(*both(METHODS["fedopt"](), rounds=3, epochs=1)) < 1e-8
    assert left == [2, 0, 1, 1]


def test_lanes_of_all_runs_have_the_same_streams() -> None:
    """PyTorch keeps workspaces for every stream it has ever seen."""
    streams = []
    for _ in range(2):
        federation = in_lanes(FedAvg())
        federation.run_round()
        streams.append([lane["cnn2"].stream for lane in federation.engine._lanes])  # type: ignore[attr-defined]
    first, second = streams
    assert len(set(first)) == 2
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_a_last_batch_of_one_image_is_explained() -> None:
    """A ResNet makes one pixel of these images: with one image BatchNorm has one value."""
    settings = {"model": "resnet10", "width": 8, "samples": {"left": 9, "right": 10}}
    with pytest.raises(ProtofedError, match=r"client left-\d: a batch of one image.*--batch"):
        in_lanes(FedAvg(), **settings).run_round()


def test_color_jitter_is_the_same_in_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def jittered(**kwargs: Any) -> Task:
        task = tiny_task(**kwargs)
        return replace(task, augment=replace(task.augment, jitter=(0.4, 0.4, 0.4, 0.1)))

    plain, _ = both(FedAvg(), rounds=1)
    monkeypatch.setattr(cpu_stand_in, "tiny_task", jittered)
    loop, lanes = both(FedAvg(), rounds=1)
    assert difference(loop, lanes) < 1e-9
    assert difference(loop, plain) > 1e-3


def test_residual_networks_with_group_norm_agree_with_the_loop() -> None:
    settings = {"model": "resnet10", "width": 8, "norm": "group"}
    loop, lanes = both(FedAvg(), rounds=1, **settings)
    assert not any("running" in name for name in loop.server.state["model"])
    assert difference(loop, lanes) < 1e-9


@pytest.mark.parametrize(
    ("sizes", "lanes"),
    [
        ([600] * 6 + [72] * 4 + [732] * 3 + [100] * 7, 9),  # in eight lanes, one has 1,200 of 6,784
        ([180] * 3 + [154] * 2 + [47] + [25] * 4, 8),  # no lane can have less than 180
        ([50] * 20, 10),
        ([50] * 3, 3),
        ([50], 1),
        ([], 0),
    ],
)
def test_lanes_are_as_many_as_share_the_work_evenly(sizes: list[int], lanes: int) -> None:
    federation = in_lanes(FedAvg())
    found = Lanes(federation.setup, federation.make_networks, torch.device("cpu"))
    assert found._count(sizes) == lanes
