"""Convolutions in bfloat16 on Hopper GPUs, which have a tensor memory accelerator.

cuDNN has few kernels for the small maps and few channels here. These can also do what would be
passes of their own over the maps: a convolution writes the sums that BatchNorm needs from its
output, and a gradient is added or masked while it is still in registers.

All tensors are channels last. Tiles were chosen by measurements with several streams at once
(benchmarks/records/lanes-numerics4-h200.txt).
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple, TypeGuard

import torch
import triton
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from protofed.engines.lanes import convolution_kernels as kernels

FEW = 32  # with fewer programs a product is computed in larger steps
BLOCK = 1024  # entries of a weight's gradient that a program adds up
MOST = 64  # rows and columns of the output, a power of two
CHANNELS = 64  # numbers of channels are multiples of this


class Tile(NamedTuple):
    """What a program computes: a product [columns, rows], summed over ``depth`` at a time."""

    rows: int  # output pixels; of a weight's gradient, input channels
    columns: int  # output channels
    depth: int  # input channels; of a weight's gradient, pixels
    warps: int
    stages: int  # boxes of each operand that are in shared memory, most of them on their way

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def _tile(outputs: int, inputs: int, pixels: int) -> Tile:
    """The tile for that many output and input channels and pixels.

    Two programs fit on a multiprocessor, by shared memory (227 KB; a stage is (rows + columns) ×
    depth numbers of 2 bytes) and registers: while one stores its result, the other computes. Where
    there are few programs, none waits for another, and one has all of the shared memory.
    """
    if outputs % 128 != 0:
        return Tile(256, 64, 32, 4, 3)
    if triton.cdiv(pixels, 128) * (outputs // 128) < FEW and inputs % 128 == 0:
        return Tile(128, 128, 128, 8, 3)
    return Tile(128, 128, 64, 4, 3)


def _weight_tile(inputs: int, outputs: int) -> Tile:
    """The tile of a weight's gradient: two or three programs fit on a multiprocessor."""
    rows, columns = (128 if channels % 128 == 0 else 64 for channels in (inputs, outputs))
    return Tile(rows, columns, 64, 4, 3 if rows + columns > 128 else 4)


