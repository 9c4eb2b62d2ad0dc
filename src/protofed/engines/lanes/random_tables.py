"""A client's random choices as tables that a recorded step can index."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protofed import keys
from protofed.federation.batches import ClientBatches
from protofed.federation.setup import ClientData, Setup
from protofed.tree import Slot

Key = tuple[str, int, int, int, int]
"""Client, round, phase, epochs, steps."""


class RandomTables:
    """Clients' batches and random tables; tables of the next round are drawn in advance."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._batches: dict[str, ClientBatches] = {}
        self.ready: dict[Key, Slot] = {}
        self._shapes: dict[str, list[tuple[int, int, int]]] = {}

    def batches(self, data: ClientData) -> ClientBatches:
        """A client's batches, prepared once; those of public images each time they are drawn."""
        if data.public:
            return ClientBatches(self.setup, data)
        if data.name not in self._batches:
            self._batches[data.name] = ClientBatches(self.setup, data)
        return self._batches[data.name]

    def take(self, data: ClientData, round: int, phase: int, epochs: int, steps: int) -> Slot:
        """A client's tables of a phase, ready to be copied to the GPU."""
        shape = (phase, epochs, steps)
        if data.public:
            return self.draw(data, round, *shape)
        shapes = self._shapes.setdefault(data.name, [])
        if shape not in shapes:
            shapes.append(shape)
        found = self.ready.pop((data.name, round, *shape), None)
        return found or self.draw(data, round, *shape)

    def draw_ahead(self, clients: Sequence[ClientData], round: int) -> dict[Key, Slot]:
        """The next round's tables of these clients, in the shapes taken before."""
        if round + 1 >= self.setup.rounds:
            return {}
        return {
            (data.name, round + 1, *shape): self.draw(data, round + 1, *shape)
            for data in clients
            for shape in list(self._shapes.get(data.name, []))
        }

    def draw(self, data: ClientData, round: int, phase: int, epochs: int, steps: int) -> Slot:
        """The random choices of all epochs of a phase, [epochs, ...] each, in pinned memory."""
        batches, setup = self.batches(data), self.setup
        where = (setup.seed, round, data.name, phase)
        each: list[Slot] = []
        for epoch in range(epochs):
            key = (*where, epoch)
            order, choices = batches.draw(key)
            numbers = range(epoch * steps, (epoch + 1) * steps)
            drawn = setup.method.draws(keys.generator(*key, "draws"), steps)
            each.append(
                {
                    "order": order,
                    "key": torch.tensor([keys.key(*where, i, "step") for i in numbers]),
                    **{f"choice.{n}": t for n, t in choices._asdict().items() if t is not None},
                    **{f"drawn.{n}": torch.from_numpy(a).to(setup.dtype) for n, a in drawn.items()},
                }
            )
        return {name: torch.stack([e[name] for e in each]).pin_memory() for name in each[0]}
