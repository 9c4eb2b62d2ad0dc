"""DICOM files as gray values, or as RGB; read with pydicom (the extra ``dicom``).

Single images are read: not compressed, or compressed as JPEG or JPEG 2000. Whatever is wrong with
a file is a ``ValueError`` that says so.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_DEFLATED = b"1.2.840.10008.1.2.1.99"
_PILLOW = {"1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.90", "1.2.840.10008.1.2.4.91"}
"""Compressions that Pillow reads: JPEG baseline and JPEG 2000."""


def is_dicom(content: bytes) -> bool:
    return content[128:132] == b"DICM"


class Dicom:
    """A DICOM file: its size, and its pixels when ``load`` is called."""

    def __init__(self, content: bytes) -> None:
        try:
            import pydicom
        except ImportError:
            raise ValueError(
                "it is a DICOM file, which needs pydicom: pip install 'protofed[dicom]'"
            ) from None
        if _DEFLATED in content[:4096]:  # it may unpack to any size
            raise ValueError("it is a deflated DICOM file: save it without compression")
        try:
            self._found: Any = pydicom.dcmread(io.BytesIO(content))
            self.size = int(self._found.Columns), int(self._found.Rows)
            frames = int(self._found.get("NumberOfFrames") or 1)
            self._syntax: Any = pydicom.uid.UID(self._found.file_meta.TransferSyntaxUID)
            self._kind = str(self._found.PhotometricInterpretation)
            bits = int(self._found.BitsAllocated)
        except Exception as error:
            raise ValueError(f"it is not a DICOM image: {error!s:.200}") from None
        if min(self.size) < 1 or "PixelData" not in self._found or bits > 32:
            raise ValueError("it is a DICOM file without pixels that can be read")
        if frames > 1:
            raise ValueError(f"it has {frames} frames: save each as an image of its own")
        if self._kind not in ("MONOCHROME1", "MONOCHROME2", "RGB", "YBR_FULL", "YBR_FULL_422"):
            raise ValueError(f"its colors are {self._kind:.40}: only gray and RGB can be read")
        if self._syntax.is_compressed and self._syntax not in _PILLOW:
            raise ValueError(
                f"it is compressed ({self._syntax.name:.80}): decompress it first, for example "
                "with gdcmconv --raw"
            )

    @property
    def inverted(self) -> bool:
        """Whether its lowest value is white."""
        return self._kind == "MONOCHROME1"

    @property
    def window(self) -> tuple[float, float] | None:
        """The values that its first window shows as black and white; None if it has none."""
        try:
            center, width = (
                float(np.atleast_1d(self._found[name].value)[0])
                for name in ("WindowCenter", "WindowWidth")
            )
        except (KeyError, TypeError, ValueError, IndexError):
            return None
        half = max(width - 1, 1) / 2
        low, high = center - 0.5 - half, center - 0.5 + half
        return (low, high) if np.isfinite([low, high]).all() else None

    def load(self) -> NDArray[Any]:
        """8-bit RGB [H, W, 3], or gray values [H, W]: 8 bits, or rescaled as float32."""
        try:
            x = self._compressed() if self._syntax.is_compressed else self._found.pixel_array
            slope, intercept = (
                float(self._found.get(name) or default)
                for name, default in (("RescaleSlope", 1), ("RescaleIntercept", 0))
            )
        except Exception as error:
            raise ValueError(f"its pixels cannot be read: {error!s:.200}") from None
        color = x.ndim == 3
        if x.shape[:2] != self.size[::-1] or x.shape[2:] not in ((), (3,)):
            raise ValueError("its pixels do not have the size that it states")
        if color and x.dtype != np.uint8:
            raise ValueError("its colors have more than 8 bits")
        if x.dtype == np.uint8 and (color or (slope, intercept) == (1, 0)):
            return np.asarray(x)
        return np.asarray(x.astype(np.float32) * np.float32(slope) + np.float32(intercept))

    def _compressed(self) -> NDArray[Any]:
        from pydicom.encaps import get_frame

        if self._found.PixelRepresentation:
            raise ValueError("signed and compressed: decompress it first")
        frame = get_frame(self._found.PixelData, 0, number_of_frames=1)
        image = Image.open(io.BytesIO(frame), formats=["JPEG", "JPEG2000"])
        if image.size != self.size:
            raise ValueError(f"{image.size[0]} × {image.size[1]} pixels")
        return np.asarray(image.convert("RGB") if image.mode == "YCbCr" else image)
