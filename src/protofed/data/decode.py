"""Image files and arrays as RGB bytes of one size.

Gray images with more than 8 bits (scans, microscopy) have values whose meaning the file does not
state: a range of values becomes black to white, set once for a task and kept in its models.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from protofed.cores import core_count
from protofed.data.dicom import Dicom, is_dicom
from protofed.data.task import MAX_IMAGE_PIXELS, Sample
from protofed.errors import ProtofedError
from protofed.silence import Silence

Bytes = NDArray[np.uint8]

PATIENCE_SECONDS = 2.0
"""How long decoding may take before a progress bar appears."""

FILE_BYTES = 8
"""The most bytes that a file has for each pixel: 16 bits of four channels, not compressed."""

PIXEL_BYTES = 32
"""The most memory that decoding takes for each pixel, its file included: JPEG 2000 in RGBA."""

_CHUNK = 32

# Not all the formats that Pillow knows: it would hand PostScript to a program that runs it.
_FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF")

_LIFTING, _LIFTED = threading.Lock(), list[int | None]()

_NOT_AN_IMAGE = "it is not an image, or its format (HEIC, SVG, raw, ...) cannot be read"

# What Pillow's plugins raise on bytes that are not an image, or a truncated one.
_BAD = (OSError, ValueError, SyntaxError, EOFError, struct.error, IndexError, TypeError, KeyError,
        OverflowError, ZeroDivisionError, MemoryError, RuntimeError,
        Image.DecompressionBombError)  # fmt: skip


def decoders() -> tuple[str, ...]:
    """What decides how images are decoded: the versions of Pillow and, if installed, pydicom."""
    pydicom = (f"pydicom {version('pydicom')}",) if find_spec("pydicom") else ()
    return (PIL.__version__, *pydicom)


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


class Deep(NamedTuple):
    """Gray values [H, W] with more than 8 bits, and which of them are black and white, if known.

    ``inverted``: the lowest is white.
    """

    values: NDArray[Any]
    window: tuple[float, float] | None = None
    inverted: bool = False

    def scaled(self, pixel_range: str | None) -> Bytes:
        """8 bits: ``pixel_range``, else the window, becomes 0 to 255."""
        shown = parse_range(pixel_range) if pixel_range else self.window
        if shown is None:
            what = "no pixel_range says which are black and white"
            raise BadImage(f"its pixels have more than 8 bits, and {what}")
        low, high = shown
        x = np.clip((self.values.astype(np.float32) - low) / (high - low), 0, 1)
        x = np.rint(255 * (1 - x if self.inverted else x))
        return np.asarray(np.nan_to_num(x), np.uint8)


def parse_range(text: str) -> tuple[float, float]:
    """The two values of a setting such as ``0:4095``."""
    try:
        low, high = map(float, text.split(":"))
        if -math.inf < low < high < math.inf:
            return low, high
    except ValueError:
        pass
    raise ProtofedError(
        f"pixel_range must be LOW:HIGH, the values that become black and white, got {text!r:.100}",
        "write 0:4095 for 12-bit images",
    )


def decode(
    content: bytes | NDArray[Any] | Image.Image,
    size: int,
    budget: Budget | None = None,
    pixel_range: str | None = None,
) -> Bytes:
    """An image (a file's bytes, an array [H, W] or [H, W, 3]) as uint8 [3, size, size].

    It is resized to a square with bilinear interpolation, ignoring the aspect ratio, as the papers
    do. ``budget`` is how many pixels may be decoded at a time, ``pixel_range`` (``LOW:HIGH``) the
    values that become 0 and 255 if they have more than 8 bits.
    """
    with _pixels(content, budget or Budget(MAX_IMAGE_PIXELS), size) as image:
        if isinstance(image, Deep):
            image = Image.fromarray(image.scaled(pixel_range))
        # A gray image is resized before it gets three channels: the same bytes.
        x = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
    return np.ascontiguousarray(np.broadcast_to(x, (3, size, size)) if x.ndim == 2
                                else x.transpose(2, 0, 1))  # fmt: skip


class Measured(NamedTuple):
    """What an image is like: its shorter side, and the lowest and highest value if ``Deep``."""

    side: int
    low: float | None = None
    high: float | None = None
    window: bool = False


def measure(content: bytes | NDArray[Any], budget: Budget) -> Measured:
    """Read an image's header, and its pixels only if they have more than 8 bits."""
    with _pixels(content, budget, headers=True) as image:
        if not isinstance(image, Deep):
            return Measured(min(image.size))
        values = image.values[np.isfinite(image.values)]
        if not len(values):
            raise BadImage("none of its pixels is a number")
        low, high = float(values.min()), float(values.max())
        return Measured(min(image.values.shape), low, high, image.window is not None)


@contextlib.contextmanager
def _pixels(
    content: bytes | NDArray[Any] | Image.Image,
    budget: Budget,
    size: int = 1,
    headers: bool = False,
) -> Iterator[Image.Image | Deep]:
    """An image in RGB or 8-bit gray, or its values; with ``headers``, it may not be loaded yet."""
    if not isinstance(content, Image.Image) and not len(content):
        raise BadImage("it is empty")
    try:
        image = _opened(content)
        width, height = image.size
        pixels = max(width, size) * max(height, size)
        if pixels > budget.total:
            advice = f"--max-image-pixels {pixels} allows that"
            raise BadImage(f"it has {width} × {height} pixels; {advice}")
        if headers and isinstance(image, Image.Image) and not _is_deep(image):
            yield image
            return
        with budget.hold(pixels):
            yield _loaded(image, content)
    except _BAD as error:
        known = not isinstance(error, UnidentifiedImageError)
        raise BadImage(str(error) if known else _NOT_AN_IMAGE) from None


def _opened(content: bytes | NDArray[Any] | Image.Image) -> Image.Image | Dicom:
    if isinstance(content, Image.Image):
        return content
    if isinstance(content, np.ndarray):
        return Image.fromarray(content)
    if is_dicom(content):
        return Dicom(content)
    return Image.open(io.BytesIO(content), formats=_formats())


def _is_deep(image: Image.Image) -> bool:
    """Whether it has integers of 16 or 32 bits, or floating-point numbers."""
    return image.mode.startswith(("I", "F"))


def _loaded(image: Image.Image | Dicom, content: object) -> Image.Image | Deep:
    if isinstance(image, Dicom):
        x = image.load()
        if x.dtype != np.uint8:
            return Deep(x, image.window, image.inverted)
        return Image.fromarray(255 - x if image.inverted else x)
    if isinstance(content, np.ndarray) and not _is_deep(image):
        return image
    if image is content:  # the caller's own, which stays as it is
        image = ImageOps.exif_transpose(image)
    else:
        ImageOps.exif_transpose(image, in_place=True)
    return Deep(np.asarray(image)) if _is_deep(image) else _rgb(image)


@cache
def _formats() -> list[str]:
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def decode_all(
    samples: Sequence[Sample],
    pixels: Bytes,
    title: str,
    most: int = MAX_IMAGE_PIXELS,
    pixel_range: str | None = None,
) -> dict[int, str]:
    """Decode the samples into the rows of ``pixels``; returns the rows that failed, and why."""
    size = pixels.shape[-1]

    def one(i: int, content: bytes | NDArray[np.uint8], budget: Budget) -> None:
        pixels[i] = decode(content, size, budget, pixel_range)

    bad = _for_all(samples, one, f"decoding {len(samples)} images of {title} (once)", most)
    for i in bad:
        pixels[i] = 0
    return bad


def measure_all(
    samples: Sequence[Sample], title: str, most: int = MAX_IMAGE_PIXELS
) -> list[Measured | None]:
    """What each sample is like; None for those that cannot be read."""
    found: list[Measured | None] = [None] * len(samples)

    def one(i: int, content: bytes | NDArray[np.uint8], budget: Budget) -> None:
        found[i] = measure(content, budget)

    _for_all(samples, one, f"measuring {len(samples)} images of {title} (once)", most)
    return found


def _for_all(
    samples: Sequence[Sample],
    do: Callable[[int, bytes | NDArray[np.uint8], Budget], None],
    text: str,
    most: int,
) -> dict[int, str]:
    """Call ``do`` with the content of each sample; returns those that failed, and why.

    In threads, not processes: Pillow decodes and resizes without holding the interpreter's lock.
    No image has more than ``most`` pixels, and all that are decoded at a time have no more
    together, so this takes at most ``PIXEL_BYTES`` times as many bytes of memory.
    """
    bad: dict[int, str] = {}
    stop = threading.Event()
    # always taken in this order, so that nobody waits for a file while another waits for pixels
    files, budget = Budget(FILE_BYTES * most), Budget(most)

    def one(i: int, sample: Sample) -> None:
        if sample.size > files.total:
            raise BadImage(
                f"its file has {sample.size} bytes, too many for an image of {most} pixels; "
                f"--max-image-pixels {-(-sample.size // FILE_BYTES)} allows that"
            )
        with files.hold(sample.size):
            do(i, sample.read(), budget)

    def chunk(start: int) -> int:
        end = min(start + _CHUNK, len(samples))
        for i in range(start, end):
            if stop.is_set():
                break
            try:
                one(i, samples[i])
            except (BadImage, OSError) as error:
                bad[i] = str(error)
        return end - start

    silence, shown, finished = Silence(), False, 0
    console = Console(stderr=True, emoji=False)
    progress = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task(escape(text), total=len(samples))
    with (
        warnings.catch_warnings(action="ignore"),  # Pillow warns about unusual metadata
        no_other_limit(),
        ThreadPoolExecutor(core_count()) as pool,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(stop.set)  # on Ctrl-C, do not decode what is queued
        for done in pool.map(chunk, range(0, len(samples), _CHUNK)):
            progress.advance(task, done)
            finished += done
            if not shown and silence.seconds > PATIENCE_SECONDS:
                shown = True
                at_end.enter_context(progress)
                if not console.is_terminal:  # one line instead of the bar
                    console.print(text, markup=False, highlight=False, soft_wrap=True)
            elif not console.is_terminal and silence.too_long():
                console.print(f"{finished} of {len(samples)} decoded", highlight=False)
    return dict(sorted(bad.items()))


@contextlib.contextmanager
def no_other_limit() -> Iterator[None]:
    """Lift Pillow's own limit on pixels, which cannot be set for one image or one thread."""
    with _LIFTING:
        _LIFTED.append(Image.MAX_IMAGE_PIXELS)
        Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        with _LIFTING:
            first = _LIFTED.pop()  # of the last thread to leave, what the first one found
            if not _LIFTED:
                Image.MAX_IMAGE_PIXELS = first


def _rgb(image: Image.Image) -> Image.Image:
    """The image in RGB.

    Transparent pixels become white, as on paper: the colors below them are not meant to be seen.
    """
    if image.has_transparency_data:
        clear = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.new("RGBA", clear.size, "white")
        image.alpha_composite(clear)
    return image if image.mode == "RGB" else image.convert("RGB")
