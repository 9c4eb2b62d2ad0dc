"""The workers engine: clients on all cores of a CPU, one thread each.

Threads, not processes: torch lets go of Python's lock inside every operation, the images are
shared without a copy, nothing is pickled, and there is no start-up. Each worker has a network of
its own and computes with one intra-op thread, so that a client's result is the loop engine's to
the bit, however many workers there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import replace

import torch

from protofed.federation.client_round import Exam, Reply, Scores, Setup, Site, examine, local
from protofed.models import Network
from protofed.tree import Tree


class Workers:
    """A pool of threads, each with networks of its own: one for each of the clients' models."""

    def __init__(self, setup: Setup, networks: Sequence[Mapping[str, Network]]) -> None:
        self.setup, self._count = setup, len(networks)
        self._own = own = threading.local()
        waiting = list(networks)

        def begin() -> None:  # without self: each thread keeps it for as long as the pool lives
            torch.set_num_threads(1)  # a setting of the thread that calls it
            own.networks = waiting.pop()

        self._pool = ThreadPoolExecutor(len(networks), "protofed", initializer=begin)

    def train(
        self, sites: Sequence[Site], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[tuple[str, Reply]]:
        """The replies as they come; the longest clients are begun first.

        In the clients' order, replies of many clients would pile up behind a slow one.
        """

        def work(site: Site) -> Reply:
            network = self._own.networks[site.model]
            return local(self.setup, network, site, received, mine(site.name), round)

        longest_first = sorted(sites, key=lambda site: -len(site.images))
        running = {self._pool.submit(work, site): site.name for site in longest_first}
        try:
            for future in as_completed(list(running)):
                if future.exception() is not None:
                    raise _first_error(running)
                yield running.pop(future), future.result()
        finally:  # an interrupted round: what has not begun is not begun
            for left in running:
                left.cancel()

    def evaluate(
        self, exams: Sequence[Exam], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[Scores]:
        """The scores of each exam, in their order; few exams go a test set to a worker."""

        def work(exam: Exam) -> Scores:
            return examine(self.setup, self._own.networks, exam, received, mine, round)

        if len(exams) >= self._count:
            yield from self._pool.map(work, exams)
            return
        for exam in exams:
            parts = [replace(exam, tests={name: exam.tests[name]}) for name in exam.tests]
            whole: Scores = {}
            for scores in self._pool.map(work, parts):
                for rule, found in scores.items():
                    whole.setdefault(rule, {}).update(found)
            yield whole

    def make_room(self) -> None:
        """Workers have no memory of a GPU."""


def _first_error(running: Iterable[Future[Reply]]) -> BaseException:
    """The error of the first of these, in the order they were submitted, that has one.

    It is the same however the threads take turns: whoever was submitted before a failure has
    begun and is waited for.
    """
    running = list(running)
    for future in running:
        future.cancel()
    wait(running)
    failed = (f.exception() for f in running if not f.cancelled())
    return next(error for error in failed if error is not None)
