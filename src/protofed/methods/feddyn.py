"""FedDyn: a dynamic regularizer that lets local and global optima agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "Federated Learning
Based on Dynamic Regularization", ICLR 2021.

    client m    CE − ⟨g_m, θ⟩ + (α/2) ‖θ − θ^t‖²,  gradients clipped at norm 10
                then g_m ← g_m − α (θ_m − θ^t)
    server      h ← h − (α/M) Σ_{m active} (θ_m − θ^t),  M: all clients
                θ^{t+1} = mean_{m active} θ_m − h/α
    state       g_m at each client, h at the server, both 0 at first and both
                over trainable entries only; buffers are averaged

Deviations
    In the code behind FPL's and I²PFL's rows the regularizer is computed on
    the *global* network's parameters: it has no gradient for the local model,
    and the server's correction is missing, so their rows are FedAvg.
    `variant=reference` reproduces that; the default is the algorithm.
    The authors scale α by 1/(M n_m/Σn); here α is the same for all clients.
    The authors also report the plain mean of the clients; only θ is tested here.
    With momentum 0.9 and BatchNorm the −h/α step can blow up: watch it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F

from protofed.method import (
    Batch,
    Client,
    Method,
    Phase,
    ServerView,
    Sizes,
    Terms,
    Update,
    hyper,
    inner,
    squared_distance,
    zeros,
)
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class FedDyn(Method):
    """FedAvg with a dual variable at every client."""

    name: ClassVar[str] = "feddyn"
    paper: ClassVar[str] = "Acar et al., ICLR 2021"

    alpha: float = hyper(0.01, "α", "strength of the regularizer", above=0)
    clip: float = hyper(10.0, "", "largest norm of a gradient", above=0)
    variant: str = hyper(
        "correct",
        "",
        "the algorithm, or what the published comparisons ran (FedAvg)",
        choices=("correct", "reference"),
    )

    @property
    def correct(self) -> bool:
        """Whether this is the algorithm and not the reference's FedAvg."""
        return self.variant == "correct"

    @property
    def weighing(self) -> str:
        """The algorithm's mean over clients is a plain one."""
        return "uniform" if self.correct else ""

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """h = 0."""
        return {"h": zeros(model, sizes.parameters)} if self.correct else {}

    def init_client(self, model: Slot, sizes: Sizes) -> Tree:
        """g_m = 0."""
        return {"g": zeros(model, sizes.parameters)} if self.correct else {}

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        """One phase, with clipped gradients."""
        return (Phase(self.loss, clip=self.clip if self.correct else None),)

    def loss(self, client: Client, batch: Batch) -> Terms:
        """CE, the linear and the quadratic term."""
        terms = {"ce": F.cross_entropy(client.forward(batch.x).logits, batch.y)}
        if self.correct:
            terms["linear"] = -inner(client.parameters, client.mine["g"])
            spring = squared_distance(client.parameters, client.start)
            terms["quadratic"] = self.alpha / 2 * spring
        return terms

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """g_m ← g_m − α (θ_m − θ^t)."""
        if not self.correct:
            return {}, {}
        g = {
            n: client.mine["g"][n] - self.alpha * (p.detach() - client.start[n])
            for n, p in client.parameters.items()
        }
        return {}, {"g": g}

    def weights(self, server: ServerView, updates: Sequence[Update]) -> Sequence[float] | None:
        """A plain mean over the active clients."""
        return [1.0] * len(updates) if self.correct else None

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """h, and the mean moved by −h/α."""
        if not self.correct:
            return {"model": mean}
        active = len(updates) / len(server.clients)
        start = server.state["model"]
        h = {
            n: h - self.alpha * active * (mean[n] - start[n]) for n, h in server.state["h"].items()
        }
        moved = {n: mean[n] - h[n] / self.alpha for n in h}
        return {"model": mean | moved, "h": h}

    def broadcast(self, server: ServerView) -> Tree:
        """h stays at the server."""
        return {"model": server.state["model"]}
