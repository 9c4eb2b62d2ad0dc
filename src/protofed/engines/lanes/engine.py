"""The lanes engine: clients on a GPU, several at a time, a whole local epoch as one CUDA graph.

Small networks leave a GPU idle between kernels and each kernel small. So a *lane* (a stream with
a network of its own) records one epoch of local training as a CUDA graph and replays it, and
several lanes run side by side. A recorded graph reads and writes fixed addresses: everything a
client needs (its images, what it received, its private state, the tables of its random choices)
is copied into its lane before its graph is replayed. One graph serves all clients with the same
number of samples; a last small batch is a part of it, since padding would corrupt BatchNorm.

The host only prepares tables and queues copies and replays, a thread for each lane (a full queue
makes whoever fills it wait); it reads results once, at the end of a round.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from protofed import keys, tree
from protofed.engines.lanes.bf16 import Halves
from protofed.engines.lanes.program import Program
from protofed.engines.lanes.random_tables import Tables
from protofed.engines.lanes.signatures import copy_into, padded, shapes_of, told_apart, trainable_of
from protofed.errors import ProtofedError
from protofed.federation.client_round import (
    Exam,
    Reply,
    Scores,
    Setup,
    Site,
    examine,
    finish,
    load,
    next_public,
    require_finite_losses,
)
from protofed.method import Client, Phase
from protofed.models import Network
from protofed.tree import Tree

LANES = 6  # on an H200 5 and 8 are slower by 3 to 5 %, 3 and 12 by a tenth or more
EVALUATION_BATCH = 2048
FEW = 128  # images at once below which testing would rather have the lanes' memory
NEW_GRAPH = 1.5  # a lane that must record a graph first counts as this much slower


class Lanes:
    """Several lanes on one GPU; results agree with the loop engine to rounding."""

    def __init__(
        self,
        setup: Setup,
        make_networks: Callable[[], Mapping[str, Network]],
        device: torch.device,
        lanes: int | None = None,
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # another one may be later
        self.setup, self.device = setup, device
        self._make_networks, self._count = make_networks, lanes or LANES
        self._tables = Tables(setup)
        self._lanes: list[dict[str, Lane]] = []  # a place for each model, on one stream
        self._judges = make_networks()
        self._at_once = EVALUATION_BATCH

    def train(
        self, sites: Sequence[Site], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[tuple[str, Reply]]:
        """Train these clients; their replies come together, in their order."""
        anew = False
        while True:
            try:
                replies = self._train(sites, received, mine, round)
                break
            except torch.cuda.OutOfMemoryError:
                pass  # until here the error's traceback keeps alive what was being made
            if anew:
                self._fewer_lanes(len(sites))
            self._forget_lanes()  # at first, without what earlier rounds and runs have left
            anew = True
        for site in sites:
            yield site.name, replies[site.name]

    def evaluate(
        self, exams: Sequence[Exam], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Iterator[Scores]:
        """The scores of each exam, as they come."""
        received = tree.to(received, self.device)
        for exam in exams:
            yield self._examine(exam, received, mine, round)

    def _examine(
        self, exam: Exam, received: Tree, mine: Callable[[str], Tree], round: int
    ) -> Scores:
        """The scores of an exam, with fewer images at once or fewer lanes if memory is short."""
        anew = False
        while True:
            try:
                return examine(self.setup, self._judges, exam, received, mine, round, self._at_once)
            except torch.cuda.OutOfMemoryError:
                if anew and self._at_once == 1 and not self._lanes:
                    raise
            if anew and self._lanes and self._at_once <= FEW:
                self.make_room()
            elif anew:
                self._at_once //= 2
            _collect()  # an earlier run's engine is garbage in a circle
            anew = True

    def make_room(self) -> None:
        """Give up the lanes and have fewer from the next round on."""
        if len(self._lanes) > 1:
            self._fewer_lanes(len(self._lanes))
        self._forget_lanes()

    def _train(
        self, sites: Sequence[Site], received: Tree, mine: Callable[[str], Tree], round: int
    ) -> dict[str, Reply]:
        received = padded(tree.to(received, self.device))
        while len(self._lanes) < min(self._count, len(sites)):
            stream = _stream(self.device, len(self._lanes))
            self._lanes.append(
                {
                    model: Lane(self.setup, network, self.device, self._tables, stream)
                    for model, network in self._make_networks().items()
                }
            )
        queues = self._assign(sites)
        states = {site.name: padded(tree.to(mine(site.name), self.device)) for site in sites}
        programs = {  # all recording before any replay
            site.name: lane[site.model].prepare(site, received, states[site.name], round)
            for lane, queue in zip(self._lanes, queues, strict=True)
            for site in queue
        }
        torch.cuda.synchronize(self.device)

        def drive(lane: Mapping[str, Lane], queue: Sequence[Site]) -> dict[str, _Pending]:
            return {
                site.name: lane[site.model].train(
                    site, received, states[site.name], round, programs[site.name]
                )
                for site in queue
            }

        with ThreadPoolExecutor(len(self._lanes), "lane") as threads:
            pairs = zip(self._lanes, queues, strict=True)
            driven = [threads.submit(drive, *pair) for pair in pairs]
            ahead = self._tables.ahead(sites, round)  # while the GPU works
            pending = {name: p for future in driven for name, p in future.result().items()}
        self._tables.ready = ahead
        torch.cuda.synchronize(self.device)
        return {site.name: pending[site.name].reply() for site in sites}

    def _assign(self, sites: Sequence[Site]) -> list[list[Site]]:
        """The clients of each lane: longest first, each where it would be done soonest."""
        load = [0.0 for _ in self._lanes]
        queues: list[list[Site]] = [[] for _ in self._lanes]
        for site in sorted(sites, key=lambda s: -len(s.images)):
            after = [
                busy + len(site.images) * (1.0 if lane[site.model].knows(site) else NEW_GRAPH)
                for busy, lane in zip(load, self._lanes, strict=True)
            ]
            place = after.index(min(after))
            load[place] = after[place]
            queues[place].append(site)
        return queues

    def _fewer_lanes(self, clients: int) -> None:
        tried = min(self._count, clients)
        if tried == 1:
            raise ProtofedError(
                "the GPU has too little memory for one client", "use a smaller --batch or --model"
            )
        self._count = tried // 2
        warnings.warn(f"GPU memory is short: going on with {self._count} lanes", stacklevel=2)

    def _forget_lanes(self) -> None:
        """Give up every lane, its graphs, and whatever else only the garbage collector frees."""
        torch.cuda.synchronize(self.device)  # what they were given may still be running
        self._lanes.clear()
        _collect()  # an error that came from a thread is in a circle with what it keeps


def _collect() -> None:
    """Memory that nothing uses is the GPU's again."""
    gc.collect()
    torch.cuda.empty_cache()


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The stream of every lane of this number, in all runs of the process.

    PyTorch keeps workspaces of cuBLAS (32 MiB each on a large GPU) for every stream there ever was.
    """
    return torch.cuda.Stream(device)


class _Pending:
    """A client's reply whose losses are still being computed."""

    def __init__(self, reply: Reply, round: int, name: str) -> None:
        self.losses: list[tuple[int, list[str], Tensor, int]] = []
        self._reply, self._round, self._name = reply, round, name

    def answer(self, client: Client, message: Tree, private: Tree) -> None:
        """What the client's round ended with."""
        self._reply.message, self._reply.mine = message, private
        self._reply.steps, self._reply.lr = client.steps, client.lr

    def reply(self) -> Reply:
        """The reply; the GPU must be done with it."""
        for number, names, sums, steps in self.losses:
            totals = dict(zip(names, sums.tolist(), strict=True))
            require_finite_losses(self._name, self._round, number, totals)
            for name, total in totals.items():
                self._reply.add_loss(name, total, steps)
        return self._reply


