"""Readers of files that hold many images: MNIST's idx, USPS as libsvm text, SVHN's .mat, .npz.

A file's format is recognized by its content, never by its name.
"""

from __future__ import annotations

import bz2
import gzip
import math
import re
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from protofed.errors import ProtofedError

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_LIBSVM = re.compile(rb"\s*[+-]?\d+(\.0*)?\s+\d+:[-+.\deE]+\s")
_MAGIC = {
    b"\0\0\x08\x03": "idx-images",
    b"\0\0\x08\x01": "idx-labels",
    b"MATLAB 5.0": "mat",
    b"MATLAB 7.3": "mat-hdf5",
    b"\x89HDF\r\n\x1a\n": "mat-hdf5",
}
_DAMAGE = (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile)


class Arrays(NamedTuple):
    """Images [N, H, W] or [N, H, W, 3] with digits as labels; ``split``: 0 training, 1 test."""

    images: Bytes
    labels: Ints
    split: Ints | None = None


def sniff(path: Path) -> str | None:
    """``idx-images``, ``idx-labels``, ``libsvm``, ``mat``, ``mat-hdf5``, ``npz`` or ``None``."""
    try:
        with _opened(path) as file:
            head = file.read(4096)
        for magic, kind in _MAGIC.items():
            if head.startswith(magic):
                return kind
        if _LIBSVM.match(head):
            return "libsvm"
        if head.startswith(b"PK") and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if {"images.npy", "labels.npy"} <= set(archive.namelist()):
                    return "npz"
    except _DAMAGE:
        pass
    return None


def read_idx(path: Path) -> Bytes:
    """MNIST's format, gzipped or not: unsigned bytes in any number of dimensions."""
    content = _unpacked(path)
    if content[:3] != b"\0\0\x08":
        raise _damaged(path, "it is not an idx file of bytes")
    dims = content[3]
    shape = tuple(np.frombuffer(content, ">u4", dims, offset=4).tolist())
    body = content[4 + 4 * dims :]
    if len(body) != math.prod(shape):
        raise _damaged(path, f"{len(body)} bytes where its header says {math.prod(shape)}")
    return np.frombuffer(body, np.uint8).reshape(shape)


def read_libsvm(path: Path) -> Arrays:
    """USPS from libsvm: 256 values in [-1, 1] per line, labels 1 to 10 for the digits 0 to 9."""
    rows = [(n, row) for n, row in enumerate(_unpacked(path).splitlines(), 1) if row.strip()]
    values = np.zeros((len(rows), 256))  # libsvm leaves out zeros
    labels = np.zeros(len(rows), np.int64)
    for i, (number, row) in enumerate(rows):
        try:
            fields = np.array(row.replace(b":", b" ").split(), np.float64)
            index = fields[1::2].astype(np.int64) - 1
            if len(fields) % 2 == 0 or (len(index) and not 0 <= index.min() <= index.max() < 256):
                raise ValueError
            values[i, index] = fields[2::2]
            labels[i] = int(fields[0]) - 1
        except ValueError:
            raise _damaged(path, f"line {number} is not a label and up to 256 values") from None
    if len(rows) and not -1 <= values.min() <= values.max() <= 1:
        raise _damaged(path, "its values are not in [-1, 1]")
    # truncated, not rounded: torchvision does so, and the published numbers come from it
    images = ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)
    return _checked(path, Arrays(images, labels))


def read_mat(path: Path) -> Arrays:
    """SVHN's cropped digits: X [32, 32, 3, N], and y where 10 stands for the digit 0."""
    from scipy.io import loadmat  # slow to import, and rarely needed
    from scipy.io.matlab import MatReadError

    try:
        content = loadmat(path, variable_names=["X", "y"])
        images = np.ascontiguousarray(np.moveaxis(content["X"], 3, 0))
        labels = content["y"].reshape(-1).astype(np.int64)
    except (*_DAMAGE, MatReadError, TypeError, NotImplementedError) as error:
        raise _damaged(path, f"it has no X and y like SVHN's files ({error})") from None
    return _checked(path, Arrays(images, np.where(labels == 10, 0, labels)))


def read_npz(path: Path) -> Arrays:
    """``images`` and ``labels``, and ``suggested_split`` if one file holds both parts."""
    try:
        with np.load(path, allow_pickle=False) as content:
            images, labels = content["images"], content["labels"].astype(np.int64)
            split = content.get("suggested_split")
    except _DAMAGE as error:
        raise _damaged(path, str(error)) from None
    return _checked(path, Arrays(images, labels, None if split is None else split.astype(np.int64)))


def _checked(path: Path, arrays: Arrays) -> Arrays:
    images, labels, split = arrays
    if images.dtype != np.uint8 or not (images.ndim == 3 or images.shape[3:] == (3,)):
        raise _damaged(path, f"images are {images.dtype} {images.shape}, not bytes [N, H, W(, 3)]")
    if labels.shape != images.shape[:1] or (split is not None and split.shape != labels.shape):
        raise _damaged(path, f"{len(images)} images but {len(labels)} labels")
    if len(labels) and not 0 <= labels.min() <= labels.max() <= 9:
        raise _damaged(path, f"labels go from {labels.min()} to {labels.max()}, not 0 to 9")
    return arrays


def pair(images: Path, labels: Path) -> Arrays:
    """An idx file of images with the idx file of their labels."""
    return _checked(images, Arrays(read_idx(images), read_idx(labels).astype(np.int64)))


def read_arrays(path: Path, kind: str) -> Arrays:
    """A file that holds images and labels; ``kind`` is what ``sniff`` returned."""
    if kind == "mat-hdf5":
        raise _damaged(path, "it is a MATLAB 7.3 file; SVHN's own files have version 5")
    return {"libsvm": read_libsvm, "mat": read_mat, "npz": read_npz}[kind](path)


def _opened(path: Path) -> BinaryIO:
    """The file, open for reading; unpacked if it is compressed."""
    with path.open("rb") as file:
        head = file.read(3)
    if head[:2] == b"\x1f\x8b":
        return cast(BinaryIO, gzip.open(path))
    return cast(BinaryIO, bz2.open(path)) if head == b"BZh" else path.open("rb")


def _unpacked(path: Path) -> bytes:
    try:
        with _opened(path) as file:
            return file.read()
    except _DAMAGE as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, why: str) -> ProtofedError:
    return ProtofedError(f"cannot read '{path}': {why}", "download or copy it again")
