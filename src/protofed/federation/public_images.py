"""Public images: without labels, seen by all clients, owned by none.

They stand for a public data set, which some methods need in addition to the clients' own images.
Every round draws its own, keyed, so clients that never met agree on them. They never contain test
images, nor images of a domain without clients.

Images from a folder are ordered by the hashes of their decoded pixels, and the digest is over
these hashes. File names, locations and the order of a directory listing do not matter: machines
with the same digest draw the same images in every round.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from protofed.data.split import UNUSED, unused
from protofed.data.task import Reading
from protofed.errors import ProtofedError, unknown
from protofed.method import PublicImages

FOLDER_POOL = "folder"
"""The pool of a folder's images. It is a key of the draws, so it is the same on all machines."""


@dataclass(frozen=True)
class ImagePool:
    """Images to draw from, which of them are public, and how many a round takes."""

    x: Tensor
    rows: Tensor
    per_round: int


class PublicSampler:
    """Draws the public images of each round of a run."""

    def __init__(
        self,
        pools: Mapping[str, ImagePool],
        seed: int,
        device: torch.device | str = "cpu",
        digest: str | None = None,
    ) -> None:
        self.pools, self.seed, self.device = pools, seed, device
        self.digest = digest
        """Identifies the images if they come from other files than the task's own."""
        self._drawn: dict[int, Images] = {}
        self._lock = threading.Lock()

    @property
    def counts(self) -> dict[str, int]:
        """How many images a round takes from each pool."""
        return {name: pool.per_round for name, pool in self.pools.items()}

    def draw(self, round: int) -> Images:
        """The images of a round, all labeled 0; those of the last two rounds are cached."""
        # One thread at a time. If two drew the same round, the second's images would replace the
        # first's in the cache and free them, while a GPU stream may still be reading them.
        with self._lock:
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
            chosen = rng.permutation(len(pool.rows))[: pool.per_round]
            parts.append(pool.x[pool.rows[torch.from_numpy(chosen)]])
        x = torch.cat(parts)
        # copies from the host are complete when they return, so every GPU stream may read them
        return Images(x.to(self.device), torch.zeros(len(x)).long().to(self.device))


def make_public_sampler(
    wanted: PublicImages | None,
    task: Task,
    shares: Sequence[Share],
    seed: int,
    device: torch.device | str = "cpu",
    data: str | Path | None = None,
    reading: Reading = Reading(),  # noqa: B008 (frozen)
) -> PublicSampler | None:
    """A sampler of the public images a method wants, for a task split into these shares.

    ``data`` and ``reading`` say where and how to read images that are not the task's own.
    """
    if wanted is None:
        return None
    digest = None
    images: Mapping[str, Tensor]
    found: Mapping[str, Tensor]
    if is_from_task(wanted, task):
        found = unused(task, shares)
        if wanted.source != UNUSED:
            found = {wanted.source: found.get(wanted.source, torch.empty(0, dtype=torch.int64))}
        images = {name: task.domains[name].train.x for name in found}
    else:
        images, found, digest = _external_images(wanted.source, task, data, reading)
    some = {name: rows for name, rows in found.items() if len(rows)}
    if not some:
        raise ProtofedError(
            f"there are no public images: clients hold every training image of "
            f"{' and '.join(found)}",
            "lower --samples or --clients, or use other images: --set public=glyphs (another "
            "task's), --set public=folder:PATH",
        )
    share, more = divmod(wanted.images, len(some))
    each = [min(len(rows), share + (i < more)) for i, rows in enumerate(some.values())]
    pools = {n: ImagePool(images[n], some[n], k) for n, k in zip(some, each, strict=True) if k}
    return PublicSampler(pools, seed, device, digest)


def is_from_task(wanted: PublicImages, task: Task) -> bool:
    """Whether the public images are training images of the task itself."""
    return wanted.source == UNUSED or wanted.source in task.domains


def public_digest(
    wanted: PublicImages | None,
    task: Task,
    data: str | Path | None = None,
    reading: Reading = Reading(),  # noqa: B008 (frozen)
) -> str | None:
    """The digest of public images that are not the task's own: their number and a hash."""
    if wanted is None or is_from_task(wanted, task):
        return None
    return _external_images(wanted.source, task, data, reading).digest


def describe_digest(digest: str | None) -> str:
    """A digest in words: the number of images, and the first characters of their hash."""
    count, _, text = (digest or "").partition("-")
    return f"{count} images ({text[:8]})" if text else "no images from files"


def digest_count(digest: str) -> int:
    """The number of images that a digest stands for."""
    return int(digest.partition("-")[0])


class _ExternalImages(NamedTuple):
    """The images and rows of each pool, and the digest of all of them."""

    images: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]
    digest: str | None


def _external_images(
    source: str, task: Task, data: str | Path | None, reading: Reading
) -> _ExternalImages:
    """Images that are not the task's: those of a folder, or of another task."""
    if source.startswith(FOLDER):
        path = folder_path(source, "write public=folder:PATH; any tree of images will do")
        x = public_images(path, task.image_size, replace(reading, pixel_range=task.pixel_range))
        hashes = [hashlib.sha256(image.numpy()).digest() for image in x]
        order = sorted(range(len(x)), key=hashes.__getitem__)
        whole = hashlib.sha256(b"".join(hashes[i] for i in order)).hexdigest()
        rows = torch.tensor(order)
        return _ExternalImages({FOLDER_POOL: x}, {FOLDER_POOL: rows}, f"{len(x)}-{whole}")
    if source not in TASKS:
        valid = (UNUSED, *task.domains, *TASKS, f"{FOLDER}PATH")
        raise unknown("source of public images", source, valid)
    size = task.image_size if source in PUBLISHED else None  # glyphs have one size
    other = load_task(source, data, image_size=size, **vars(reading))
    if other.image_size != task.image_size:
        raise ProtofedError(
            f"public images of {other.name} have {other.image_size} pixels, but those of "
            f"{task.name} have {task.image_size}",
            "choose another task for the public images",
        )
    images = {f"{other.name} {d}": domain.train.x for d, domain in other.domains.items()}
    pools = {name: torch.arange(len(x)) for name, x in images.items()}
    total = sum(map(len, pools.values()))
    return _ExternalImages(images, pools, f"{total}-{other.digest}" if other.digest else None)
