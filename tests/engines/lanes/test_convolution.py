"""Convolutions by kernels against PyTorch's.

Needs Triton, and a GPU or ``TRITON_INTERPRET=1`` (which runs kernels on a CPU, slowly). The
interpreter has no bfloat16: there they compute in float32.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from protofed.engines.lanes import convolution  # noqa: E402

if not INTERPRETED and torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("the kernels are for Hopper GPUs", allow_module_level=True)

DEVICE, DTYPE = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
CLOSE = 1e-5 if INTERPRETED else 0.004  # bfloat16 has 8 bits

# images, input and output channels, side of the output
SMALL = [(3, 64, 128, 4), (1, 128, 64, 2), (2, 64, 64, 16), (33, 64, 64, 1), (5, 64, 64, 8)]
RESNET = [
    *((n, width, width, 2048 // width) for n in (1, 9, 32, 64) for width in (64, 128, 256, 512)),
    *((n, width // 2, width, 2048 // width) for n in (5, 32) for width in (128, 256, 512)),
]
SHAPES = SMALL if INTERPRETED else [*SMALL, *RESNET]


def close(ours: Tensor, exact: Tensor) -> bool:
    return bool((ours.double() - exact).norm() < CLOSE * exact.norm())


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE).contiguous(memory_format=torch.channels_last)


class Case:
    """A convolution with its exact gradients, in float64 from the same rounded numbers."""

    def __init__(self, shape: tuple[int, int, int, int], stride: int, kernel: int) -> None:
        n, ci, co, side = shape
        torch.manual_seed(n)
        self.x = drawn(n, ci, stride * side, stride * side)
        self.w = drawn(co, ci, kernel, kernel)
        self.g = drawn(n, co, side, side)
        x, w = (t.double().requires_grad_() for t in (self.x, self.w))
        self.y = F.conv2d(x, w, stride=stride, padding=kernel // 2)
        self.dx, self.dw = torch.autograd.grad(self.y, (x, w), self.g.double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("stride", "kernel"), [(1, 3), (2, 3), (2, 1)])
def test_a_convolution_and_its_statistics(
    shape: tuple[int, int, int, int], stride: int, kernel: int
) -> None:
    case = Case(shape, stride, kernel)
    y, parts, size = convolution.convolve(case.x, case.w, stride)
    assert close(y, case.y)
    rows = y.permute(0, 2, 3, 1).reshape(-1, y.shape[1]).double().split(size)
    assert len(rows) == len(parts)
    means = torch.stack([r.mean(0) for r in rows])
    deviations = torch.stack([(r - r.mean(0)).square().sum(0) for r in rows])
    torch.testing.assert_close(parts[:, 0].double(), means, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(parts[:, 1].double(), deviations, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("stride", "kernel"), [(1, 3), (2, 3), (2, 1)])
def test_the_gradient_of_the_weights(
    shape: tuple[int, int, int, int], stride: int, kernel: int
) -> None:
    case = Case(shape, stride, kernel)
    dw = convolution.weight_gradient(case.x, case.g, case.w, stride)
    assert close(dw, case.dw) and dw.stride() == case.w.stride()
    again = convolution.weight_gradient(case.x, case.g, case.w, stride)
    assert torch.equal(dw, again)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("added", [False, True])
def test_the_gradient_of_the_input(shape: tuple[int, int, int, int], added: bool) -> None:
    case = Case(shape, 1, 3)
    add = torch.randn_like(case.x) if added else None
    exact = case.dx + add.double() if added else case.dx
    assert close(convolution.input_gradient(case.g, case.w, add), exact)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_before_a_norm(shape: tuple[int, int, int, int]) -> None:
    """Where the input is y = ReLU(norm(x)): the gradient masked by it, and the sums of norm's."""
    case = Case(shape, 1, 3)
    x = torch.randn_like(case.x)
    mean, scale = (torch.rand(x.shape[1], device=DEVICE) + 0.5 for _ in range(2))
    y = F.relu(case.x)
    g, parts = convolution.normalized_input_gradient(case.g, case.w, y, x, mean, scale)
    assert close(g, case.dx * (y > 0))
    each = convolution._tile(x.shape[1], case.g.shape[1], x.numel() // x.shape[1]).rows
    hat = (x.double() - mean.double()[:, None, None]) * scale.double()[:, None, None]
    for number, values in enumerate((g.double(), g.double() * hat)):
        rows = values.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
        sums = torch.stack([r.sum(0) for r in rows.split(each)])
        torch.testing.assert_close(parts[:, number].double(), sums, rtol=1e-3, atol=0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_of_the_input_with_stride_two(shape: tuple[int, int, int, int]) -> None:
    """Of a 3×3 convolution and the 1×1 convolution of the shortcut, which read the same input."""
    case, other = Case(shape, 2, 3), Case(shape, 2, 1)
    dx = convolution.strided_input_gradient(case.g, case.w, other.g, other.w)
    assert close(dx, case.dx + other.dx)


def test_nan_stays_nan() -> None:
    case = Case(SMALL[0], 1, 3)
    case.x[1, 2, 1, 1] = torch.nan
    y, parts, _ = convolution.convolve(case.x, case.w, 1)
    assert y[1, :, :3, :3].isnan().all()
    assert not y[0].isnan().any() and parts.isnan().any()
