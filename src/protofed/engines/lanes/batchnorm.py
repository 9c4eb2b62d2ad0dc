"""Batch normalization in training, with the addition and ReLU that follow it.

PyTorch takes about nine kernels for it, forward and backward, and reads the activations as many
times. Here each pass goes over them twice: a kernel of partial sums, and, when a small one has
joined these, a kernel that normalizes, adds the shortcut and applies ReLU, or computes the gradient
(see ``kernels``). ReLU's mask is recomputed from the input, or read from the output if a shortcut
was added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from protofed.engines.lanes import kernels
from protofed.errors import NoSecondDerivative

TILE = 64  # rows a program holds in registers at a time
CHANNELS = 32  # channels a program works on: 64 bytes of bfloat16
PROGRAMS = 512  # that sum over rows: about four for each multiprocessor of an H200
PARTS = 256  # that a program joins at a time
JOINED = 8  # channels of which a program joins the parts


def batchnorm_forward(
    norm: nn.BatchNorm2d, x: Tensor, add: Tensor | None = None, relu: bool = False
) -> Tensor:
    """The normalized x plus ``add``, with ReLU if asked for."""
    if not trains_with_kernels(norm, x.numel() // x.shape[1]):
        plain = nn.BatchNorm2d.forward(norm, x)
        plain = plain if add is None else plain + add
        return F.relu(plain) if relu else plain
    y: Tensor = _FusedBatchNorm.apply(x, norm.weight, norm.bias, add, norm, relu)
    return y


class _FusedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        add: Tensor | None,
        norm: nn.BatchNorm2d,
        relu: bool,
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if add is not None:
            add = add.contiguous(memory_format=torch.channels_last).to(x.dtype)
        sums_P2C, rows = _statistics(x, weight.dtype)
        normed = join_statistics(norm, sums_P2C, rows, x)
        y = normalize(normed, add, relu)
        ctx.relu, ctx.added = relu, add is not None
        ctx.save_for_backward(*normed, *((y,) if ctx.added else ()))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        normed = Normed(*ctx.saved_tensors[:5])
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        y = ctx.saved_tensors[5] if ctx.relu and ctx.added else None
        relu = ctx.relu and not ctx.added
        g, sums = gradient_sums(normed, dy, y, relu)
        dx = gradient(normed, g, sums[0], sums[1], relu)
        return dx, sums[1], sums[0], g if ctx.added else None, None, None


def refuse_second_derivative() -> None:
    """Called in a backward pass."""
    if torch.is_grad_enabled():  # called with create_graph
        raise NoSecondDerivative("the kernels of lanes have no second derivative")


class Normed(NamedTuple):
    """A map and what normalizes it: its channels' mean and 1 / deviation, BatchNorm's weights."""

    x: Tensor
    mean_C: Tensor
    scale_C: Tensor
    weight: Tensor
    bias: Tensor


def trains_with_kernels(norm: nn.BatchNorm2d, rows: int) -> bool:
    """Whether a layer normalizes by the batch's statistics, as the kernels do.

    They count a map's entries in 32 bits.
    """
    return (
        norm.training
        and norm.momentum is not None
        and norm.affine
        and 2 <= rows < 2**31 // norm.num_features
    )


def join_statistics(norm: nn.BatchNorm2d, sums_P2C: Tensor, rows: int, x: Tensor) -> Normed:
    """The statistics of x from those of its parts of that many rows; updates the running ones."""
    tracked = norm.track_running_stats and norm.running_mean is not None
    if tracked and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    mean_C, scale_C = torch.empty_like(norm.weight), torch.empty_like(norm.weight)
    grid, sizes = _join_grid(sums_P2C)
    kernels.join_statistics[grid](
        sums_P2C,
        mean_C,
        scale_C,
        norm.running_mean if tracked else mean_C,
        norm.running_var if tracked else mean_C,
        x.numel() // x.shape[1],
        x.shape[1],
        rows,
        len(sums_P2C),
        MOMENTUM=norm.momentum,
        EPS=norm.eps,
        TRACK=tracked,
        **sizes,
    )
    return Normed(x, mean_C, scale_C, norm.weight.detach(), norm.bias.detach())


def normalize(normed: Normed, add: Tensor | Normed | None, relu: bool) -> Tensor:
    """The normalized map plus another one, which may be normalized too, with ReLU if asked for."""
    y = torch.empty_like(normed.x)
    second = add if isinstance(add, Normed) else normed if add is None else Normed(add, *normed[1:])
    grid, shape, sizes = _row_grid(normed.x)
    kernels.normalize[grid](
        *normed, *second, y, *shape,
        ADD="none" if add is None else "normalized" if isinstance(add, Normed) else "map",
        RELU=relu, **sizes,
    )  # fmt: skip
    return y


def gradient_sums(
    normed: Normed, dy: Tensor, y: Tensor | None, relu: bool, second: Normed | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient g at BatchNorm's output, and its sums [S, C]: of g, of g · x̂, of g · x̂2.

    With ``y``, the output of a ReLU after an addition, g is dy where y is positive. With ``relu``,
    ReLU came right after BatchNorm: g is counted where that let it pass, but not masked.
    """
    x = normed.x
    grid, shape, each, sizes = _part_grid(x)
    g = dy if y is None else torch.empty_like(dy)
    other = normed if second is None else second
    part_PSC = normed.mean_C.new_empty(grid[0], 2 if second is None else 3, x.shape[1])
    kernels.gradient_sums[grid](
        *normed, dy, x if y is None else y, g, *other[:3], part_PSC, *shape, each,
        MASKS=y is not None, RELU=relu, SECOND=second is not None, **sizes,
    )  # fmt: skip
    return g, join_sums(part_PSC)


