"""Images that were found but not yet decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protofed.errors import ProtofedError

SPLITS = ("train", "test")


class DataMissing(ProtofedError):
    """A task's files are not where they were looked for."""


@dataclass(frozen=True)
class Sample:
    """An image to decode: its name for messages, its label, and its file's bytes or its pixels."""

    name: str
    label: int
    read: Callable[[], bytes | NDArray[np.uint8]]


Parts = dict[tuple[str, str], list[Sample]]
"""Samples by domain and split."""


@dataclass(frozen=True)
class Plan:
    """The images of a task in their order, and notes for a reader of its results."""

    classes: tuple[str, ...]
    parts: Mapping[tuple[str, str], list[Sample]]
    notes: list[str] = field(default_factory=list)
