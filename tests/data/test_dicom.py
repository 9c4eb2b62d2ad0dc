"""DICOM files: values, windows, and what is refused."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protofed.data import load_task
from protofed.data.decode import BadImage, Budget, decode, measure
from protofed.errors import ProtofedError
from tests.data.dicoms import dicom

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)
JPEG, JPEG_2000, RLE = (f"1.2.840.10008.1.2.{n}" for n in ("4.50", "4.90", "5"))
DEFLATED = "1.2.840.10008.1.2.1.99"


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(BadImage, match=r"pip install 'protofed\[dicom\]'"):
        decode(bytes(128) + b"DICM", 8)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_what_is_remembered_ends_when_pydicom_is_installed(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, skip_bad: bool
) -> None:
    """The images were not measured then, or were left out."""
    for number, name in enumerate(("a/x", "a/y", "b/x", "b/y")):
        for i in range(3):
            path = tmp_path / "ct" / name / f"{i}.dcm"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(dicom(RAMP + np.uint16(3 * number + i)))
            if skip_bad:
                Image.new("L", (40, 40), 3 * number + i).save(path.with_name(f"{i}.png"))
    task = f"folder:{tmp_path / 'ct'}"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pydicom", None)
        if skip_bad:
            assert len(load_task(task, skip_bad=True).skipped) == 12
        else:
            with pytest.raises(ProtofedError, match=r"protofed\[dicom\]"):
                load_task(task)
    found = load_task(task, skip_bad=skip_bad)
    assert not found.skipped and found.pixel_range == "0:4106"


@pytest.fixture(autouse=True)
def pydicom(request: pytest.FixtureRequest) -> None:
    if "without_the_extra" not in request.node.name:
        pytest.importorskip("pydicom")


def shown(content: bytes, pixel_range: str | None = None) -> Any:
    """The gray image that a file becomes at its own size."""
    x = decode(content, 64, pixel_range=pixel_range)
    assert (x == x[0]).all()
    return x[0].astype(int)


def test_the_window_is_of_rescaled_values() -> None:
    """Center 40 and width 400, as for soft tissue: −160 is black and 239 white (PS3.3, C.11.2)."""
    content = dicom(RAMP, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=[40, 500],
                    WindowWidth=[400, 2000])  # fmt: skip
    hounsfield = RAMP.astype(float) - 1024
    expected = np.clip((hounsfield - 39.5) / 399 + 0.5, 0, 1) * 255
    np.testing.assert_array_equal(shown(content), np.rint(expected))
    low, high = measure(content, Budget(10**6))[1:3]
    assert (low, high) == (-1024, 3071)


def test_a_range_that_is_asked_for_comes_before_the_window() -> None:
    content = dicom(RAMP, WindowCenter=40, WindowWidth=400)
    np.testing.assert_array_equal(shown(content, "0:4095"), np.rint(RAMP / 4095 * 255))


def test_lowest_is_white() -> None:
    content = dicom(RAMP, PhotometricInterpretation="MONOCHROME1")
    np.testing.assert_array_equal(shown(content, "0:4095"), np.rint((1 - RAMP / 4095) * 255))
    eight = np.arange(256, dtype=np.uint8).repeat(16).reshape(64, 64)
    inverted = dicom(eight, PhotometricInterpretation="MONOCHROME1")
    np.testing.assert_array_equal(shown(inverted), 255 - eight)


def test_signed_values() -> None:
    values = RAMP.astype(np.int16) - 2048
    np.testing.assert_array_equal(shown(dicom(values), "-2048:2047"), np.rint(RAMP / 4095 * 255))


def test_eight_bits_and_colors_are_as_they_are() -> None:
    gray = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    np.testing.assert_array_equal(shown(dicom(gray)), gray)
    color = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    np.testing.assert_array_equal(decode(dicom(color), 64), color.transpose(2, 0, 1))
    ybr = Image.fromarray(color).convert("YCbCr")
    x = decode(dicom(np.asarray(ybr), PhotometricInterpretation="YBR_FULL"), 64)
    np.testing.assert_allclose(x, np.asarray(ybr.convert("RGB")).transpose(2, 0, 1), atol=2)


@pytest.mark.parametrize(("syntax", "kind"), [(JPEG, "JPEG"), (JPEG_2000, "JPEG2000")])
def test_compressed_as_pillow_reads_it(pictures: Any, syntax: str, kind: str) -> None:
    from pydicom.encaps import encapsulate

    deep = kind == "JPEG2000"
    pixels = RAMP if deep else (RAMP // 16).astype(np.uint8)
    frame = pictures.encoded(Image.fromarray(pixels), kind)
    content = dicom(pixels, syntax, PixelData=encapsulate([frame]))
    expected = Image.open(io.BytesIO(frame))
    if deep:
        np.testing.assert_array_equal(shown(content, "0:4095"), np.rint(RAMP / 4095 * 255))
    else:
        np.testing.assert_array_equal(shown(content), np.asarray(expected))
    smaller = dicom(pixels[:32], syntax, PixelData=encapsulate([frame]))
    with pytest.raises(BadImage, match="64 × 64 pixels"):
        decode(smaller, 8)


def test_what_is_refused() -> None:
    from pydicom.encaps import encapsulate

    for content, words in (
        (dicom(RAMP), "no pixel_range says"),
        (dicom(RAMP, NumberOfFrames=7), "it has 7 frames"),
        (dicom(RAMP, PhotometricInterpretation="PALETTE COLOR"), "its colors are PALETTE COLOR"),
        (dicom(RAMP, RLE, PixelData=encapsulate([b"xx"])), r"compressed \(RLE Lossless\)"),
        (dicom(RAMP, DEFLATED), "deflated"),
        (dicom(RAMP, PixelData=b"short"), "its pixels cannot be read"),
        (dicom(RAMP)[:200], "not a DICOM image"),
        (dicom(RAMP).replace(b"10008.1.2.1", b"10008\\1.2.1"), "not a DICOM image"),  # two values
        (bytes(128) + b"DICM" + bytes(range(256)), "not a DICOM image"),
    ):
        with pytest.raises(BadImage, match=words):
            decode(content, 8)
    with pytest.raises(BadImage, match="--max-image-pixels 4096"):
        decode(dicom(RAMP), 8, Budget(4095), "0:4095")
