"""A step in lanes against autocast and PyTorch's optimizers.

The kernel needs Triton, and a GPU or ``TRITON_INTERPRET=1`` (which runs kernels on a CPU, slowly);
the fallback without Triton is tested everywhere.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.engines.lanes import step as module
from protofed.engines.lanes.bf16 import Bf16Weights
from protofed.federation.optimizers import SGD, Adam
from protofed.models import Network, build

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ABLE = module.kernels is not None and (torch.cuda.is_available() or INTERPRETED)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
KERNEL = [False, pytest.param(True, marks=pytest.mark.skipif(not ABLE, reason="needs Triton"))]


def network(model: str = "cnn2") -> Network:
    torch.manual_seed(0)
    net = build(model, 5, 8, 8 if model == "resnet10" else 4, "batch").to(
        DEVICE, memory_format=torch.channels_last
    )
    return net.eval()


def plain(net: Network, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 3, 8, 8, generator=generator).to(DEVICE)
    return F.cross_entropy(net(x).logits, torch.arange(6, device=DEVICE) % 5)


def autocast() -> torch.autocast:
    return torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False)


def by_hand(net: Network, loss: Any, steps: int, momentum: float, decay: float) -> Network:
    """Autocast's gradients and PyTorch's own SGD."""
    trained = [p for p in net.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(trained, lr=0.1, momentum=momentum, weight_decay=decay)
    anchor = [p.detach().clone() for p in trained]
    for number in range(steps):
        with autocast():
            value = loss(net, number, trained, anchor)
        sgd.zero_grad()
        value.backward()
        sgd.step()
    return net


def by_step(
    net: Network,
    loss: Any,
    steps: int,
    momentum: float,
    decay: float,
    kernel: bool,
    lr: float | Tensor = 0.1,
) -> tuple[Network, Bf16Weights]:
    trained = [p for p in net.parameters() if p.requires_grad]
    bf16 = Bf16Weights(net)
    anchor = [p.detach().clone() for p in trained]
    one = module.Bf16OptimizerStep(trained, SGD(trained, lr, momentum, decay), None, bf16, steps)
    assert (one._fused is not None) == kernel, "or nothing is tested"
    one.begin_epoch()
    for number in range(steps):
        with autocast():
            value = one.compute(partial(loss, net, number, trained, anchor))
        one.step(value, number)
        if kernel and INTERPRETED:  # which truncates where a GPU rounds
            for name, weight in bf16.weights.items():
                copy = bf16.copies[name].float()
                assert ((copy - weight).abs() <= weight.abs() / 128).all(), "the copies follow"
            bf16.refresh()
    return net, bf16


def usual(net: Network, number: int, *_: object) -> Tensor:
    return plain(net, number)


def proximal(net: Network, number: int, trained: list[Tensor], anchor: list[Tensor]) -> Tensor:
    """A term of the weights themselves besides the one of their copies."""
    away = [(p - a).square().sum() for p, a in zip(trained, anchor, strict=True)]
    return plain(net, number) + 0.3 * torch.stack(away).sum()


def head_alone(net: Network, number: int, *_: object) -> Tensor:
    """Parameters without a gradient must not change, even with weight decay."""
    return F.cross_entropy(net.head(torch.ones(3, net.head.in_features, device=DEVICE)), ONES)


ONES = torch.ones(3, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("loss", [usual, proximal, head_alone])
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.01), (0.0, 0.0)])
def test_steps_are_those_of_autocast_and_sgd(
    loss: Any, momentum: float, decay: float, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(module, "kernels", None)
    theirs = by_hand(network(), loss, 3, momentum, decay)
    ours, bf16 = by_step(network(), loss, 3, momentum, decay, kernel)
    start = dict(network().named_parameters())
    moved = 0
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        # a last bit of a weight may flip a bit of its copy, and that changes the next gradient
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4, msg=name)
        moved += not torch.equal(b, start[name])
    assert moved == (2 if loss is head_alone else len(start))
    for name, weight in bf16.weights.items():
        assert torch.equal(bf16.copies[name], weight.bfloat16()), "the copies follow"


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_one_step_is_exact(tensor: bool, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        monkeypatch.setattr(module, "kernels", None)
    lr = torch.tensor(0.1, device=DEVICE) if tensor else 0.1
    theirs = by_hand(network("resnet10"), usual, 1, 0.9, 0.01)
    ours, _ = by_step(network("resnet10"), usual, 1, 0.9, 0.01, kernel, lr)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", ["adam", "clip"])
def test_adam_and_clipping_run_without_the_kernel(kind: str) -> None:
    nets = network(), network()
    values = []
    for net in nets:
        trained = list(net.parameters())
        bf16 = Bf16Weights(net)
        optimizer = Adam(trained, lr=0.01) if kind == "adam" else SGD(trained, 0.1, 0.9, 0.0)
        clip = 0.01 if kind == "clip" else None
        if net is nets[0]:
            one = module.Bf16OptimizerStep(trained, optimizer, clip, bf16, 2)
            assert one._fused is None
            one.begin_epoch()
            for number in range(2):
                with autocast():
                    value = one.compute(partial(usual, net, number))
                one.step(value, number)
            values.append(value)
            continue
        for number in range(2):
            with autocast():
                value = usual(net, number)
            optimizer.zero_grad()
            value.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(trained, clip)
            optimizer.step()
        values.append(value)
    torch.testing.assert_close(values[0], values[1])
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)


def test_in_the_weights_own_precision() -> None:
    ours, theirs = network(), network()
    trained = list(ours.parameters())
    one = module.OptimizerStep(trained, SGD(trained, 0.1, 0.9, 0.01), None)
    hand = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for number in range(3):
        one.begin_epoch()
        one.step(one.compute(partial(plain, ours, number)), number)
        hand.zero_grad()
        plain(theirs, number).backward()
        hand.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are recorded on a GPU")
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_a_recorded_epoch_replays_the_same_steps(tensor: bool) -> None:
    """Also with a learning rate that is changed after the recording."""
    eager = copy.deepcopy(network())
    recorded = copy.deepcopy(eager)
    expected, _ = by_step(eager, usual, 3, 0.9, 0.01, kernel=True)
    trained, bf16 = list(recorded.parameters()), Bf16Weights(recorded)
    lr = torch.tensor(0.7, device=DEVICE) if tensor else 0.1
    sgd = SGD(trained, lr, 0.9, 0.01)
    one = module.Bf16OptimizerStep(trained, sgd, None, bf16, 3)
    start = copy.deepcopy(recorded.state_dict())
    batches = [torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(n)).to(DEVICE)
               for n in range(3)]  # fmt: skip
    labels = torch.arange(6, device=DEVICE) % 5

    def scored(x: Tensor) -> Tensor:
        return F.cross_entropy(recorded(x).logits, labels)

    def epoch() -> None:
        one.begin_epoch()
        for number, x in enumerate(batches):
            with autocast():
                value = one.compute(partial(scored, x))
            one.step(value, number)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        epoch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            epoch()
        one.end_recording()
        recorded.load_state_dict(start)
        sgd.reset()
        if isinstance(lr, Tensor):
            lr.fill_(0.1)
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(expected.parameters(), recorded.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_gradient_inside_a_larger_tensor_is_copied() -> None:
    """The kernel reads 16 bytes at a time, from multiples of 16."""
    whole = torch.arange(9.0, device=DEVICE)
    assert module._aligned(whole).data_ptr() == whole.data_ptr()
    part = module._aligned(whole[1:])
    assert part.data_ptr() % 16 == 0 and torch.equal(part, whole[1:])
