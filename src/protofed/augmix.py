"""AugMix: each image mixed with chains of simple changes of it (Hendrycks et al., ICLR 2020).

Images are [N, C, H, W] with pixels in [0, 1]. A chain is 1 to D operations, each drawn with a level
ℓ ~ U(0.1, s) and a sign:

    rotate ±3ℓ°; shear x, y by ±0.03ℓ; translate x, y by ±ℓ/30 of the side;
    autocontrast; equalize; posterize to 4 − ⌊0.4ℓ⌋ bits; solarize from 1 − ℓ/10;
    brightness, contrast, color, sharpness by a factor of 1 ± 0.09ℓ

Geometry is bilinear, with black around the image, and pixels are rounded to 8 bits only where an
operation needs it. Every image has chains, levels and weights of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.fused import replaceable
from protofed.prototypes import full_precision


class Draws(NamedTuple):
    """The random numbers for N images, each ~ U(0, 1); chains are the outer dimension of M × N."""

    length: Tensor
    """[M·N]: how many operations a chain has."""
    operation: Tensor
    """[D, 3, M·N]: for each operation, which one it is, its level and its sign."""
    weight: Tensor
    """[M, N]: for the weights of the chains relative to each other."""
    share: Tensor
    """[N]: for the weight of the image as it was."""


@replaceable
@full_precision
def augmix(x: Tensor, draws: Draws, severity: float) -> Tensor:
    """m x + (1−m) Σ_i w_i c_i(x), with w ~ Dirichlet(1, ..., 1) and m ~ U(0, 1)."""
    chains, depth = len(draws.weight), len(draws.operation)
    chained = x.repeat(chains, 1, 1, 1)
    length = _each(1 + (draws.length * depth).floor())
    # An operation is computed for all images and kept for those that drew it.
    for number, (which, level, sign) in enumerate(draws.operation.to(x.dtype)):
        operation = (which * (len(GEOMETRY) + len(COLORS))).long()
        level = 0.1 + (severity - 0.1) * level
        signed = level * (sign - 0.5).sign()
        changed = moved(chained, operation, signed)
        for i, change in enumerate(COLORS, len(GEOMETRY)):
            value = change(chained, _each(level), _each(signed))
            changed = torch.where(_each(operation == i), value, changed)
        chained = torch.where(number < length, changed, chained)
    weight = -draws.weight.to(x.dtype).log()
    weight = (weight / weight.sum(0)).view(chains, -1, 1, 1, 1)
    share = _each(draws.share.to(x.dtype))
    return share * x + (1 - share) * (weight * chained.view(chains, *x.shape)).sum(0)


def _each(values: Tensor) -> Tensor:
    """One value for each image, to broadcast."""
    return values[:, None, None, None]


GEOMETRY = ("rotate", "shear x", "shear y", "translate x", "translate y")


def moved(x: Tensor, operation: Tensor, signed: Tensor) -> Tensor:
    """Each image through one of ``GEOMETRY``, with black around it; other images as they are."""
    rotate, shear_x, shear_y, right, down = (
        (signed * (operation == i))[:, None, None] for i in range(len(GEOMETRY))
    )
    cos, sin = (f(rotate * (math.pi / 60)) for f in (torch.cos, torch.sin))
    rows, columns = (
        (2 * torch.arange(n, device=x.device, dtype=x.dtype) + 1) / n - 1 for n in x.shape[2:]
    )
    rows = rows[:, None]
    # where a pixel comes from, in [-1, 1]; not F.affine_grid, a matrix product that TF32 would blur
    column = cos * columns + (0.03 * shear_x - sin) * rows + right / 15
    row = (sin + 0.03 * shear_y) * columns + cos * rows + down / 15
    where = torch.stack([column, row], 3)
    return F.grid_sample(x, where, "bilinear", "zeros", align_corners=False)


def autocontrast(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    """The darkest value of a channel becomes 0, the brightest 1; a flat channel stays as it is.

    An earlier operation may have left rounding errors in it, which must not become black and white.
    """
    low, high = x.amin((2, 3), True), x.amax((2, 3), True)
    flat = high - low < 1e-5
    return torch.where(flat, x, (x - low) / (high - low).masked_fill(flat, 1))


def eight_bits(x: Tensor) -> Tensor:
    """Whole numbers up to 255; halves, of which autocontrast makes many, go up on every machine."""
    return (x * 255 + 1e-3).round()


def equalize(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    """Make all values of a channel about equally frequent, by Pillow's integer rule."""
    value = eight_bits(x).long().flatten(2)
    count = value.new_zeros(*value.shape[:2], 256).scatter_add_(2, value, torch.ones_like(value))
    step = (value.shape[2] - count.gather(2, value.amax(2, True))) // 255
    below = count.cumsum(2) - count
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table.gather(2, value), value).view(x.shape).to(x.dtype) / 255


def posterize(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    """Keep only the upper bits of a value."""
    unit = 2.0 ** (4 + (0.4 * level).floor())
    return (eight_bits(x) / unit).floor() * unit / 255


def solarize(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    """Invert bright values."""
    return torch.where(x >= 1 - level / 10, 1 - x, x)


def brightness(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return _away(x, torch.zeros_like(x), signed)


def contrast(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return _away(x, _gray(x).mean((2, 3), True), signed)


def color(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return _away(x, _gray(x), signed)


def sharpness(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    """Away from the images smoothed by 3 × 3 pixels, of which the middle one counts five times."""
    if min(x.shape[2:]) < 3:  # no pixel has all its neighbors
        return _away(x, x, signed)
    inner = x[:, :, 1:-1, 1:-1]
    smooth = (9 * F.avg_pool2d(x, 3, 1) + 4 * inner) / 13
    return _away(x, x + F.pad(smooth - inner, (1, 1, 1, 1)), signed)


def _away(x: Tensor, origin: Tensor, signed: Tensor) -> Tensor:
    factor = 1 + 0.09 * signed
    return (origin + factor * (x - origin)).clamp(0, 1)


def _gray(x: Tensor) -> Tensor:
    return 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]


COLORS = (
    autocontrast, equalize, posterize, solarize, brightness, contrast, color, sharpness,
)  # fmt: skip
