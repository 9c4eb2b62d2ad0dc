"""The cache of decoded images: one memory-mapped uint8 array for each task and image size.

An entry is named after a hash of what it was made from. It consists of ``NAME.npy`` with the pixels
and ``NAME.json`` with labels, notes and checksums. Both are written under a temporary name and then
renamed; two processes that make the same entry write the same bytes. A damaged entry counts as
missing, and a run does not need a writable cache folder. Images may be private, so only their owner
can read the entries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.data.task import Domain, Images
from protofed.errors import ProtofedError
from protofed.files import expand_user, write_atomic

FORMAT = 3
"""Raise this whenever pixels, splits or notes change: older entries are then ignored."""

Pixels = NDArray[np.uint8]
Parts = Sequence[tuple[str, str, Sequence[int]]]
"""Domain, split and labels of each run of consecutive images."""


@dataclass(frozen=True)
class Decoded:
    """The images of an entry. ``digest`` is a hash of classes, splits, labels and pixels."""

    classes: tuple[str, ...]
    domains: Mapping[str, Domain]
    notes: tuple[str, ...]
    skipped: tuple[str, ...]
    digest: str


def cache_folder() -> Path:
    """The cache folder: ``PROTOFED_CACHE``, else ``protofed`` in the user's cache folder."""
    if own := os.environ.get("PROTOFED_CACHE"):
        return expand_user(own)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is invalid and must be ignored.
    root = Path(shared) if Path(shared).is_absolute() else expand_user("~/.cache")
    return root / "protofed"


def entry_name(task: str, size: int, *made_from: object) -> str:
    """The name of the entry for a task at a size, made from these plain values."""
    return f"{task}-{size}-{_hash(made_from)}"


def load(name: str) -> Decoded | None:
    """An entry, or None if it is missing or damaged."""
    try:
        metadata = json.loads((entries_folder() / f"{name}.json").read_text("utf-8"))
        # Copy on write: a tensor must be writable, and the file must not change.
        pixels = np.load(entries_folder() / f"{name}.npy", mmap_mode="c", allow_pickle=False)
        # A CRC detects a damaged file three times as fast as a cryptographic hash.
        if metadata["digest"] != _digest(metadata) or metadata["crc"] != zlib.crc32(pixels.data):
            return None
        return _decoded(metadata, pixels)
    except Exception:  # whatever is wrong, the entry is made again
        return None


def store(
    name: str,
    pixels: Pixels,
    classes: Sequence[str],
    parts: Parts,
    notes: Sequence[str] = (),
    skipped: Sequence[str] = (),
    source: Sequence[str] = (),
) -> Decoded:
    """Write an entry and return what it holds; ``skipped`` are the files left out.

    ``source`` says where the images were, for people who list the cache. An array from
    ``scratch`` is moved into place, any other is copied.
    """
    metadata = {
        "classes": classes,
        "parts": parts,
        "notes": notes,
        "skipped": skipped,
        "source": source,
        "shape": pixels.shape,
        "crc": zlib.crc32(pixels.data),
        "sha256": hashlib.sha256(pixels.data).hexdigest(),
    }
    metadata["digest"] = _digest(metadata)
    if isinstance(pixels, np.memmap):
        _publish(name, metadata, pixels)
    else:
        with scratch(name, pixels.shape) as mapped:
            if isinstance(mapped, np.memmap):
                mapped[:] = pixels
                _publish(name, metadata, mapped)
    return load(name) or _decoded(metadata, np.array(pixels))


@contextlib.contextmanager
def scratch(name: str, shape: tuple[int, ...]) -> Iterator[Pixels]:
    """An array to fill: a temporary file in the cache folder, or memory if that cannot be made."""
    with contextlib.ExitStack() as at_end:
        try:
            _make_private_folder()
            handle, made = tempfile.mkstemp(dir=entries_folder(), prefix=f".{name}.", suffix=".tmp")
            at_end.callback(Path(made).unlink, missing_ok=True)
            os.close(handle)
            pixels: Pixels = np.lib.format.open_memmap(made, "w+", np.uint8, shape)
            _reserve(Path(made))
        except OSError as error:
            at_end.close()  # what was reserved of a full disk is free again
            pixels = _in_memory(shape, error)
        yield pixels


