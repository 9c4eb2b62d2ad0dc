"""From images to network input: augmentation and normalization of whole batches.

The random choices of an epoch are drawn at once on the host (``Choices``), and one gather applies
crop and flip to any set of rows. So batches of any size, on any device, give the same pixels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.data.task import Augment
from protofed.fused import replaceable

Ints = NDArray[np.int64]

# Attempts to draw a part that lies in the image, and its aspect ratio, as in torchvision.
_TRIES = 10
_RATIO = (3 / 4, 4 / 3)
_CACHE_BYTES = 1 << 19

AUGMENTS: dict[str, Callable[[bool], Augment]] = {
    "crop": lambda flip: Augment(flip=flip),
    "color": lambda flip: Augment(flip=flip, jitter=(0.4, 0.4, 0.4, 0.1)),
    "resized": lambda flip: Augment(padding=0, flip=flip, resized_crop=(0.25, 1.0)),
    "large": lambda flip: Augment(
        padding=0, flip=flip, resized_crop=(0.7, 1.0), jitter=(0.4, 0.4, 0.4, 0.4), grayscale=0.1
    ),
}
"""``crop``: as in the papers at 32 pixels; ``color``: the same with color jitter.
``resized``: stronger than ``crop``, without a change of color.
``large``: as usual in domain generalization."""


class Choices(NamedTuple):
    """For every image of an epoch: the crop's corner in the padded image, and whether to flip.

    ``size`` [N, 2] is the height and width of a part to enlarge, ``jitter`` [N, 4] the factors of
    brightness, contrast and saturation and the shift of the hue, ``order`` [N, 4] the order in
    which they are applied, ``gray`` [N] whether to remove the colors. None if the task's
    augmentation has no such step.
    """

    top: Tensor
    left: Tensor
    flip: Tensor
    size: Tensor | None = None
    jitter: Tensor | None = None
    order: Tensor | None = None
    gray: Tensor | None = None

    @classmethod
    def draw(
        cls, rng: np.random.Generator, n: int, augment: Augment, side: int | None = None
    ) -> Choices:
        """Random choices for n images; ``side`` is needed for a resized crop."""
        corner = rng.integers(0, 2 * augment.padding + 1, size=(2, n))
        flip = rng.random(n) < 0.5 if augment.flip else np.zeros(n, dtype=bool)
        size = jitter = order = gray = None
        if augment.resized_crop is not None:
            if side is None:
                raise ValueError("a resized crop needs the side of the images")
            corner, sizes = _parts(rng, n, augment.resized_crop, side)
            size = torch.from_numpy(sizes)
        if augment.jitter is not None:
            spread = np.array(augment.jitter)
            middle = np.array([1.0, 1.0, 1.0, 0.0])
            low = np.maximum(middle - spread, [0.0, 0.0, 0.0, -0.5])
            high = np.minimum(middle + spread, [np.inf, np.inf, np.inf, 0.5])  # half a turn of hue
            jitter = torch.from_numpy(rng.uniform(low, high, (n, 4)).astype(np.float32))
            order = torch.from_numpy(rng.permuted(np.tile(np.arange(4), (n, 1)), axis=1))
        if augment.grayscale:
            gray = torch.from_numpy(rng.random(n) < augment.grayscale)
        top, left = torch.from_numpy(corner)
        return cls(top, left, torch.from_numpy(flip), size, jitter, order, gray)

    def rows(self, index: Tensor, device: torch.device) -> Choices:
        """The choices of these rows, on ``device``."""
        return Choices(*(None if t is None else t[index].to(device) for t in self))  # type: ignore[arg-type]


def cropped(x: Tensor, choices: Choices, augment: Augment) -> Tensor:
    """uint8 images [N, C, H, W] with the whole augmentation applied, still uint8."""
    if choices.size is not None:
        values = _resized(x, choices, choices.size)
    else:
        every = torch.arange(len(x), device=x.device)
        x = crops(padded(x, augment), every, choices, augment)
        if choices.jitter is None and choices.gray is None:
            return x
        values = x.contiguous().to(torch.float32) / 255
    if choices.jitter is not None and choices.order is not None:
        values = jittered(values, choices.jitter, choices.order)
    if choices.gray is not None:
        values = torch.where(choices.gray[:, None, None, None], _gray(values), values)
    return values.mul(255).round_().to(torch.uint8)


@replaceable
def jittered(x: Tensor, factor_N4: Tensor, order_N4: Tensor) -> Tensor:
    """Images [N, 3, H, W] in [0, 1] with brightness, contrast, saturation and hue changed.

    ``factor_N4`` says by how much, ``order_N4`` in which order, as ``Choices`` has them.
    """
    for turn_N in order_N4.unbind(1):
        changed = torch.empty_like(x)
        for operation, change in enumerate(_JITTER):
            rows = turn_N == operation
            if x.is_cuda:
                # all images, of which some are kept: a selection of rows would have a
                # data-dependent size, which a CUDA graph cannot capture
                changed = torch.where(_each(rows), change(x, factor_N4[:, operation]), changed)
            else:
                changed[rows] = change(x[rows], factor_N4[rows, operation])
        x = changed
    return x


def padded(x: Tensor, augment: Augment) -> Tensor:
    """The images that ``crops`` takes its crops from; made once for many epochs.

    [2, N, H, W, C] with the padding in H and W: the images, and the images flipped (or [1, ...]
    without flips). A row of a crop is then contiguous in memory.
    """
    n, channels, height, width = x.shape
    p = augment.padding
    ready = x.new_zeros(1 + augment.flip, n, height + 2 * p, width + 2 * p, channels)
    ready[0, :, p : p + height, p : p + width] = x.permute(0, 2, 3, 1)
    if augment.flip:
        ready[1] = ready[0].flip(2)
    return ready


def crops(ready: Tensor, index: Tensor, choices: Choices, augment: Augment) -> Tensor:
    """Crops of the images ``index`` of ``padded`` by their ``choices``, in channels-last layout."""
    _, n, height, width, channels = ready.shape
    p = augment.padding
    rows, columns = height - 2 * p, width - 2 * p
    left = choices.left
    if augment.flip:
        index = index + n * choices.flip
        left = torch.where(choices.flip, 2 * p - left, left)
    start = (index * height + choices.top) * width + left
    start = start[:, None] + width * torch.arange(rows, device=ready.device)
    # All runs with the length of a row, one from each pixel: overlapping views without a copy.
    count = max(0, ready.numel() // channels - columns + 1)
    runs = ready.as_strided((count, columns * channels), (channels, 1))
    taken = runs.index_select(0, start.view(-1))
    return taken.view(-1, rows, columns, channels).permute(0, 3, 1, 2)


def _parts(
    rng: np.random.Generator, n: int, scale: tuple[float, float], side: int
) -> tuple[Ints, Ints]:
    """Corners [2, n] and sizes [n, 2] of random parts: the first attempt that fits, or it all."""
    area = side * side * rng.uniform(*scale, (_TRIES, n))
    ratio = np.exp(rng.uniform(math.log(_RATIO[0]), math.log(_RATIO[1]), (_TRIES, n)))
    sizes = np.rint(np.sqrt(np.stack([area / ratio, area * ratio]))).astype(np.int64)
    fits = ((sizes > 0) & (sizes <= side)).all(0)
    size = np.where(fits.any(0), sizes[:, fits.argmax(0), np.arange(n)], side)
    corner = np.floor(rng.random((2, n)) * (side - size + 1)).astype(np.int64)
    return corner, np.ascontiguousarray(size.T)


def _resized(x: Tensor, choices: Choices, size: Tensor) -> Tensor:
    """The chosen part of each image, enlarged (bilinear) and perhaps flipped, in [0, 1]."""
    height, width = x.shape[2:]
    values = x.to(torch.float32) / 255
    for axis, (start, part, length) in enumerate(
        ((choices.top, size[:, 0], height), (choices.left, size[:, 1], width)), start=2
    ):
        place = torch.arange(length, device=x.device)
        if axis == 3:
            place = torch.where(choices.flip[:, None], length - 1 - place, place)
        place = (place + 0.5) * (part[:, None] / length) - 0.5
        last = part[:, None] - 1
        place = torch.minimum(place.clamp(min=0), last)
        low = place.floor().to(torch.int64)
        high = torch.minimum(low + 1, last)
        weight = (place - low).to(torch.float32)
        # [N, length], to broadcast along the axis
        shape = (len(x), 1, length, 1) if axis == 2 else (len(x), 1, 1, length)
        low_values, high_values = (
            values.gather(axis, (start[:, None] + i).view(shape).expand_as(values))
            for i in (low, high)
        )
        values = torch.lerp(low_values, high_values, weight.view(shape))
    return values


def _gray(x: Tensor) -> Tensor:
    """Luma with torchvision's weights, in three channels."""
    weights = _channels((0.2989, 0.587, 0.114), x.dtype, x.device)
    return (x * weights).sum(1, keepdim=True).expand_as(x)


