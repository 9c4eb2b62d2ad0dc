"""What FedAvgM, FedOPT and FedAdam share: an optimizer at the server.

The clients' mean change of the model is taken as a gradient. The optimizer's state covers the
trainable entries, is kept at the server between rounds and never goes down; buffers are replaced
by their mean over the clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protofed.method import Method, ServerView, Sizes, Slot, Slots, Tree, Update, zeros


@dataclass(frozen=True)
class ServerOptimizer(Method):
    """FedAvg with an optimizer at the server: SGD with momentum, unless ``aggregate`` differs."""

    slots = Slots(server={"v": "momentum, the size of the trainable entries"})

    @property
    def beta(self) -> float:
        """Momentum."""
        return 0.0

    @property
    def eta_g(self) -> float:
        """Learning rate."""
        return 1.0

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        return {"v": zeros(model, sizes.parameters)}

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """Δ = θ^t − mean,  v ← β v + Δ,  θ^{t+1} = θ^t − η_g v."""
        start = server.state["model"]
        v = {n: self.beta * v + (start[n] - mean[n]) for n, v in server.state["v"].items()}
        return {"model": mean | {n: start[n] - self.eta_g * v[n] for n in v}, "v": v}

    def broadcast(self, server: ServerView) -> Tree:
        return {"model": server.state["model"]}
