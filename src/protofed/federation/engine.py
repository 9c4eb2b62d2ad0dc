"""Engines as a federation sees them: an interface, and what ``protofed.engines`` registers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from importlib import import_module
from typing import Protocol

import torch

from protofed.data.task import Images
from protofed.errors import unknown
from protofed.federation.client_round import Reply
from protofed.federation.evaluation import EvalJob, Scores
from protofed.federation.setup import ClientData, Setup
from protofed.models import Network
from protofed.tree import Tree

PrivateStates = Callable[[str], Tree]
"""Gives a client's private state by its name."""

MakeNetworks = Callable[[], Mapping[str, Network]]
"""Makes a network for each of the clients' models."""


class Engine(Protocol):
    """Trains and evaluates clients."""

    def train(
        self, clients: Sequence[ClientData], received: Tree, mine: PrivateStates, round: int
    ) -> Generator[tuple[str, Reply]]:
        """Train these clients; yields the name and reply of each, in any order."""

    def evaluate(
        self, jobs: Sequence[EvalJob], received: Tree, mine: PrivateStates, round: int
    ) -> Generator[Scores]:
        """The scores of each job, in order."""

    def free_memory(self) -> None:
        """Free device memory that can be allocated again in the next round, if there is any."""
        return

    def close(self) -> None:
        """End the engine's processes, if it has any; another round would start others."""
        return


EngineFactory = Callable[[Setup, MakeNetworks, torch.device, int | None, Sequence[Images]], Engine]
"""The last arguments are the setting ``workers``, and all images of clients and tests."""

ENGINES = "protofed.engines"
"""Registers its engines when it is imported, which is when a federation needs the first one. By
name: engines import the federation's interface, not the other way around."""

_FACTORIES: dict[str, EngineFactory] = {}


def register_engine(name: str, factory: EngineFactory) -> None:
    """Make an engine known by its name."""
    _FACTORIES[name] = factory


def engine_factory(name: str) -> EngineFactory:
    """What makes the engine of that name."""
    import_module(ENGINES)
    if name not in _FACTORIES:
        raise unknown("engine", name, _FACTORIES)
    return _FACTORIES[name]
