"""Styles: the mean and the deviation of each channel of a map of features.

A style is a tensor [..., 2, C]: for a sample's map x [C, H, W], the mean of each channel over H × W
and the root of its unbiased variance plus ε. Methods mix styles and add noise to them as tensors;
``restyle`` gives a map another style:

    restyle(x, style_of(x), new)  =  σ_new (x − μ)/σ + μ_new

Gradients go through both styles; ``style_of(x).detach()`` keeps those of x out. Where the two are
equal, x stays as it is, bit for bit. Both functions compute in float32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protofed.fused import replaceable
from protofed.prototypes import full_precision, widened

EPS = 1e-6
"""ε: what is added to a variance."""


@replaceable
@full_precision
def style_of(x: Tensor, eps: float = EPS) -> Tensor:
    """The style [B, 2, C] of each map of x [B, C, H, W]."""
    one = min(1, x[0, 0].numel() - 1)  # a map of one pixel has no variance
    var_BC, mean_BC = torch.var_mean(x, (2, 3), correction=one)
    return torch.stack([mean_BC, (var_BC + eps).sqrt()], 1)


@replaceable
def restyle(x: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """x [B, C, H, W], whose style is ``old`` [B, 2, C], with the style ``new``."""
    scale_BC = widened(new[:, 1]) / widened(old[:, 1])
    shift_BC = new[:, 0] - old[:, 0] * scale_BC
    y: Tensor = widened(x) * scale_BC[:, :, None, None] + shift_BC[:, :, None, None]
    return y.to(x.dtype)
