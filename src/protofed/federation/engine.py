"""Engines as a federation sees them: an interface, and what ``protofed.engines`` registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from protofed.errors import unknown
from protofed.federation.client_round import Reply
from protofed.federation.evaluation import EvalJob, Scores
from protofed.federation.setup import ClientData, Setup
from protofed.models import Network
from protofed.tree import Tree


class Engine(Protocol):
    """Trains and evaluates clients. ``mine`` gives a client's private state by its name."""

    def train(
        self, clients: Sequence[ClientData], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[tuple[str, Reply]]:
        """Train these clients; yields the name and reply of each, in any order."""

    def evaluate(
        self, jobs: Sequence[EvalJob], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[Scores]:
        """The scores of each job, in order."""

    def free_memory(self) -> None:
        """Free device memory that can be allocated again in the next round."""


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
    """The engine of that name; ``make_networks`` makes a network for each of the models."""
    if name not in _FACTORIES:
        raise unknown("engine", name, _FACTORIES)
    return _FACTORIES[name](setup, make_networks, device, workers)
