"""One image: every mode, rotation, and bytes that are not an image."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protofed.data.decode import BadImage, decode


def color(content: bytes, size: int = 8) -> list[int]:
    """The color of an image that has only one."""
    x = decode(content, size)
    assert x.shape == (3, size, size)
    assert x.dtype == np.uint8
    assert (x == x[:, :1, :1]).all()
    return [int(v) for v in x[:, 0, 0]]


def test_equals_pillows_bilinear_resize(pictures: Any) -> None:
    content = pictures.one(3, side=20)
    image = Image.open(io.BytesIO(content)).convert("RGB")
    expected = np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    np.testing.assert_array_equal(decode(content, 8), expected)


def test_modes(pictures: Any) -> None:
    def of(mode: str, value: Any, kind: str = "PNG", **options: Any) -> list[int]:
        return color(pictures.encoded(Image.new(mode, (5, 9), value), kind, **options))

    assert of("L", 77) == [77] * 3
    assert of("1", 1) == [255] * 3
    assert of("RGB", (10, 20, 30)) == [10, 20, 30]
    assert of("RGBA", (10, 20, 30, 255)) == [10, 20, 30]
    assert of("RGBA", (10, 20, 30, 0)) == [255] * 3  # what is transparent is white
    assert of("LA", (40, 255)) == [40] * 3
    assert of("LA", (40, 0)) == [255] * 3
    half = of("RGBA", (0, 0, 0, 128))
    assert all(abs(v - 127) <= 1 for v in half)
    assert of("I;16", 0x4CFF) == [0x4C] * 3  # the upper 8 of 16 bits
    assert of("CMYK", (0, 255, 255, 0), "TIFF") == [255, 0, 0]
    cyan = of("CMYK", (255, 0, 0, 0), "JPEG", quality=95)
    assert cyan[0] < 10 and cyan[1] > 245 and cyan[2] > 245


def test_palette_with_and_without_transparency(pictures: Any) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    assert color(pictures.encoded(image)) == [9, 8, 7]
    assert color(pictures.encoded(image, transparency=1)) == [255] * 3
    assert color(pictures.encoded(image, "GIF")) == [9, 8, 7]


def test_exif_rotation_is_applied(pictures: Any) -> None:
    image = Image.new("RGB", (8, 8), "black")
    image.paste("white", (0, 0, 8, 4))  # the upper half
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it a quarter clockwise to see it upright
    x = decode(pictures.encoded(image, exif=exif), 8)
    assert (x[:, :, 4:] == 255).all() and (x[:, :, :4] == 0).all()


def test_gray_arrays_get_three_channels() -> None:
    gray = np.arange(16, dtype=np.uint8).reshape(4, 4)
    x = decode(gray, 4)
    assert (x == gray).all() and x.shape == (3, 4, 4)
    large = decode(np.arange(49, dtype=np.uint8).reshape(7, 7), 4)
    assert (large[0] == large[1]).all() and (large[0] == large[2]).all()


def test_bytes_that_are_not_an_image(pictures: Any) -> None:
    whole = pictures.one(side=40, kind="JPEG")
    floating = pictures.encoded(Image.new("F", (4, 4), 0.5), "TIFF")
    for content, words in (
        (b"", "empty"),
        (b"hello", "not an image"),
        (whole[: len(whole) // 2], "truncated"),
        (pictures.one(side=40)[:200], "."),
        (floating, "floating-point"),
    ):
        with pytest.raises(BadImage, match=words):
            decode(content, 8)
