"""The cache of decoded images: one uint8 file for a task at a size, mapped into memory.

Its name comes from the content of the task's files, so that neither another folder nor a copy of
the same data is decoded again. The content is hashed once: after that the names, sizes and times
of the files stand for it, as they do for git.

Beside ``x.npy`` lies ``x.json`` with labels, notes and a checksum. Both are written under another
name first, and two processes that build the same task write the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from protofed.data.cache import cache_folder
from protofed.data.images import BadImage, decode
from protofed.data.specs import Plan, Sample
from protofed.data.task import Domain, Images
from protofed.data.trees import Stamp
from protofed.errors import ProtofedError
from protofed.files import write_atomic

# Raise this whenever pixels, splits or notes change: older caches are then left alone.
VERSION = 1
PATIENCE_SECONDS = 2.0
_CHUNK = 32

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Decoded:
    """A task's images, and what was learned on the way."""

    classes: tuple[str, ...]
    domains: Mapping[str, Domain]
    notes: tuple[str, ...]
    skipped: tuple[str, ...]
    digest: str


def folder() -> Path:
    """Where decoded images are kept."""
    return cache_folder() / "decoded"


def remembered(stamp: Stamp, options: Sequence[object]) -> str | None:
    """The name under which files with this stamp were decoded before."""
    try:
        return _stamp_file(stamp, options).read_text("utf-8").strip() or None
    except OSError:
        return None


def remember(stamp: Stamp, options: Sequence[object], name: str) -> None:
    """Note that files with this stamp are decoded under this name."""
    with contextlib.suppress(OSError):
        write_atomic(_stamp_file(stamp, options), name)


def cache_name(task: str, size: int, content: str, options: Sequence[object]) -> str:
    """The name of a cache, for this content with these options."""
    key = _hash([VERSION, PIL.__version__, content, *options])
    return f"{task}-{size}-{key}"


def load(name: str) -> Decoded | None:
    """A cache, or None where there is none or it is not what was written."""
    try:
        about = json.loads((folder() / f"{name}.json").read_text("utf-8"))
        # Copy on write: a tensor must be writable, and the file must not change.
        pixels = np.load(folder() / f"{name}.npy", mmap_mode="c", allow_pickle=False)
        if about["digest"] != _digest(about) or about["crc"] != _crc(pixels):
            return None
        return _decoded(about, pixels)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def build(name: str, plan: Plan, size: int, skip_bad: bool) -> Decoded:
    """Decode all images of the plan and keep them under the name."""
    samples = [s for part in plan.parts.values() for s in part]
    with _room(name, (len(samples), 3, size, size)) as pixels:
        bad = _decode_all(samples, pixels, size, name)
        if bad and not skip_bad:
            shown = "; ".join(f"'{samples[i].name}': {why}" for i, why in list(bad.items())[:5])
            more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
            raise ProtofedError(
                f"cannot decode {len(bad)} of {len(samples)} images: {shown}{more}",
                "mend or remove them, or leave them out with --skip-bad",
            )
        about = _about(plan, bad)
        if bad:
            good = np.ones(len(samples), bool)
            good[list(bad)] = False
            return _skipping(name, about, pixels[good])
        _seal(about, pixels)
        _keep(name, about, pixels)
        kept = load(name)
        # a cache folder that cannot be written must not stop a run
        return kept or _decoded(about, np.array(pixels))


def _skipping(name: str, about: dict[str, Any], pixels: Pixels) -> Decoded:
    _seal(about, pixels)
    with _room(name, pixels.shape) as own:
        own[:] = pixels
        _keep(name, about, own)
    return _decoded(about, pixels)


@contextlib.contextmanager
def _room(name: str, shape: tuple[int, ...]) -> Iterator[Pixels]:
    """An array in a file of its own in the cache folder, or in memory where that fails."""
    path = None
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle, text = tempfile.mkstemp(dir=folder(), prefix=f".{name}.", suffix=".tmp")
        os.close(handle)
        path = Path(text)
        pixels: Pixels = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    except OSError:
        pixels = np.empty(shape, np.uint8)
    try:
        yield pixels
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _keep(name: str, about: Mapping[str, Any], pixels: Pixels) -> None:
    """Give the file its name; the JSON comes last, so that it never lacks its pixels."""
    if not isinstance(pixels, np.memmap):
        return
    with contextlib.suppress(OSError):
        pixels.flush()
        path = Path(str(pixels.filename))
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.chmod(0o644)
        path.replace(folder() / f"{name}.npy")
        write_atomic(folder() / f"{name}.json", json.dumps(about))


