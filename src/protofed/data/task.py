"""A task: several domains with the same classes, as images in memory or still to decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.data.choose import Survey
from protofed.data.unpack import MAX_UNPACKED_GB
from protofed.errors import ProtofedError

SPLITS = ("train", "test")

TABLE_COLUMNS = {"average", "worst", "spread", "seen average", "own domain", "validation average"}
"""The columns of tables beside those of the domains."""

MAX_IMAGE_PIXELS = 100_000_000


@dataclass(frozen=True)
class Reading:
    """How to read files that may be bad, or made to use up the memory.

    ``skip_bad``: files that cannot be decoded are left out. ``max_image_pixels`` is how many pixels
    one image may have, and all that are decoded at a time. ``max_unpacked_gb`` is what a compressed
    file or an archive may unpack to. ``pixel_range`` (``LOW:HIGH``) has the values that become
    black and white in images with more than 8 bits.
    """

    skip_bad: bool = False
    max_image_pixels: int = MAX_IMAGE_PIXELS
    max_unpacked_gb: float = MAX_UNPACKED_GB
    pixel_range: str | None = None


class DataMissing(ProtofedError):
    """A task's files are not where they were looked for."""


@dataclass(frozen=True)
class Sample:
    """An image to decode: its name for messages, its label, and its file's bytes or its pixels.

    ``size`` is the number of bytes that reading it takes; 0 if they are in memory already.
    """

    name: str
    label: int
    read: Callable[[], bytes | NDArray[np.uint8]]
    size: int = 0


Parts = dict[tuple[str, str], list[Sample]]
"""Samples by domain and split."""


@dataclass(frozen=True)
class Plan:
    """The images of a task in their order, and notes for a reader of its results."""

    classes: tuple[str, ...]
    parts: Parts
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Images:
    """Images ``x`` [N, 3, H, W] uint8 with labels ``y`` [N] int64."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.dtype != torch.uint8 or self.x.ndim != 4:
            raise ValueError(
                f"images must be uint8 [N, C, H, W], got {self.x.dtype} {self.x.shape}"
            )
        if self.y.dtype != torch.int64 or self.y.shape != self.x.shape[:1]:
            raise ValueError(f"labels must be int64 [N], got {self.y.dtype} {self.y.shape}")

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Domain:
    """One domain's training and test images, and those in its folder for validation, if any.

    No image is in two of them.
    """

    train: Images
    test: Images
    validation: Images | None = None


@dataclass(frozen=True)
class Augment:
    """What is done to a training image: a random crop after zero padding, and a horizontal flip.

    ``resized_crop`` enlarges a random part with this range of the area; ``jitter`` is that of
    brightness, contrast, saturation and hue; ``grayscale`` a probability. Training and test images
    are then scaled to [0, 1] and normalized with ``mean`` and ``std``.
    """

    padding: int = 4
    flip: bool = True
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    resized_crop: tuple[float, float] | None = None
    jitter: tuple[float, float, float, float] | None = None
    grayscale: float = 0.0


@dataclass(frozen=True)
class TaskInfo:
    """A task without its images; see ``Task``.

    What is not known before a folder is read is None. ``test_splits`` are the ways to divide
    the images, the default first; empty if there is no choice. ``training`` is the number of
    training images of each domain, ``survey`` what those of a folder are like; empty and None until
    the images are loaded.
    """

    name: str
    domains: tuple[str, ...] | None
    classes: tuple[str, ...] | None
    clients: Mapping[str, int] | None
    samples: Mapping[str, float] | None
    image_size: int | None = 32
    flip: bool = True
    test_splits: tuple[str, ...] = ()
    leftover: bool = False
    repair: bool = False
    about: str = ""
    training: Mapping[str, int] = field(default_factory=dict)
    survey: Survey | None = None


@dataclass(frozen=True)
class Task:
    """Domains, classes and image size, and the defaults of a comparison on them.

    ``clients`` is the number of clients of each domain, ``samples`` how many training images each
    of them holds: a count, or a fraction of the domain's training images. ``leftover`` and
    ``repair`` are rules of ``protofed.data.split`` that are part of the task's published protocol.
    ``whole_unseen``: a domain that is left out of training is tested on all of its images, not
    only on its test images.

    For images from files, ``digest`` is a hash of classes, splits, labels and pixels,
    ``test_split`` the way they were divided, and ``skipped`` the files that could not be decoded.
    ``survey`` is what the images of a folder are like, ``pixel_range`` which of their values became
    black and white (``Reading``).
    """

    name: str
    classes: tuple[str, ...]
    domains: Mapping[str, Domain]
    augment: Augment
    clients: Mapping[str, int]
    samples: Mapping[str, float]
    note: str = ""
    leftover: bool = False
    repair: bool = False
    whole_unseen: bool = False
    digest: str = ""
    test_split: str | None = None
    skipped: tuple[str, ...] = ()
    survey: Survey | None = None
    pixel_range: str | None = None

    def __post_init__(self) -> None:
        for name in self.domains.keys() & TABLE_COLUMNS:
            raise ProtofedError(
                f"a domain cannot be called '{name}': tables have a column with that name",
                "rename its folder",
            )

    @property
    def has_images(self) -> bool:
        """False if only the shape of the task is known."""
        return any(len(domain.train) for domain in self.domains.values())

    @property
    def info(self) -> TaskInfo:
        return TaskInfo(
            self.name,
            tuple(self.domains),
            self.classes,
            self.clients,
            self.samples,
            self.image_size,
            self.augment.flip,
            () if self.test_split is None else (self.test_split,),
            self.leftover,
            self.repair,
            self.note,
            {d: len(images.train) for d, images in self.domains.items() if len(images.train)},
            self.survey,
        )

    @property
    def image_size(self) -> int:
        """Side length of the (square) images in pixels."""
        return int(next(iter(self.domains.values())).train.x.shape[-1])
