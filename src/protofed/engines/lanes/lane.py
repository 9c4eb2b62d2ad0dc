"""A lane: a stream, a network, and the programs recorded on them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from protofed import keys, tree
from protofed.engines.lanes.bf16 import Bf16Weights
from protofed.engines.lanes.program import Program
from protofed.engines.lanes.random_tables import RandomTables
from protofed.engines.lanes.signatures import loss_signature, tree_signature
from protofed.federation.batches import next_public_batches
from protofed.federation.client_round import Reply, finish_round, moving_parameters
from protofed.federation.finite import require_finite_losses
from protofed.federation.model_state import load_model
from protofed.federation.privacy import collect_private
from protofed.federation.setup import ClientData, Setup
from protofed.method import Client, Phase
from protofed.models import Network
from protofed.tree import Tree


class PendingReply:
    """A client's reply whose losses are still being computed."""

    def __init__(self, reply: Reply, round: int, name: str) -> None:
        self.losses: list[tuple[int, list[str], Tensor, int]] = []
        self._reply, self._round, self._name = reply, round, name

    def finish(self, client: Client, message: Tree, private: Tree) -> None:
        """Fill in what the client's round ended with."""
        self._reply.message, self._reply.mine = message, private
        self._reply.steps, self._reply.lr = client.steps, client.lr

    def reply(self) -> Reply:
        """The reply; the GPU must have finished its work."""
        for number, names, sums, steps in self.losses:
            totals = dict(zip(names, sums.tolist(), strict=True))
            require_finite_losses(self._name, self._round, number, totals)
            for name, total in totals.items():
                self._reply.add_loss(name, total, steps)
        return self._reply


class Lane:
    """Runs clients of one model, one after another."""

    def __init__(
        self,
        setup: Setup,
        network: Network,
        device: torch.device,
        tables: RandomTables,
        stream: torch.cuda.Stream,
    ) -> None:
        self.setup, self.network, self.device, self.tables = setup, network, device, tables
        _fuse(network)
        self.bf16 = Bf16Weights(network) if setup.bf16 else None
        self.stream = stream
        self.pool = torch.cuda.graph_pool_handle()
        self._clients: dict[Any, Client] = {}
        self._programs: dict[Any, Program] = {}

    def knows(self, data: ClientData) -> bool:
        """Whether this lane has a program for a client of this size."""
        return any(key[0] == len(data) for key in self._programs)

    def prepare(self, data: ClientData, received: Tree, mine: Tree, round: int) -> list[Program]:
        """The programs this client runs; those the lane does not have yet are recorded."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            client = self._client(received, mine)
            client.name = data.name  # for errors, which come up while its program is recorded
            phases = self.setup.method.phases(round, self.setup.training.epochs)
            return [
                self._program(
                    data.for_phase(self.setup, phase, round), client, number, phase,
                    last=number == len(phases) - 1,
                )
                for number, phase in enumerate(phases)
                if phase.epochs != 0
            ]  # fmt: skip

    def train(
        self, data: ClientData, received: Tree, mine: Tree, round: int, programs: Sequence[Program]
    ) -> PendingReply:
        """Queue a client's whole round."""
        setup = self.setup
        with torch.cuda.stream(self.stream):
            client = self._client(received, mine)
            _copy_into(client.received, received)
            _copy_into(client.mine, mine)
            client.round.fill_(round)
            client.id.fill_(keys.key(data.name))
            client.domain.fill_(keys.key(data.domain))
            client.progress.fill_(round / max(1, setup.rounds - 1))
            batches = self.tables.batches(data)
            client.name, client.samples = data.name, len(batches.parts["train"])
            client.clean, client.steps = batches.clean, 0
            client.small_classes = batches.small_classes()
            client.public = next_public_batches(setup, data, round)
            client.begin_prototypes()
            load_model(self.network, client.start)
            key = (setup.seed, round, data.name)
            if setup.proto_pass == "received":
                with setup.autocast(self.device):
                    collect_private(setup.privacy, client, key, setup.min_class_count)
            self.network.train()
            pending = PendingReply(Reply({}, {}, client.samples, 0, 0.0), round, data.name)
            for program in programs:
                program.run(data.for_phase(setup, program.phase, round), round)
                steps = program.epochs * program.steps
                client.steps += steps
                pending.losses.append((program.number, program.names, program.sums.clone(), steps))
            with setup.autocast(self.device):
                pending.finish(client, *finish_round(setup, client, key, self.device))
        return pending

    def _client(self, received: Tree, mine: Tree) -> Client:
        """The view whose tensors have these shapes; graphs know it by its addresses."""
        shapes = (tree_signature(received), tree_signature(mine))
        if shapes not in self._clients:
            self._clients[shapes] = Client(
                self.setup.method,
                self.network,
                self.setup.sizes,
                received=tree.map_tensors(received, torch.clone),
                mine=tree.map_tensors(mine, torch.clone),
                min_class_count=self.setup.min_class_count,
                label_smoothing=self.setup.training.label_smoothing,
                mean=self.setup.augment.mean,
                std=self.setup.augment.std,
            )
        return self._clients[shapes]

    def _program(
        self, data: ClientData, client: Client, number: int, phase: Phase, last: bool
    ) -> Program:
        """The program of a phase; the phases of a round may differ from those of the last."""
        moving = moving_parameters(client, phase)
        trainable = {name: name in moving for name, _ in self.network.named_parameters()}
        key = (
            len(data),
            id(client),
            number,
            self.setup.training.for_phase(phase),
            phase.data,
            loss_signature(phase.loss),
            tuple(trainable.values()),
            last,
        )
        if key not in self._programs:
            program = Program(
                self.setup, self.network, self.bf16, self.tables,
                data, client, number, phase, trainable, last,
            )  # fmt: skip
            program.record(self.stream, self.pool)
            self._programs[key] = program
        return self._programs[key]


def _copy_into(static: Tree, content: Tree) -> None:
    """Fill tensors that keep their addresses."""
    for slot, entries in static.items():
        torch._foreach_copy_(list(entries.values()), [content[slot][n] for n in entries])


def _fuse(network: Network) -> None:
    try:
        from protofed.engines.lanes.fusion import fuse
    except ImportError:  # Triton comes with PyTorch for CUDA on Linux, not elsewhere
        text = "Triton is not installed: lanes run with PyTorch's own kernels, which are slower"
        warnings.warn(text, stacklevel=2)
    else:
        fuse(network)
