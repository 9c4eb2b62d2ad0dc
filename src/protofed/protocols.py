"""Protocols: what all methods of a comparison share. They never belong to a method."""

from __future__ import annotations

from dataclasses import dataclass

from protofed.errors import unknown


@dataclass(frozen=True)
class Protocol:
    """Model, optimiser and length of a comparison; ``None`` is the model's own."""

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
    )
}

TASK_PROTOCOL = {"glyphs": "glyphs"}
"""The protocol a task is run with unless told otherwise."""


def protocol(name: str) -> Protocol:
    """The protocol of that name."""
    if name not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]
