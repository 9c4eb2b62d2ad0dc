"""The workers engine: clients on all cores of a CPU, one thread each.

Threads, not processes: torch releases Python's lock inside every operation, images are shared
without a copy, nothing is pickled, and there is no start-up. Each worker has networks of its own
and computes with one intra-op thread, so a client's result equals the loop engine's bit for bit,
whatever the number of workers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import replace

import torch

from protofed.federation.client_round import Reply, train_client
from protofed.federation.cpu import keep_freed_memory
from protofed.federation.engine import Engine, MakeNetworks, PrivateStates
from protofed.federation.evaluation import EvalJob, Scores, evaluate_job
from protofed.federation.setup import ClientData, Setup
from protofed.tree import Tree


class Workers(Engine):
    """A pool of threads, each with its own network for each of the clients' models."""

    def __init__(
        self, setup: Setup, networks: MakeNetworks, _: torch.device, workers: int | None = None
    ) -> None:
        keep_freed_memory()
        self.setup, self._count = setup, workers or os.cpu_count() or 1
        self._local = local = threading.local()
        unclaimed = [networks() for _ in range(self._count)]

        def start() -> None:  # without self, which every thread of the pool would keep alive
            torch.set_num_threads(1)  # applies to the calling thread
            local.networks = unclaimed.pop()

        self._pool = ThreadPoolExecutor(self._count, "protofed", initializer=start)

    def train(
        self, clients: Sequence[ClientData], received: Tree, mine: PrivateStates, round: int
    ) -> Iterator[tuple[str, Reply]]:
        """The replies in order of completion; the largest clients start first.

        In the clients' order, many replies would pile up behind a slow client.
        """

        def work(data: ClientData) -> Reply:
            network = self._local.networks[data.model]
            return train_client(self.setup, network, data, received, mine(data.name), round)

        largest_first = sorted(clients, key=lambda data: -len(data.images))
        running = {self._pool.submit(work, data): data.name for data in largest_first}
        try:
            for future in as_completed(list(running)):
                if future.exception() is not None:
                    raise _first_error(running)
                yield running.pop(future), future.result()
        finally:  # if the round is interrupted, clients that have not started do not start
            for left in running:
                left.cancel()

    def evaluate(
        self, jobs: Sequence[EvalJob], received: Tree, mine: PrivateStates, round: int
    ) -> Iterator[Scores]:
        def work(job: EvalJob) -> Scores:
            return evaluate_job(self.setup, self._local.networks, job, received, mine, round)

        if len(jobs) >= self._count:
            yield from self._pool.map(work, jobs)
            return
        for job in jobs:  # too few for all workers: split by test set
            parts = [replace(job, tests={name: job.tests[name]}) for name in job.tests]
            whole: Scores = {}
            for scores in self._pool.map(work, parts):
                for rule, found in scores.items():
                    whole.setdefault(rule, {}).update(found)
            yield whole


def _first_error(running: Iterable[Future[Reply]]) -> BaseException:
    """The error of the first of these futures, in order of submission, that has one.

    It does not depend on how threads are scheduled: every client submitted before a failed one
    has started, and is waited for.
    """
    running = list(running)
    for future in running:
        future.cancel()
    wait(running)
    failed = (f.exception() for f in running if not f.cancelled())
    return next(error for error in failed if error is not None)
