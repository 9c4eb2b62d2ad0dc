"""Image files and arrays as RGB bytes of one size."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import Progress

from protofed.data.task import Sample

Bytes = NDArray[np.uint8]

PATIENCE_SECONDS = 2.0
"""How long decoding may take before a progress bar appears."""

_CHUNK = 32

# What Pillow's plugins raise on bytes that are not an image, or a truncated one.
_BAD = (OSError, ValueError, SyntaxError, EOFError, struct.error, IndexError, TypeError, KeyError,
        OverflowError, ZeroDivisionError, MemoryError, Image.DecompressionBombError)  # fmt: skip


class BadImage(Exception):
    """Bytes that cannot be decoded as an image."""


def decode(content: bytes | Bytes | Image.Image, size: int) -> Bytes:
    """An image (a file's bytes, an array [H, W] or [H, W, 3]) as uint8 [3, size, size].

    Resized to a square with bilinear interpolation, ignoring the aspect ratio, as the papers do.
    """
    if isinstance(content, np.ndarray):
        image = Image.fromarray(content)
    elif isinstance(content, Image.Image):
        image = _rgb(content)
    elif not content:
        raise BadImage("it is empty")
    else:
        try:
            image = _rgb(Image.open(io.BytesIO(content)))
        except _BAD as error:
            known = not isinstance(error, UnidentifiedImageError)
            raise BadImage(str(error) if known else "it is not an image") from None
    # A gray array is resized before it gets three channels: a third of the work, the same bytes.
    x = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
    return np.ascontiguousarray(np.broadcast_to(x, (3, size, size)) if x.ndim == 2
                                else x.transpose(2, 0, 1))  # fmt: skip


def decode_all(samples: Sequence[Sample], pixels: Bytes, title: str) -> dict[int, str]:
    """Decode the samples into the rows of ``pixels``; returns the rows that failed, and why.

    In threads, not processes: Pillow decodes and resizes without holding the interpreter's lock.
    """
    size = pixels.shape[-1]
    bad: dict[int, str] = {}
    stop = threading.Event()

    def chunk(start: int) -> int:
        end = min(start + _CHUNK, len(samples))
        for i in range(start, end):
            if stop.is_set():
                break
            try:
                pixels[i] = decode(samples[i].read(), size)
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


def _rgb(image: Image.Image) -> Image.Image:
    """The image upright and in RGB.

    EXIF rotation is applied. Transparent pixels become white, as on paper: the colors below them
    are not meant to be seen. Of 16 bits per pixel, the upper 8 are kept.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        deep = np.asarray(image)
        if image.mode == "I" and (deep.min() < 0 or deep.max() > 65535):
            raise BadImage("its pixels have 32 bits: their range is unknown")
        # Older versions of Pillow open 16-bit PNG files as 32-bit integers.
        image = Image.fromarray((deep >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise BadImage("its pixels are floating-point numbers: their range is unknown")
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        image = Image.new("RGBA", clear.size, "white")
        image.alpha_composite(clear)
    return image.convert("RGB")
