"""The workers engine: clients on all cores of a CPU, one thread each.

Threads, not processes: torch lets go of Python's lock inside every operation, the images are
shared without a copy, nothing is pickled, and there is no start-up. Each worker has a network of
its own and computes with one intra-op thread, so that a client's result is the loop engine's to
the bit, however many workers there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from protofed.data.task import Images
from protofed.federation.local import Reply, Setup, Site, evaluate, local
from protofed.federation.tree import Tree
from protofed.models import Network


class Workers:
    """A pool of threads, each with its own network."""

    def __init__(self, setup: Setup, networks: Sequence[Network]) -> None:
        self.setup = setup
        self._own = threading.local()
        waiting = list(networks)

        def begin() -> None:
            torch.set_num_threads(1)  # a setting of the thread that calls it
            self._own.network = waiting.pop()

        self._pool = ThreadPoolExecutor(len(networks), "protofed", initializer=begin)

    def train(
        self, sites: Sequence[Site], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[tuple[str, Reply]]:
        """The replies in the clients' order; the longest clients are begun first."""

        def work(site: Site) -> Reply:
            return local(self.setup, self._own.network, site, received, mine(site.name), round)

        longest_first = sorted(sites, key=lambda site: -len(site.images))
        running = {site.name: self._pool.submit(work, site) for site in longest_first}
        try:
            for site in sites:
                yield site.name, running.pop(site.name).result()
        finally:  # an interrupted round: what has not begun is not begun
            for left in running.values():
                left.cancel()

    def evaluate(
        self, received: Tree, mine: Tree, tests: Mapping[str, Images], round: int
    ) -> dict[str, float]:
        """Accuracy in percent on each test set, a test set to a worker."""

        def work(name: str) -> float:
            one = {name: tests[name]}
            return evaluate(self.setup, self._own.network, received, mine, one, round)[name]

        return dict(zip(tests, self._pool.map(work, tests), strict=True))
