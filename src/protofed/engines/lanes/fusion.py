"""A network with its layers' forward passes replaced by faster ones, for training in lanes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.engines.lanes import convolution, stem
from protofed.engines.lanes.batchnorm import (
    Normed,
    batchnorm_forward,
    gradient,
    gradient_sums,
    join_statistics,
    join_sums,
    normalize,
    refuse_second_derivative,
    trains_with_kernels,
)
from protofed.models.resnet import ResidualBlock

MIN_CHANNELS = 8  # input channels a convolution needs for its bfloat16 kernels


def fuse(network: nn.Module) -> None:
    """Make BatchNorm train with kernels of its own, joined with what follows it.

    Residual blocks have kernels for their convolutions too, and so has a first convolution of
    images, where the GPU and the sizes allow it. Other convolutions with few channels or strided
    1×1 kernels are replaced by faster equivalents. Nothing else changes: parameters, buffers,
    names, evaluation mode. A method may bring modules of its own, so modules of other types, or
    used in two places, are left alone.
    """
    places = Counter(id(m) for module in network.modules() for m in module._modules.values())
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.forward = partial(batchnorm_forward, module)  # type: ignore[method-assign]
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
                    norm.forward = partial(batchnorm_forward, norm, relu=True)  # type: ignore[method-assign]
                    relu.forward = _identity  # type: ignore[method-assign, assignment]
            if _stem(module) is not None:
                module.forward = partial(_stem_forward, module)  # type: ignore[method-assign]
        if type(module) is ResidualBlock and type(module.body[-1]) is nn.BatchNorm2d:
            module.forward = partial(_block_forward, module)  # type: ignore[method-assign]


def _is_plain(conv: nn.Conv2d) -> bool:
    return conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"


def _identity(x: Tensor) -> Tensor:
    return x


Layer = tuple[nn.Conv2d, nn.BatchNorm2d]


def _block_forward(block: ResidualBlock, x: Tensor) -> Tensor:
    """What ``ResidualBlock.forward`` computes."""
    layers = _layers(block)
    if layers is None or not _can_fuse(layers, x):
        norm = block.body[-1]
        assert isinstance(norm, nn.BatchNorm2d)
        return batchnorm_forward(norm, block.body[:-1](x), block.shortcut(x), relu=True)
    x = x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    parameters = [p for conv, norm in layers for p in (conv.weight, norm.weight, norm.bias)]
    y: Tensor = _FusedBlock.apply(x, layers, *parameters)
    return y


def _layers(block: ResidualBlock) -> list[Layer] | None:
    """The two layers of a basic block and its shortcut's, if it has one; None for other blocks."""
    body, shortcut = list(block.body), block.shortcut
    if len(body) != 5 or type(body[2]) is not nn.ReLU:
        return None
    pairs = [(body[0], body[1], 3), (body[3], body[4], 3)]
    if type(shortcut) is nn.Sequential and len(shortcut) == 2:
        pairs.append((shortcut[0], shortcut[1], 1))
    elif type(shortcut) is not nn.Identity:
        return None
    layers: list[Layer] = []
    for conv, norm, kernel in pairs:
        if type(norm) is not nn.BatchNorm2d or not convolution.is_plain(conv, kernel):
            return None
        layers.append((conv, norm))
    strides = [conv.stride[0] for conv, _ in layers]
    return layers if strides in ([1, 1], [2, 1, 2]) else None


def _can_fuse(layers: list[Layer], x: Tensor) -> bool:
    """Whether the kernels can take these layers as they are now, and their input."""
    stride = layers[0][0].stride[0]
    n, _, height, width = x.shape
    if height % stride or width % stride:
        return False
    height, width = height // stride, width // stride
    return not torch._C._are_functorch_transforms_active() and all(
        trains_with_kernels(norm, n * height * width)
        and convolution.supports(conv.weight, x.device, height, width)
        for conv, norm in layers
    )


