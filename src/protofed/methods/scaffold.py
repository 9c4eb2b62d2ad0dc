"""SCAFFOLD: control variates take each client's drift out of its gradients.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic
Controlled Averaging for Federated Learning", ICML 2020 (option II).

    client m    CE + ⟨c − c_m, θ⟩: every gradient is corrected by c − c_m
                c_m⁺ = c_m − c + (θ^t − θ_m)/(lr a)
                a: how many gradients θ^t − θ_m holds, the number of steps when
                there is no momentum
    server      θ^{t+1} = θ^t + η_g mean_{m active}(θ_m − θ^t), a plain mean
                c ← c + (1/M) Σ_{m active} (c_m⁺ − c_m),  M: all clients
    state       c at the server, c_m at each client, both 0 at first and both
                over trainable entries only; buffers are averaged

c goes down and c_m⁺ − c_m comes up, each as large as the trainable entries:
about twice the traffic of FedAvg.

Deviations
    ρ    Momentum of the local SGD: 0 as in the paper, whatever the protocol
         says. At the protocol's lr clients then move up to 10 times less than
         the others' do with 0.9: tune lr, or set `momentum=0.9`.
    a    With momentum gradients count more than once: after τ steps
         a = (τ − ρ(1−ρ^τ)/(1−ρ))/(1−ρ). The usual τ/(1−ρ) is its limit for
         many steps; at ρ = 0.9 it makes c_m 2.4 times too small after 10.
    Weight decay is a part of the gradients that c_m averages.
    NIID-Bench corrects BatchNorm's running statistics too; that is not done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from protofed.federation.server import mean as average
from protofed.method import (
    Batch,
    Client,
    Method,
    Phase,
    ServerView,
    Sizes,
    Terms,
    Update,
    effective_steps,
    hyper,
    inner,
    zeros,
)
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg with a control variate at every client and one at the server."""

    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    travels: ClassVar[str] = "model and controls, both ways (twice FedAvg's bytes)"

    eta_g: float = hyper(1.0, "η_g", "the server's learning rate", above=0)
    momentum: float = hyper(0.0, "ρ", "momentum of the clients' SGD", least=0, most=0.999)

    @property
    def weighing(self) -> str:
        """The mean over clients is a plain one."""
        return "uniform"

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """c = 0."""
        return {"c": zeros(model, sizes.parameters)}

    def init_client(self, model: Slot, sizes: Sizes) -> Tree:
        """c_m = 0."""
        return {"c_m": zeros(model, sizes.parameters)}

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        """One phase, with the method's own momentum."""
        return (Phase(self.loss, momentum=self.momentum),)

    def loss(self, client: Client, batch: Batch) -> Terms:
        """CE and the correction, whose gradient is c − c_m."""
        c, c_m = client.received["c"], client.mine["c_m"]
        correction = {n: c[n] - c_m[n] for n in c}
        return {
            "ce": F.cross_entropy(client.forward(batch.x).logits, batch.y),
            "correction": inner(client.parameters, correction),
        }

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """c_m⁺ − c_m goes up, c_m⁺ stays."""
        c, c_m = client.received["c"], client.mine["c_m"]
        unit = client.lr * effective_steps(client.steps, self.momentum)
        change = {
            n: (client.start[n] - p.detach()) / unit - c[n] for n, p in client.parameters.items()
        }
        return {"change": change}, {"c_m": {n: c_m[n] + change[n] for n in change}}

    def weights(self, server: ServerView, updates: Sequence[Update]) -> Sequence[float]:
        """A plain mean over the active clients."""
        return [1.0] * len(updates)

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """The step towards the mean, and c."""
        start, c = server.state["model"], server.state["c"]
        change = average(updates, "change", [1.0] * len(updates))
        active = len(updates) / len(server.clients)
        stepped = {n: torch.lerp(start[n], mean[n], self.eta_g) for n in c}
        return {"model": mean | stepped, "c": {n: c[n] + active * change[n] for n in c}}
