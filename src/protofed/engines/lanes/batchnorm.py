"""Batch normalization in training, with the addition and ReLU that follow it, in two kernels.

PyTorch takes about nine kernels for it, forward and backward, and reads the activations as often;
a small network on a large GPU spends more time there than in its convolutions. Here the forward
pass is a kernel of partial statistics and one that joins them, normalizes, adds the shortcut and
applies ReLU; the backward pass is two kernels of the same form (see ``kernels``). ReLU's mask is
recomputed from the input, or read from the output if a shortcut was added.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from protofed.engines.lanes import kernels
from protofed.errors import NoSecondDerivative
from protofed.models.resnet import ResidualBlock

TILE = 64  # rows a program holds in registers at a time
CHANNELS = 32  # channels a program works on: 64 bytes of bfloat16
PROGRAMS = 256  # about two for each multiprocessor of an H200; other lanes fill the rest
MIN_CHANNELS = 8  # input channels a convolution needs for its bfloat16 kernels
PARTS = 64  # of the rows, at most: every program of a second kernel reads all of them


def fuse(network: nn.Module) -> None:
    """Make every BatchNorm of a network train with these kernels, joined with what follows it.

    Convolutions with few channels or strided 1×1 kernels are replaced by faster equivalents too.
    Nothing else changes: parameters, buffers, names, evaluation mode. A method may bring modules
    of its own, so modules of other types, or used in two places, are left alone.
    """
    places = Counter(id(m) for module in network.modules() for m in module._modules.values())
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.forward = partial(_batchnorm_forward, module)  # type: ignore[method-assign]
        if type(module) is nn.Conv2d and _is_plain(module):
            if module.in_channels < MIN_CHANNELS:
                module.forward = partial(_few_channels_conv, module)  # type: ignore[method-assign]
            elif module.kernel_size == (1, 1) != module.stride and module.padding == (0, 0):
                module.forward = partial(_strided_1x1_conv, module)  # type: ignore[method-assign]
    for module in network.modules():
        if type(module) is nn.Sequential:
            for norm, relu in pairwise(module):
                once = places[id(norm)] == places[id(relu)] == 1
                if once and type(norm) is nn.BatchNorm2d and type(relu) is nn.ReLU:
                    norm.forward = partial(_batchnorm_forward, norm, relu=True)  # type: ignore[method-assign]
                    relu.forward = _identity  # type: ignore[method-assign, assignment]
        if type(module) is ResidualBlock and type(module.body[-1]) is nn.BatchNorm2d:
            module.forward = partial(_block_forward, module)  # type: ignore[method-assign]


def _is_plain(conv: nn.Conv2d) -> bool:
    return conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"


def _identity(x: Tensor) -> Tensor:
    return x


def _block_forward(block: ResidualBlock, x: Tensor) -> Tensor:
    """What ``ResidualBlock.forward`` computes."""
    norm = block.body[-1]
    assert isinstance(norm, nn.BatchNorm2d)
    return _batchnorm_forward(norm, block.body[:-1](x), block.shortcut(x), relu=True)


def _few_channels_conv(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution of images; in bfloat16 with channels of zeros added to their three."""
    weight = conv.weight
    if weight.dtype != torch.bfloat16 or x.requires_grad:
        return F.conv2d(x, weight, conv.bias, conv.stride, conv.padding)
    more = MIN_CHANNELS - x.shape[1]
    wide = torch.empty(
        len(x), MIN_CHANNELS, *x.shape[2:], dtype=weight.dtype, device=x.device,
        memory_format=torch.channels_last,
    ).zero_()  # fmt: skip
    wide[:, : x.shape[1]] = x
    weight = F.pad(weight, (0, 0, 0, 0, 0, more))
    return F.conv2d(wide, weight, conv.bias, conv.stride, conv.padding)


