"""The fast crop and normalization give the very bits of the plain ones that they replaced."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from protofed.data.augment import Choices, cropped, crops, normalized, padded
from protofed.data.task import Augment


def gathered(x: Tensor, choices: Choices, augment: Augment) -> Tensor:
    """Padding, crop and flip by an index for every pixel."""
    n, channels, height, width = x.shape
    if augment.padding:
        x = pad(x, (augment.padding,) * 4)
    image, row, column = (torch.arange(s) for s in (n, height, width))
    column = torch.where(choices.flip[:, None], width - 1 - column, column)
    return x[
        image[:, None, None, None],
        torch.arange(channels)[None, :, None, None],
        (choices.top[:, None] + row)[:, None, :, None],
        (choices.left[:, None] + column)[:, None, None, :],
    ]


def broadcast(x: Tensor, augment: Augment, dtype: torch.dtype) -> Tensor:
    """(x / 255 - mean) / std with constants of shape [3, 1, 1]."""
    mean = torch.tensor(augment.mean, dtype=dtype)[:, None, None]
    std = torch.tensor(augment.std, dtype=dtype)[:, None, None]
    return x.to(dtype, memory_format=torch.channels_last).mul_(1 / 255).sub_(mean).div_(std)


def images(n: int, height: int, width: int) -> Tensor:
    rng = np.random.default_rng(n)
    return torch.from_numpy(rng.integers(0, 256, (n, 3, height, width), dtype=np.uint8))


SHAPES = [(1, 32, 32), (7, 32, 32), (130, 16, 16), (3, 9, 14), (0, 32, 32)]


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("padding", [0, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_crops_are_those_of_the_gather(
    shape: tuple[int, int, int], padding: int, flip: bool
) -> None:
    x, augment = images(*shape), Augment(padding=padding, flip=flip)
    choices = Choices.draw(np.random.default_rng(1), len(x), augment)
    expected = gathered(x, choices, augment)
    assert torch.equal(cropped(x, choices, augment), expected)
    last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(cropped(last, choices, augment), expected)
    # Any rows in any order, from images that were prepared once.
    order = torch.from_numpy(np.random.default_rng(2).permutation(len(x)))[: len(x) // 2 + 1]
    some = choices.rows(order, x.device)
    assert torch.equal(crops(padded(x, augment), order, some, augment), expected[order])


def test_every_corner_and_flip() -> None:
    augment = Augment(padding=3)
    corners = [(t, c, f) for t in range(7) for c in range(7) for f in (False, True)]
    top, left, flip = (torch.tensor(column) for column in zip(*corners, strict=True))
    x = images(len(corners), 8, 8)
    choices = Choices(top, left, flip)
    assert torch.equal(cropped(x, choices, augment), gathered(x, choices, augment))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 300, 300)])
def test_normalized_has_the_same_bits_and_layout(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, augment = images(*shape), Augment()
    expected = broadcast(x, augment, dtype)
    for layout in (torch.contiguous_format, torch.channels_last):
        found = normalized(x.contiguous(memory_format=layout), augment, dtype)
        assert torch.equal(found, expected)
        assert found.is_contiguous(memory_format=torch.channels_last)
