"""SCAFFOLD: control variates remove each client's drift from its gradients.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic
Controlled Averaging for Federated Learning", ICML 2020 (option II).

c_m estimates the mean gradient at client m, and c that of all clients. Adding
c − c_m to every local gradient makes clients move as if they saw all data.

    client m    CE + ⟨c − c_m, θ⟩: every gradient is corrected by c − c_m
                c_m⁺ = c_m − c + (θ^t − θ_m)/(lr a)
                a: how many gradients θ^t − θ_m holds, which is the number of
                steps if there is no momentum
    server      θ^{t+1} = θ^t + η_g mean_{m active}(θ_m − θ^t), a plain mean
                c ← c + (1/M) Σ_{m active} (c_m⁺ − c_m),  M: all clients
    state       c at the server, c_m at each client, both initially 0 and both
                over trainable entries only; buffers are averaged
    cost        one pass over the weights per step. c goes down and c_m⁺ − c_m
                comes up, each as large as the trainable entries: about twice
                the traffic of FedAvg

Deviations
    ρ    Momentum of the local SGD: 0 as in the paper, whatever the protocol
         says. At the protocol's lr, clients then move up to 10 times less than
         those of other methods do with 0.9: tune lr, or set `rho=0.9`.
    a    With momentum, gradients count more than once: after τ steps
         a = (τ − ρ(1−ρ^τ)/(1−ρ))/(1−ρ). The usual τ/(1−ρ) is its limit for
         many steps; at ρ = 0.9 it makes c_m 2.4 times too small after 10.
    Weight decay is a part of the gradients that c_m averages.
    NIID-Bench also corrects BatchNorm's running statistics; that is not done here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protofed.method import (
    Batch,
    Client,
    Method,
    Phase,
    ServerView,
    Sizes,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
    effective_steps,
    hyper,
    inner_product,
    weighted_mean,
    zeros,
)


@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg with a control variate at every client and one at the server."""

    name = "scaffold"
    paper = "Karimireddy et al., ICML 2020"
    slots = Slots(
        up={"change": "change of the client's control"},
        down={"c": "control of the server"},
        client={"c_m": "control of the client"},
    )
    weighting = "uniform"
    sgd_only = "a control variate is the mean gradient only if the steps are SGD's"

    eta_g: float = hyper(1.0, "η_g", "learning rate at the server", above=0)
    rho: float = hyper(0.0, "ρ", "momentum of the clients' SGD", least=0, most=0.999)

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        return {"c": zeros(model, sizes.parameters)}

    def init_client(self, model: Slot, sizes: Sizes) -> Tree:
        return {"c_m": zeros(model, sizes.parameters)}

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        return (Phase(self.loss, momentum=self.rho),)

    def loss(self, client: Client, batch: Batch) -> Terms:
        """CE and the correction, whose gradient is c − c_m."""
        c, c_m = client.received["c"], client.mine["c_m"]
        correction = {n: c[n] - c_m[n] for n in c}
        return {
            "ce": client.cross_entropy(client.forward(batch.x).logits, batch.y),
            "correction": inner_product(client.parameters, correction),
        }

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """c_m⁺ − c_m goes up, c_m⁺ stays."""
        c, c_m = client.received["c"], client.mine["c_m"]
        unit = client.lr * effective_steps(client.steps, self.rho)
        moved = {n: client.start[n] - p.detach() for n, p in client.parameters.items()}
        change = {n: moved[n] / unit - c[n] for n in moved}
        return {"change": change}, {"c_m": {n: c_m[n] + change[n] for n in change}}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """The step toward the mean, and c."""
        start, c = server.state["model"], server.state["c"]
        change = weighted_mean(updates, "change", [1.0] * len(updates))
        active = len(updates) / len(server.clients)
        stepped = {n: torch.lerp(start[n], mean[n], self.eta_g) for n in c}
        return {"model": mean | stepped, "c": {n: c[n] + active * change[n] for n in c}}
