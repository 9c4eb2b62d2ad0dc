"""A client's images as batches: augmented epochs to train on, clean passes for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed import keys
from protofed.data.augment import Choices, cropped, crops, normalized, padded
from protofed.data.task import Augment
from protofed.errors import ProtofedError
from protofed.federation.setup import ClientData, Setup
from protofed.method import Batch, BatchSource

Rows = NDArray[np.int64]

EVALUATION_BATCH = 256
PREPARED_BYTES = 128 << 20  # larger sets of images are not kept a second time for cropping
_CHUNK_BYTES = 8 << 20  # float images made at once: small enough to stay in a CPU cache


def evaluation_batch(side: int) -> int:
    """How many images are tested at once: fewer if large, since activations take gigabytes."""
    return max(1, min(EVALUATION_BATCH, EVALUATION_BATCH * 64**2 // side**2))


class ClientBatches:
    """Batches of one client's images. ``parts`` are the rows to train on and those of the holdout.

    ``labels`` are those to balance, on the host; None if each image comes once.
    """

    def __init__(self, setup: Setup, data: ClientData) -> None:
        self.setup, self.images, self.augment = setup, data.images, setup.augment
        balanced = setup.training.sampling == "balanced" and not data.public
        self.labels = data.images.y.cpu().numpy() if balanced else None
        self._prepared: Tensor | None = None
        n = len(data)
        if data.public:  # all of them, without augmentation
            self.augment = Augment(
                padding=0, flip=False, mean=setup.augment.mean, std=setup.augment.std
            )
            self.parts = {"holdout": np.arange(0), "train": np.arange(n)}
            return
        held = int(n * setup.method.holdout)
        shuffled = keys.generator(setup.seed, data.name, "holdout").permutation(n)
        self.parts = {"holdout": np.sort(shuffled[:held]), "train": np.sort(shuffled[held:])}
        if setup.method.holdout and not (held and n - held):
            raise ProtofedError(
                f"client {data.name} has {n} samples: too few to hold out "
                f"{setup.method.holdout:.0%} of them",
                "give it more samples",
            )

    def epoch(self, key: tuple[int | str, ...], batch: int) -> Iterator[Batch]:
        """One pass in keyed random order; the last batch may be small."""
        x, y = self.images.x, self.images.y
        order, choices = self.draw(key)
        prepared = self.prepared()
        per_batch = batch * x[0].numel() * self.setup.dtype.itemsize
        chunks = torch.arange(len(order)).split(batch * max(1, _CHUNK_BYTES // per_batch))
        for chunk in chunks:
            index = order[chunk].to(x.device)
            chosen = choices.rows(chunk, x.device)
            if prepared is None:
                images = cropped(x[index], chosen, self.augment)
            else:
                images = crops(prepared, index, chosen, self.augment)
            images = normalized(images, self.augment, self.setup.dtype)
            yield from map(Batch, images.split(batch), y[index].split(batch), index.split(batch))

    def draw(self, key: tuple[int | str, ...]) -> tuple[Tensor, Choices]:
        """An epoch's rows in order, and the augmentation of each."""
        x, rows = self.images.x, self.parts["train"]
        rng, augment_rng = keys.generator(*key, "order"), keys.generator(*key, "augment")
        draw = partial(Choices.draw, augment_rng, augment=self.augment, side=x.shape[-1])
        if self.labels is None:
            order = torch.from_numpy(rng.permutation(rows))
            return order, draw(len(x)).rows(order, order.device)
        order = torch.from_numpy(balanced_order(rng, rows, self.labels[rows]))
        return order, draw(len(order))  # not by row: an image that comes again looks different

    def prepared(self) -> Tensor | None:
        """The images ready for cropping, made once for all epochs; None if that is not possible.

        Resized crops and color changes need the images as they are, and a very large set must
        not be in memory twice.
        """
        x, augment = self.images.x, self.augment
        plain = augment.resized_crop is None and augment.jitter is None and not augment.grayscale
        if self._prepared is None and plain and x.numel() <= PREPARED_BYTES:
            self._prepared = padded(x, augment)
        return self._prepared

    def small_classes(self) -> Tensor | None:
        """The classes [K] with too few images for a prototype; None if one image is enough.

        Under privacy, the noised counts decide, and the true ones must not.
        """
        if self.setup.min_class_count == 1 or self.setup.proto_pass == "received":
            return None
        y = self.images.y[torch.from_numpy(self.parts["train"]).to(self.images.y.device)]
        one_hot_NK = y[:, None] == torch.arange(self.setup.sizes.classes, device=y.device)
        return one_hot_NK.sum(0) < self.setup.min_class_count

    def clean(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The images of a part in order, without augmentation."""
        rows = torch.from_numpy(self.parts[part]).to(self.images.x.device)
        for index in rows.split(evaluation_batch(self.images.x.shape[-1])):
            x = normalized(self.images.x[index], self.augment, self.setup.dtype)
            yield x, self.images.y[index]


def balanced_order(rng: np.random.Generator, rows: Rows, labels: Rows) -> Rows:
    """As many rows as there are, with every class equally often, give or take one.

    A class's rows come in shuffled passes: none is repeated before all have come.
    """
    turns = np.resize(rng.permutation(np.unique(labels)), len(rows))
    rng.shuffle(turns)
    order = np.empty_like(rows)
    for label in np.unique(labels):
        own, wanted = rows[labels == label], np.count_nonzero(turns == label)
        passes = [rng.permutation(own) for _ in range(-(-wanted // len(own)))]
        order[turns == label] = np.concatenate(passes)[:wanted]
    return order


def next_public_batches(setup: Setup, data: ClientData, round: int) -> BatchSource | None:
    """Clean batches of the next round's public images; None if the run has none."""
    if setup.public is None:
        return None
    return lambda part: ClientBatches(setup, data.with_public_images(setup, round + 1)).clean(part)
