"""The loop engine: one client after another, in one network. The oracle of all other engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from protofed.federation.client_round import Exam, Reply, Scores, Setup, Site, examine, local
from protofed.models import Network
from protofed.tree import Tree


class Loop:
    """Runs clients in their order, each in the network of its model."""

    def __init__(self, setup: Setup, networks: Mapping[str, Network]) -> None:
        self.setup, self.networks = setup, networks

    def train(
        self, sites: Sequence[Site], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[tuple[str, Reply]]:
        """The replies of the clients, as they come."""
        for site in sites:
            network = self.networks[site.model]
            yield site.name, local(self.setup, network, site, received, mine(site.name), round)

    def evaluate(
        self, exams: Sequence[Exam], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[Scores]:
        """The scores of each exam, as they come."""
        for exam in exams:
            yield examine(self.setup, self.networks, exam, received, mine, round)

    def make_room(self) -> None:
        """It keeps one network for each model, which it needs."""
