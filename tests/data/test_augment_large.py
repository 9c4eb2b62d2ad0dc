"""The augmentation of larger images against a reference for one image at a time."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from protofed.data.augment import AUGMENTS, Choices, cropped
from protofed.data.task import Augment

SIDE = 20
N = 24


@pytest.fixture
def images() -> Tensor:
    rng = np.random.default_rng(5)
    x = rng.integers(0, 256, (N, 3, SIDE, SIDE)).astype(np.uint8)
    x[0] = 128  # no color: the hue is not defined
    x[1] = 0
    x[2, :, :, :] = np.array([255, 0, 0])[:, None, None]
    return torch.from_numpy(x)


def luma(x: np.ndarray) -> np.ndarray:
    return 0.2989 * x[0] + 0.587 * x[1] + 0.114 * x[2]


def turn(x: np.ndarray, shift: float) -> np.ndarray:
    out = np.empty_like(x)
    for i, j in np.ndindex(x.shape[1:]):
        h, s, v = colorsys.rgb_to_hsv(*x[:, i, j])
        out[:, i, j] = colorsys.hsv_to_rgb((h + shift) % 1.0, s, v)
    return out


def reference(image: Tensor, i: int, choices: Choices, augment: Augment) -> np.ndarray:
    top, left = int(choices.top[i]), int(choices.left[i])
    if choices.size is not None:
        height, width = choices.size[i].tolist()
        part = image[None, :, top : top + height, left : left + width].double()
        part = interpolate(part, (SIDE, SIDE), mode="bilinear", align_corners=False)[0]
    else:
        p = augment.padding
        part = torch.nn.functional.pad(image, (p,) * 4)[:, top : top + SIDE, left : left + SIDE]
    if choices.flip[i]:
        part = part.flip(-1)
    x = part.double().numpy() / 255
    if choices.jitter is not None and choices.order is not None:
        factors = choices.jitter[i].double().tolist()
        for operation in choices.order[i].tolist():
            f = factors[operation]
            if operation == 0:
                x = np.clip(x * f, 0, 1)
            elif operation == 1:
                x = np.clip(f * x + (1 - f) * luma(x).mean(), 0, 1)
            elif operation == 2:
                x = np.clip(f * x + (1 - f) * luma(x), 0, 1)
            else:
                x = turn(x, f)
    if choices.gray is not None and choices.gray[i]:
        x = np.broadcast_to(luma(x), x.shape)
    return x * 255


@pytest.mark.parametrize(
    "augment",
    [
        AUGMENTS["large"](True),
        AUGMENTS["large"](False),
        AUGMENTS["color"](True),
        AUGMENTS["resized"](True),
        Augment(padding=0, resized_crop=(0.08, 1.0)),
        Augment(padding=2, jitter=(0.4, 0.4, 0.4, 0.4)),
        Augment(padding=2, flip=False, grayscale=0.5),
        Augment(padding=0, flip=False, jitter=(0.0, 0.0, 0.0, 0.5)),
    ],
)
def test_equals_one_image_at_a_time(images: Tensor, augment: Augment) -> None:
    choices = Choices.draw(np.random.default_rng(1), N, augment, SIDE)
    out = cropped(images, choices, augment)
    assert out.dtype == torch.uint8 and out.shape == images.shape
    for i in range(N):
        expected = reference(images[i], i, choices, augment)
        # rounded once at the end: half a level, and the rounding of float32
        assert np.abs(out[i].numpy() - expected).max() < 0.5 + 1e-2, i


def test_chunks_of_any_size_give_the_same_pixels(images: Tensor) -> None:
    augment = AUGMENTS["large"](True)
    choices = Choices.draw(np.random.default_rng(1), N, augment, SIDE)
    whole = cropped(images, choices, augment)
    for rows in torch.arange(N).split(7):
        part = cropped(images[rows], choices.rows(rows, torch.device("cpu")), augment)
        assert torch.equal(part, whole[rows])


def test_parts_are_inside_and_as_large_as_asked() -> None:
    augment = Augment(padding=0, resized_crop=(0.5, 0.8))
    choices = Choices.draw(np.random.default_rng(2), 5000, augment, 100)
    assert choices.size is not None
    height, width = choices.size[:, 0], choices.size[:, 1]
    assert ((choices.top >= 0) & (choices.top + height <= 100)).all()
    assert ((choices.left >= 0) & (choices.left + width <= 100)).all()
    area, ratio = height * width / 100**2, width / height
    assert 0.49 < area.min() < 0.52 and 0.78 < area.max() < 0.81
    assert abs(area.mean() - 0.65) < 0.01
    assert ratio.min() > 0.73 and ratio.max() < 1.37
    assert abs(ratio.log().mean()) < 0.01


def test_factors_are_as_asked_and_orders_all_occur() -> None:
    choices = Choices.draw(np.random.default_rng(3), 4000, AUGMENTS["large"](True), 32)
    assert choices.jitter is not None and choices.order is not None and choices.gray is not None
    low, high = choices.jitter.min(0).values, choices.jitter.max(0).values
    torch.testing.assert_close(low, torch.tensor([0.6, 0.6, 0.6, -0.4]), atol=0.01, rtol=0)
    torch.testing.assert_close(high, torch.tensor([1.4, 1.4, 1.4, 0.4]), atol=0.01, rtol=0)
    assert len(choices.order.unique(dim=0)) == 24
    assert abs(choices.gray.float().mean() - 0.1) < 0.02


def test_color_is_crop_with_jitter() -> None:
    plain, color = (
        Choices.draw(np.random.default_rng(3), 4000, AUGMENTS[name](True), 32)
        for name in ("crop", "color")
    )
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], color[:3], strict=True))
    assert color.jitter is not None and color.size is None and color.gray is None
    spread = torch.tensor([0.4, 0.4, 0.4, 0.1])
    middle = torch.tensor([1.0, 1.0, 1.0, 0.0])
    low, high = color.jitter.min(0).values, color.jitter.max(0).values
    torch.testing.assert_close(low, middle - spread, atol=0.01, rtol=0)
    torch.testing.assert_close(high, middle + spread, atol=0.01, rtol=0)


def test_resized_takes_a_quarter_of_the_image_or_more_and_changes_no_color() -> None:
    choices = Choices.draw(np.random.default_rng(3), 4000, AUGMENTS["resized"](True), 32)
    assert choices.size is not None and choices.jitter is None and choices.gray is None
    share = choices.size.prod(1) / 32**2
    assert 0.2 < share.min() < 0.3 and share.max() > 0.95
    one_color = torch.tensor([200, 100, 10], dtype=torch.uint8)[None, :, None, None]
    images = one_color.expand(20, 3, 32, 32)
    rows = choices.rows(torch.arange(20), torch.device("cpu"))
    assert torch.equal(cropped(images, rows, AUGMENTS["resized"](True)), images)


def test_the_plain_augmentation_draws_what_it_always_did() -> None:
    augment = Augment()
    rng = np.random.default_rng(7)
    corner = rng.integers(0, 9, size=(2, 6))
    flip = rng.random(6) < 0.5
    choices = Choices.draw(np.random.default_rng(7), 6, augment, 32)
    assert choices.top.tolist() == corner[0].tolist() and choices.flip.tolist() == flip.tolist()
    assert choices[3:] == (None,) * 4


def test_a_resized_crop_has_to_know_the_side() -> None:
    with pytest.raises(ValueError, match="side"):
        Choices.draw(np.random.default_rng(0), 3, AUGMENTS["large"](True))