def is_plain(conv: nn.Module, kernel: int) -> TypeGuard[nn.Conv2d]:
    """Whether a module is a convolution as here: its kernel, stride, padding, and no bias."""
    return (
        type(conv) is nn.Conv2d
        and conv.kernel_size == (kernel, kernel)
        and conv.stride in ((1, 1), (2, 2))
        and conv.padding == (kernel // 2, kernel // 2)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.bias is None
        and conv.padding_mode == "zeros"
    )


def supports(weight: Tensor, device: torch.device, height: int, width: int) -> bool:
    """Whether the kernels can compute outputs of this size with this weight, on this device."""
    return (
        weight.dtype == torch.bfloat16
        and _is_hopper(device)
        and weight.is_contiguous(memory_format=torch.channels_last)
        and all(channels % CHANNELS == 0 for channels in weight.shape[:2])
        and all(size <= MOST and size & (size - 1) == 0 for size in (height, width))
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    """Later GPUs could do it too, with other tensor cores: nobody has tried."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def convolve(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor, int]:
    """The convolution, and mean and squared deviations of its channels: [P, 2, C].

    They are those of P parts; the third result is how many rows each has. The last may have fewer.
    """
    co, ci, kernel, _ = weight.shape
    n, _, h, w = x.shape
    ho, wo = h // stride, w // stride
    y = _empty(x, (n, co, ho, wo))
    tile = _tile(co, ci, n * ho * wo)
    images, rows = _box(tile.rows, ho, wo)
    tiles = triton.cdiv(n, images) * (ho // rows)
    part_P2C = _sums(tiles, co, x)
    kernels.convolve[(tiles, co // tile.columns)](
        _strided(x, stride, (images, rows, 1, wo, tile.depth)),
        _matrix(weight, co, (tile.columns, tile.depth)),
        _matrix(y, n * ho * wo, (tile.rows, tile.columns)),
        part_P2C, n * ho * wo,
        CI=ci, CO=co, STRIDE=stride, TAPS=kernel * kernel, HO=ho, WO=wo,
        NB=images, BH=rows, COLUMNS=tile.columns, DEPTH=tile.depth, **tile.launch,
    )  # fmt: skip
    return y, part_P2C, tile.rows


def input_gradient(g: Tensor, weight: Tensor, add: Tensor | None = None) -> Tensor:
    """The gradient of the input of a 3×3 convolution with stride 1, plus ``add``."""
    return _input_gradient(g, weight, add, None, None, None, None)[0]


def normalized_input_gradient(
    g: Tensor, weight: Tensor, y: Tensor, x: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient at BatchNorm's output where the convolution's input is y = ReLU(BatchNorm(x)).

    Also the sums of it and of it times x̂, [P, 2, C], as ``convolve`` has them.
    """
    return _input_gradient(g, weight, None, y, x, mean, scale)


def _input_gradient(
    g: Tensor,
    weight: Tensor,
    add: Tensor | None,
    y: Tensor | None,
    x: Tensor | None,
    mean: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    co, ci = weight.shape[:2]
    n, _, h, w = g.shape
    dx = _empty(g, (n, ci, h, w))
    tile = _tile(ci, co, n * h * w)
    images, rows = _box(tile.rows, h, w)
    tiles = triton.cdiv(n, images) * (h // rows)
    part_P2C = _sums(0 if y is None else tiles, ci, g)
    block = (tile.rows, tile.columns)
    kernels.input_gradient[(tiles, ci // tile.columns)](
        _maps(g, (images, rows, w, tile.depth)),
        _matrix(weight, co, (tile.depth, tile.columns)),
        # dx stands in for what is not there
        *(_matrix(dx if t is None else t, n * h * w, block) for t in (dx, add, y, x)),
        dx if mean is None else mean, dx if scale is None else scale,
        part_P2C,
        CI=ci, CO=co, H=h, W=w, NB=images, BH=rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        ADD=add is not None, NORM=y is not None, **tile.launch,
    )  # fmt: skip
    return dx, part_P2C


def strided_input_gradient(g: Tensor, weight: Tensor, g1: Tensor, weight1: Tensor) -> Tensor:
    """The gradient of the input of a 3×3 and a 1×1 convolution, both with stride 2."""
    co, ci = weight.shape[:2]
    n, _, ho, wo = g.shape
    dx = _empty(g, (n, ci, 2 * ho, 2 * wo))
    tile = _tile(ci, co, n * ho * wo)
    images, rows = _box(tile.rows, ho, wo)
    tiles = triton.cdiv(n, images) * (ho // rows)
    box, block = (images, rows, wo, tile.depth), (tile.depth, tile.columns)
    kernels.strided_input_gradient[(tiles, ci // tile.columns, 4)](
        _maps(g, box),
        _matrix(weight, co, block),
        _maps(g1, box),
        _matrix(weight1, co, block),
        _strided(dx, 2, (images, rows, 1, wo, tile.columns)),
        CI=ci, CO=co, HO=ho, WO=wo, NB=images, BH=rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        **tile.launch,
    )  # fmt: skip
    return dx


def weight_gradient(x: Tensor, g: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The gradient of a convolution's weight from its input and its output's gradient."""
    co, ci, kernel, _ = weight.shape
    n, _, ho, wo = g.shape
    taps = kernel * kernel
    tile = _weight_tile(ci, co)
    images, rows = _box(tile.depth, ho, wo)
    inner, outer = tile.rows, tile.columns
    programs = taps * (ci // inner) * (co // outer)
    # About half as many programs as an H200 has multiprocessors, or a quarter of large ones: more
    # parts would keep more of them busy, and take more memory traffic to add up.
    wanted = 66 if inner == 64 else 33
    parts = min(max(1, round(wanted / programs)), triton.cdiv(n, images) * (ho // rows))
    dw = torch.empty_like(weight)
    # The parts are added up in their order: atomic additions would round differently in every run.
    summed = dw if parts == 1 else dw.new_empty(parts, dw.numel(), dtype=torch.float32)
    kernels.weight_gradient[(taps * (ci // inner), co // outer, parts)](
        _strided(x, stride, (images, rows, 1, wo, inner)),
        _matrix(g, n * ho * wo, (tile.depth, outer)),
        summed, n,
        CI=ci, CO=co, STRIDE=stride, TAPS=taps, HO=ho, WO=wo, NB=images, BH=rows,
        IN=inner, OUT=outer, PARTS=parts, **tile.launch,
    )  # fmt: skip
    if parts > 1:
        grid = (triton.cdiv(dw.numel(), BLOCK),)
        kernels.add_parts[grid](summed, dw, dw.numel(), PARTS=parts, BLOCK=BLOCK, num_warps=4)
    return dw


def _box(pixels: int, height: int, width: int) -> tuple[int, int]:
    """Images and rows of an image that have that many pixels together."""
    return max(1, pixels // (height * width)), min(height, pixels // width)


def _sums(tiles: int, channels: int, like: Tensor) -> Tensor:
    return torch.empty(tiles, 2, channels, dtype=torch.float32, device=like.device)


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _matrix(tensor: Tensor, rows: int, block: tuple[int, int]) -> TensorDescriptor:
    """A channels-last tensor as a matrix: pixels × channels, or outputs × the rest."""
    return _boxes(tensor, [rows, tensor.numel() // rows], block)


def _maps(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """Maps [N, H, W, C]."""
    n, c, h, w = x.shape
    return _boxes(x, [n, h, w, c], block)


def _strided(x: Tensor, stride: int, block: tuple[int, ...]) -> TensorDescriptor:
    """Maps by the place of a pixel among ``stride``: [N, H/S, S, W/S, S·C]."""
    n, c, h, w = x.shape
    return _boxes(x, [n, h // stride, stride, w // stride, stride * c], block)


def _boxes(tensor: Tensor, shape: list[int], block: tuple[int, ...]) -> TensorDescriptor:
    """Boxes of a channels-last tensor that is read as if it had this shape."""
    # PyTorch's own strides mean nothing where a size is 1.
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return TensorDescriptor(tensor, shape, strides, list(block))
