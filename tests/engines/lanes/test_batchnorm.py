"""Fused batch normalization against PyTorch's own.

Needs Triton, and a GPU or ``TRITON_INTERPRET=1`` (which runs kernels on a CPU, slowly).
"""

from __future__ import annotations

import copy
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from protofed.engines.lanes import batchnorm as module  # noqa: E402
from protofed.errors import NoSecondDerivative  # noqa: E402
from protofed.models import build  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


def plain(norm: nn.BatchNorm2d, x: Tensor, add: Tensor | None, relu: bool) -> Tensor:
    y = nn.BatchNorm2d.forward(norm, x)
    y = y if add is None else y + add
    return F.relu(y) if relu else y


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 3, 1), (7, 40, 5, 6), (9, 64, 8, 8)])
def test_values_gradients_and_statistics(shape: tuple[int, ...], added: bool, relu: bool) -> None:
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(shape[1]).double().to(DEVICE) for _ in range(2)]
    for norm in norms:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(-1, 2, shape[1]))
            norm.bias.copy_(torch.linspace(1, -1, shape[1]))
    x = torch.randn(shape, dtype=torch.float64, device=DEVICE) * 3 + 10
    add = torch.randn_like(x) if added else None
    weight = torch.randn_like(x)
    found = []
    for norm, way in zip(norms, (plain, module._batchnorm_forward), strict=True):
        inputs = [t.clone().requires_grad_() for t in (x, *((add,) if added else ()))]
        y = way(norm, inputs[0], inputs[1] if added else None, relu)
        grads = torch.autograd.grad((y * weight).sum(), [*inputs, norm.weight, norm.bias])
        found.append([y.detach(), *grads, *norm.buffers()])
    for ours, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 4, 8, 8, device=DEVICE) + 1000
    norm = nn.BatchNorm2d(4).to(DEVICE)
    exact = (x.double() - x.double().mean((0, 2, 3), keepdim=True)) / x.double().var(
        (0, 2, 3), correction=0, keepdim=True
    ).sqrt()
    assert float((module._batchnorm_forward(norm, x).detach() - exact).abs().max()) < 1e-3


def test_statistics_that_are_not_tracked_stay() -> None:
    norm = nn.BatchNorm2d(4).to(DEVICE)
    norm.track_running_stats = False
    before = [t.clone() for t in norm.buffers()]
    module._batchnorm_forward(norm, torch.randn(3, 4, 2, 2, device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_a_whole_network(training: bool) -> None:
    torch.manual_seed(0)
    network = build("resnet10", 5, 8, 8).double().to(DEVICE, memory_format=torch.channels_last)
    twin = copy.deepcopy(network)
    module.fuse(twin)
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64, device=DEVICE)
    assert network.state_dict().keys() == twin.state_dict().keys()
    grads = []
    for net in (network, twin):
        net.train()
        net(x)  # updates the running statistics
        net.train(training)
        out = net(x)
        loss = out.logits.square().sum() + out.feature.sum()
        grads.append([out.logits, *torch.autograd.grad(loss, list(net.parameters()))])
    for ours, theirs in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    for ours, theirs in zip(twin.buffers(), network.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_first_convolution_in_bfloat16() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 16, 3, 2, padding=1).to(DEVICE, torch.bfloat16)
    x = torch.randn(4, 3, 9, 9, device=DEVICE).bfloat16()
    ours, theirs = module._few_channels_conv(conv, x), conv(x)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    weight = torch.randn_like(theirs)
    grads = [torch.autograd.grad((y * weight).sum(), conv.weight)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=0.05, atol=0.1)


@pytest.mark.parametrize(("stride", "side"), [((2, 2), 8), ((3, 2), 7)])
def test_a_strided_convolution_of_single_pixels(stride: tuple[int, int], side: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 5, 1, stride).double().to(DEVICE, memory_format=torch.channels_last)
    found = []
    for way in (conv, partial(module._strided_1x1_conv, conv)):
        x = torch.linspace(-1, 2, 3 * 8 * side * side, dtype=torch.float64, device=DEVICE)
        x = x.reshape(3, 8, side, side).requires_grad_()
        y = way(x)
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        second = torch.autograd.grad(dx.square().sum(), [x, conv.weight], retain_graph=True)
        grads = torch.autograd.grad(y.square().sum(), [x, conv.weight, conv.bias])
        of_one = torch.func.grad(lambda x, way=way: way(x[None]).square().sum())
        found.append([y, dx, *second, *grads, torch.func.vmap(of_one)(x.detach())])
    for ours, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_strided_convolutions_of_a_resnet_are_subsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build("resnet10", 5, 8, 8).to(DEVICE, memory_format=torch.channels_last)
    module.fuse(network)
    subsampled: list[tuple[int, ...]] = []
    inner = module._Subsample.apply
    monkeypatch.setattr(
        module._Subsample,
        "apply",
        lambda x, *s: (subsampled.append(tuple(x.shape)), inner(x, *s))[1],
    )
    network(torch.randn(2, 3, 8, 8, device=DEVICE))
    assert subsampled == [(2, 8, 8, 8), (2, 16, 4, 4), (2, 32, 2, 2)]


@pytest.mark.parametrize("added", [False, True])
def test_nan_stays_nan(added: bool) -> None:
    """A ReLU that turns NaN into 0 hides divergence: the loss would stay finite."""
    x = torch.randn(3, 4, 2, 2, device=DEVICE)
    x[1, 2, 0, 1] = torch.nan
    add = torch.zeros_like(x) if added else None
    norm = nn.BatchNorm2d(4).to(DEVICE)
    found = module._batchnorm_forward(norm, x, add, relu=True).isnan()
    assert torch.equal(found, plain(nn.BatchNorm2d(4).to(DEVICE), x, add, relu=True).isnan())
    assert found[:, 2].all() and not found[:, :2].any()


class Louder(nn.BatchNorm2d):
    """A module of a method's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def network_of_other_modules() -> nn.Sequential:
    torch.manual_seed(0)
    relu = nn.ReLU()
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, dilation=2, padding=2),
        nn.BatchNorm2d(6),
        relu,
        nn.Conv2d(6, 6, 3, groups=3, padding=1, padding_mode="circular"),
        relu,  # used again, and not after a norm
        nn.Conv2d(6, 4, 1),
        Louder(4),
        nn.ReLU(),
    ).to(DEVICE)


@pytest.mark.parametrize("bf16", [False, True])
def test_other_modules_are_left_alone(bf16: bool) -> None:
    """A method may bring modules of its own."""
    network, twin = network_of_other_modules(), network_of_other_modules()
    module.fuse(twin)
    x = torch.randn(4, 3, 6, 6, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
        ours, theirs = twin(x), network(x)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05 if bf16 else 1e-5)


def test_a_second_derivative_is_refused() -> None:
    """The kernels have none; without an error it would silently be 0."""
    x = torch.randn(3, 4, 2, 2, device=DEVICE, requires_grad=True)
    y = module._batchnorm_forward(nn.BatchNorm2d(4).to(DEVICE), x)
    with pytest.raises(NoSecondDerivative):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