def _decode_all(samples: Sequence[Sample], pixels: Pixels, size: int, name: str) -> dict[int, str]:
    """Fill the rows; returns the rows that could not be, and why.

    Threads, not processes: Pillow decodes and resizes without holding the interpreter's lock.
    """
    bad: dict[int, str] = {}
    stop = threading.Event()

    def some(start: int) -> int:
        end = min(start + _CHUNK, len(samples))
        for i in range(start, end):
            if stop.is_set():
                break
            try:
                pixels[i] = decode(samples[i].read(), size)
            except (BadImage, OSError) as error:
                pixels[i] = 0
                bad[i] = str(error)
        return end - start

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with (
        warnings.catch_warnings(action="ignore"),  # Pillow's, on odd metadata
        ThreadPoolExecutor(cores or 1) as pool,
        _Progress(name, len(samples)) as progress,
    ):
        try:
            for done in pool.map(some, range(0, len(samples), _CHUNK)):
                progress.advance(done)
        finally:
            stop.set()  # Ctrl-C: what is queued must not be decoded first
    return dict(sorted(bad.items()))


class _Progress:
    """A bar on standard error (a line where it is no terminal), if it takes more than 2 seconds."""

    def __init__(self, name: str, total: int) -> None:
        self.total, self.done, self.began = total, 0, time.perf_counter()
        self.text = f"decoding {total} images of {name.split('-')[0]} (once)"
        self.console = Console(stderr=True)
        self.bar: Progress | None = None

    def __enter__(self) -> _Progress:
        return self

    def advance(self, n: int) -> None:
        self.done += n
        if self.bar is None and time.perf_counter() - self.began > PATIENCE_SECONDS:
            self.bar = Progress(console=self.console, transient=True,
                                disable=not self.console.is_terminal)  # fmt: skip
            self.task = self.bar.add_task(self.text, total=self.total)
            self.bar.start()
            if not self.console.is_terminal:
                self.console.print(self.text, highlight=False, soft_wrap=True)
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _about(plan: Plan, bad: Mapping[int, str]) -> dict[str, Any]:
    parts, start = [], 0
    names: list[str] = []
    for (domain, split), samples in plan.parts.items():
        labels = []
        for i, sample in enumerate(samples, start):
            if i in bad:
                names.append(f"{sample.name}: {bad[i]}")
            else:
                labels.append(sample.label)
        if not labels:
            raise ProtofedError(f"no image for {split} is left of domain '{domain}'")
        parts.append([domain, split, labels])
        start += len(samples)
    return {"classes": plan.classes, "parts": parts, "notes": plan.notes, "skipped": names}


def _decoded(about: Mapping[str, Any], pixels: Pixels) -> Decoded:
    x = torch.from_numpy(pixels)
    images: dict[str, dict[str, Images]] = {}
    none = Images(x[:0], torch.empty(0, dtype=torch.int64))  # public images are for no test
    start = 0
    for domain, split, labels in about["parts"]:
        end = start + len(labels)
        own = Images(x[start:end], torch.tensor(labels, dtype=torch.int64))
        images.setdefault(domain, {})[split] = own
        start = end
    return Decoded(
        tuple(about["classes"]),
        {d: Domain(s["train"], s.get("test", none)) for d, s in images.items()},
        tuple(about["notes"]),
        tuple(about["skipped"]),
        about["digest"],
    )


def _seal(about: dict[str, Any], pixels: Pixels) -> None:
    about["shape"] = pixels.shape
    about["crc"] = _crc(pixels)
    about["sha256"] = hashlib.sha256(_bytes(pixels)).hexdigest()
    about["digest"] = _digest(about)


def _digest(about: Mapping[str, Any]) -> str:
    """Of classes, splits, labels and pixels: wherever they lay, and in whatever kind of file."""
    parts = [about[k] for k in ("classes", "parts", "shape", "sha256")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _crc(pixels: Pixels) -> int:
    """What tells a damaged file; three times as fast as a cryptographic hash."""
    return zlib.crc32(_bytes(pixels))


def _bytes(pixels: Pixels) -> memoryview:
    return memoryview(pixels).cast("B")  # type: ignore[arg-type]


def _stamp_file(stamp: Stamp, options: Sequence[object]) -> Path:
    return folder() / "stamps" / _hash([VERSION, PIL.__version__, stamp, *options])


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()[:24]
