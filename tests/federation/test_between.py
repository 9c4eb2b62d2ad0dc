"""A method between the stages of a network: when it is called, what the system collects there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.engines.lanes.cpu_stand_in import both, difference, pretend
from torch import Tensor

from protofed import keys, tree
from protofed.config import make_config
from protofed.engines.lanes import program
from protofed.errors import ProtofedError
from protofed.federation.model_fit import require_fit
from protofed.federation.simulation import Federation
from protofed.method import (
    Batch,
    Client,
    Entry,
    Method,
    ServerView,
    Shared,
    Sizes,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
    hyper,
)
from protofed.methods import FedAvg
from protofed.models import build
from protofed.runs.run import run
from protofed.styles import restyle, style_of
from protofed.testing.checks import SHORT, check, tiny_task

STAGES = ("pixels", "stage1")


@dataclass(frozen=True)
class Borrow(Method):
    """Samples take on the style of another client's samples, half of the time."""

    name: ClassVar[str] = "borrow"
    detached_terms = ("ce",)
    stages: str = hyper(",".join(STAGES), "", "where")

    @property
    def slots(self) -> Slots:
        return Slots(up={"styles": "styles"}, down={"styles": "everybody's styles"})

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.stages.split(","))

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        return {
            "styles": {s: torch.zeros(1, 2, 2, sizes.channels[s]) for s in self.stages.split(",")}
        }

    def between(self, client: Client, stage: str, x: Tensor) -> Tensor:
        bank = client.received["styles"][stage]
        own = style_of(x).detach()
        pick = client.uniform(len(x), len(bank)).argmax(1)
        new = bank[pick, 0] + client.normal(*own.shape) * bank[pick, 1]
        taken = (client.uniform(len(x), 1, 1) < 0.5) & (bank[pick, :1, 1] > 0)
        return restyle(x, own, torch.where(taken, new, own))

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        return {"styles": client.styles(client.start)}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        styles = {
            stage: torch.stack([u["styles"][stage] for u in updates])
            for stage in self.stages.split(",")
        }
        return {"model": mean, "styles": styles}


def test_it_passes_the_checks_that_any_method_must() -> None:
    check(Borrow)


def test_the_same_in_loop_workers_and_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, workers = (
        run(tiny_task(), Borrow(), **{**SHORT, "engine": engine}) for engine in ("loop", "workers")
    )
    assert tree.equal({"model": loop.model}, {"model": workers.model})
    plain = run(tiny_task(), FedAvg(), **SHORT)
    assert not tree.equal({"model": loop.model}, {"model": plain.model})
    pretend(monkeypatch)
    assert difference(*both(Borrow())) < 1e-9