class Lane:
    """A stream, a network, and the graphs recorded on them."""

    def __init__(
        self,
        setup: Setup,
        network: Network,
        device: torch.device,
        tables: Tables,
        stream: torch.cuda.Stream,
    ) -> None:
        self.setup, self.network, self.device, self.tables = setup, network, device, tables
        _fuse(network)
        self.halves = Halves(network) if setup.bf16 else None
        self.stream = stream
        self.pool = torch.cuda.graph_pool_handle()
        self._clients: dict[Any, Client] = {}
        self._programs: dict[Any, Program] = {}

    def knows(self, site: Site) -> bool:
        """Whether a client of this size has been here."""
        return any(key[0] == len(site.images) for key in self._programs)

    def prepare(self, site: Site, received: Tree, mine: Tree, round: int) -> list[Program]:
        """What this client runs; recorded where the lane does not have it yet."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            client = self._client(received, mine)
            client.name = site.name  # for errors: whoever records it is the first to meet them
            phases = self.setup.method.phases(round, self.setup.training.epochs)
            return [
                self._program(
                    site.of_phase(self.setup, phase, round), client, number, phase,
                    last=number == len(phases) - 1,
                )
                for number, phase in enumerate(phases)
                if phase.epochs != 0
            ]  # fmt: skip

    def train(
        self, site: Site, received: Tree, mine: Tree, round: int, programs: Sequence[Program]
    ) -> _Pending:
        """Queue a client's whole local training, and what follows it."""
        setup = self.setup
        with torch.cuda.stream(self.stream):
            client = self._client(received, mine)
            copy_into(client.received, received)
            copy_into(client.mine, mine)
            client.round.fill_(round)
            client.id.fill_(keys.key(site.name))
            client.progress.fill_(round / max(1, setup.rounds - 1))
            data = self.tables.data(site)
            client.name, client.samples = site.name, len(data.parts["train"])
            client.clean, client.steps = data.clean, 0
            client.public = next_public(setup, site, round)
            client.begin_prototypes()
            load(self.network, client.start)
            self.network.train()
            pending = _Pending(Reply({}, {}, client.samples, 0, 0.0), round, site.name)
            for program in programs:
                seen = site.of_phase(setup, program.phase, round)
                program.run(seen, self.tables.data(seen), round)
                steps = program.epochs * program.steps
                client.steps += steps
                client.lr = program.lr
                pending.losses.append((program.number, program.names, program.sums.clone(), steps))
            with setup.autocast(self.device):
                pending.answer(client, *finish(setup.method, client, self.device))
        return pending

    def _client(self, received: Tree, mine: Tree) -> Client:
        """The view whose tensors have these shapes; graphs know it by its addresses."""
        shapes = (shapes_of(received), shapes_of(mine))
        if shapes not in self._clients:
            self._clients[shapes] = Client(
                self.setup.method,
                self.network,
                self.setup.sizes,
                received=tree.map_tensors(received, torch.clone),
                mine=tree.map_tensors(mine, torch.clone),
            )
        return self._clients[shapes]

    def _program(
        self, site: Site, client: Client, number: int, phase: Phase, last: bool
    ) -> Program:
        """The program of a phase; a round's phases may be others than the round's before."""
        trainable = trainable_of(self.network, phase)
        settings = (phase.epochs, phase.batch, phase.lr, phase.momentum, phase.clip)
        kind = (
            phase.optimizer,
            phase.data,
            told_apart(phase.loss),
            tuple(trainable.values()),
            last,
        )
        key = (len(site.images), id(client), number, settings, kind)
        if key not in self._programs:
            program = Program(self, site, client, number, phase, trainable, last)
            program.record()
            self._programs[key] = program
        return self._programs[key]


def _fuse(network: Network) -> None:
    try:
        from protofed.engines.lanes.batchnorm import fuse
    except ImportError:  # Triton comes with PyTorch for CUDA on Linux, not elsewhere
        text = "Triton is not installed: BatchNorm runs in PyTorch's own kernels, some 15 % slower"
        warnings.warn(text, stacklevel=2)
    else:
        fuse(network)
