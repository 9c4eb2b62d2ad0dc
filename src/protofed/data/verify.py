"""What is wrong or unusual about a task's images: counts, files that are not images, duplicates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from protofed.data.load import load_task, task_plan
from protofed.data.sources import PUBLISHED
from protofed.data.task import SPLITS, Task


@dataclass
class Report:
    """What was found."""

    task: Task
    counts: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = field(default_factory=dict)
    """Training and test images of each domain: those found, and those published."""
    bad: tuple[str, ...] = ()
    """Files that cannot be decoded."""
    leaked: list[tuple[str, str]] = field(default_factory=list)
    """Pairs with the same content, one a training image and one a test image."""
    repeated: int = 0
    """Images with the same content as an earlier one of the same split."""
    conflicting: list[tuple[str, str]] = field(default_factory=list)
    """Pairs with the same content in different classes or domains."""


def verify(name: str, data: str | Path | None = None, test_split: str | None = None) -> Report:
    """Look at every image of a task."""
    task = load_task(name, data, test_split=test_split, skip_bad=True)
    report = Report(task, bad=task.skipped)
    published = PUBLISHED.get(name)
    # the published counts are those of the default split
    default = published is not None and task.test_split == published.info.test_splits[0]
    for domain, images in task.domains.items():
        found = (len(images.train), len(images.test))
        report.counts[domain] = (found, published.counts[domain] if published and default else None)
    first: dict[bytes, dict[str, tuple[str, str, int]]] = {}
    for domain, split, label, title, content in _contents(task, data):
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


def _contents(task: Task, data: str | Path | None) -> Iterator[tuple[str, str, int, str, bytes]]:
    """Domain, split, label, name and content of every image: of its file, if it has one."""
    if task.test_split is None:
        for name, domain in task.domains.items():
            for split, images in zip(SPLITS, (domain.train, domain.test), strict=True):
                for i, (x, y) in enumerate(zip(images.x, images.y.tolist(), strict=True)):
                    yield name, split, y, f"{name} {split}[{i}]", x.numpy().tobytes()
        return
    for (name, split), samples in task_plan(task.name, data, task.test_split).parts.items():
        for sample in samples:
            content = sample.read()
            if len(content):  # empty files are bad, not duplicates
                raw = content if isinstance(content, bytes) else content.tobytes()
                yield name, split, sample.label, sample.name, raw
