"""The loop engine: one client after another, in one network. The oracle of all other engines."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from protofed.federation.client_round import Reply, train_client
from protofed.federation.cpu import keep_freed_memory
from protofed.federation.engine import Engine, MakeNetworks, PrivateStates
from protofed.federation.evaluation import EvalJob, Scores, evaluate_job
from protofed.federation.setup import ClientData, Setup
from protofed.tree import Tree


class Loop(Engine):
    """Runs clients in order, each in the network of its model."""

    def __init__(self, setup: Setup, networks: MakeNetworks, device: torch.device, *_: Any) -> None:
        if device.type == "cpu":
            keep_freed_memory()
        self.setup, self.networks = setup, networks()

    def train(
        self, clients: Sequence[ClientData], received: Tree, mine: PrivateStates, round: int
    ) -> Generator[tuple[str, Reply]]:
        for data in clients:
            network = self.networks[data.model]
            reply = train_client(self.setup, network, data, received, mine(data.name), round)
            yield data.name, reply

    def evaluate(
        self, jobs: Sequence[EvalJob], received: Tree, mine: PrivateStates, round: int
    ) -> Generator[Scores]:
        for job in jobs:
            yield evaluate_job(self.setup, self.networks, job, received, mine, round)