@pytest.mark.slow
def test_lanes_put_kernels_in_place_of_expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"uniform": 0, "restyle": 0}

    def counted(name: str, plain: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return plain(*args)

        return call

    kernels = {
        "uniform": counted("uniform", keys.uniform.__wrapped__),  # type: ignore[attr-defined]
        "restyle": counted("restyle", restyle.__wrapped__),  # type: ignore[attr-defined]
    }
    pretend(monkeypatch)
    monkeypatch.setattr(program, "_kernels", lambda device: kernels)
    assert difference(*both(Borrow())) < 1e-9
    assert calls["restyle"] > 0 and calls["uniform"] >= 2 * calls["restyle"]
    before = dict(calls)
    run(tiny_task(), Borrow(), **SHORT)  # the loop is the reference
    assert calls == before


@dataclass(frozen=True)
class Watch(Method):
    """Notes when it is called."""

    name: ClassVar[str] = "watch"
    calls: ClassVar[list[str]] = []

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        return stages[1:]

    def between(self, client: Client, stage: str, x: Tensor) -> Tensor:
        self.calls.append(stage)
        return 2 * x

    def loss(self, client: Client, batch: Batch) -> Terms:
        first = client.forward(batch.x)
        assert self.calls == ["stage1", "stage2"]
        plain = client.forward(batch.x, between=lambda stage, x: x)
        assert self.calls == ["stage1", "stage2"]
        client.forward(batch.x)
        assert self.calls == ["stage1", "stage2"] * 2
        assert not torch.equal(first.feature, plain.feature)
        assert torch.equal(client.main_feature(), first.feature)
        client.forward_with({}, batch.x)
        self.calls.clear()
        return {"ce": F.cross_entropy(plain.logits, batch.y)}


def federation(method: Method, **settings: Any) -> Federation:
    task = tiny_task()
    return Federation(make_config(task, method, **{**SHORT, **settings}), task)


def test_it_is_called_in_every_training_pass_and_in_no_other() -> None:
    Watch.calls.clear()
    federation(Watch()).run_round()  # the evaluation included
    assert not Watch.calls


def a_client(method: Method, min_class_count: int = 1) -> tuple[Client, Tensor, Tensor]:
    """A client whose weights have moved since it received them, with its images and labels."""
    network = build("cnn2", 4, 8, width=4, norm="batch").double()
    start = {n: t.clone() for n, t in network.state_dict().items()}
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(1.5)
    x = torch.from_numpy(keys.generator("images").standard_normal((7, 3, 8, 8)))
    y = torch.tensor([0, 0, 1, 1, 1, 3, 3])
    client = Client(
        method,
        network.train(),
        Sizes.of(network, 4, 8),
        received={"model": start},
        mine={},
        clean=lambda part: iter([(x[:4], y[:4]), (x[4:], y[4:])]),
        samples=7,
        min_class_count=min_class_count,
    )
    return client, x, y


def test_styles_of_the_received_model_and_of_the_current_one() -> None:
    client, x, _ = a_client(Borrow())
    received = build("cnn2", 4, 8, width=4, norm="batch").double().eval()
    received.load_state_dict(client.start)
    after_conv = received.encoder[:4](x)  # type: ignore[index]
    found = client.styles(client.start)
    assert {stage: t.shape for stage, t in found.items()} == {
        "pixels": (2, 2, 3),
        "stage1": (2, 2, 4),
    }
    for stage, features in (("pixels", x), ("stage1", after_conv)):
        styles = style_of(features)
        torch.testing.assert_close(client.sample_styles(client.start)[stage], styles)
        torch.testing.assert_close(found[stage][0], styles.mean(0))
        torch.testing.assert_close(found[stage][1], styles.std(0, correction=0))
    ran: list[int] = []
    client.network.encoder[4].register_forward_hook(lambda *_: ran.append(1))  # type: ignore[index]
    current = client.styles()
    assert not ran  # what follows the last stage is not computed
    assert torch.equal(current["pixels"], found["pixels"])
    assert not torch.allclose(current["stage1"], found["stage1"])
    assert client.network.training


def test_a_client_with_too_few_samples_tells_no_style() -> None:
    assert all(bool((t[0, 1] > 0).all()) for t in a_client(Borrow(), 7)[0].styles().values())
    assert not any(bool(t.any()) for t in a_client(Borrow(), 8)[0].styles().values())


def test_class_means_of_restyled_samples() -> None:
    client, x, y = a_client(Borrow())
    client.use_sums(torch.ones(4, 512), torch.ones(4))
    centre = torch.tensor([[0.5, -1.0, 2.0], [1.0, 2.0, 0.5]], dtype=torch.float64)

    def to_centre(stage: str, x: Tensor) -> Tensor:
        return restyle(x, style_of(x), centre.expand(len(x), 2, 3)) if stage == "pixels" else x

    mean, count = client.class_means(to_centre)
    z = client.forward_with({}, to_centre("pixels", x)).feature
    assert count.tolist() == [2, 3, 0, 2]
    for k in (0, 1, 3):
        torch.testing.assert_close(mean[k], z[y == k].mean(0))
    assert torch.equal(client.class_means()[0], torch.ones(4, 512))  # what was collected stays


def test_an_unknown_stage_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(ProtofedError, match=r"stem.*pixels, stage1, stage2"):
        federation(Borrow(stages="pixels,stem"))


@dataclass(frozen=True)
class Alone(Watch):
    """The same without a common model."""

    name: ClassVar[str] = "alone"
    evaluates = "everyone"

    def shared(self, entry: Entry) -> Shared:
        return "no"


def test_different_models_need_the_same_stages() -> None:
    require_fit(FedAvg(), ("cnn2", "cnn2"), 4, 8, 4, "batch")
    with pytest.raises(ProtofedError, match=r"cnn2 has stage1 \(4 channels\), stage2.*; cnn3 has"):
        require_fit(Alone(), ("cnn2", "cnn3"), 4, 8, 4, "batch")


def test_a_privacy_budget_refuses_styles() -> None:
    with pytest.raises(ProtofedError, match="borrow also sends styles, which would get no noise"):
        federation(Borrow(), norm="group", update_epsilon=8.0)


@pytest.mark.parametrize("stage", STAGES)
def test_between_that_returns_nothing_is_an_error(stage: str) -> None:
    """PyTorch's hooks would take None for features that stay as they are."""

    @dataclass(frozen=True)
    class Forgetful(Method):
        name: ClassVar[str] = "forgetful"

        def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
            return (stage,)

        def between(self, client: Client, stage: str, x: Tensor) -> Tensor:
            return None  # type: ignore[return-value]

    with pytest.raises(ProtofedError, match=f"between returns None at stage {stage}"):
        run(tiny_task(), Forgetful(), **SHORT)
