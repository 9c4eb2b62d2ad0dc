"""Protocols: what all methods of a comparison share. They never belong to a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from protofed.errors import unknown


@dataclass(frozen=True)
class Protocol:
    """Model, optimizer and length of a comparison; ``None`` is the model's own."""

    name: str
    source: str
    model: str
    width: int | None
    norm: str | None
    rounds: int
    epochs: int
    batch: int
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    distribution: str | None = None
    """The clients of each domain, by name (``protofed.data.distributions``); None: the task's."""
    per_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the paper does otherwise on certain tasks."""


PROTOCOLS = {
    p.name: p
    for p in (
        Protocol(
            "glyphs",
            "this package: small enough for two CPU cores",
            model="cnn3",
            width=16,
            norm="batch",
            rounds=20,
            epochs=5,
            batch=32,
        ),
        Protocol(
            "fpl",
            "Huang et al., CVPR 2023, and its published code",
            model="resnet10",
            width=None,
            norm=None,
            rounds=100,
            epochs=10,
            batch=64,
            distribution="skewed",
        ),
        Protocol(
            "i2pfl",
            "Le et al., arXiv 2025; momentum from the authors' other code",
            model="resnet10",
            width=None,
            norm=None,
            rounds=100,
            epochs=10,
            batch=32,
            distribution="skewed",
            per_task={
                "pacs": {"model": "resnet18", "batch": 16},
                "vlcs": {"model": "resnet18", "batch": 16},
            },
        ),
        # The paper states the layers and the clients on PACS; widths, batch, epochs, rounds and
        # optimizer are in a supplement that could not be had, and are FPL's here.
        Protocol(
            "fedseproto",
            "Lai et al., ECAI 2024; what it does not state is FPL's",
            model="cnn3",
            width=None,
            norm=None,
            rounds=100,
            epochs=10,
            batch=64,
            distribution="fedseproto",
        ),
    )
}

TASK_PROTOCOL = {
    "glyphs": "glyphs",
    "digits": "fpl",
    "office_caltech": "fpl",
    "pacs": "i2pfl",
    "vlcs": "fedseproto",
}
"""The protocol a task is run with unless told otherwise; ``fpl`` for a user's own folders."""


def protocol(name: str | None, task: str) -> Protocol:
    """The protocol of that name as it is on the task; None: the task's own."""
    name = name or TASK_PROTOCOL.get(task, "fpl")
    if name not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS)
    found = PROTOCOLS[name]
    return replace(found, **found.per_task.get(task, {}))