def _strided_1x1_conv(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """A strided 1×1 convolution, computed densely on the pixels that it reads.

    For some sizes cuDNN picks a kernel without tensor cores, in another memory layout.
    """
    if torch._C._are_functorch_transforms_active():  # like vmap, unsupported by _Subsample
        return F.conv2d(x, conv.weight, conv.bias, conv.stride)
    thin: Tensor = _Subsample.apply(x, *conv.stride)
    return F.conv2d(thin, conv.weight, conv.bias)


class _Subsample(torch.autograd.Function):
    """``x[:, :, ::rows, ::columns]``; autograd would fill in zeros twice, once per dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, columns: int) -> Tensor:
        ctx.shape, ctx.steps = x.shape, (rows, columns)
        return x[:, :, ::rows, ::columns].contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        kinds: dict[str, Any] = {"dtype": grads[0].dtype, "device": grads[0].device}
        dx = torch.empty(ctx.shape, memory_format=torch.channels_last, **kinds).zero_()
        rows, columns = ctx.steps
        dx[:, :, ::rows, ::columns] = grads[0]
        return dx, None, None


def _batchnorm_forward(
    norm: nn.BatchNorm2d, x: Tensor, add: Tensor | None = None, relu: bool = False
) -> Tensor:
    """The normalized x plus ``add``, with ReLU if asked for."""
    rows = x.numel() // x.shape[1]
    if not norm.training or norm.momentum is None or not norm.affine or rows < 2:
        plain = nn.BatchNorm2d.forward(norm, x)
        plain = plain if add is None else plain + add
        return F.relu(plain) if relu else plain
    tracked = norm.track_running_stats and norm.running_mean is not None
    if tracked and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    mean, var = (norm.running_mean, norm.running_var) if tracked else (None, None)
    y: Tensor = _FusedBatchNorm.apply(
        x, norm.weight, norm.bias, add, mean, var, norm.momentum, norm.eps, relu
    )
    return y


class _FusedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        add: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if add is not None:
            add = add.contiguous(memory_format=torch.channels_last).to(x.dtype)
        shape, parts, grid, sizes = _grid(x)
        part_P2C = weight.new_empty(parts, 2, x.shape[1])
        mean_C, scale_C = torch.empty_like(weight), torch.empty_like(weight)
        y = torch.empty_like(x)
        kernels.statistics[grid](x, part_P2C, *shape, **sizes)
        kernels.normalize[grid](
            x,
            x if add is None else add,
            y,
            part_P2C,
            mean_C,
            scale_C,
            weight,
            bias,
            weight if running_mean is None else running_mean,
            weight if running_var is None else running_var,
            *shape,
            parts,
            MOMENTUM=momentum,
            EPS=eps,
            ADD=add is not None,
            RELU=relu,
            TRACK=running_mean is not None,
            PARTS=PARTS,
            **sizes,
        )
        ctx.relu, ctx.added = relu, add is not None
        ctx.save_for_backward(x, weight, bias, mean_C, scale_C, *((y,) if ctx.added else ()))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # called with create_graph
            raise NoSecondDerivative("BatchNorm's kernels have no second derivative")
        x, weight, bias, mean_C, scale_C, *output = ctx.saved_tensors
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        shape, parts, grid, sizes = _grid(x)
        part_P2C = weight.new_empty(parts, 2, x.shape[1])
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
        # After an addition the masked gradient is also the shortcut's: the first kernel writes it.
        masks = ctx.relu and ctx.added
        dadd = torch.empty_like(dy) if masks else dy
        sizes |= {"RELU": ctx.relu and not ctx.added}
        pointers = (x, mean_C, scale_C, weight, bias)
        kernels.gradient_sums[grid](
            *pointers, dy, output[0] if masks else x, dadd, part_P2C, *shape,
            MASKS=masks, **sizes,
        )  # fmt: skip
        kernels.gradient[grid](
            *pointers, dadd, dx, dweight, dbias, part_P2C, *shape, parts,
            PARTS=PARTS, **sizes,
        )  # fmt: skip
        return dx, dweight, dbias, dadd if ctx.added else None, None, None, None, None, None


def _grid(x: Tensor) -> tuple[tuple[int, int, int], int, tuple[int, int], dict[str, Any]]:
    """Rows, channels and tiles per program; number of parts; grid of programs; tile sizes."""
    channels = x.shape[1]
    rows = x.numel() // channels
    block = min(CHANNELS, triton.next_power_of_2(channels))
    blocks = triton.cdiv(channels, block)
    tiles = triton.cdiv(rows, TILE)
    each = triton.cdiv(tiles, max(1, min(PARTS, PROGRAMS // blocks)))
    parts = triton.cdiv(tiles, each)
    sizes = {"TILE": TILE, "BLOCK": block, "num_warps": 4}
    return (rows, channels, each), parts, (parts, blocks), sizes