class _FusedBlock(torch.autograd.Function):
    """ReLU(norm2(conv2(a)) + shortcut), a = ReLU(norm1(conv1(x))); the shortcut is x or a layer.

    What this gains over its parts: convolutions compute BatchNorm's sums, both norms of the last
    addition are one pass, and the gradients of x are added where they are computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[Layer], *parameters: Tensor) -> Tensor:
        weights = parameters[::3]
        ctx.stride = layers[0][0].stride[0]
        first = _convolved(x, layers[0][1], weights[0], ctx.stride)
        a = normalize(first, None, relu=True)
        second = _convolved(a, layers[1][1], weights[1], 1)
        third = None
        if len(layers) == 3:
            third = _convolved(x, layers[2][1], weights[2], ctx.stride)
        y = normalize(second, x if third is None else third, relu=True)
        ctx.save_for_backward(x, a, y, *weights, *first, *second, *(third or ()))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | list[Tensor] | None, ...]:
        refuse_second_derivative()
        x, a, y, *rest = ctx.saved_tensors
        count = len(rest) // 6  # layers, each with a weight and what was normalized
        weights = rest[:count]
        first, second, *third = (
            Normed(*rest[count + 5 * i : count + 5 * i + 5]) for i in range(count)
        )
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        g, sums = gradient_sums(second, dy, y, relu=False, second=third[0] if third else None)
        g2 = gradient(second, g, sums[0], sums[1], relu=False)
        ga, part_P2C = convolution.normalized_input_gradient(g2, weights[1], a, *first[:3])
        sums1 = join_sums(part_P2C)
        g1 = gradient(first, ga, sums1[0], sums1[1], relu=False)
        dw1 = convolution.weight_gradient(x, g1, weights[0], ctx.stride)
        dw2 = convolution.weight_gradient(a, g2, weights[1], 1)
        gradients = [dw1, sums1[1], sums1[0], dw2, sums[1], sums[0]]
        if third:
            g3 = gradient(third[0], g, sums[0], sums[2], relu=False)
            dw3 = convolution.weight_gradient(x, g3, weights[2], ctx.stride)
            gradients += [dw3, sums[2], sums[0]]
            dx = convolution.strided_input_gradient(g1, weights[0], g3, weights[2])
        else:
            dx = convolution.input_gradient(g1, weights[0], g)
        return dx, None, *gradients


def _convolved(x: Tensor, norm: nn.BatchNorm2d, weight: Tensor, stride: int) -> Normed:
    y, part_P2C, rows = convolution.convolve(x, weight, stride)
    return join_statistics(norm, part_P2C, rows, y)


def _stem_forward(module: nn.Sequential, x: Tensor) -> Tensor:
    """What ``Sequential.forward`` computes, where it begins with a stem."""
    layer = _stem(module)
    if layer is None or not _can_fuse_stem(*layer, x):
        return nn.Sequential.forward(module, x)  # type: ignore[no-any-return]
    conv, norm = layer
    x = _FusedStem.apply(x, norm, conv.weight, norm.weight, norm.bias)
    for after in list(module)[2:]:  # from ReLU on: it changes nothing, but a stage may end there
        x = after(x)
    return x


def _stem(module: nn.Sequential) -> Layer | None:
    """The convolution of few channels and the norm that come first, if ReLU is next."""
    first = list(module)[:3]
    if [type(m) for m in first] != [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]:
        return None
    conv, norm, _ = first
    assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
    return (conv, norm) if conv.in_channels <= stem.MOST_INPUTS else None


def _can_fuse_stem(conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether the stem's kernels can take these layers as they are now, and the images.

    They have no gradient of the images, and do not call hooks of these two layers.
    """
    return (
        stem.supports(conv, x)
        and trains_with_kernels(norm, x.numel() // x.shape[1])
        and not x.requires_grad
        and not torch._C._are_functorch_transforms_active()
        and not any(
            m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
            for m in (conv, norm)
        )
    )


class _FusedStem(torch.autograd.Function):
    """ReLU(norm(conv(x))) for images x, which have no gradient.

    What this gains over its parts: images are read as they are, the convolution computes
    BatchNorm's sums, and its output's gradient is used where it is computed and never written.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: nn.BatchNorm2d, weight: Tensor, scale: Tensor, shift: Tensor
    ) -> Tensor:
        y, part_P2C = stem.convolve(x, weight)
        normed = join_statistics(norm, part_P2C, stem.ROWS, y)
        ctx.save_for_backward(x, weight, *normed)
        return normalize(normed, None, relu=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, weight, *rest = ctx.saved_tensors
        normed = Normed(*rest)
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        _, sums = gradient_sums(normed, dy, None, relu=True)
        dw = stem.weight_gradient(x, weight, normed, dy, sums) if ctx.needs_input_grad[2] else None
        return None, None, dw, sums[1], sums[0]


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
