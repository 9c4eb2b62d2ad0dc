"""What a federation needs of an engine; ``protofed.engines`` implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from protofed.federation.client_round import Reply
from protofed.federation.evaluation import EvalJob, Scores
from protofed.federation.setup import ClientData
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
