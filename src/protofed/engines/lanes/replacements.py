"""Kernels in place of the tensor expressions of ``protofed.keys`` and ``protofed.styles``.

As expressions, a draw of random numbers is 14 to 30 small kernels, and restyling a map reads and
writes it eight times. Here a draw is one kernel; a style is one that reads the map, and restyling
one that reads and writes it. If styles have no gradient, restyling's backward pass is the same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from protofed import keys
from protofed.engines.lanes import kernels
from protofed.errors import NoSecondDerivative
from protofed.styles import EPS

DRAWS = 256  # numbers a program draws
VALUES = 4096  # of a map that a program holds at a time
CHANNELS = 16  # that a program works on: 32 bytes of bfloat16


def uniform(key: Tensor, draw: int, shape: tuple[int, ...]) -> Tensor:
    return _drawn("uniform", key, draw, shape)


def normal(key: Tensor, draw: int, shape: tuple[int, ...]) -> Tensor:
    return _drawn("normal", key, draw, shape)


def beta(key: Tensor, draw: int, shape: tuple[int, ...], a: float) -> Tensor:
    return _drawn("beta", key, draw, shape, a)


def _drawn(kind: str, key: Tensor, draw: int, shape: tuple[int, ...], a: float = 1.0) -> Tensor:
    out = torch.empty(shape, dtype=torch.float32, device=key.device)
    kernels.draw[(triton.cdiv(out.numel(), DRAWS),)](
        key, out, (draw << 40) + 1, out.numel(),
        A=a, KIND=kind, GAMMA=keys._GAMMA, MIX_1=keys._MIX_1, MIX_2=keys._MIX_2, BLOCK=DRAWS,
    )  # fmt: skip
    return out


def style_of(x: Tensor, eps: float = EPS) -> Tensor:
    style: Tensor = _StyleOf.apply(x, eps)
    return style


def restyle(x: Tensor, old: Tensor, new: Tensor) -> Tensor:
    size = (len(x), 2, x.shape[1])  # one style may be given for all maps
    y: Tensor = _Restyle.apply(x, old.expand(size), new.expand(size))
    return y


class _StyleOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        dtype = torch.promote_types(x.dtype, torch.float32)
        style = torch.empty(len(x), 2, x.shape[1], dtype=dtype, device=x.device)
        sizes, grid, _, blocks = _grid(x)
        kernels.style[grid](x, style, *sizes, EPS=eps, **blocks)
        ctx.save_for_backward(x, style)
        return style

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _require_first_derivative()
        x, style = ctx.saved_tensors
        dx = torch.empty_like(x)
        sizes, _, grid, blocks = _grid(x)
        kernels.style_gradient[grid](x, style, grads[0].contiguous(), dx, *sizes, **blocks)
        return dx, None


class _Restyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, old: Tensor, new: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        dtype = torch.promote_types(x.dtype, torch.float32)
        ctx.dtypes = old.dtype, new.dtype
        old, new = (style.to(dtype).contiguous() for style in (old, new))
        y = torch.empty_like(x)
        sizes, _, grid, blocks = _grid(x)
        kernels.restyle[grid](x, old, new, y, *sizes, SHIFT=True, **blocks)
        ctx.through_styles = any(ctx.needs_input_grad[1:])
        ctx.save_for_backward(old, new, *((x,) if ctx.through_styles else ()))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _require_first_derivative()
        old, new, *maps = ctx.saved_tensors
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(dy)
        sizes, whole, parts, blocks = _grid(dy)
        if not ctx.through_styles:
            kernels.restyle[parts](dy, old, new, dx, *sizes, SHIFT=False, **blocks)
            return dx, None, None
        dold, dnew = torch.empty_like(old), torch.empty_like(new)
        kernels.restyle_gradient[whole](maps[0], old, new, dy, dx, dold, dnew, *sizes, **blocks)
        return dx, dold.to(ctx.dtypes[0]), dnew.to(ctx.dtypes[1])


def _require_first_derivative() -> None:
    if torch.is_grad_enabled():  # called with create_graph
        raise NoSecondDerivative("the kernels of restyling have no second derivative")


def _grid(x: Tensor) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, ...], dict[str, int]]:
    """Pixels and channels; programs that see whole maps, and parts of them; their tiles."""
    batch, channels, height, width = x.shape
    pixels = height * width
    block = min(CHANNELS, triton.next_power_of_2(channels))
    tile = min(VALUES // block, triton.next_power_of_2(pixels))
    whole = (batch, triton.cdiv(channels, block))
    parts = (*whole, triton.cdiv(pixels, tile))
    return (pixels, channels), whole, parts, {"TILE": tile, "BLOCK": block, "num_warps": 4}


KERNELS = {f.__name__: f for f in (uniform, normal, beta, style_of, restyle)}
