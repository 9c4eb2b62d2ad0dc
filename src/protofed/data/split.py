"""Splitting the domains of a task into clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protofed import keys
from protofed.data.task import Task
from protofed.errors import ProtofedError, unknown


@dataclass(frozen=True)
class Share:
    """A client's part of the data: rows of its domain's training images."""

    name: str
    domain: str
    rows: Tensor


def split(
    task: Task, clients: Mapping[str, int], samples: Mapping[str, float], seed: int
) -> list[Share]:
    """Give each client its own random samples of one domain, without overlap.

    ``samples`` is, per domain, a count (int) or a fraction of the training images (float). A
    domain without clients is only tested on. Clients are named ``domain-0``, ``domain-1``, ...
    """
    for domain in [*clients, *samples]:
        if domain not in task.domains:
            raise unknown(f"domain of {task.name}", domain, task.domains)
    shares = []
    for domain, images in task.domains.items():
        count, pool = clients.get(domain, 0), len(images.train)
        if not count:
            continue
        if domain not in samples:
            raise ProtofedError(f"no number of samples is given for clients of domain '{domain}'")
        each = _count(samples[domain], pool)
        if each < 1 or each * count > pool:
            raise ProtofedError(
                f"domain '{domain}' has {pool} training images: too few for {count} clients "
                f"with {each} each"
                if each
                else f"{samples[domain]} of domain '{domain}' is none",
                f"lower --clients or --samples: at most {pool // count} each for {count} clients",
            )
        order = torch.from_numpy(keys.generator(seed, domain, "split").permutation(pool))
        shares += [
            Share(f"{domain}-{i}", domain, order[i * each : (i + 1) * each]) for i in range(count)
        ]
    if not shares:
        raise ProtofedError("no domain has a client", "give --clients at least one, e.g. scan=1")
    return shares


def _count(samples: float, pool: int) -> int:
    return samples if isinstance(samples, int) else int(samples * pool)
