"""The loop engine: one client after another, in one network. The oracle of all other engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from protofed.federation.client_round import Reply, train_client
from protofed.federation.evaluation import EvalJob, Scores, evaluate_job
from protofed.federation.setup import ClientData, Setup
from protofed.models import Network
from protofed.tree import Tree


class Loop:
    """Runs clients in order, each in the network of its model."""

    def __init__(self, setup: Setup, networks: Mapping[str, Network]) -> None:
        self.setup, self.networks = setup, networks

    def train(
        self, clients: Sequence[ClientData], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[tuple[str, Reply]]:
        """The clients' replies, in order."""
        for data in clients:
            network = self.networks[data.model]
            reply = train_client(self.setup, network, data, received, mine(data.name), round)
            yield data.name, reply

    def evaluate(
        self, jobs: Sequence[EvalJob], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[Scores]:
        """The scores of each job."""
        for job in jobs:
            yield evaluate_job(self.setup, self.networks, job, received, mine, round)

    def free_memory(self) -> None:
        """Nothing to free: the loop needs its one network per model."""
