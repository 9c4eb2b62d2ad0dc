"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification", arXiv 2019.

    client    CE
    server    Δ = θ^t − Σ_m (n_m/Σn) θ_m
              v ← β v + Δ,  θ^{t+1} = θ^t − v
              buffers are replaced by their weighted mean
    state     v at the server, 0 at first, kept between rounds

Deviations
    v    Holds the full Δ. The variant in MOON's code adds (1−β)Δ: steps a
         tenth as long. Flower's reproduction steps by Δ + βv (Nesterov).
    β    0.9; the paper tunes it. In the long run a step is 1/(1−β) = 10 times
         Δ, so a β or lr too large shows as a run that falls apart late.
    With β = 0 it is FedAvg, to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from protofed.method import Method, ServerView, Sizes, Update, hyper, zeros
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class FedAvgM(Method):
    """Server momentum on FedAvg's change."""

    name: ClassVar[str] = "fedavgm"
    paper: ClassVar[str] = "Hsu, Qi, Brown, arXiv 2019"

    beta: float = hyper(0.9, "β", "the server's momentum", least=0, most=1)

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """v = 0."""
        return {"v": zeros(model, sizes.parameters)}

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """v and the step."""
        start = server.state["model"]
        v = {n: self.beta * v + (start[n] - mean[n]) for n, v in server.state["v"].items()}
        return {"model": mean | {n: start[n] - v[n] for n in v}, "v": v}

    def broadcast(self, server: ServerView) -> Tree:
        """v stays at the server."""
        return {"model": server.state["model"]}
