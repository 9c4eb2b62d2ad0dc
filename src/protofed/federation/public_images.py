"""Public images: without labels, seen by all clients, held by none.

They stand for a public data set, which some methods need beside the clients' own images. Every
round draws its own, keyed: clients that never met agree on them. No test image is among them, and
none of a domain that no client has.

Those of a folder are in the order of the hashes of their decoded pixels, and the digest is over
these hashes: neither the files' names nor where they lie nor an operating system's order matters,
and machines that have the same digest draw the same images in every round.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from protofed import keys
from protofed.data import TASKS, Images, Share, Task, load_task
from protofed.data.info import FOLDER
from protofed.data.load import public_images
from protofed.data.sources import PUBLISHED
from protofed.data.sources.folder import folder_path
from protofed.errors import ProtofedError, unknown
from protofed.method import PublicImages

UNUSED = "unused"
PLACE = "folder"
"""What the images of a folder are drawn under: it has no other name that all machines know."""


@dataclass(frozen=True)
class Pool:
    """Images to draw from, which of them are public, and how many a round takes."""

    x: Tensor
    rows: Tensor
    each: int


class Public:
    """The public images of a run; ``draw`` gives those of a round."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        seed: int,
        device: torch.device | str = "cpu",
        digest: str | None = None,
    ) -> None:
        self.pools, self.seed, self.device = pools, seed, device
        self.digest = digest
        """Stands for the images where they come from other files than the task's own."""
        self._drawn: dict[int, Images] = {}
        self._drawing = threading.Lock()

    @property
    def counts(self) -> dict[str, int]:
        """How many images a round takes from where."""
        return {name: pool.each for name, pool in self.pools.items()}

    def draw(self, round: int) -> Images:
        """The images of a round, all labeled 0; the last two rounds' are kept at hand."""
        # One at a time: of two who draw the same, the first's would be let go when the second's
        # are kept, and a stream of a GPU that still reads them is nobody's concern then.
        with self._drawing:
            found = self._drawn.get(round)
            if found is None:
                found = self._draw(round)
                before = {r: i for r, i in self._drawn.items() if r == round - 1}
                self._drawn = before | {round: found}
            return found

    def _draw(self, round: int) -> Images:
        parts = []
        for name, pool in self.pools.items():
            rng = keys.generator(self.seed, round, name, "public")
            chosen = rng.permutation(len(pool.rows))[: pool.each]
            parts.append(pool.x[pool.rows[torch.from_numpy(chosen)]])
        x = torch.cat(parts)
        # copies from the host are complete when they return: all streams of a GPU may read
        return Images(x.to(self.device), torch.zeros(len(x)).long().to(self.device))


def make_public(
    wanted: PublicImages | None,
    task: Task,
    shares: Sequence[Share],
    seed: int,
    device: torch.device | str = "cpu",
    data: str | Path | None = None,
    skip_bad: bool = False,
) -> Public | None:
    """The public images a method wants of a task that is split into these shares.

    ``data`` and ``skip_bad`` are those of ``load_task``, for images that are not the task's own.
    """
    if wanted is None:
        return None
    digest = None
    images: Mapping[str, Tensor]
    found: Mapping[str, Tensor]
    if of_task(wanted, task):
        found = _unused(task, shares)
        if wanted.source != UNUSED:
            found = {wanted.source: found.get(wanted.source, torch.empty(0, dtype=torch.int64))}
        images = {name: task.domains[name].train.x for name in found}
    else:
        images, found, digest = _elsewhere(wanted.source, task, data, skip_bad)
    some = {name: rows for name, rows in found.items() if len(rows)}
    if not some:
        raise ProtofedError(
            f"there are no public images: clients hold every training image of "
            f"{' and '.join(found)}",
            "lower --samples or --clients, or take others: --set public=glyphs (another task's), "
            "--set public=folder:PATH",
        )
    share, more = divmod(wanted.images, len(some))
    each = [min(len(rows), share + (i < more)) for i, rows in enumerate(some.values())]
    pools = {n: Pool(images[n], some[n], k) for n, k in zip(some, each, strict=True) if k}
    return Public(pools, seed, device, digest)


def of_task(wanted: PublicImages, task: Task) -> bool:
    """Whether the public images are training images of the task itself."""
    return wanted.source == UNUSED or wanted.source in task.domains


def public_digest(
    wanted: PublicImages | None, task: Task, data: str | Path | None = None, skip_bad: bool = False
) -> str | None:
    """What stands for public images of other files than the task's: their number and a hash."""
    if wanted is None or of_task(wanted, task):
        return None
    return _elsewhere(wanted.source, task, data, skip_bad).digest


def told(digest: str | None) -> str:
    """A digest in words: how many images, and the first characters of their hash."""
    count, _, text = (digest or "").partition("-")
    return f"{count} images ({text[:8]})" if text else "no images of files"


def count(digest: str) -> int:
    """How many images a digest is of."""
    return int(digest.partition("-")[0])


class _Elsewhere(NamedTuple):
    """Images and their order, by where they are from, and what stands for them."""

    images: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]
    digest: str | None


def _elsewhere(source: str, task: Task, data: str | Path | None, skip_bad: bool) -> _Elsewhere:
    """Images that are not the task's: of a folder, or of another task."""
    if source.startswith(FOLDER):
        path = folder_path(source, "write public=folder:PATH; any tree of images will do")
        x = public_images(path, task.image_size, skip_bad)
        hashes = [hashlib.sha256(image.numpy()).digest() for image in x]
        order = sorted(range(len(x)), key=hashes.__getitem__)
        whole = hashlib.sha256(b"".join(hashes[i] for i in order)).hexdigest()
        return _Elsewhere({PLACE: x}, {PLACE: torch.tensor(order)}, f"{len(x)}-{whole}")
    if source not in TASKS:
        valid = (UNUSED, *task.domains, *TASKS, f"{FOLDER}PATH")
        raise unknown("source of public images", source, valid)
    size = task.image_size if source in PUBLISHED else None  # glyphs have one size
    other = load_task(source, data, image_size=size, skip_bad=skip_bad)
    if other.image_size != task.image_size:
        raise ProtofedError(
            f"public images of {other.name} have {other.image_size} pixels, those of "
            f"{task.name} {task.image_size}",
            "choose another task for them",
        )
    images = {f"{other.name} {d}": domain.train.x for d, domain in other.domains.items()}
    rows = {name: torch.arange(len(x)) for name, x in images.items()}
    total = sum(map(len, rows.values()))
    return _Elsewhere(images, rows, f"{total}-{other.digest}" if other.digest else None)


def _unused(task: Task, shares: Sequence[Share]) -> dict[str, Tensor]:
    """The training images that no client holds, of each domain that has clients."""
    free = {
        s.domain: torch.ones(len(task.domains[s.domain].train), dtype=torch.bool) for s in shares
    }
    for share in shares:
        free[share.domain][share.rows] = False
    return {domain: mask.nonzero()[:, 0] for domain, mask in free.items()}
