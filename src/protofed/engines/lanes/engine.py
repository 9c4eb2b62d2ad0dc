"""The lanes engine: clients on a GPU, several at a time, a whole local epoch as one CUDA graph.

The kernels of a small network are short, and a GPU idles between them. So a *lane* (a stream with
networks of its own) records one epoch of local training as a CUDA graph and replays it, and
several lanes run side by side. A recorded graph reads and writes fixed addresses: everything a
client needs (its images, what it received, its private state, the tables of its random choices)
is copied into its lane before the graph is replayed. One graph serves all clients with the same
number of samples; a small last batch is part of it, since padding would corrupt BatchNorm.

The host only prepares tables and queues copies and replays, with a thread for each lane (a full
queue blocks the thread that fills it). It reads results once, at the end of a round.
"""

from __future__ import annotations

import gc
import heapq
import warnings
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
import torch.nn.functional as F

from protofed import tree
from protofed.engines.lanes.lane import Lane, PendingReply
from protofed.engines.lanes.random_tables import RandomTables
from protofed.errors import ProtofedError
from protofed.federation.client_round import Reply
from protofed.federation.engine import Engine, MakeNetworks, PrivateStates
from protofed.federation.evaluation import EvalJob, Scores, evaluate_job
from protofed.federation.setup import ClientData, Setup
from protofed.tree import Tree

LANES = range(8, 13)
"""How many there may be; more than the fewest only if that distributes clients more evenly."""
UNEVEN = 1.1  # the longest lane may be this many times as long as with the best number of lanes
LARGEST_EVALUATION_BATCH = 2048
SMALL_EVALUATION_BATCH = 128  # rather than go below it, evaluation takes the lanes' memory
RECORDING_COST = 1.5  # a lane that must first record a graph counts as this much slower
FEWEST_PROTOTYPES = 16  # a class's prototypes are padded to this many, or the next power of two


