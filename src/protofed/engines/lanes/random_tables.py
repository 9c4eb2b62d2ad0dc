"""What a client's local training draws at random, as tables that a recorded step can index."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protofed import keys
from protofed.data.augment import Choices
from protofed.federation.client_round import Data, Setup, Site
from protofed.tree import Slot


class Tables:
    """The clients' images and random choices as tables; those of the next round in advance."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._data: dict[str, Data] = {}
        self.ready: dict[tuple[str, int, int, int, int], Slot] = {}
        self._asked: dict[str, list[tuple[int, int, int]]] = {}

    def data(self, site: Site) -> Data:
        """A client's images, prepared once; public ones anew, as every round has others."""
        if site.public:
            return Data(self.setup, site)
        if site.name not in self._data:
            self._data[site.name] = Data(self.setup, site)
        return self._data[site.name]

    def take(self, site: Site, round: int, phase: int, epochs: int, steps: int) -> Slot:
        """A client's tables of a phase, ready to be copied to the GPU."""
        shape = (phase, epochs, steps)
        if site.public:
            return self.draw(site, round, *shape)
        asked = self._asked.setdefault(site.name, [])
        if shape not in asked:
            asked.append(shape)
        found = self.ready.pop((site.name, round, *shape), None)
        return found or self.draw(site, round, *shape)

    def ahead(
        self, sites: Sequence[Site], round: int
    ) -> dict[tuple[str, int, int, int, int], Slot]:
        """The next round's tables of these clients, of the shapes they were asked for before."""
        if round + 1 >= self.setup.rounds:
            return {}
        return {
            (site.name, round + 1, *shape): self.draw(site, round + 1, *shape)
            for site in sites
            for shape in list(self._asked.get(site.name, []))
        }

    def draw(self, site: Site, round: int, phase: int, epochs: int, steps: int) -> Slot:
        """The random choices of all epochs of a phase, [epochs, ...] each, in pinned memory."""
        data = self.data(site)
        setup, rows = data.setup, data.parts["train"]
        where = (setup.seed, round, site.name, phase)
        each: list[Slot] = []
        for epoch in range(epochs):
            key = (*where, epoch)
            order = torch.from_numpy(keys.generator(*key, "order").permutation(rows))
            rng, side = keys.generator(*key, "augment"), site.images.x.shape[-1]
            choices = Choices.draw(rng, len(site.images), setup.augment, side)
            numbers = range(epoch * steps, (epoch + 1) * steps)
            drawn = setup.method.draws(keys.generator(*key, "draws"), steps)
            each.append(
                {
                    "order": order,
                    "key": torch.tensor([keys.key(*where, i, "step") for i in numbers]),
                    **{
                        f"choice.{n}": t[order]
                        for n, t in choices._asdict().items()
                        if t is not None
                    },
                    **{f"drawn.{n}": torch.from_numpy(a).to(setup.dtype) for n, a in drawn.items()},
                }
            )
        return {name: torch.stack([e[name] for e in each]).pin_memory() for name in each[0]}
