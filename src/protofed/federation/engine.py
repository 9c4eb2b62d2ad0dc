"""Engines as the federation sees them: an interface, and the engines that have registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from protofed.errors import unknown
from protofed.federation.client_round import Exam, Reply, Scores, Setup, Site
from protofed.models import Network
from protofed.tree import Tree


class Engine(Protocol):
    """What a run needs of an engine."""

    def train(
        self, sites: Sequence[Site], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[tuple[str, Reply]]:
        """Train these clients and give their replies."""

    def evaluate(
        self, exams: Sequence[Exam], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[Scores]:
        """The scores of each exam, in their order."""

    def make_room(self) -> None:
        """Give up memory of the device that the next round can do without."""


EngineFactory = Callable[
    [Setup, Callable[[], Mapping[str, Network]], torch.device, int | None], Engine
]
"""Makes an engine from the setup, a maker of networks for each model, the device, and the number
of workers (None: as many as the engine likes)."""

_FACTORIES: dict[str, EngineFactory] = {}


def register_engine(name: str, factory: EngineFactory) -> None:
    """Make an engine known by its name; ``protofed.engines`` does so when it is imported."""
    _FACTORIES[name] = factory


def build_engine(
    name: str,
    setup: Setup,
    make_networks: Callable[[], Mapping[str, Network]],
    device: torch.device,
    workers: int | None = None,
) -> Engine:
    """The engine of that name."""
    if name not in _FACTORIES:
        raise unknown("engine", name, _FACTORIES)
    return _FACTORIES[name](setup, make_networks, device, workers)
