"""Readers of files that hold many images: MNIST's idx, USPS as libsvm text, SVHN's .mat, .npz.

A file's format is recognized by its content, never by its name.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from collections.abc import Iterator
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
_MATRIX, _COMPRESSED = 14, 15  # types of the elements of a MATLAB file
_NUMERIC_CLASSES = range(6, 16)
_NUMBERS = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}
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
    """SVHN's cropped digits: X [32, 32, 3, N], and y where 10 stands for the digit 0.

    Read here because SciPy's reader trusts a file: a wrong number in it may crash the process.
    """
    try:
        found = dict(_mat_arrays(path))
        images = np.array(np.moveaxis(found["X"], 3, 0), order="C")
        labels = _whole("y", found["y"].reshape(-1))
    except DAMAGE as error:
        raise _damaged(path, f"it has no X and y like SVHN's files ({error})") from None
    return _checked(path, Arrays(images, np.where(labels == 10, 0, labels)))


def _mat_arrays(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of numbers in a MATLAB 5 file, by name."""
    allowance = Allowance(path)
    content = unpacked(path, allowance)
    order = "<" if content[126:128] == b"IM" else ">"
    for kind, body in _mat_elements(content[128:], order):
        inner = [(kind, body)]
        if kind == _COMPRESSED:
            inner = list(_mat_elements(b"".join(unzipped(bytes(body), allowance)), order))
        for kind, body in inner:
            if kind != _MATRIX:
                continue
            (_, flags), (_, shape), (_, name), *parts = _mat_elements(body, order)
            if struct.unpack_from(f"{order}I", flags)[0] & 0xFF in _NUMERIC_CLASSES:
                kind, data = parts[0]
                numbers = np.frombuffer(data, order + _NUMBERS[kind])
                sides = np.frombuffer(shape, f"{order}u4")
                yield str(name, "latin-1"), numbers.reshape(sides, order="F")


def _mat_elements(content: bytes | memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """The elements that follow each other: the type and the body of each."""
    content, at = memoryview(content), 0
    while at < len(content):
        kind, size = struct.unpack_from(f"{order}2I", content, at)
        start, end = at + 8, at + 8 + size
        at = end if kind == _COMPRESSED else end + -size % 8
        if kind >> 16:  # a short one has its size and up to four bytes in place of the tag
            kind, size, at = kind & 0xFFFF, kind >> 16, start
            start, end = at - 4, at - 4 + size
        if end > len(content) or end - start != size:
            raise ValueError("it is cut off")
        yield kind, content[start:end]


def read_npz(path: Path) -> Arrays:
    """``images`` and ``labels``, and ``suggested_split`` if one file holds both parts."""
    try:
        allowance, split = Allowance(path), None
        with zipfile.ZipFile(path) as archive:

            def array(name: str) -> Any:
                content = io.BytesIO(read_member(archive, archive.getinfo(name), allowance))
                return np.lib.format.read_array(content, allow_pickle=False)

            images, labels = array("images.npy"), _whole("labels", array("labels.npy"))
            if "suggested_split.npy" in archive.namelist():
                split = _whole("suggested_split", array("suggested_split.npy"))
    except DAMAGE as error:
        raise _damaged(path, str(error)) from None
    return _checked(path, Arrays(images, labels, split))


def _whole(name: str, given: NDArray[Any]) -> Ints:
    found = given.astype(np.int64)
    if not np.array_equal(found, given):
        raise ValueError(f"{name} does not hold whole numbers")
    return found


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
        raise _damaged(path, "its split has values other than 0 (training) and 1 (test)")
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
