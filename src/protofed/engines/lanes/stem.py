"""A network's first convolution in bfloat16: 3×3, of images with up to four channels.

For so few channels cuDNN has no kernel for bfloat16 tensor cores; images must be cast for it, and
padded to eight channels. There is little to compute, so what counts is how often
memory is read and written. Here each pixel's neighborhood is gathered from the images as they are,
27 numbers of three channels, which makes the convolution one product of small matrices. It writes
the sums that BatchNorm needs from its output; and the weight's gradient computes the gradient of
BatchNorm and ReLU on the way, which nothing else needs.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from protofed.engines.lanes import convolution
from protofed.engines.lanes import stem_kernels as kernels
from protofed.engines.lanes.batchnorm import Normed, join_sums

MOST_INPUTS = 4  # channels of the images
MULTIPLE = 16  # divides the number of output channels
COLUMNS = 64  # output channels of a program, at most
ROWS = 128  # pixels of a tile
PIXELS = 64  # that the weight's gradient takes at a time
PROGRAMS = 132  # of the weight's gradient, at most: an H200's multiprocessors
WARPS = 8  # of each of them

TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def supports(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether the kernels can convolve these images."""
    weight = conv.weight
    return (
        convolution.is_plain(conv, 3)
        and conv.stride == (1, 1)
        and conv.in_channels <= MOST_INPUTS
        and conv.out_channels % MULTIPLE == 0
        and weight.dtype == torch.bfloat16
        and (weight.is_contiguous() or _is_channels_last(weight))
        and x.dim() == 4
        and x.shape[1] == conv.in_channels
        and x.dtype in TYPES
        and all(s <= convolution.MOST and s & (s - 1) == 0 for s in x.shape[2:])
        and x.device == weight.device
        and _has_bfloat16(x.device)
    )


@cache
def _has_bfloat16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def convolve(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution, and mean and squared deviations of its channels: [P, 2, C].

    They are those of P tiles of ROWS rows each; the last may have fewer.
    """
    n, _, h, w = x.shape
    co = len(weight)
    y = torch.empty(
        n, co, h, w, dtype=weight.dtype, device=x.device, memory_format=torch.channels_last
    )
    tiles, sizes = triton.cdiv(n * h * w, ROWS), _sizes(x, weight)
    part_P2C = torch.empty(tiles, 2, co, dtype=torch.float32, device=x.device)
    kernels.convolve[(tiles, co // sizes["COLUMNS"])](
        x, weight, y, part_P2C, n * h * w, *x.stride(), **sizes, ROWS=ROWS, num_warps=4
    )
    return y, part_P2C


def weight_gradient(x: Tensor, weight: Tensor, normed: Normed, dy: Tensor, sums: Tensor) -> Tensor:
    """The gradient of the weight from that of ReLU(BatchNorm(the convolution)).

    ``sums`` are those of ``batchnorm.gradient_sums``: BatchNorm's gradients.
    """
    sizes = _sizes(x, weight)
    blocks = len(weight) // sizes["COLUMNS"]
    rows = dy.numel() // len(weight)
    tiles = triton.cdiv(rows, PIXELS)
    each = triton.cdiv(tiles, max(1, PROGRAMS // blocks))
    parts = triton.cdiv(tiles, each)
    dw = torch.empty_like(weight)
    # The parts are added up in their order: atomic additions would round differently in every run.
    part_P1W = torch.empty(parts, 1, dw.numel(), dtype=torch.float32, device=x.device)
    # One stage: more would take registers, and loads of other programs fill the time.
    kernels.weight_gradient[(parts, blocks)](
        x, *normed, dy, sums[0], sums[1], part_P1W, rows, each, *x.stride(), **sizes,
        PIXELS=PIXELS, DTYPE=TYPES[weight.dtype], num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return join_sums(part_P1W, dw)


def _sizes(x: Tensor, weight: Tensor) -> dict[str, int]:
    co, ci = weight.shape[:2]
    return {
        "CI": ci, "CO": co, "H": x.shape[2], "W": x.shape[3], "LAST": _is_channels_last(weight),
        "COLUMNS": math.gcd(co, COLUMNS), "DEPTH": triton.next_power_of_2(9 * ci),
    }  # fmt: skip


def _is_channels_last(weight: Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last)
