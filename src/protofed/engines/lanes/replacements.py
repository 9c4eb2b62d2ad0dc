"""Kernels in place of the tensor expressions that are marked ``@replaceable``.

As expressions, a draw of random numbers is 14 to 30 small kernels, restyling a map reads and writes
it eight times, a loss of prototypes is some 50 kernels, color jitter some 250 and AugMix 400. Here
a draw is one kernel; a style is one that reads the map, and restyling one that reads and writes it.
If styles have no gradient, restyling's backward pass is the same. A loss is one kernel for each
sample's loss and gradient, one for the mean, and one that scales the gradient. Jitter is four
times a kernel and the mean that it needs; AugMix is one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from protofed import keys
from protofed.augmix import Draws
from protofed.data.augment import gray_mean
from protofed.engines.lanes import image_kernels, kernels, prototype_kernels
from protofed.engines.lanes.batchnorm import refuse_second_derivative
from protofed.prototypes import Prototypes
from protofed.prototypes.losses import ABSENT, NO_LENGTH
from protofed.styles import EPS

DRAWS = 256  # numbers a program draws
VALUES = 4096  # of a map, or of prototypes, that a program holds at a time
CHANNELS = 16  # that a program works on: 32 bytes of bfloat16
LONGEST = 8192  # features of a prototype, which a program holds as a whole
MANY = 1024  # prototypes, padding included: a program compares one sample with all of them
FEATURES = 64  # that a program works on, of class means
PIXELS = 1024  # that a program changes the color of
IMAGE = 4096  # pixels of an image that a program holds as a whole


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
        refuse_second_derivative()
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
        refuse_second_derivative()
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


def _grid(x: Tensor) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, ...], dict[str, int]]:
    """Pixels and channels; programs that see whole maps, and parts of them; their tiles."""
    batch, channels, height, width = x.shape
    pixels = height * width
    block = min(CHANNELS, triton.next_power_of_2(channels))
    tile = min(VALUES // block, triton.next_power_of_2(pixels))
    whole = (batch, triton.cdiv(channels, block))
    parts = (*whole, triton.cdiv(pixels, tile))
    return (pixels, channels), whole, parts, {"TILE": tile, "BLOCK": block, "num_warps": 4}


def contrast(
    z_Bd: Tensor, y_B: Tensor, prototypes: Prototypes, tau: float | Tensor, power: float = 1.0
) -> Tensor | None:
    mean, mask = prototypes.table()
    count, features = mask.numel(), mean.shape[2]
    if not _is_narrow(z_Bd) or isinstance(tau, Tensor) or features > LONGEST or count > MANY:
        return None
    block = triton.next_power_of_2(features)
    rows, own = (
        max(1, min(triton.next_power_of_2(n), VALUES // block)) for n in (count, mask.shape[1])
    )
    tables = y_B.contiguous(), mean.detach().contiguous(), _numbers(mask)

    def launch(z: Tensor, loss: Tensor, dz: Tensor, gradient: bool) -> None:
        prototype_kernels.contrast[(len(z),)](
            z, *tables, loss, dz, features, count, mask.shape[1], 1 / tau,
            POWER=power, NO_LENGTH=NO_LENGTH, ABSENT=ABSENT, GRADIENT=gradient,
            ROWS=rows, OWN=own, D=block, num_warps=min(max(rows * block // 512, 1), 8),
        )  # fmt: skip

    loss: Tensor = _BatchMean.apply(z_Bd, launch)
    return loss


def consistency(
    z_Bd: Tensor, y_B: Tensor, prototypes: Prototypes, reduction: str = "mean", detach: bool = True
) -> Tensor | None:
    mean, mask = prototypes
    moves = _has_gradient(mean) and not detach
    if not (_is_narrow(z_Bd) and _is_narrow(mean)) or moves or reduction not in ("mean", "sum"):
        return None
    features = mean.shape[1]
    tables = y_B.contiguous(), mean.detach().contiguous(), _numbers(mask)

    def launch(z: Tensor, loss: Tensor, dz: Tensor, gradient: bool) -> None:
        prototype_kernels.consistency[(len(z),)](
            z, *tables, loss, dz, features, 1 / features if reduction == "mean" else 1.0,
            GRADIENT=gradient, BLOCK=min(triton.next_power_of_2(features), 1024), num_warps=4,
        )  # fmt: skip

    loss: Tensor = _BatchMean.apply(z_Bd, launch)
    return loss


class _BatchMean(torch.autograd.Function):
    """The mean of the samples' losses, by a kernel that also writes the gradient."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, launch: Callable[[Tensor, Tensor, Tensor, bool], None]
    ) -> Tensor:
        z = z.contiguous()
        loss = torch.empty(len(z), dtype=torch.float32, device=z.device)
        gradient = ctx.needs_input_grad[0]
        dz = torch.empty_like(z, dtype=torch.float32) if gradient else loss
        launch(z, loss, dz, gradient)
        ctx.save_for_backward(dz)
        ctx.dtype = z.dtype
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        (dz,) = ctx.saved_tensors
        return torch.mul(dz, grads[0], out=torch.empty_like(dz, dtype=ctx.dtype)), None