def _in_memory(shape: tuple[int, ...], error: OSError) -> Pixels:
    try:
        return np.empty(shape, np.uint8)
    except MemoryError:
        raise ProtofedError(
            f"the decoded images take {math.prod(shape) / 1e9:.1f} GB, more than the memory, and "
            f"cannot be kept in '{cache_folder()}' ({error.strerror or error})",
            "lower --image-size, or set PROTOFED_CACHE to a folder with more space",
        ) from None


def recall(*key: object) -> str:
    """The text that ``remember`` stored under this key of plain values; empty if none."""
    return _text(_stamp(key))


def remember(text: str, *key: object) -> None:
    """Store a text, such as the name of an entry, under a key of plain values."""
    with contextlib.suppress(OSError):
        _make_private_folder()
        write_atomic(_stamp(key), text, private=True)


@dataclass(frozen=True)
class CacheEntry:
    """An entry on disk: its number of images, its size in bytes, and when it was made."""

    name: str
    source: str
    images: int
    size: int
    made: float


def entries() -> list[CacheEntry]:
    """All entries, newest first, including leftovers of unfinished ones."""
    found: dict[str, list[Path]] = {}
    for path in entries_folder().glob("*"):
        if path.is_file():
            found.setdefault(_entry_of(path), []).append(path)
    return sorted((_entry(*item) for item in found.items()), key=lambda entry: -entry.made)


def purge(names: Collection[str]) -> None:
    """Delete these entries. A process that has one mapped can go on using it."""
    for path in entries_folder().glob("*"):
        if path.is_file() and _entry_of(path) in names:
            path.unlink(missing_ok=True)
    for stamp in _stamp(()).parent.glob("*"):
        text = _text(stamp)
        if text in names or not (entries_folder() / f"{text:.100}.json").is_file():
            stamp.unlink(missing_ok=True)


def _text(stamp: Path) -> str:
    """What a stamp says; empty if it is missing or damaged."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return stamp.read_text("utf-8").strip()
    return ""


def _entry_of(path: Path) -> str:
    """The entry that a file belongs to, even a temporary one: .NAME.npy.0a1b.tmp."""
    return path.name.lstrip(".").partition(".")[0]


def _entry(name: str, files: list[Path]) -> CacheEntry:
    source, images = "unfinished or damaged", 0
    with contextlib.suppress(Exception):
        metadata = json.loads((entries_folder() / f"{name}.json").read_text("utf-8"))
        source, images = ", ".join(metadata.get("source", ())), int(metadata["shape"][0])
    stats = []
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # another process has renamed or deleted it
            stats.append(path.stat())
    made = max((s.st_mtime for s in stats), default=0.0)
    return CacheEntry(name, source, images, sum(s.st_size for s in stats), made)


def _reserve(path: Path) -> None:
    """Reserve disk space: writing to a mapped file on a full disk kills the process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def entries_folder() -> Path:
    return cache_folder() / "decoded"


def _make_private_folder() -> None:
    entries_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        entries_folder().chmod(0o700)  # older versions let others read it


def _stamp(key: object) -> Path:
    return entries_folder() / "stamps" / _hash(key)


def _publish(name: str, metadata: Mapping[str, Any], pixels: np.memmap[Any, Any]) -> None:
    """Move the files into place; the JSON comes last, so that it is never without its pixels."""
    with contextlib.suppress(OSError):
        pixels.flush()
        path = Path(str(pixels.filename))
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.replace(entries_folder() / f"{name}.npy")
        write_atomic(entries_folder() / f"{name}.json", json.dumps(metadata), private=True)


def _decoded(metadata: Mapping[str, Any], pixels: Pixels) -> Decoded:
    x = torch.from_numpy(pixels)
    images: dict[str, dict[str, Images]] = {}
    empty = Images(x[:0], torch.empty(0, dtype=torch.int64))  # a public domain has none for testing
    start = 0
    for domain, split, labels in metadata["parts"]:
        end = start + len(labels)
        y = torch.tensor(labels, dtype=torch.int64)
        images.setdefault(domain, {})[split] = Images(x[start:end], y)
        start = end
    return Decoded(
        tuple(metadata["classes"]),
        {
            d: Domain(s["train"], s.get("test", empty), s.get("validation"))
            for d, s in images.items()
        },
        tuple(metadata["notes"]),
        tuple(metadata["skipped"]),
        metadata["digest"],
    )


def _digest(metadata: Mapping[str, Any]) -> str:
    """A hash that depends neither on where the images were nor on the format of their files."""
    parts = [metadata[k] for k in ("classes", "parts", "shape", "sha256")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _hash(value: object) -> str:
    text = json.dumps([FORMAT, value], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
