from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from protofed.data.augment import Choices, cropped, crops, normalized, padded
from protofed.data.task import Augment

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def images(n: int, height: int = 6, width: int = 6) -> Tensor:
    rng = np.random.default_rng(n)
    return torch.from_numpy(rng.integers(0, 256, (n, 3, height, width)).astype(np.uint8))


def reference(
    image: NDArray[np.uint8], top: int, left: int, flip: bool, augment: Augment
) -> NDArray[np.float64]:
    """One image, pixel by pixel."""
    channels, height, width = image.shape
    p = augment.padding
    padded = np.zeros((channels, height + 2 * p, width + 2 * p))
    for c, i, j in np.ndindex(*image.shape):
        padded[c, i + p, j + p] = image[c, i, j]
    out = np.zeros((channels, height, width))
    for c, i, j in np.ndindex(*out.shape):
        out[c, i, j] = padded[c, top + i, left + j]
    if flip:
        mirrored = np.zeros_like(out)
        for c, i, j in np.ndindex(*out.shape):
            mirrored[c, i, width - 1 - j] = out[c, i, j]
        out = mirrored
    for c in range(channels):
        out[c] = (out[c] / 255 - augment.mean[c]) / augment.std[c]
    return out


@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("size", [(6, 6), (5, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_a_reference_pixel_by_pixel(
    padding: int, flip: bool, size: tuple[int, int], dtype: torch.dtype
) -> None:
    augment = Augment(padding=padding, flip=flip, mean=MEAN, std=STD)
    x = images(24, *size)
    choices = Choices.draw(np.random.default_rng(0), len(x), augment)
    out = normalized(cropped(x, choices, augment), augment, dtype)
    expected = np.stack(
        [
            reference(x[i].numpy(), int(choices.top[i]), int(choices.left[i]), bool(f), augment)
            for i, f in enumerate(choices.flip)
        ]
    )
    assert out.dtype == dtype
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    np.testing.assert_allclose(out.numpy(), expected, rtol=tolerance, atol=tolerance)


def test_pixels_stay_uint8_until_they_are_normalized() -> None:
    augment = Augment(padding=2)
    x = images(3)
    before = x.clone()
    out = cropped(x, Choices.draw(np.random.default_rng(0), 3, augment), augment)
    assert out.dtype == torch.uint8
    normalized(x, augment, torch.float32)
    assert torch.equal(x, before), "the client's images are not written to"


def test_without_padding_and_flip_nothing_happens() -> None:
    augment = Augment(padding=0, flip=False)
    x = images(10)
    choices = Choices.draw(np.random.default_rng(0), 10, augment)
    assert torch.equal(cropped(x, choices, augment), x)


@pytest.mark.parametrize("flip", [True, False])
def test_choices_cover_every_corner_evenly(flip: bool) -> None:
    augment, n = Augment(padding=2, flip=flip), 20_000
    choices = Choices.draw(np.random.default_rng(0), n, augment)
    corners = torch.stack([choices.top, choices.left], 1).unique(dim=0, return_counts=True)
    assert corners[0].tolist() == [list(c) for c in itertools.product(range(5), repeat=2)]
    assert (corners[1] - n / 25).abs().max() < 5 * (n / 25) ** 0.5
    flipped = float(choices.flip.double().mean())
    assert abs(flipped - 0.5) < 4 * 0.5 / n**0.5 if flip else flipped == 0


def test_the_middle_corner_gives_the_image_and_the_outer_ones_show_padding() -> None:
    augment = Augment(padding=2, flip=False)
    x = images(1) // 2 + 1  # no zeros but those of the padding
    for top, left in itertools.product(range(5), repeat=2):
        choice = Choices(torch.tensor([top]), torch.tensor([left]), torch.tensor([False]))
        out = cropped(x, choice, augment)[0]
        empty_rows = (out == 0).all(2).all(0).sum()
        empty_columns = (out == 0).all(1).all(0).sum()
        assert (int(empty_rows), int(empty_columns)) == (abs(top - 2), abs(left - 2))
        if (top, left) == (2, 2):
            assert torch.equal(out, x[0])


@pytest.mark.parametrize("chunk", [1, 4, 7, 30])
def test_chunks_give_the_same_pixels(chunk: int) -> None:
    augment = Augment(padding=3)
    x = images(30)
    choices = Choices.draw(np.random.default_rng(1), 30, augment)
    order = torch.from_numpy(np.random.default_rng(2).permutation(30))
    device = torch.device("cpu")
    whole = normalized(cropped(x, choices, augment), augment, torch.float32)[order]
    parts = [
        normalized(cropped(x[i], choices.rows(i, device), augment), augment, torch.float32)
        for i in order.split(chunk)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_output_is_channels_last() -> None:
    augment = Augment()
    x = images(5)
    for source in (x, cropped(x, Choices.draw(np.random.default_rng(0), 5, augment), augment)):
        out = normalized(source, augment, torch.float32)
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert not out.is_contiguous()


def test_choices_are_a_function_of_the_generator() -> None:
    a, b, c = (Choices.draw(np.random.default_rng(s), 50, Augment()) for s in (0, 0, 1))
    assert all(torch.equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a[:3], c[:3], strict=True))


# ---- the very bits of plain crops and normalization --------------------------------------------


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


def test_a_hue_is_turned_by_half_a_turn_at_most() -> None:
    augment = Augment(jitter=(0.0, 0.0, 0.0, 3.0))
    jitter = Choices.draw(np.random.default_rng(0), 1000, augment).jitter
    assert jitter is not None
    hue = jitter[:, 3]
    assert -0.5 <= hue.min() < -0.49 and 0.49 < hue.max() <= 0.5


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
