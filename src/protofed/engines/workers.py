"""The workers engine: clients on all cores of a CPU, one thread each.

A worker is a process, forked from this one, with a loop engine of its own: two of them are faster
than two threads, which share Python's lock. It has the run's images and method from the start, so
only the rest of a client's round travels, through shared memory: what all clients receive, its
private state and its reply. Where a process cannot be forked (``protofed.engines.forked``), workers
are threads. A client's result equals the loop engine's bit for bit in any case, whatever the number
of workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from protofed.cores import core_count
from protofed.data.task import Images
from protofed.engines.forked import Processes, Work, fork
from protofed.engines.loop import Loop
from protofed.federation.client_round import Reply
from protofed.federation.cpu import keep_freed_memory, use_one_thread
from protofed.federation.engine import Engine, MakeNetworks, PrivateStates
from protofed.federation.evaluation import EvalJob, Scores
from protofed.federation.setup import ClientData, Setup
from protofed.tree import Tree


class Workers(Engine):
    """A thread for each worker, which asks its process, or computes in place of one."""

    def __init__(
        self,
        setup: Setup,
        networks: MakeNetworks,
        device: torch.device,
        workers: int | None = None,
        images: Sequence[Images] = (),
    ) -> None:
        keep_freed_memory()
        self._count = workers or core_count()
        self._make_loop = partial(Loop, setup, networks, device)
        self._images = images
        self._start()

    def _start(self) -> None:
        tensors = [tensor for images in self._images for tensor in (images.x, images.y)]
        self._pool = pool = ThreadPoolExecutor(self._count, "protofed", use_one_thread)
        self._processes = processes = fork(self._count, self._make_loop, tensors)
        self._idle = SimpleQueue[Callable[..., Any]]()
        for n in range(self._count):
            ask = processes.each[n].ask if processes else partial(_call, self._make_loop())
            self._idle.put(ask)
        self._end = weakref.finalize(self, _end, pool, processes)

    def _ask(self, *work: Any) -> Any:
        """Called in a thread of the pool, of which there are as many as workers."""
        idle = self._idle  # that of this pool: a thread may outlast it
        ask = idle.get()
        try:
            return ask(*work)
        finally:
            idle.put(ask)

    def train(
        self, clients: Sequence[ClientData], received: Tree, mine: PrivateStates, round: int
    ) -> Generator[tuple[str, Reply]]:
        """The replies in order of completion; the largest clients start first.

        In the clients' order, many replies would pile up behind a slow client.
        """
        self._prepare(received)

        def work(data: ClientData) -> Reply:
            return self._ask(_train, data, received, mine(data.name), round)  # type: ignore[no-any-return]

        largest_first = sorted(clients, key=lambda data: -len(data))
        running = {self._pool.submit(work, data): data.name for data in largest_first}
        try:
            for future in as_completed(list(running)):
                if future.exception() is not None:
                    raise _first_error(running)
                yield running.pop(future), future.result()
        finally:
            self._give_up(running)

    def evaluate(
        self, jobs: Sequence[EvalJob], received: Tree, mine: PrivateStates, round: int
    ) -> Generator[Scores]:
        self._prepare(received)

        def work(job: EvalJob) -> Scores:
            private = {} if job.client is None else mine(job.client)
            return self._ask(_evaluate, job, received, private, round)  # type: ignore[no-any-return]

        parts = [[job] for job in jobs]
        if len(jobs) < self._count:  # too few for all workers: split by test set
            parts = [[replace(j, tests={n: t}) for n, t in j.tests.items()] for j in jobs]
        running = [[self._pool.submit(work, part) for part in job] for job in parts]
        try:
            for futures in running:
                whole: Scores = {}
                for future in futures:
                    for rule, found in future.result().items():
                        whole.setdefault(rule, {}).update(found)
                yield whole
        finally:
            self._give_up(future for futures in running for future in futures)

    def close(self) -> None:
        self._end()

    def _prepare(self, received: Tree) -> None:
        """Give the workers what all clients receive; start them if they were ended."""
        if not self._end.alive:
            self._start()
        if self._processes is not None:
            self._processes.post(received)

    def _give_up(self, futures: Iterable[Future[Any]]) -> None:
        """If a round is interrupted, no client of it starts, and no process computes on."""
        running = [future for future in futures if not (future.done() or future.cancel())]
        if running and self._processes is not None:
            self._end()


def _train(loop: Loop, data: ClientData, received: Tree, mine: Tree, round: int) -> Reply:
    ((_, reply),) = loop.train([data], received, lambda _: mine, round)
    return reply


def _evaluate(loop: Loop, job: EvalJob, received: Tree, mine: Tree, round: int) -> Scores:
    (scores,) = loop.evaluate([job], received, lambda _: mine, round)
    return scores


def _end(pool: ThreadPoolExecutor, processes: Processes | None) -> None:
    pool.shutdown(wait=False)
    if processes is not None:
        processes.end()


def _call(loop: Loop, work: Work, *args: Any) -> Any:
    return work(loop, *args)


def _first_error(running: Iterable[Future[Reply]]) -> BaseException:
    """The error of the first of these futures, in order of submission, that has one.

    It does not depend on how threads are scheduled: every client submitted before a failed one
    has started, and is waited for.
    """
    running = list(running)
    for future in running:
        future.cancel()
    for future in running:
        if not future.cancelled() and (error := future.exception()) is not None:
            return error
    raise AssertionError("one of the futures has failed")
