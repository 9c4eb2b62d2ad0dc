"""FedOPT: the server takes the clients' average change as a gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive
Federated Optimization", ICLR 2021, in the form FPL compares with: server SGD
with momentum.

    client    CE
    server    Δ = θ^t − mean_m θ_m,  every client counting the same
              v ← β v + Δ,  θ^{t+1} = θ^t − η_g v
              buffers are replaced by their plain mean
    state     v at the server, 0 at first, kept between rounds

Deviations
    η_g    0.25, the value in the code's settings lists (its comments name 0.5,
           0.25 and 0.1; the paper behind the row names none).
    mean   Uniform, as in that code, where the rest average by sample counts:
           this alone lifts small domains. Over the clients of the round; that
           code takes all clients, also those who sat out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from protofed.method import Method, ServerView, Sizes, Update, hyper, zeros
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class FedOpt(Method):
    """Server SGD with momentum on the clients' mean change."""

    name: ClassVar[str] = "fedopt"
    paper: ClassVar[str] = "Reddi et al., ICLR 2021"

    eta_g: float = hyper(0.25, "η_g", "the server's learning rate", above=0)
    beta: float = hyper(0.9, "β", "the server's momentum", least=0, most=1)

    @property
    def weighing(self) -> str:
        """The mean over clients is a plain one."""
        return "uniform"

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """v = 0."""
        return {"v": zeros(model, sizes.parameters)}

    def weights(self, server: ServerView, updates: Sequence[Update]) -> Sequence[float]:
        """Every client counts the same."""
        return [1.0] * len(updates)

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """v and the step."""
        start = server.state["model"]
        v = {n: self.beta * v + (start[n] - mean[n]) for n, v in server.state["v"].items()}
        stepped = {n: start[n] - self.eta_g * v[n] for n in v}
        return {"model": mean | stepped, "v": v}

    def broadcast(self, server: ServerView) -> Tree:
        """v stays at the server."""
        return {"model": server.state["model"]}
