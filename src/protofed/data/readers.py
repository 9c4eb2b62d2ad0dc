"""Readers of files that hold many images: MNIST's idx, USPS as libsvm text, SVHN's .mat, .npz.

A file's format is recognized by its content, never by its name.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protofed.data.unpack import DAMAGE, Allowance, opened, read_member, unpacked, unzipped
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
_COMPRESSED = 15  # the type of an element of a MATLAB file
_LONGEST_LINE = 1 << 16


class Arrays(NamedTuple):
    """Images [N, H, W] or [N, H, W, 3] with digits as labels; ``split``: 0 training, 1 test."""

    images: Bytes
    labels: Ints
    split: Ints | None = None


def sniff(path: Path) -> str | None:
    """``idx-images``, ``idx-labels``, ``libsvm``, ``mat``, ``mat-hdf5``, ``npz`` or ``None``."""
    try:
        if not path.is_file():
            return None
        with opened(path) as file:
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
    except DAMAGE:
        pass
    return None


def read_idx(path: Path) -> Bytes:
    """MNIST's format, gzipped or not: unsigned bytes in any number of dimensions."""
    try:
        content = unpacked(path, Allowance(path))
        if content[:3] != b"\0\0\x08":
            raise ValueError("it is not an idx file of bytes")
        dims = content[3]
        shape = struct.unpack_from(f">{dims}I", content, 4)
        body = np.frombuffer(content, np.uint8, offset=4 + 4 * dims)
        if len(body) != math.prod(shape):
            raise ValueError(f"{len(body)} bytes where its header says {math.prod(shape)}")
        return body.reshape(shape)
    except DAMAGE as error:
        raise _damaged(path, str(error)) from None


def read_libsvm(path: Path) -> Arrays:
    """USPS from libsvm: 256 values in [-1, 1] per line, labels 1 to 10 for the digits 0 to 9."""
    allowance = Allowance(path)
    images, labels = [], []
    try:
        content = io.BytesIO(unpacked(path, allowance))
    except DAMAGE as error:
        raise _damaged(path, str(error)) from None
    for number, line in enumerate(content, 1):
        if not line.strip():
            continue
        allowance.take(1 << 10)
        try:
            label, pixels = _libsvm_line(line)
        except ValueError:
            raise _damaged(path, f"line {number} is not a label and up to 256 values") from None
        images.append(pixels)
        labels.append(label - 1)
    shape = (-1, 16, 16)
    return _checked(path, Arrays(np.array(images, np.uint8).reshape(shape), np.array(labels, int)))


def _libsvm_line(line: bytes) -> tuple[int, Bytes]:
    if len(line) > _LONGEST_LINE:
        raise ValueError
    fields = np.array(line.replace(b":", b" ").split(), np.float64)
    if len(fields) % 2 == 0:
        raise ValueError
    label, index, given = fields[0], fields[1::2], fields[2::2]
    if label not in range(1, 11) or not set(index) <= set(range(1, 257)):
        raise ValueError
    values = np.zeros(256)  # libsvm leaves out zeros
    values[index.astype(np.int64) - 1] = given
    if not -1 <= values.min() <= values.max() <= 1:
        raise ValueError
    # truncated, not rounded: torchvision does so, and the published numbers come from it
    return int(label), ((values + 1) / 2 * 255).astype(np.uint8)


def read_mat(path: Path) -> Arrays:
    """SVHN's cropped digits: X [32, 32, 3, N], and y where 10 stands for the digit 0."""
    from scipy.io import loadmat, whosmat  # slow to import, and rarely needed

    try:
        file = _unpacked_mat(path)
        kinds = {name: kind for name, _, kind in whosmat(file)}
        if kinds["X"] != "uint8" or kinds["y"] in ("cell", "struct", "object", "function"):
            raise ValueError("they are not arrays of numbers")
        content = loadmat(file, variable_names=["X", "y"])
        images = np.ascontiguousarray(np.moveaxis(content["X"], 3, 0))
        labels = content["y"].reshape(-1).astype(np.int64)
    except ProtofedError:
        raise
    except Exception as error:  # SciPy's reader trusts the file, and stumbles anywhere
        raise _damaged(path, f"it has no X and y like SVHN's files ({error})") from None
    return _checked(path, Arrays(images, np.where(labels == 10, 0, labels)))


def _unpacked_mat(path: Path) -> io.BytesIO:
    """A MATLAB 5 file with its compressed elements unpacked, which SciPy would do without limit."""
    allowance = Allowance(path)
    content = unpacked(path, allowance)
    order, at = "<" if content[126:128] == b"IM" else ">", 128
    plain = io.BytesIO()
    plain.write(content[:at])
    while at < len(content):
        kind, size = struct.unpack_from(f"{order}2I", content, at)
        element, at = content[at : at + 8 + size], at + 8 + size
        for step in unzipped(element[8:], allowance) if kind == _COMPRESSED else [element]:
            plain.write(step)
    plain.seek(0)
    return plain


def read_npz(path: Path) -> Arrays:
    """``images`` and ``labels``, and ``suggested_split`` if one file holds both parts."""
    try:
        allowance, split = Allowance(path), None
        with zipfile.ZipFile(path) as archive:

            def array(name: str) -> Any:
                content = io.BytesIO(read_member(archive, archive.getinfo(name), allowance))
                return np.lib.format.read_array(content, allow_pickle=False)

            def whole_numbers(name: str) -> Ints:
                given = array(name)
                found: Ints = given.astype(np.int64)
                if not np.array_equal(found, given):
                    raise ValueError(f"{name} does not hold whole numbers")
                return found

            images, labels = array("images.npy"), whole_numbers("labels.npy")
            if "suggested_split.npy" in archive.namelist():
                split = whole_numbers("suggested_split.npy")
    except DAMAGE as error:
        raise _damaged(path, str(error)) from None
    return _checked(path, Arrays(images, labels, split))


def _checked(path: Path, arrays: Arrays) -> Arrays:
    images, labels, split = arrays
    right = images.ndim == 3 or images.shape[3:] == (3,)
    if images.dtype != np.uint8 or not right or 0 in images.shape[1:3]:
        raise _damaged(path, f"images are {images.dtype} {images.shape}, not bytes [N, H, W(, 3)]")
    if labels.shape != images.shape[:1] or (split is not None and split.shape != labels.shape):
        raise _damaged(path, f"{len(images)} images but {labels.size} labels")
    if len(labels) and not 0 <= labels.min() <= labels.max() <= 9:
        raise _damaged(path, f"labels go from {labels.min()} to {labels.max()}, not 0 to 9")
    if split is not None and len(split) and not 0 <= split.min() <= split.max() <= 1:
        raise _damaged(path, "its split has other values than 0 (training) and 1 (test)")
    return arrays


def pair(images: Path, labels: Path) -> Arrays:
    """An idx file of images with the idx file of their labels."""
    return _checked(images, Arrays(read_idx(images), read_idx(labels).astype(np.int64)))


def read_arrays(path: Path, kind: str) -> Arrays:
    """A file that holds images and labels; ``kind`` is what ``sniff`` returned."""
    if kind == "mat-hdf5":
        raise _damaged(path, "it is a MATLAB 7.3 file; SVHN's own files have version 5")
    return {"libsvm": read_libsvm, "mat": read_mat, "npz": read_npz}[kind](path)


def _damaged(path: Path, why: str) -> ProtofedError:
    return ProtofedError(f"cannot read '{path}': {why}", "download or copy it again")
