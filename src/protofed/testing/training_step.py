"""One training step of a client, as the checks look at it: by term, by slope, as a recording."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from protofed import keys, tree
from protofed.federation.model_state import load_model
from protofed.federation.simulation import Federation
from protofed.keys import generator
from protofed.method import Batch, Client, Phase, Terms, call_with
from protofed.tree import Slot, Tree


class TrainingStep:
    """A step of a client in the next round of a federation, some way into its training."""

    def __init__(self, federation: Federation) -> None:
        method, dtype = federation.method, federation.setup.dtype
        self.method, self.dtype, self.sizes = method, dtype, federation.sizes
        self.network = federation.make_network()
        self.received = federation.server.broadcast()
        self.site, *others = federation.clients.values()
        self.another = others[-1]
        self.mine = federation.store.get(self.site.name)
        self.epochs = federation.setup.training.epochs
        self.phases = method.phases(1, self.epochs)
        load_model(self.network, self.mine.get("model", {}) | self.received.get("model", {}))
        rng = generator("scene")
        with torch.no_grad():
            for p in self.network.parameters():
                p.add_(torch.from_numpy(rng.standard_normal(tuple(p.shape))).to(dtype), alpha=0.02)
        self.network.train()
        self.model: Slot = tree.copy({"model": self.network.state_dict()})["model"]
        self.batch = self._batch(0)

    def _batch(self, shift: int) -> Batch:
        rows = torch.arange(8) + shift
        x = self.site.images.x[rows].to(self.dtype) / 128 - 1
        return Batch(x, self.site.images.y[rows], rows)

    def terms(self, phase: Phase, moved: Slot | None = None) -> Terms:
        """The terms of the loss at the step's weights, some of them moved."""
        load_model(self.network, self.model | (moved or {}))
        return phase.loss(self._client(self.received, self.mine), self.batch)

    def slope(self, phase: Phase, name: str) -> tuple[float, float, float, float]:
        """Slope along a random direction by autograd and by differences, ‖gradient‖, value."""
        term = self.terms(phase)[name]
        value = float(term.detach())
        moving = _moving(phase, dict(self.network.named_parameters()))
        if not term.requires_grad:
            return 0.0, 0.0, 0.0, value
        grads = torch.autograd.grad(term, list(moving.values()), allow_unused=True)
        rng = generator("direction", name)
        normal = {n: rng.standard_normal(tuple(p.shape)) for n, p in moving.items()}
        direction = {n: torch.from_numpy(a) for n, a in normal.items()}
        pairs = [(g, direction[n]) for n, g in zip(moving, grads, strict=True) if g is not None]
        slope = sum(float((g * v).sum()) for g, v in pairs)
        size = math.sqrt(sum(float((g * g).sum()) for g, _ in pairs))
        # A finite step may cross the kink of a ReLU or a max-pool; a smaller one rarely does.
        tries = [self._difference(phase, name, direction, step) for step in (1e-6, 1e-7, 1e-8)]
        return slope, min(tries, key=lambda d: abs(d - slope)), size, value

    def _difference(self, phase: Phase, name: str, direction: Slot, step: float) -> float:
        ends = []
        for sign in (1, -1):
            moved = {n: self.model[n] + sign * step * v for n, v in direction.items()}
            ends.append(float(self.terms(phase, moved)[name].detach()))
        return (ends[0] - ends[1]) / (2 * step)

    # ---- the step as a function of tensors alone, as an engine records it ----------------------

    def inputs(self, later: bool = False) -> list[Any]:
        """Everything that a step reads; ``later``: all changed that may differ between steps."""
        buffers = {n for n, _ in self.network.named_buffers()}
        factor, client = (1.1, self.another) if later else (1.0, self.site)
        model = {n: t.clone() if n in buffers else t * factor for n, t in self.model.items()}
        return [
            {n: t.requires_grad_() for n, t in model.items() if n not in buffers},
            {n: t for n, t in model.items() if n in buffers},
            tuple(self._batch(3 if later else 0)),
            *(tree.map_tensors(t, partial(_scaled, factor)) for t in (self.received, self.mine)),
            torch.tensor(2 if later else 1),
            torch.tensor(1.0 if later else 0.5),
            torch.tensor(keys.key(client.name)),
            torch.tensor(keys.key(client.domain)),
            torch.tensor(12 if later else 11),
            self._drawn(1 if later else 0),
        ]

    def __call__(self, phase: Phase, *inputs: Any) -> list[Tensor]:
        """Loss and gradients."""
        parameters, buffers, batch, received, mine, *rest = inputs
        client = self._client(received, mine)
        client.parameters = parameters
        client.round, client.progress, client.id, client.domain, client.key, client.drawn = rest
        loss = partial(phase.loss, client, Batch(*batch))
        total = torch.stack([*call_with(self.network, parameters | buffers, loss).values()]).sum()
        wanted = list(_moving(phase, parameters).values())
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        return [total, *(g for g in grads if g is not None)]

    def _client(self, received: Tree, mine: Tree) -> Client:
        client = Client(
            self.method, self.network, self.sizes, received=received, mine=mine, round=1, rounds=3,
            name=self.site.name, domain=self.site.domain, mean=(0.5,), std=(0.5,),
        )  # fmt: skip
        client.begin_step(11)
        client.drawn = self._drawn(0)
        return client

    def _drawn(self, row: int) -> Slot:
        table = self.method.draws(generator("draws"), 2)
        return {name: torch.from_numpy(a).to(self.dtype)[row] for name, a in table.items()}


def _moving(phase: Phase, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    moves = phase.trainable or (lambda name: True)
    return {name: p for name, p in parameters.items() if moves(name)}


def _scaled(factor: float, t: Tensor) -> Tensor:
    return t * factor if t.is_floating_point() else t.clone()