def _each(values: Tensor) -> Tensor:
    """One value for each image, to broadcast."""
    return values[:, None, None, None]


def _brightness(x: Tensor, factor: Tensor) -> Tensor:
    return (x * _each(factor)).clamp(0, 1)


def gray_mean(x: Tensor) -> Tensor:
    """The mean [N, 1, 1, 1] of each gray image."""
    return _gray(x)[:, :1].mean((1, 2, 3), keepdim=True)


def _contrast(x: Tensor, factor: Tensor) -> Tensor:
    return _mixed(x, gray_mean(x), factor)


def _saturation(x: Tensor, factor: Tensor) -> Tensor:
    return _mixed(x, _gray(x), factor)


def _mixed(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (x * _each(factor) + other * (1 - _each(factor))).clamp(0, 1)


def _hue(x: Tensor, shift: Tensor) -> Tensor:
    """The hue shifted by ``shift`` of a full turn; saturation and value (HSV) stay."""
    high, low = x.max(1).values, x.min(1).values
    span = high - low
    divisor = span.masked_fill(span <= 0, 1)
    r, g, b = x.unbind(1)
    hue = torch.where(
        high == r,
        (g - b) / divisor,
        torch.where(high == g, 2 + (b - r) / divisor, 4 + (r - g) / divisor),
    )
    # A channel is a trapezoid over the hue, displaced by a third of a turn for each channel:
    # value - span * max(0, min(k, 4 - k, 1)), with k in sixths of a turn.
    k = (hue[:, None] + 6 * _each(shift) + _channels((5.0, 3.0, 1.0), x.dtype, x.device)) % 6
    share = torch.minimum(torch.minimum(k, 4 - k), torch.ones_like(k)).clamp(min=0)
    return high[:, None] - span[:, None] * share


_JITTER = (_brightness, _contrast, _saturation, _hue)
"""The changes of color, in the order of ``Choices.jitter``."""


@functools.cache
def _channels(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant per channel, made once: a CUDA graph cannot capture a copy from the host."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None, None]


def normalized(x: Tensor, augment: Augment, dtype: torch.dtype) -> Tensor:
    """uint8 images as (x / 255 - mean) / std, per channel.

    In channels-last layout: convolutions of small networks are 1.5 times as fast with it on a CPU.
    """
    n, channels, height, width = x.shape
    # As rows of pixels, so that the constants are contiguous: four times as fast.
    rows = x.permute(0, 2, 3, 1).reshape(n * height, width * channels)
    mean = _channels(augment.mean, dtype, x.device).flatten().repeat(width)
    std = _channels(augment.std, dtype, x.device).flatten().repeat(width)
    result = torch.empty(rows.shape, dtype=dtype, device=x.device)
    # On a CPU, in parts that stay in its cache for all four steps.
    fitting = _CACHE_BYTES // (rows.shape[1] * dtype.itemsize)
    part = max(1, fitting if x.device.type == "cpu" else len(rows))
    for to, source in zip(result.split(part), rows.split(part), strict=True):
        to.copy_(source).mul_(1 / 255).sub_(mean).div_(std)
    return result.view(n, height, width, channels).permute(0, 3, 1, 2)
