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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protofed.errors import ProtofedError

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_LIBSVM = re.compile(rb"\s*[+-]?\d+(\.0*)?\s+\d+:[-+.\deE]+\s")
_DAMAGE = (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile)


class Arrays(NamedTuple):
    """Images [N, H, W] or [N, H, W, 3] with digits as labels; ``split``: 0 training, 1 test."""

    images: Bytes
    labels: Ints
    split: Ints | None = None


def sniff(path: Path) -> str | None:
    """``idx-images``, ``idx-labels``, ``libsvm``, ``mat``, ``mat-hdf5``, ``npz`` or ``None``."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
        if head[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:
                head = file.read(4096)
        elif head[:3] == b"BZh":
            with bz2.open(path) as file:
                head = file.read(4096)
    except _DAMAGE:
        return None
    if head[:4] == b"\0\0\x08\x03":
        return "idx-images"
    if head[:4] == b"\0\0\x08\x01":
        return "idx-labels"
    if head[:10] == b"MATLAB 5.0":
        return "mat"
    if head[:10] == b"MATLAB 7.3" or head[:8] == b"\x89HDF\r\n\x1a\n":
        return "mat-hdf5"
    if _LIBSVM.match(head):
        return "libsvm"
    if head[:2] == b"PK" and zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except _DAMAGE:
            return None
        return "npz" if {"images.npy", "labels.npy"} <= set(names) else None
    return None


def read_idx(path: Path) -> NDArray[np.uint8]:
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
    rows = _unpacked(path).splitlines()
    values = np.zeros((len(rows), 256))  # libsvm leaves out zeros
    labels = np.zeros(len(rows), np.int64)
    n = 0
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        try:
            fields = np.array(row.replace(b":", b" ").split(), np.float64)
            index = fields[1::2].astype(np.int64) - 1
            if len(fields) % 2 == 0 or (len(index) and not 0 <= index.min() <= index.max() < 256):
                raise ValueError
            values[n, index] = fields[2::2]
            labels[n] = int(fields[0]) - 1
        except ValueError:
            raise _damaged(path, f"line {number} is not a label and up to 256 values") from None
        n += 1
    values = values[:n]
    if n and not -1 <= values.min() <= values.max() <= 1:
        raise _damaged(path, "its values are not in [-1, 1]")
    # truncated, not rounded: torchvision does so, and the published numbers come from it
    images = ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)
    return _checked(path, Arrays(images, labels[:n]))


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
    split = None if split is None else split.astype(np.int64)
    return _checked(path, Arrays(images, labels, split))


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
    readers: dict[str, Any] = {"libsvm": read_libsvm, "mat": read_mat, "npz": read_npz}
    arrays: Arrays = readers[kind](path)
    return arrays


def _unpacked(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            return gzip.decompress(content)
        return bz2.decompress(content) if content[:3] == b"BZh" else content
    except _DAMAGE as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, why: str) -> ProtofedError:
    return ProtofedError(f"cannot read '{path}': {why}", "download or copy it again")
