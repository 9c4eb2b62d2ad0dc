"""A task without its images, for code that wants a ``Task`` and not a ``TaskInfo``."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from protofed.data.info import describe
from protofed.data.task import IMAGE_SIZE, Augment, Domain, Images, Task


def outline(name: str, domains: Iterable[str]) -> Task:
    """A task without its images; ``domains`` are those of a folder."""
    info = describe(name)
    empty = Images(
        torch.empty(0, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.uint8), torch.empty(0).long()
    )
    names = info.domains or tuple(domains)
    return Task(
        name=name,
        classes=info.classes or (),
        domains={d: Domain(empty, empty) for d in names},
        augment=Augment(),
        clients=info.clients or dict.fromkeys(names, 1),
        samples=info.samples or dict.fromkeys(names, 1.0),
        note=info.about,
        leftover=info.leftover,
        repair=info.repair,
        test_split=info.test_splits[0] if info.test_splits else None,
    )
