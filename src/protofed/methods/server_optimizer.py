"""What FedAvgM, FedOPT and FedAdam share: an optimizer at the server.

The clients' mean change of the model is taken as a gradient. The optimizer's state covers the
trainable entries, is kept at the server between rounds and never goes down; buffers are replaced
by their mean over the clients.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofed.method import Method, ServerView, Sizes, Slot, Slots, Tree, Updates, zeros


@dataclass(frozen=True)
class ServerOptimizer(Method):
    """FedAvg with an optimizer at the server: SGD with momentum, unless ``aggregate`` differs."""

    slots = Slots(server={"v": "momentum, the size of the trainable entries"})

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        return {"v": zeros(model, sizes.parameters)}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """Δ = θ^t − mean,  v ← β v + Δ,  θ^{t+1} = θ^t − η_g v;  η_g is 1 where not given."""
        hypers = {"eta_g": 1.0, **self.options()}
        beta, eta_g, start = hypers["beta"], hypers["eta_g"], server.state["model"]
        v = {n: beta * v + (start[n] - mean[n]) for n, v in server.state["v"].items()}
        return {"model": mean | {n: start[n] - eta_g * v[n] for n in v}, "v": v}

    def broadcast(self, server: ServerView) -> Tree:
        return {"model": server.state["model"]}
