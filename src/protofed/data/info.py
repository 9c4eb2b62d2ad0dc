"""The tasks by name, and what is known about them before any image is read.

Every task can give its domains ``skewed``, ``equal``, ``one`` or ``random`` numbers of clients; the
published tasks add the distributions of single papers.
"""

from __future__ import annotations

import math

import numpy as np

from protofed.data.glyphs import INFO as GLYPHS
from protofed.data.sources import PUBLISHED
from protofed.data.sources.folder import FOLDER, TEST_SPLITS
from protofed.data.task import TaskInfo
from protofed.errors import ProtofedError, unknown

TASKS: tuple[str, ...] = ("glyphs", *PUBLISHED)
"""The names of the tasks; ``folder:PATH`` is a task too."""

_EVERY_TASK = ("skewed", "equal", "one", "random")


def describe(name: str) -> TaskInfo:
    """The static description of a task. Nothing is read from the disk."""
    if name == "glyphs":
        return GLYPHS
    if name in PUBLISHED:
        return PUBLISHED[name].info
    if name in (FOLDER, FOLDER.rstrip(":")):
        raise ProtofedError("task folder: which folder?", "write --task folder:PATH")
    if name.startswith(FOLDER):
        return TaskInfo(name, None, None, None, None, None, test_splits=TEST_SPLITS)
    if "/" in name:
        hint = f"for a folder of images, write --task {FOLDER}{name:.100}"
        raise ProtofedError(f"unknown task '{name:.100}'", hint)
    raise unknown("task", name, (*TASKS, "folder:PATH"))


def distributions(info: TaskInfo) -> tuple[str, ...]:
    """The names of the task's client distributions."""
    published = PUBLISHED.get(info.name)
    return (*_EVERY_TASK, *(published.distributions if published else ()))


def distribution(info: TaskInfo, name: str, seed: int = 0) -> dict[str, int]:
    """The number of clients of each domain under the named distribution.

    - ``skewed``: the task's main one, on which the papers compare methods;
    - ``equal``: the clients of ``skewed``, divided equally among the domains and rounded up;
    - ``one``: one client per domain;
    - ``random``: drawn by ``seed`` as in the published code, so seeds also differ in their clients.
    """
    if name not in distributions(info):
        raise unknown(f"client distribution of {info.name}", name, distributions(info))
    assert info.domains is not None and info.clients is not None, "the folder was not read yet"
    published = PUBLISHED.get(info.name)
    domains, total = len(info.domains), sum(info.clients.values())
    if name == "skewed":
        return dict(info.clients)
    if name == "equal":
        counts = (math.ceil(total / domains),) * domains
    elif name == "one":
        counts = (1,) * domains
    elif name == "random":
        counts = _draw(domains, total, seed, published is None or published.random_covers_domains)
    else:
        assert published is not None
        counts = published.distributions[name]
    return dict(zip(info.domains, counts, strict=True))


def _draw(domains: int, clients: int, seed: int, cover: bool) -> tuple[int, ...]:
    """Drawn by NumPy's legacy generator, seeded with the run's seed, as in the published code.

    ``cover``: every domain gets one client first, and only the others are drawn. A draw with more
    than 10 clients of a domain (or twice the even share, for large tasks) is repeated.
    """
    rng = np.random.RandomState(seed % 2**32)
    limit = max(10, 2 * math.ceil(clients / domains))
    first = int(cover)
    while True:
        drawn = rng.choice(domains, max(0, clients - first * domains))
        counts = np.bincount(drawn, minlength=domains) + first
        if counts.max() <= limit:
            return tuple(int(c) for c in counts)


__all__ = ["FOLDER", "TASKS", "TaskInfo", "describe", "distribution", "distributions"]