class Lanes(Engine):
    """Several lanes on one GPU; results agree with the loop engine up to rounding."""

    def __init__(
        self,
        setup: Setup,
        make_networks: MakeNetworks,
        device: torch.device,
        lanes: int | None = None,
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # which may change later
        self.setup, self.device = setup, device
        self._make_networks = make_networks
        self._counts = range(lanes, lanes + 1) if lanes else LANES
        self._tables = RandomTables(setup)
        self._lanes: list[dict[str, Lane]] = []  # for each stream, a lane per model
        self._evaluation_networks = make_networks()
        self._evaluation_batch = LARGEST_EVALUATION_BATCH

    def train(
        self, clients: Sequence[ClientData], received: Tree, mine: PrivateStates, round: int
    ) -> Generator[tuple[str, Reply]]:
        """Train these clients; all replies come at the end, in the clients' order."""
        retried = False
        while True:
            try:
                replies = self._train(clients, received, mine, round)
                break
            except torch.cuda.OutOfMemoryError:
                pass  # leave the handler: the error's traceback keeps tensors alive
            if retried:
                self._halve_lanes(self._count([len(data) for data in clients]))
            self._drop_lanes()  # the first time, only frees what earlier rounds and runs left
            retried = True
        for data in clients:
            yield data.name, replies[data.name]

    def evaluate(
        self, jobs: Sequence[EvalJob], received: Tree, mine: PrivateStates, round: int
    ) -> Generator[Scores]:
        received = tree.to(received, self.device)
        for job in jobs:
            yield self._evaluate(job, received, mine, round)

    def _evaluate(self, job: EvalJob, received: Tree, mine: PrivateStates, round: int) -> Scores:
        """The scores of a job; when out of memory, in smaller batches or with fewer lanes."""
        networks, retried = self._evaluation_networks, False
        while True:
            batch = self._evaluation_batch
            try:
                return evaluate_job(self.setup, networks, job, received, mine, round, batch)
            except torch.cuda.OutOfMemoryError:
                if retried and batch == 1 and not self._lanes:
                    raise
            if retried and self._lanes and batch <= SMALL_EVALUATION_BATCH:
                self.free_memory()
            elif retried:
                self._evaluation_batch //= 2
            _collect_garbage()  # an earlier run's engine may be garbage in a reference cycle
            retried = True

    def free_memory(self) -> None:
        """Drop all lanes, and have fewer from the next round on."""
        if len(self._lanes) > 1:
            self._halve_lanes(len(self._lanes))
        self._drop_lanes()

    def _train(
        self, clients: Sequence[ClientData], received: Tree, mine: PrivateStates, round: int
    ) -> dict[str, Reply]:
        received = _pad_prototypes(tree.to(received, self.device))
        wanted = self._count([len(data) for data in clients])
        while len(self._lanes) < wanted:
            stream = _stream(self.device, len(self._lanes))
            self._lanes.append(
                {
                    model: Lane(self.setup, network, self.device, self._tables, stream)
                    for model, network in self._make_networks().items()
                }
            )
        queues = self._assign(clients)
        states = {
            data.name: _pad_prototypes(tree.to(mine(data.name), self.device)) for data in clients
        }
        programs = {  # all recording before any replay
            data.name: lane[data.model].prepare(data, received, states[data.name], round)
            for lane, queue in zip(self._lanes, queues, strict=True)
            for data in queue
        }
        torch.cuda.synchronize(self.device)

        def drive(lane: Mapping[str, Lane], queue: Sequence[ClientData]) -> dict[str, PendingReply]:
            return {
                data.name: lane[data.model].train(
                    data, received, states[data.name], round, programs[data.name]
                )
                for data in queue
            }

        with ThreadPoolExecutor(len(self._lanes), "lane") as threads:
            pairs = zip(self._lanes, queues, strict=True)
            driven = [threads.submit(drive, *pair) for pair in pairs]
            ahead = self._tables.draw_ahead(clients, round)  # while the GPU works
            pending = {name: p for future in driven for name, p in future.result().items()}
        self._tables.ready = ahead
        torch.cuda.synchronize(self.device)
        return {data.name: pending[data.name].reply() for data in clients}

    def _count(self, sizes: Sequence[int]) -> int:
        """How many lanes clients of these sizes get."""
        counts = [count for count in self._counts if count <= len(sizes)] or [len(sizes)]
        longest = {count: _longest_lane(sizes, count) for count in counts}
        return next(n for n in counts if longest[n] <= UNEVEN * min(longest.values()))

    def _assign(self, clients: Sequence[ClientData]) -> list[list[ClientData]]:
        """The clients of each lane: largest first, each where it would finish soonest."""
        load = [0.0 for _ in self._lanes]
        queues: list[list[ClientData]] = [[] for _ in self._lanes]
        for data in sorted(clients, key=lambda d: -len(d)):
            after = [
                busy + len(data) * (1.0 if lane[data.model].knows(data) else RECORDING_COST)
                for busy, lane in zip(load, self._lanes, strict=True)
            ]
            place = after.index(min(after))
            load[place] = after[place]
            queues[place].append(data)
        return queues

    def _halve_lanes(self, tried: int) -> None:
        if tried == 1:
            raise ProtofedError(
                "out of GPU memory with one client at a time", "use a smaller --batch or --model"
            )
        half = tried // 2
        self._counts = range(half, half + 1)
        lanes = f"{half} lane{'s' if half > 1 else ''}"
        warnings.warn(f"out of GPU memory: continuing with {lanes}", stacklevel=2)

    def _drop_lanes(self) -> None:
        """Free every lane, its graphs, and whatever else only the garbage collector frees."""
        torch.cuda.synchronize(self.device)  # their work may still be running
        self._lanes.clear()
        _collect_garbage()  # an error from a thread is in a reference cycle with what it keeps


def _longest_lane(sizes: Sequence[int], count: int) -> int:
    """Samples in the fullest of that many lanes, if each client goes to the emptiest."""
    lanes = [0] * count
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(lanes, lanes[0] + size)
    return max(lanes, default=0)


def _collect_garbage() -> None:
    """Return memory that nothing uses to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The stream of every lane of this number, in all runs of the process.

    PyTorch keeps cuBLAS workspaces (32 MiB each on a large GPU) for every stream ever used.
    """
    return torch.cuda.Stream(device)


def _pad_prototypes(content: Tree) -> Tree:
    """Ragged slots (those with a mask [K, J]) with J padded, so that few graphs serve all J."""
    result = {}
    for slot, entries in content.items():
        mask = entries.get("mask")
        if mask is None or mask.ndim != 2:
            result[slot] = entries
            continue
        size = mask.shape[1]
        more = max(FEWEST_PROTOTYPES, 1 << (size - 1).bit_length()) - size
        result[slot] = {
            n: F.pad(t, (0, 0) * (t.ndim - 2) + (0, more)) if t.shape[:2] == mask.shape else t
            for n, t in entries.items()
        }
    return result
