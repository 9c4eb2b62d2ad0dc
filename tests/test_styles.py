"""Styles: channel statistics of a map, and giving it others."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from protofed.styles import restyle, style_of


def maps(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made * 3 + 2


def test_a_style_is_mean_and_unbiased_deviation_of_each_channel() -> None:
    x = maps(2, 3, 4, 5)
    style = style_of(x, eps=0.5)
    assert style.shape == (2, 2, 3)
    for i in range(2):
        for c in range(3):
            pixels = x[i, c].flatten().tolist()
            assert float(style[i, 0, c]) == pytest.approx(statistics.fmean(pixels))
            spread = math.sqrt(statistics.variance(pixels) + 0.5)
            assert float(style[i, 1, c]) == pytest.approx(spread)


def test_a_restyled_map_has_the_new_style() -> None:
    x, new = maps(2, 3, 4, 5), maps(2, 2, 3, seed=1).abs()
    y = restyle(x, style_of(x, eps=0), new)
    torch.testing.assert_close(style_of(y, eps=0), new)
    by_hand = new[0, 1, 2] * (x[0, 2] - x[0, 2].mean()) / x[0, 2].std() + new[0, 0, 2]
    torch.testing.assert_close(y[0, 2], by_hand)


def test_the_same_style_changes_no_bit() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = maps(2, 3, 4, 5).to(dtype).contiguous(memory_format=torch.channels_last)
        own = style_of(x)
        assert own.dtype == torch.promote_types(dtype, torch.float32)
        y = restyle(x, own, own)
        assert torch.equal(x, y) and y.dtype == dtype
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_gradients_with_and_without_those_of_the_statistics() -> None:
    x, new = maps(2, 3, 2, 2).requires_grad_(), maps(2, 2, 3, seed=1).requires_grad_()
    torch.autograd.gradcheck(lambda x, new: restyle(x, style_of(x), new), (x, new))
    own = style_of(x).detach()
    (grad,) = torch.autograd.grad(restyle(x, own, new).sum(), x)
    scale = (new[:, 1] / own[:, 1])[:, :, None, None].expand_as(x)
    torch.testing.assert_close(grad, scale)


def test_a_map_of_one_pixel_has_a_style() -> None:
    x = maps(2, 3, 1, 1)
    style = style_of(x)
    torch.testing.assert_close(style[:, 0], x[:, :, 0, 0])
    torch.testing.assert_close(style[:, 1], torch.full((2, 3), 1e-3, dtype=torch.float64))


def test_bfloat16_is_widened_even_under_autocast() -> None:
    x = maps(2, 3, 16, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        style = style_of(x)
        y = restyle(x, style, style * 2)
    assert torch.equal(style, style_of(x.float()))
    assert y.dtype == torch.bfloat16
    exact = restyle(x.double(), style.double(), 2 * style.double())
    assert float((y - exact).abs().max()) < 0.1
