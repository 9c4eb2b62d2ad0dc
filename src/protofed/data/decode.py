"""Image files and arrays as RGB bytes of one size."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import Progress

from protofed.data.task import MAX_IMAGE_PIXELS, Sample

Bytes = NDArray[np.uint8]

PATIENCE_SECONDS = 2.0
"""How long decoding may take before a progress bar appears."""

FILE_BYTES = 8
"""The most bytes that a file has for each pixel: 16 bits of four channels, not compressed."""

PIXEL_BYTES = 32
"""The most memory that decoding takes for each pixel, its file included: JPEG 2000 in RGBA."""

_CHUNK = 32

# Not all that Pillow knows: it would hand PostScript to a program that runs it.
_FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF")

# What Pillow's plugins raise on bytes that are not an image, or a truncated one.
_BAD = (OSError, ValueError, SyntaxError, EOFError, struct.error, IndexError, TypeError, KeyError,
        OverflowError, ZeroDivisionError, MemoryError, Image.DecompressionBombError)  # fmt: skip


class BadImage(Exception):
    """Bytes that cannot be decoded as an image."""


class Budget:
    """An amount that threads share: one that needs more than is left waits for the others."""

    def __init__(self, total: int) -> None:
        self.total = self._left = total
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, amount: int) -> Iterator[None]:
        if not amount:
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: amount <= self._left)
            self._left -= amount
        try:
            yield
        finally:
            with self._changed:
                self._left += amount
                self._changed.notify_all()


def decode(content: bytes | Bytes | Image.Image, size: int, budget: Budget | None = None) -> Bytes:
    """An image (a file's bytes, an array [H, W] or [H, W, 3]) as uint8 [3, size, size].

    Resized to a square with bilinear interpolation, ignoring the aspect ratio, as the papers do.
    ``budget`` are the pixels that may be decoded at a time.
    """
    budget = budget or Budget(MAX_IMAGE_PIXELS)
    if not isinstance(content, Image.Image) and not len(content):
        raise BadImage("it is empty")
    try:
        if isinstance(content, np.ndarray):
            image = Image.fromarray(content)
        elif isinstance(content, Image.Image):
            image = content
        else:
            image = Image.open(io.BytesIO(content), formats=_formats())
        width, height = image.size
        pixels = max(width, size) * max(height, size)
        if pixels > budget.total:
            advice = f"--max-image-pixels {pixels} allows that"
            raise BadImage(f"it has {width} × {height} pixels; {advice}")
        with budget.hold(pixels):
            if not isinstance(content, np.ndarray):
                image = _rgb(image)
            # A gray array is resized before it gets three channels: the same bytes.
            x = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
    except _BAD as error:
        known = not isinstance(error, UnidentifiedImageError)
        raise BadImage(str(error) if known else "it is not an image") from None
    return np.ascontiguousarray(np.broadcast_to(x, (3, size, size)) if x.ndim == 2
                                else x.transpose(2, 0, 1))  # fmt: skip


@cache
def _formats() -> list[str]:
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def decode_all(
    samples: Sequence[Sample], pixels: Bytes, title: str, most: int = MAX_IMAGE_PIXELS
) -> dict[int, str]:
    """Decode the samples into the rows of ``pixels``; returns the rows that failed, and why.

    In threads, not processes: Pillow decodes and resizes without holding the interpreter's lock.
    No image has more than ``most`` pixels, and neither have all that are decoded at a time: it
    takes no more than ``PIXEL_BYTES`` times as much memory.
    """
    size = pixels.shape[-1]
    bad: dict[int, str] = {}
    stop = threading.Event()
    # always taken in this order, so that nobody waits for a file while another waits for pixels
    files, budget = Budget(FILE_BYTES * most), Budget(most)

    def one(sample: Sample) -> Bytes:
        if sample.size > files.total:
            raise BadImage(
                f"its file has {sample.size} bytes, too many for an image of {most} pixels; "
                f"--max-image-pixels {-(-sample.size // FILE_BYTES)} allows that"
            )
        with files.hold(sample.size):
            return decode(sample.read(), size, budget)

    def chunk(start: int) -> int:
        end = min(start + _CHUNK, len(samples))
        for i in range(start, end):
            if stop.is_set():
                break
            try:
                pixels[i] = one(samples[i])
            except (BadImage, OSError) as error:
                pixels[i] = 0
                bad[i] = str(error)
        return end - start

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text, start, shown = (
        f"decoding {len(samples)} images of {title} (once)",
        time.monotonic(),
        False,
    )
    console = Console(stderr=True)
    progress = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task(text, total=len(samples))
    with (
        warnings.catch_warnings(action="ignore"),  # Pillow warns of unusual metadata
        _no_other_limit(),
        ThreadPoolExecutor(cores or 1) as pool,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(stop.set)  # on Ctrl-C, do not decode what is queued
        for done in pool.map(chunk, range(0, len(samples), _CHUNK)):
            progress.advance(task, done)
            if not shown and time.monotonic() - start > PATIENCE_SECONDS:
                shown = True
                at_end.enter_context(progress)
                if not console.is_terminal:  # one line instead of the bar
                    console.print(text, highlight=False, soft_wrap=True)
    return dict(sorted(bad.items()))


@contextlib.contextmanager
def _no_other_limit() -> Iterator[None]:
    """Without Pillow's own limit on pixels, which cannot be set for one image."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _rgb(image: Image.Image) -> Image.Image:
    """The image upright and in RGB.

    EXIF rotation is applied. Transparent pixels become white, as on paper: the colors below them
    are not meant to be seen. Of 16 bits per pixel, the upper 8 are kept.
    """
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I"):
        deep = np.asarray(image)
        if image.mode == "I" and (deep.min() < 0 or deep.max() > 65535):
            raise BadImage("its pixels have 32 bits: their range is unknown")
        # Older versions of Pillow open 16-bit PNG files as 32-bit integers.
        image = Image.fromarray((deep >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise BadImage("its pixels are floating-point numbers: their range is unknown")
    if image.has_transparency_data:
        clear = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.new("RGBA", clear.size, "white")
        image.alpha_composite(clear)
    return image if image.mode == "RGB" else image.convert("RGB")
