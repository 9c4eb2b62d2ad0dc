"""Public images: without labels, seen by all clients, held by none.

They stand for a public data set, which some methods need beside the clients' own images. Every
round draws its own, keyed: clients that never met agree on them. No test image is among them, and
none of a domain that no client has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protofed import keys
from protofed.data import TASKS, Images, Share, Task, load_task
from protofed.errors import ProtofedError, unknown
from protofed.methods.base import PublicImages

UNUSED = "unused"


@dataclass(frozen=True)
class Pool:
    """Images to draw from, which of them are public, and how many a round takes."""

    x: Tensor
    rows: Tensor
    each: int


class Public:
    """The public images of a run; ``draw`` gives those of a round."""

    def __init__(
        self, pools: Mapping[str, Pool], seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.pools, self.seed, self.device = pools, seed, device
        self._drawn: dict[int, Images] = {}

    @property
    def counts(self) -> dict[str, int]:
        """How many images a round takes from where."""
        return {name: pool.each for name, pool in self.pools.items()}

    def draw(self, round: int) -> Images:
        """The images of a round, all labelled 0; the last two rounds' are kept at hand."""
        found = self._drawn.get(round)
        if found is None:
            parts = []
            for name, pool in self.pools.items():
                rng = keys.generator(self.seed, round, name, "public")
                chosen = rng.permutation(len(pool.rows))[: pool.each]
                parts.append(pool.x[pool.rows[torch.from_numpy(chosen)]])
            x = torch.cat(parts)
            # copies from the host are complete when they return: all streams of a GPU may read
            found = Images(x.to(self.device), torch.zeros(len(x)).long().to(self.device))
            # a new dictionary: workers read the old one meanwhile
            self._drawn = {r: i for r, i in self._drawn.items() if r == round - 1} | {round: found}
        return found


def make_public(
    wanted: PublicImages | None,
    task: Task,
    shares: Sequence[Share],
    seed: int,
    device: torch.device | str = "cpu",
) -> Public | None:
    """The public images a method wants of a task that is split into these shares."""
    if wanted is None:
        return None
    if wanted.source == UNUSED or wanted.source in task.domains:
        found = _unused(task, shares)
        if wanted.source != UNUSED:
            found = {wanted.source: found.get(wanted.source, torch.empty(0, dtype=torch.int64))}
        images = {name: task.domains[name].train.x for name in found}
    elif wanted.source in TASKS:
        other = load_task(wanted.source)
        if other.image_size != task.image_size:
            raise ProtofedError(
                f"public images of {other.name} have {other.image_size} pixels, those of "
                f"{task.name} {task.image_size}",
                "choose another task for them",
            )
        images = {f"{other.name} {d}": domain.train.x for d, domain in other.domains.items()}
        found = {name: torch.arange(len(x)) for name, x in images.items()}
    else:
        raise unknown("source of public images", wanted.source, (UNUSED, *task.domains, *TASKS))
    some = {name: rows for name, rows in found.items() if len(rows)}
    if not some:
        raise ProtofedError(
            f"there are no public images: clients hold every training image of "
            f"{' and '.join(found)}",
            "lower --samples or --clients, or take another task's: --set public=glyphs",
        )
    share, more = divmod(wanted.images, len(some))
    each = [min(len(rows), share + (i < more)) for i, rows in enumerate(some.values())]
    pools = {n: Pool(images[n], some[n], k) for n, k in zip(some, each, strict=True) if k}
    return Public(pools, seed, device)


def _unused(task: Task, shares: Sequence[Share]) -> dict[str, Tensor]:
    """The training images that no client holds, of each domain that has clients."""
    free = {
        s.domain: torch.ones(len(task.domains[s.domain].train), dtype=torch.bool) for s in shares
    }
    for share in shares:
        free[share.domain][share.rows] = False
    return {domain: mask.nonzero()[:, 0] for domain, mask in free.items()}
