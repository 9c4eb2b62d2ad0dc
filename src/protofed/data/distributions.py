"""How many clients each domain has, by name: ``skewed``, ``equal``, ``one``, ``random``, ...

Every task has these four; the published tasks add those of single papers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from protofed.data.task import TaskInfo
from protofed.errors import unknown

# In the order of the task's domains. The paper of FPL prints 3, 7, 6, 4 for Digits; its code, its
# results and I2PFL have 6, 4, 3, 7. FedSeProto states its clients for PACS only.
PUBLISHED: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "digits": {"skewed": (6, 4, 3, 7), "printed": (3, 7, 6, 4), "fedseproto": (2, 3, 4, 1)},
    "office_caltech": {"skewed": (3, 2, 1, 4), "fedseproto": (2, 3, 4, 1)},
    "pacs": {"skewed": (3, 2, 1, 4), "fedseproto": (2, 3, 4, 1)},
    "vlcs": {"skewed": (2, 3, 4, 1), "fedseproto": (2, 3, 4, 1)},
}


def distributions(task: TaskInfo) -> tuple[str, ...]:
    """The names of the client distributions that the task has."""
    return tuple(dict.fromkeys(("skewed", "equal", "one", "random", *PUBLISHED.get(task.name, {}))))


def distribution(task: TaskInfo, name: str, seed: int = 0) -> dict[str, int]:
    """The number of clients of each domain under the distribution of that name.

    - ``skewed``: the task's main one, as the papers compare methods on it;
    - ``equal``: as many for each domain, the clients of ``skewed`` divided up, rounded up;
    - ``one``: a client for each domain;
    - ``random``: drawn by ``seed`` as the published code draws it. Seeds then differ in their
      clients too, so it says little about a method unless there are many of them.
    """
    if name not in distributions(task):
        raise unknown(f"client distribution of {task.name}", name, distributions(task))
    assert task.domains is not None and task.clients is not None, "the task's domains are unknown"
    published = PUBLISHED.get(task.name, {})
    counts = published.get(name) or published.get("skewed") or tuple(task.clients.values())
    if name == "equal":
        counts = (math.ceil(sum(counts) / len(task.domains)),) * len(task.domains)
    elif name == "one":
        counts = (1,) * len(task.domains)
    elif name == "random":
        # Digits alone may leave a domain without a client
        counts = _draw(len(task.domains), sum(counts), seed, spread=task.name != "digits")
    elif name not in published:
        return dict(task.clients)
    return dict(zip(task.domains, counts, strict=True))


def _draw(domains: int, clients: int, seed: int, spread: bool) -> tuple[int, ...]:
    """Numpy's old global generator, seeded with the run's seed, as the published code uses it.

    ``spread``: a client of each domain first, and only the others are drawn. A draw with more
    than 10 clients of a domain is repeated (twice the even share where that is more, so that
    a task with hundreds of clients ends too).
    """
    rng = np.random.RandomState(seed % 2**32)
    limit = max(10, 2 * math.ceil(clients / domains))
    first = int(spread)
    while True:
        drawn = rng.choice(domains, max(0, clients - first * domains))
        counts = np.bincount(drawn, minlength=domains) + first
        if counts.max() <= limit:
            return tuple(int(c) for c in counts)
