"""A task at a glance: its images by class, a contact sheet, and what is wrong with its files."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from protofed.data.decode import FILE_BYTES
from protofed.data.load import load_task, task_files
from protofed.data.sources import PUBLISHED
from protofed.data.task import MAX_IMAGE_PIXELS, SPLITS, Reading, Task
from protofed.data.unpack import MAX_UNPACKED_GB

_GAP = 4
_MARGIN = 10
_INK, _FAINT, _PAPER = "#222222", "#b0b0b0", "white"


def class_counts(task: Task) -> dict[str, dict[str, list[int]]]:
    """The number of images of each class, by domain and split."""
    return {
        name: {
            split: torch.bincount(images.y, minlength=len(task.classes)).tolist()
            for split, images in (("train", domain.train), ("test", domain.test))
        }
        for name, domain in task.domains.items()
    }


def contact_sheet(task: Task, each: int = 4) -> bytes:
    """A PNG with a row per domain and a column per class, ``each`` images in every cell.

    They are evenly spaced training images; small ones are enlarged.
    """
    import matplotlib

    zoom = max(1, 64 // task.image_size)
    side = task.image_size * zoom
    across = 1 if each == 1 else 2
    down = -(-each // across)
    # Pillow's own font has Latin letters only; matplotlib ships one with many scripts.
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(fonts / "DejaVuSans.ttf", 15)
    width = max([across * (side + _GAP), *(int(font.getlength(c)) + 13 for c in task.classes)])
    height = down * (side + _GAP)
    left = max(int(font.getlength(d)) + 1 for d in task.domains) + 2 * _MARGIN
    top = 40
    whole = left + len(task.classes) * (width + _MARGIN)
    page = Image.new("RGB", (whole, top + len(task.domains) * (height + _MARGIN)), _PAPER)
    pen = ImageDraw.Draw(page)
    for column, name in enumerate(task.classes):
        middle = left + column * (width + _MARGIN) + width // 2
        pen.text((middle, top // 2), name, _INK, font, anchor="mm")
    for row, (name, domain) in enumerate(task.domains.items()):
        y = top + row * (height + _MARGIN)
        pen.text((_MARGIN, y + height // 2), name, _INK, font, anchor="lm")
        for column in range(len(task.classes)):
            x = left + column * (width + _MARGIN) + (width - across * (side + _GAP)) // 2
            rows = torch.nonzero(domain.train.y == column).flatten()
            if not len(rows):
                middle = x + across * (side + _GAP) // 2
                pen.text((middle, y + height // 2), "none", _FAINT, font, anchor="mm")
            n = min(each, len(rows))
            for i in range(n):
                pixels = domain.train.x[rows[i * len(rows) // n]].permute(1, 2, 0).numpy()
                image = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
                corner = (x + i % across * (side + _GAP), y + i // across * (side + _GAP))
                page.paste(image, corner)
    buffer = io.BytesIO()
    page.save(buffer, "PNG")
    return buffer.getvalue()


@dataclass
class Report:
    """What is wrong or unusual about a task's images.

    ``counts`` are the training and test images of each domain, as found and as published; ``bad``
    the files that cannot be decoded. ``leaked`` are pairs of a training and a test image with the
    same content, ``conflicting`` such pairs in different classes or domains. ``repeated`` counts
    the images with the same content as an earlier one of the same split.
    """

    task: Task
    bad: tuple[str, ...]
    counts: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = field(default_factory=dict)
    leaked: list[tuple[str, str]] = field(default_factory=list)
    conflicting: list[tuple[str, str]] = field(default_factory=list)
    repeated: int = 0


def verify(
    name: str,
    data: str | Path | None = None,
    test_split: str | None = None,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    max_unpacked_gb: float = MAX_UNPACKED_GB,
) -> Report:
    reading = Reading(True, max_image_pixels, max_unpacked_gb)
    task = load_task(name, data, test_split=test_split, **vars(reading))
    report = Report(task, bad=task.skipped)
    published = PUBLISHED.get(name)
    # the published counts are those of the default split
    default = published is not None and task.test_split == published.info.test_splits[0]
    counts = published.counts if published and default else {}
    for domain, images in task.domains.items():
        report.counts[domain] = ((len(images.train), len(images.test)), counts.get(domain))
    first: dict[bytes, dict[str, tuple[str, str, int]]] = {}
    for domain, split, label, title, content in _contents(task, data, reading):
        seen = first.setdefault(hashlib.sha256(content).digest(), {})
        for other, (where, before, known) in seen.items():
            if (where, known) != (domain, label):
                report.conflicting.append((before, title))
            if other != split:
                report.leaked.append((before, title))
        if split in seen:
            report.repeated += 1
        else:
            seen[split] = (domain, title, label)
    return report


def _contents(
    task: Task, data: str | Path | None, reading: Reading
) -> Iterator[tuple[str, str, int, str, bytes]]:
    """Domain, split, label, name and content of every image: of its file, if it has one."""
    if task.test_split is None:
        for name, domain in task.domains.items():
            for split, images in zip(SPLITS, (domain.train, domain.test), strict=True):
                for i, (x, y) in enumerate(zip(images.x, images.y.tolist(), strict=True)):
                    yield name, split, y, f"{name} {split}[{i}]", x.numpy().tobytes()
        return
    _, plan = task_files(task.name, data, task.test_split, reading)
    for (name, split), samples in plan().parts.items():
        for sample in samples:
            content: bytes | NDArray[np.uint8] = b""
            if sample.size <= FILE_BYTES * reading.max_image_pixels:
                with suppress(OSError):
                    content = sample.read()
            if len(content):  # the others are bad, not duplicates
                raw = content if isinstance(content, bytes) else content.tobytes()
                yield name, split, sample.label, sample.name, raw