def join_sums(part_PSC: Tensor, sums: Tensor | None = None) -> Tensor:
    """The sums [S, C] over the parts, in a tensor's memory if one is given."""
    sums = torch.empty_like(part_PSC[0]) if sums is None else sums
    (blocks,), sizes = _join_grid(part_PSC)
    channels = part_PSC.shape[2]
    grid = (blocks, part_PSC.shape[1])
    kernels.join_sums[grid](part_PSC, sums, channels, len(part_PSC), **sizes)
    return sums


def gradient(normed: Normed, g: Tensor, dbias: Tensor, dweight: Tensor, relu: bool) -> Tensor:
    """The gradient of BatchNorm's input."""
    dx = torch.empty_like(normed.x)
    grid, shape, sizes = _row_grid(dx)
    kernels.gradient[grid](*normed, g, dx, dbias, dweight, *shape, RELU=relu, **sizes)
    return dx


def _statistics(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Mean and squared deviations of the channels over parts of the rows; rows of a part."""
    grid, shape, each, sizes = _part_grid(x)
    part_P2C = torch.empty(grid[0], 2, x.shape[1], dtype=dtype, device=x.device)
    kernels.statistics[grid](x, part_P2C, *shape, each, **sizes)
    return part_P2C, each * TILE


def _row_grid(x: Tensor) -> tuple[tuple[int, int], tuple[int, int], dict[str, Any]]:
    """Programs for every tile of rows and block of channels; rows and channels; tile sizes."""
    channels = x.shape[1]
    rows = x.numel() // channels
    block = min(CHANNELS, triton.next_power_of_2(channels))
    grid = (triton.cdiv(rows, TILE), triton.cdiv(channels, block))
    return grid, (rows, channels), {"TILE": TILE, "BLOCK": block, "num_warps": 4}


def _part_grid(x: Tensor) -> tuple[tuple[int, int], tuple[int, int], int, dict[str, Any]]:
    """The same for sums, where a program has several tiles: ``each``."""
    (tiles, blocks), shape, sizes = _row_grid(x)
    each = triton.cdiv(tiles, max(1, PROGRAMS // blocks))
    return (triton.cdiv(tiles, each), blocks), shape, each, sizes


def _join_grid(part_PSC: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    parts = min(PARTS, triton.next_power_of_2(len(part_PSC)))
    grid = (triton.cdiv(part_PSC.shape[2], JOINED),)
    return grid, {"PARTS": parts, "BLOCK": JOINED, "num_warps": 4}
