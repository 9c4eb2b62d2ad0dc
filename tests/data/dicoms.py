"""DICOM files made by pydicom, for tests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray


def dicom(pixels: NDArray[Any], syntax: str = "1.2.840.10008.1.2.1", **tags: Any) -> bytes:
    """A DICOM file with these pixels [H, W] or [H, W, 3], and tags such as ``WindowCenter``."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import UID, SecondaryCaptureImageStorage

    found = Dataset()
    found.file_meta = FileMetaDataset()
    found.file_meta.TransferSyntaxUID = UID(syntax)
    found.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    found.file_meta.MediaStorageSOPInstanceUID = UID("1.2.3")
    found.SOPClassUID, found.SOPInstanceUID = SecondaryCaptureImageStorage, UID("1.2.3")
    found.Rows, found.Columns = pixels.shape[:2]
    found.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    found.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    if pixels.ndim == 3:
        found.PlanarConfiguration = 0
    bits = 8 * pixels.dtype.itemsize
    found.BitsAllocated, found.BitsStored, found.HighBit = bits, bits, bits - 1
    found.PixelRepresentation = int(np.issubdtype(pixels.dtype, np.signedinteger))
    found.PixelData = pixels.tobytes()
    found["PixelData"].VR = "OW" if bits > 8 else "OB"
    for name, value in tags.items():
        setattr(found, name, value)
    if syntax not in ("1.2.840.10008.1.2.1", "1.2.840.10008.1.2.1.99"):
        found["PixelData"].is_undefined_length = True
    file = io.BytesIO()
    found.save_as(file, enforce_file_format=True)
    return file.getvalue()
