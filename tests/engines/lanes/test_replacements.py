"""Kernels of draws and styles against the tensor expressions that they replace.

Needs Triton, and a GPU or ``TRITON_INTERPRET=1`` (which runs kernels on a CPU, slowly).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from protofed import keys  # noqa: E402
from protofed.engines.lanes.replacements import KERNELS  # noqa: E402
from protofed.errors import NoSecondDerivative  # noqa: E402
from protofed.fused import using  # noqa: E402
from protofed.styles import restyle, style_of  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPES = [(3, 3, 5, 7), (2, 40, 9, 8), (2, 16, 1, 1), (1, 64, 24, 24)]


def both(function: Any, *args: Any) -> tuple[Any, Any]:
    """What the expressions give, and the kernels."""
    plain = function(*args)
    with using(KERNELS):
        return plain, function(*args)


@pytest.mark.parametrize("number", [0, 11, keys.key(1, "client", 3), (1 << 63) - 1])
@pytest.mark.parametrize("draw", [1, 2, 300])
def test_draws(number: int, draw: int) -> None:
    key = torch.tensor(number, device=DEVICE)
    plain, kernel = both(keys.uniform, key, draw, (7, 100))
    assert torch.equal(plain, kernel)
    for way in (keys.normal, lambda *a: keys.beta(*a, 0.1), lambda *a: keys.beta(*a, 2.0)):
        plain, kernel = both(way, key, draw, (3, 200))
        torch.testing.assert_close(kernel, plain, rtol=1e-6, atol=1e-7)
        assert kernel.dtype == torch.float32 and kernel.shape == (3, 200)


def maps(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * 3 + 2).to(DEVICE, dtype)


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: tuple[int, ...], detached: bool) -> None:
    x = maps(shape, torch.float64).requires_grad_()
    new = maps((shape[0], 2, shape[1]), torch.float64, 1).abs().requires_grad_(not detached)
    weight = maps(shape, torch.float64, 2)

    def step() -> list[Tensor]:
        own = style_of(x)
        own = own.detach() if detached else own
        y = restyle(x, own, new)
        return [own, y, *torch.autograd.grad((y * weight).sum(), [x] if detached else [x, new])]

    for plain, kernel in zip(*both(step), strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-10, atol=1e-9)


def test_bfloat16_and_equal_styles() -> None:
    x = maps(SHAPES[1], torch.bfloat16).contiguous(memory_format=torch.channels_last)
    plain, kernel = both(style_of, x)
    torch.testing.assert_close(kernel, plain)
    assert kernel.dtype == torch.float32
    new = plain.flip(0)
    ours, theirs = (restyled.float() for restyled in both(restyle, x, plain, new))
    torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.01)
    with using(KERNELS):
        same = restyle(x, kernel, kernel)
    assert torch.equal(same, x) and same.dtype == torch.bfloat16
    assert same.is_contiguous(memory_format=torch.channels_last)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    x = maps((2, 4, 16, 16), torch.float32) + 1000
    with using(KERNELS):
        style = style_of(x)
    torch.testing.assert_close(style.double(), style_of(x.double()), rtol=1e-5, atol=1e-4)


def test_a_second_derivative_is_refused() -> None:
    """The kernels have none; without an error it would silently be 0."""
    x = maps((2, 3, 2, 2), torch.float32).requires_grad_()
    with using(KERNELS):
        y = restyle(x, style_of(x), style_of(x) * 2)
    with pytest.raises(NoSecondDerivative):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_one_style_for_all_maps() -> None:
    x = maps((3, 5, 4, 4), torch.float32)
    own = style_of(x)
    plain, kernel = both(restyle, x, own, own[:1] + 0.5)
    torch.testing.assert_close(kernel, plain)
