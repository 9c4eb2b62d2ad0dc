"""FedFA: noise on styles, wider in the channels where clients differ.

Zhou, Konukoglu: "FedFA: Federated Feature Augmentation", ICLR 2023.

As in DSU, a sample's style is drawn from a Gaussian around its own. Its width
is not the client's alone: the server knows in which channels the clients'
styles differ, and those get more noise.

    style       μ_i, σ_i: mean and deviation of each channel of sample i's map
    client      V_μ = variance of μ_i over the batch + 1e-6,  V_σ likewise
                μ̄ ← 0.99 μ̄ + 0.01 mean_i μ_i (first 0),  σ̄ likewise (first 1)
    server      S_μ[c] = variance of μ̄_m[c] over the clients m (first 1),
                S_σ likewise
    weight      γ_c = C g_c / Σ_c g_c,  g_c = 1/(1 + 1/(S_c + 1e-6))
    new         μ' = μ_i + ε sqrt((γ_μ + 1) V_μ),  σ' = σ_i + ε' sqrt((γ_σ + 1) V_σ)
                ε, ε' ~ N(0, 1) per sample and channel
    map         x' = σ' (x − μ)/σ + μ'
    where       after the stem and every stage of a ResNet, each with
                probability p per batch, in training only; μ̄ and σ̄ move then
    gradient    through μ_i, σ_i and V
    server      θ averaged with equal weights

μ̄ and σ̄ are buffers of the network: they travel and are averaged with it. The
variance S is sent down. With one client S stays as it is. A batch of one
sample has no variance: it stays as it is.

Deviations
    S    the released code takes one variance over clients and channels and
         fills the vector with it, so every γ is 1 and nothing arrives from the
         other clients. `server_var`: per_channel (default), scalar (as
         released).
    μ̄    the paper resets it in each round; the code averages the clients' and
         continues from there, as is done here.
    σ'   may be negative, which inverts the map.
    CNN  after every convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from protofed.method import (
    Client,
    Method,
    Network,
    ServerView,
    Sizes,
    Slot,
    Slots,
    Tree,
    Updates,
    chosen_stages,
    hyper,
    restyled_stages,
    stages_hyper,
)
from protofed.styles import EPS, restyle, style_of

RUNNING = "running."
"""The prefix of the names of μ̄ and σ̄ [2, C] of each stage."""
SHARE = 0.01
"""The weight of a batch's styles in the running ones."""


@dataclass(frozen=True)
class FedFA(Method):
    """FedAvg with noise on styles, guided by how the clients differ."""

    name = "fedfa"
    paper = "Zhou, Konukoglu, ICLR 2023"
    slots = Slots(down={"variance": "variance of the clients' styles"})
    weighting = "uniform"
    size_limit = 50.0  # a gradient through the style of a nearly flat map can be huge

    p: float = hyper(0.5, "p", "probability per batch and stage", above=0, most=1)
    server_var: str = hyper(
        "per_channel",
        "S",
        "variance of the clients' styles in each channel, or one over all channels (as released)",
        choices=("per_channel", "scalar"),
    )
    stages: str = stages_hyper("all but pixels")

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        return chosen_stages(self.stages, stages[1:])

    def network(self, backbone: Network, sizes: Sizes) -> Network:
        backbone.running = nn.Module()
        for stage in restyled_stages(self, backbone):
            first = torch.tensor([[0.0], [1.0]]).repeat(1, sizes.channels[stage])
            backbone.running.register_buffer(stage, first)
        return backbone

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        return {"variance": {n: torch.ones_like(t) for n, t in _running(model).items()}}

    def between(self, client: Client, stage: str, x: Tensor) -> Tensor:
        if len(x) == 1:
            return x
        own = style_of(x)
        noised_now = client.uniform(1) < self.p
        running = client.network.get_buffer(RUNNING + stage)
        running += SHARE * (own.detach().mean(0) - running) * noised_now
        g = 1 / (1 + 1 / (client.received["variance"][stage] + EPS))
        gamma = g / g.mean(1, keepdim=True)
        width = ((gamma + 1) * (own.var(0) + EPS)).sqrt()
        noised = own + client.normal(*own.shape) * width
        return restyle(x, own, torch.where(noised_now, noised, own))

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        if len(updates) == 1:
            return {**server.state, "model": mean}
        sent = [_running(update["model"]) for update in updates]
        variance = {}
        for stage in server.state["variance"]:
            running_M2C = torch.stack([running[stage] for running in sent])
            over = 0 if self.server_var == "per_channel" else (0, 2)
            found = running_M2C.var(over)
            variance[stage] = found.reshape(2, -1).expand(running_M2C.shape[1:]).clone()
        return {"model": mean, "variance": variance}


def _running(model: Slot) -> Slot:
    """μ̄ and σ̄ [2, C] of each stage."""
    return {n.removeprefix(RUNNING): t for n, t in model.items() if n.startswith(RUNNING)}
