"""What is wrong, or odd, with a task's images: counts, files that are none, duplicates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from protofed.data.find import find
from protofed.data.info import FOLDER
from protofed.data.real import own_folder, plan, real_task
from protofed.data.specs import SPECS, SPLITS
from protofed.data.task import Task


@dataclass
class Report:
    """What was found. ``bad`` and ``crossing`` hold names of files."""

    task: Task
    counts: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = field(default_factory=dict)
    """Training and test images of each domain: those that are there, and those published."""
    bad: tuple[str, ...] = ()
    crossing: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of the same content, one a training image and one a test image."""
    twins: int = 0
    """Images with the content of an earlier one of the same split."""
    disputed: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of the same content with different classes or domains."""


def verify(name: str, data: str | Path | None = None, test_split: str | None = None) -> Report:
    """Look at every image of a task."""
    from protofed.data import load_task

    real = name in SPECS or name.startswith(FOLDER)
    task = (
        real_task(name, data, test_split=test_split, skip_bad=True)
        if real
        else load_task(name, test_split=test_split)
    )
    report = Report(task, bad=task.skipped)
    spec = SPECS.get(name)
    # published counts are those of the usual split
    official = spec.official if spec and task.test_split == spec.test_splits[0] else {}
    for domain, images in task.domains.items():
        have = (len(images.train), len(images.test))
        report.counts[domain] = (have, official.get(domain))
    first: dict[bytes, dict[str, tuple[str, str, int]]] = {}
    contents = _files(name, data, task) if real else _pixels(task)
    for domain, split, label, title, content in contents:
        seen = first.setdefault(hashlib.sha256(content).digest(), {})
        for other, (where, before, known) in seen.items():
            if (where, known) != (domain, label):
                report.disputed.append((before, title))
            if other != split:
                report.crossing.append((before, title))
        if split in seen:
            report.twins += 1
        else:
            seen[split] = (domain, title, label)
    return report


def _files(
    name: str, data: str | Path | None, task: Task
) -> Iterator[tuple[str, str, int, str, bytes]]:
    paths = find(SPECS[name], data) if name in SPECS else [own_folder(name)]
    assert task.test_split is not None
    for (domain, split), samples in plan(name, paths, task.test_split).parts.items():
        for sample in samples:
            content = sample.read()
            if len(content):  # empty files are bad, not alike
                raw = content if isinstance(content, bytes) else content.tobytes()
                yield domain, split, sample.label, sample.name, raw


def _pixels(task: Task) -> Iterator[tuple[str, str, int, str, bytes]]:
    for name, domain in task.domains.items():
        for split, images in zip(SPLITS, (domain.train, domain.test), strict=True):
            for i, (x, y) in enumerate(zip(images.x, images.y.tolist(), strict=True)):
                yield name, split, y, f"{name} {split}[{i}]", x.numpy().tobytes()
