"""One image: every mode, rotation, and bytes that are not an image."""

from __future__ import annotations

import io
import threading
import time
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from protofed.data import decode as module
from protofed.data.decode import (
    BadImage,
    Budget,
    decode,
    decode_all,
    measure,
    no_other_limit,
    parse_range,
)
from protofed.data.task import Sample
from protofed.errors import ProtofedError


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
        (floating, "more than 8 bits.*pixel_range"),
    ):
        with pytest.raises(BadImage, match=words):
            decode(content, 8)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_a_damaged_avif(pictures: Any) -> None:
    """Pillow's decoder raises a RuntimeError, which no other does."""
    content = pictures.one(kind="AVIF")
    at = content.index(b"pixi") + 8
    with pytest.raises(BadImage, match="Failed to decode image"):
        decode(content[:at] + bytes(1) + content[at + 1 :], 8)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_a_12_bit_scan_keeps_its_levels(pictures: Any, kind: str) -> None:
    ramp = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    content = pictures.encoded(Image.fromarray(ramp), kind)
    x = decode(content, 64, pixel_range="0:4095")
    np.testing.assert_array_equal(x, np.broadcast_to(np.rint(ramp / 4095 * 255), x.shape))
    assert len(np.unique(x)) == 256
    window = decode(content, 64, pixel_range="1000:2000")[0]  # what is outside is black or white
    assert (window[ramp <= 1000] == 0).all() and (window[ramp >= 2000] == 255).all()
    assert measure(content, Budget(4096)) == (64, 0, 4095, False)
    with pytest.raises(BadImage, match="no pixel_range says"):
        decode(content, 64)


def test_integers_of_32_bits_and_floats(pictures: Any) -> None:
    for values, pixel_range in ((np.array([[-5, 100_000]]), "-5:100000"), ([[-0.5, 1]], "-0.5:1")):
        dtype = np.int32 if pixel_range == "-5:100000" else np.float32
        image = Image.fromarray(np.repeat(values, 2, 0).astype(dtype))
        content = pictures.encoded(image, "TIFF")
        np.testing.assert_array_equal(decode(content, 2, pixel_range=pixel_range)[0, 0], [0, 255])
    nothing = pictures.encoded(Image.fromarray(np.full((2, 2), np.nan, np.float32)), "TIFF")
    assert (decode(nothing, 2, pixel_range="0:1") == 0).all()
    with pytest.raises(BadImage, match="none of its pixels is a number"):
        measure(nothing, Budget(9))


@pytest.mark.parametrize("text", ["", "1", "4095:0", "1:1", "a:b", "0:inf", "nan:1", "0:1:2"])
def test_a_range_is_two_values(text: str) -> None:
    with pytest.raises(ProtofedError, match="pixel_range must be LOW:HIGH"):
        parse_range(text)
    assert parse_range("-1024:3071.5") == (-1024, 3071.5)


def test_only_headers_of_8_bit_images_are_read(pictures: Any) -> None:
    content = pictures.one(side=40)
    assert measure(content[: len(content) // 2], Budget(10**6)) == (40, None, None, False)
    with pytest.raises(BadImage, match="not an image"):
        measure(b"hello", Budget(10**6))


def test_programs_are_not_images() -> None:
    """Pillow would hand PostScript to Ghostscript, which runs it."""
    with pytest.raises(BadImage, match="not an image"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", 8)


def test_an_image_with_too_many_pixels_is_refused_by_its_header(pictures: Any) -> None:
    content = pictures.encoded(Image.new("1", (3000, 3000)))
    with pytest.raises(BadImage, match="3000 × 3000 pixels; --max-image-pixels 9000000 allows"):
        decode(content, 8, Budget(8_999_999))
    assert decode(content, 8, Budget(9_000_000)).shape == (3, 8, 8)
    with pytest.raises(BadImage, match="2 × 9000 pixels; --max-image-pixels 72000 allows"):
        decode(pictures.encoded(Image.new("1", (2, 9000))), 8, Budget(18_000))  # it is widened


def rows(samples: list[Sample], most: int) -> dict[int, str]:
    return decode_all(samples, np.zeros((len(samples), 3, 8, 8), np.uint8), "test", most)


def test_a_limit_above_that_of_pillow(pictures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    content = pictures.one(side=20)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert rows([Sample("x", 0, lambda: content)], 1000) == {}
    assert Image.MAX_IMAGE_PIXELS == 100
    assert "20 pixels" in rows([Sample("x", 0, lambda: content)], 400)[0]


def test_pillows_limit_is_back_after_the_last_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a server predicts in several threads, which leave in the order they came."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    first, second = no_other_limit(), no_other_limit()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert Image.MAX_IMAGE_PIXELS is None
    second.__exit__(None, None, None)
    assert Image.MAX_IMAGE_PIXELS == 100


def test_a_file_too_large_for_an_image_is_not_read() -> None:
    def read() -> bytes:
        raise AssertionError("read")

    bad = rows([Sample("x", 0, read, size=8 * 1000 + 1)], 1000)
    assert "has 8001 bytes" in bad[0] and "--max-image-pixels 1001" in bad[0]


def test_all_threads_together_stay_below_the_limit(
    pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels that are decoded, and bytes of files that are held, at any time."""
    lock, held, most = threading.Lock(), {"pixels": 0, "bytes": 0}, {"pixels": 0, "bytes": 0}

    def change(what: str, by: int) -> None:
        with lock:
            held[what] += by
            most[what] = max(most[what], held[what])

    upright = module._rgb

    def watched(image: Image.Image) -> Image.Image:
        change("pixels", 1200)
        time.sleep(0.01)  # time for another thread
        change("pixels", -1200)
        change("bytes", -4000)
        return upright(image)

    def read() -> bytes:
        change("bytes", 4000)
        return content

    content = pictures.encoded(Image.new("RGB", (30, 40)))
    monkeypatch.setattr(module, "_rgb", watched)
    monkeypatch.setattr(module, "_CHUNK", 1)
    monkeypatch.setattr(module, "core_count", lambda: 8)
    assert rows([Sample("x", 0, read, size=4000) for _ in range(40)], 2500) == {}
    assert 1200 <= most["pixels"] <= 2500 and 4000 <= most["bytes"] <= 8 * 2500
