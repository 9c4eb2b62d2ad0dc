"""Compressed files and archives, unpacked into memory no further than a limit.

A few megabytes can unpack to terabytes. Sizes that a file declares may be wrong, so what is really
unpacked counts, in steps small enough to stop in time.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from protofed.errors import ProtofedError

MAX_UNPACKED_GB = 4.0

DAMAGE = (OSError, EOFError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError,
          MemoryError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
          tarfile.TarError)  # fmt: skip
"""What the standard library and NumPy raise on files that are damaged, or were made to be."""

_STEP = 1 << 20
_ZIP_STEP = 1 << 12  # zipfile unpacks all of a step, which bzip2 may make 20,000 times as large
_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}

_limit: ContextVar[float] = ContextVar("max_unpacked_gb", default=MAX_UNPACKED_GB)


@contextmanager
def unpacking_at_most(gigabytes: float) -> Iterator[None]:
    """Inside this block, this is how much one file may unpack to."""
    before = _limit.set(gigabytes)
    try:
        yield
    finally:
        _limit.reset(before)


class Allowance:
    """How much memory a file may still take."""

    def __init__(self, path: Path) -> None:
        self._path, self._gigabytes = path, _limit.get()
        self._left = int(self._gigabytes * 1e9)

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ProtofedError(
                f"'{self._path}' unpacks to more than {self._gigabytes:g} GB",
                "unpack an archive of images into a folder, or raise the limit: "
                f"--max-unpacked-gb {2 * self._gigabytes:g}",
            )


def opened(path: Path) -> BinaryIO:
    """The file, open for reading; unpacked if it is compressed."""
    with path.open("rb") as file:
        head = file.read(8)
    found = (opener for magic, opener in _OPENERS.items() if head.startswith(magic))
    return cast(BinaryIO, next(found, open)(path, "rb"))


def unpacked(path: Path, allowance: Allowance) -> bytes:
    """The whole content of a file that may be compressed."""
    steps = []
    with opened(path) as file:
        while step := file.read(_STEP):
            allowance.take(len(step))
            steps.append(step)
    return b"".join(steps)


def unzipped(content: bytes, allowance: Allowance) -> Iterator[bytes]:
    """A zlib stream's content, step by step."""
    stream = zlib.decompressobj()
    while step := stream.decompress(content, _STEP):
        allowance.take(len(step))
        yield step
        content = stream.unconsumed_tail


def read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, allowance: Allowance) -> bytes:
    """A member of a zip archive: never more than its declared size."""
    allowance.take(info.file_size)
    with archive.open(info) as file:
        return b"".join(iter(partial(file.read, _ZIP_STEP), b""))


@contextmanager
def opened_tar(path: Path) -> Iterator[tuple[tarfile.TarFile, bool]]:
    """A tar archive, and whether it is compressed. All that is read from it counts."""
    with opened(path) as file:
        counted = cast(BinaryIO, _Counted(file, Allowance(path)))
        with tarfile.open(fileobj=counted, mode="r:") as archive:
            yield archive, not isinstance(file, io.BufferedReader)


class _Counted:
    """A stream that yields no more bytes than allowed: a tar's headers may claim any size."""

    def __init__(self, file: BinaryIO, allowance: Allowance) -> None:
        self._file, self._allowance = file, allowance
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int) -> bytes:
        self._allowance.take(size)
        return self._file.read(size)
