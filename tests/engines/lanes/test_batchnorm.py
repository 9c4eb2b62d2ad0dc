"""Fused batch normalization against PyTorch's own.

Needs Triton, and a GPU or ``TRITON_INTERPRET=1`` (which runs kernels on a CPU, slowly).
"""

from __future__ import annotations

import os

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
    for norm, way in zip(norms, (plain, module.batchnorm_forward), strict=True):
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
    assert float((module.batchnorm_forward(norm, x).detach() - exact).abs().max()) < 1e-3


def test_statistics_that_are_not_tracked_stay() -> None:
    norm = nn.BatchNorm2d(4).to(DEVICE)
    norm.track_running_stats = False
    before = [t.clone() for t in norm.buffers()]
    module.batchnorm_forward(norm, torch.randn(3, 4, 2, 2, device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True))


@pytest.mark.parametrize("added", [False, True])
def test_nan_stays_nan(added: bool) -> None:
    """A ReLU that turns NaN into 0 hides divergence: the loss would stay finite."""
    x = torch.randn(3, 4, 2, 2, device=DEVICE)
    x[1, 2, 0, 1] = torch.nan
    add = torch.zeros_like(x) if added else None
    norm = nn.BatchNorm2d(4).to(DEVICE)
    found = module.batchnorm_forward(norm, x, add, relu=True).isnan()
    assert torch.equal(found, plain(nn.BatchNorm2d(4).to(DEVICE), x, add, relu=True).isnan())
    assert found[:, 2].all() and not found[:, :2].any()


def test_a_second_derivative_is_refused() -> None:
    """The kernels have none; without an error it would silently be 0."""
    x = torch.randn(3, 4, 2, 2, device=DEVICE, requires_grad=True)
    y = module.batchnorm_forward(nn.BatchNorm2d(4).to(DEVICE), x)
    with pytest.raises(NoSecondDerivative):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_maps_with_too_many_entries_to_count_are_left_to_pytorch() -> None:
    norm = nn.BatchNorm2d(64)
    assert module.trains_with_kernels(norm, 2**25 - 1)
    assert not module.trains_with_kernels(norm, 2**25), "2³¹ entries"
    assert not module.trains_with_kernels(norm, 1)
    assert not module.trains_with_kernels(norm.eval(), 8)