def per_class_mean(prototypes: Prototypes) -> Prototypes | None:
    mean, mask = prototypes
    if not _is_narrow(mean) or _has_gradient(mean):
        return None
    classes, size, features = mean.shape
    out = torch.empty(classes, features, dtype=torch.float32, device=mean.device)
    there = torch.empty(classes, dtype=torch.float32, device=mean.device)
    grid = (classes, triton.cdiv(features, FEATURES))
    rows = min(triton.next_power_of_2(size), VALUES // FEATURES)
    prototype_kernels.per_class_mean[grid](
        mean.contiguous(), _numbers(mask), out, there, features, size, ROWS=rows, BLOCK=FEATURES
    )
    return Prototypes(out, there)


def mixed_class_means(
    z_Bd: Tensor, y_B: Tensor, gamma: Tensor, score_BB: Tensor, classes: int
) -> Prototypes | None:
    if not _is_narrow(z_Bd) or _has_gradient(z_Bd) or gamma.ndim > 0:
        return None
    batch, features = z_Bd.shape
    mean = torch.empty(classes, features, dtype=torch.float32, device=z_Bd.device)
    there = torch.empty(classes, dtype=torch.bool, device=z_Bd.device)
    grid = (classes, triton.cdiv(features, FEATURES))
    rows = min(triton.next_power_of_2(batch), VALUES // FEATURES)
    prototype_kernels.mixed_class_means[grid](
        z_Bd.contiguous(), y_B.contiguous(), gamma, score_BB.contiguous(), mean, _numbers(there),
        batch, features, ROWS=rows, OTHERS=rows, BLOCK=FEATURES, num_warps=8,
    )  # fmt: skip
    return Prototypes(mean, there)


def jittered(x: Tensor, factor_N4: Tensor, order_N4: Tensor) -> Tensor | None:
    if x.dtype != torch.float32 or not _is_colored(x):
        return None
    x, factor_N4, order_N4 = x.contiguous(), factor_N4.contiguous(), order_N4.contiguous()
    pixels = x[0, 0].numel()
    grid = (len(x), triton.cdiv(pixels, PIXELS))
    for turn in range(order_N4.shape[1]):
        y = torch.empty_like(x)
        image_kernels.jitter[grid](
            x, gray_mean(x), factor_N4, order_N4, y, pixels,
            TURN=turn, BLOCK=PIXELS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        x = y
    return x


def augmix(x: Tensor, draws: Draws, severity: float) -> Tensor | None:
    pixels = x[0, 0].numel() if len(x) else 0
    if not _is_narrow(x) or not _is_colored(x) or pixels > IMAGE or _has_gradient(x):
        return None
    x, draws = x.to(torch.float32).contiguous(), Draws(*(t.float().contiguous() for t in draws))
    y, block = torch.empty_like(x), triton.next_power_of_2(pixels)
    image_kernels.augmix[(len(x),)](
        x, *draws, torch.empty_like(x), y, len(x), severity,
        CHAINS=len(draws.weight), DEPTH=len(draws.operation), H=x.shape[2], W=x.shape[3],
        BLOCK=block, num_warps=min(max(block // 128, 4), 16),
    )  # fmt: skip
    return y


def _is_colored(x: Tensor) -> bool:
    return x.ndim == 4 and x.shape[1] == 3 and x.numel() > 0


def _is_narrow(x: Tensor) -> bool:
    """Whether this is to be computed in float32, as the kernels do, and is not empty."""
    return torch.promote_types(x.dtype, torch.float32) == torch.float32 and x.numel() > 0


def _has_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _numbers(mask: Tensor) -> Tensor:
    """A mask as kernels read it, without a copy."""
    return (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).contiguous()


KERNELS = {
    f.__name__: f
    for f in (
        *(uniform, normal, beta, style_of, restyle),
        *(contrast, consistency, per_class_mean, mixed_class_means),
        *(jittered, augmix),
    )
}
