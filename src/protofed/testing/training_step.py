"""One training step of a client, as the checks look at it: by term, by slope, as a recording."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from protofed import keys, tree
from protofed.federation.model_state import load_model
from protofed.federation.simulation import Federation
from protofed.keys import generator
from protofed.method import Batch, Client, Phase, Terms
from protofed.tree import Slot, Tree


class TrainingStep:
    """A step of a client in the next round of a federation, some way into its training."""

    def __init__(self, federation: Federation) -> None:
        method, dtype = federation.method, federation.setup.dtype
        self.method, self.dtype, self.sizes = method, dtype, federation.sizes
        self.network = federation.make_network()
        self.received = federation.server.broadcast()
        self.site, *others = federation.clients.values()
        self.another = others[0].name
        self.mine = federation.store.get(self.site.name)
        self.epochs = federation.setup.training.epochs
        self.phases = method.phases(1, self.epochs)
        start = self.mine.get("model", {}) | self.received.get("model", {})
        load_model(self.network, start)
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

    def terms(self, phase: Phase) -> Terms:
        """The terms of the loss at the step's weights."""
        load_model(self.network, self.model)
        return phase.loss(self._client(self.received, self.mine), self.batch)

    def slope(self, phase: Phase, name: str) -> tuple[float, float, float, float]:
        """Slope along a random direction by autograd and by differences, ‖gradient‖, value."""
        term = self.terms(phase)[name]
        value = float(term.detach())
        moving = {
            n: p
            for n, p in self.network.named_parameters()
            if phase.trainable is None or phase.trainable(n)
        }
        if not term.requires_grad:
            return 0.0, 0.0, 0.0, value
        grads = torch.autograd.grad(term, list(moving.values()), allow_unused=True)
        rng = generator("direction", name)
        direction = {
            n: torch.from_numpy(rng.standard_normal(tuple(p.shape))) for n, p in moving.items()
        }
        pairs = [(g, direction[n]) for n, g in zip(moving, grads, strict=True) if g is not None]
        slope = sum(float((g * v).sum()) for g, v in pairs)
        size = math.sqrt(sum(float((g * g).sum()) for g, _ in pairs))
        # A finite step may cross the kink of a ReLU or a max-pool; a smaller one rarely does.
        tries = [self._difference(phase, name, direction, step) for step in (1e-6, 1e-7, 1e-8)]
        return slope, min(tries, key=lambda d: abs(d - slope)), size, value

    def _difference(self, phase: Phase, name: str, direction: Slot, step: float) -> float:
        ends = []
        for sign in (1, -1):
            load_model(self.network, self.model)
            with torch.no_grad():
                for n, p in self.network.named_parameters():
                    if n in direction:
                        p.add_(direction[n], alpha=sign * step)
            client = self._client(self.received, self.mine)
            ends.append(float(phase.loss(client, self.batch)[name].detach()))
        return (ends[0] - ends[1]) / (2 * step)

    # ---- the step as a function of tensors alone, as an engine records it ----------------------

    def inputs(self) -> list[Any]:
        buffers = {n for n, _ in self.network.named_buffers()}
        return [
            {n: t.clone().requires_grad_() for n, t in self.model.items() if n not in buffers},
            {n: t.clone() for n, t in self.model.items() if n in buffers},
            tuple(self.batch),
            self.received,
            self.mine,
            torch.tensor(1),
            torch.tensor(0.5),
            torch.tensor(keys.key(self.site.name)),
            torch.tensor(11),
            self._drawn(0),
        ]

    def other_inputs(self) -> list[Any]:
        """The same, with everything changed that may differ between two steps."""
        parameters, buffers, _, received, mine, *_ = self.inputs()
        scaled = [tree.map_tensors(t, _scaled) for t in (received, mine)]
        return [
            {n: (t.detach() * 1.1).requires_grad_() for n, t in parameters.items()},
            buffers,
            tuple(self._batch(3)),
            *scaled,
            torch.tensor(2),
            torch.tensor(1.0),
            torch.tensor(keys.key(self.another)),
            torch.tensor(12),
            self._drawn(1),
        ]

    def __call__(
        self,
        phase: Phase,
        parameters: Slot,
        buffers: Slot,
        batch: tuple[Tensor, Tensor, Tensor],
        received: Tree,
        mine: Tree,
        round: Tensor,
        progress: Tensor,
        id: Tensor,
        key: Tensor,
        drawn: Slot,
    ) -> list[Tensor]:
        client = self._client(received, mine)
        client.parameters = parameters  # type: ignore[assignment]
        client.round, client.progress, client.id, client.key = round, progress, id, key
        client.drawn = drawn
        loss = _Loss(self.network, lambda: phase.loss(client, Batch(*batch)))
        state = {f"network.{n}": t for n, t in (parameters | buffers).items()}
        total: Tensor = functional_call(loss, state, ())
        wanted = [p for n, p in parameters.items() if phase.trainable is None or phase.trainable(n)]
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        return [total, *(g for g in grads if g is not None)]

    def _client(self, received: Tree, mine: Tree) -> Client:
        client = Client(
            self.method,
            self.network,
            self.sizes,
            received=received,
            mine=mine,
            round=1,
            rounds=3,
            name=self.site.name,
        )
        client.begin_step(11)
        client.drawn = self._drawn(0)
        return client

    def _drawn(self, row: int) -> Slot:
        table = self.method.draws(generator("draws"), 2)
        return {name: torch.from_numpy(a).to(self.dtype)[row] for name, a in table.items()}


class _Loss(nn.Module):
    def __init__(self, network: nn.Module, call: Callable[[], Terms]) -> None:
        super().__init__()
        self.network, self.call = network, call

    def forward(self) -> Tensor:
        return torch.stack(list(self.call().values())).sum()


def _scaled(t: Tensor) -> Tensor:
    return t * 1.1 if t.is_floating_point() else t.clone()
