"""The loop engine: one client after another, in one network. The oracle of all other engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from protofed.data import Images
from protofed.federation.local import Reply, Setup, Site, evaluate, local
from protofed.federation.tree import Tree
from protofed.models import Network


class Loop:
    """Runs clients in their order on the network it is given."""

    def __init__(self, setup: Setup, network: Network) -> None:
        self.setup, self.network = setup, network

    def train(
        self, sites: Sequence[Site], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[tuple[str, Reply]]:
        """The replies of the clients, as they come."""
        for site in sites:
            yield site.name, local(self.setup, self.network, site, received, mine(site.name), round)

    def evaluate(
        self, received: Tree, mine: Tree, tests: Mapping[str, Images], round: int
    ) -> dict[str, float]:
        """Accuracy in percent on each test set."""
        return evaluate(self.setup, self.network, received, mine, tests, round)
