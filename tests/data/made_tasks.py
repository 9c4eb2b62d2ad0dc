"""Small tasks with chosen labels, and what the shares of a split look like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from protofed.data import Augment, Domain, Images, Share, Task


def images(labels: Sequence[int], side: int = 1) -> Images:
    y = torch.tensor(list(labels), dtype=torch.int64)
    shape = (len(y), 3, side, side)
    return Images(torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8)), y)


def made(
    labels: Mapping[str, Sequence[int]],
    name: str = "made",
    classes: int = 5,
    clients: int | Mapping[str, int] = 2,
    samples: float = 0.2,
    leftover: bool = False,
    repair: bool = False,
    side: int = 1,
) -> Task:
    """A task with these training labels per domain and ten test images."""
    counts = clients if isinstance(clients, Mapping) else dict.fromkeys(labels, clients)
    return Task(
        name=name,
        classes=tuple(f"class {k}" for k in range(classes)),
        domains={d: Domain(images(y, side), images(range(10), side)) for d, y in labels.items()},
        augment=Augment(),
        clients=counts,
        samples=dict.fromkeys(labels, samples),
        leftover=leftover,
        repair=repair,
    )


def balanced(per_class: int, classes: int = 5, **kwargs: Any) -> Task:
    labels = [k for k in range(classes) for _ in range(per_class)]
    return made({"a": labels}, classes=classes, **kwargs)


def sizes(shares: Sequence[Share]) -> list[int]:
    return [len(s.rows) for s in shares]


def no_overlap(shares: Sequence[Share]) -> bool:
    seen = Counter((s.domain, int(r)) for s in shares for r in s.rows)
    return max(seen.values()) == 1


def class_counts(task: Task, share: Share) -> list[int]:
    labels = task.domains[share.domain].train.y[share.rows]
    return torch.bincount(labels, minlength=len(task.classes)).tolist()


def same(a: Sequence[Share], b: Sequence[Share]) -> bool:
    return all(torch.equal(s.rows, t.rows) for s, t in zip(a, b, strict=True))
