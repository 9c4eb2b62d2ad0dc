"""How many clients each domain has, by name: ``skewed``, ``equal``, ``one``, ``random``, ...

Every task has these four; the published tasks add those of single papers.
"""

from __future__ import annotations

import math

import numpy as np

from protofed.data.sources import PUBLISHED
from protofed.data.task import TaskInfo
from protofed.errors import unknown

_EVERY_TASK = ("skewed", "equal", "one", "random")


def distributions(info: TaskInfo) -> tuple[str, ...]:
    """The names of the task's client distributions."""
    published = PUBLISHED.get(info.name)
    return (*_EVERY_TASK, *(published.distributions if published else ()))


def distribution(info: TaskInfo, name: str, seed: int = 0) -> dict[str, int]:
    """The number of clients of each domain under the named distribution.

    - ``skewed``: the task's main one, on which the papers compare methods;
    - ``equal``: the clients of ``skewed``, divided equally among the domains and rounded up;
    - ``one``: one client per domain;
    - ``random``: drawn by ``seed`` as the published code draws it. Seeds then also differ in their
      clients, so it says little about a method unless there are many seeds.
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
    than 10 clients of a domain is repeated (or twice the even share, if that is more, so that a
    task with hundreds of clients terminates too).
    """
    rng = np.random.RandomState(seed % 2**32)
    limit = max(10, 2 * math.ceil(clients / domains))
    first = int(cover)
    while True:
        drawn = rng.choice(domains, max(0, clients - first * domains))
        counts = np.bincount(drawn, minlength=domains) + first
        if counts.max() <= limit:
            return tuple(int(c) for c in counts)
