"""One image file or array as RGB bytes of one size."""

from __future__ import annotations

import io
import struct

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

Bytes = NDArray[np.uint8]

# What Pillow's plugins raise on bytes that are no image, or half of one.
BAD = (OSError, ValueError, SyntaxError, EOFError, struct.error, IndexError, TypeError, KeyError,
       OverflowError, ZeroDivisionError, MemoryError, Image.DecompressionBombError)  # fmt: skip


class BadImage(Exception):
    """Bytes that are no image that can be shown."""


def decode(content: bytes | Bytes, size: int) -> Bytes:
    """An image file (or an array [H, W] or [H, W, 3]) as uint8 [3, size, size].

    Resized to the square with bilinear interpolation, the aspect not kept, as the papers do.
    """
    if isinstance(content, np.ndarray):
        image = Image.fromarray(content)
    elif not content:
        raise BadImage("it is empty")
    else:
        try:
            image = rgb(Image.open(io.BytesIO(content)))
        except BAD as error:
            known = not isinstance(error, UnidentifiedImageError)
            raise BadImage(str(error) if known else "it is no image") from None
    # A gray array is resized before it has three channels: a third of the work, the same bytes.
    x = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
    return np.ascontiguousarray(np.broadcast_to(x, (3, size, size)) if x.ndim == 2
                                else x.transpose(2, 0, 1))  # fmt: skip


def rgb(image: Image.Image) -> Image.Image:
    """The image upright and in RGB.

    EXIF rotation is applied. What is transparent shows white, as it would on paper: the colors
    below it are never meant to be seen. 16 bits a pixel become the upper 8.
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
