"""FedAdam: an adaptive optimizer at the server (also FedYogi and FedAdagrad).

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive
Federated Optimization", ICLR 2021, Algorithm 2.

The server's step is scaled entry by entry: entries that change little from
round to round move further than entries that change a lot.

    client    CE
    server    Δ = Σ_i (n_i/Σn) θ_i − θ^t over the clients i
              m ← β₁ m + (1−β₁) Δ
              v ← β₂ v + (1−β₂) Δ²                  adam
                  v − (1−β₂) Δ² sign(v − Δ²)        yogi
                  v + Δ²                            adagrad
              θ^{t+1} = θ^t + η_g m/(√v + τ), entry by entry
              buffers are replaced by their weighted mean
    state     m and v at the server, kept between rounds; initially m = 0 and
              v = τ². There is no bias correction.

Deviations
    Δ      Algorithm 2 prints a plain mean; the authors' code weights by
           samples, as here (`--average uniform` is the printed form).
    η_g    0.01. The authors' tuned values at τ = 1e-3 are 10^-1.5 and 10^-2,
           and 10^-2.5 for EMNIST at τ = 1e-4 (hyperparameters.md of their
           code). Tune it per task, like lr.
    v      The paper asks for v ≥ τ² initially; the authors' code starts Yogi
           and Adagrad at 0. For `variant=adagrad` the paper sets β₁ = 0: pass
           beta1=0 with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.method import ServerView, Sizes, Slot, Slots, Tree, Updates, hyper, zeros
from protofed.methods.server_optimizer import ServerOptimizer


@dataclass(frozen=True)
class FedAdam(ServerOptimizer):
    """Adam, Yogi or Adagrad at the server, on the clients' mean change."""

    name = "fedadam"
    paper = "Reddi et al., ICLR 2021"
    slots = Slots(server={"m": "mean of Δ", "v": "mean of Δ²"})

    eta_g: float = hyper(0.01, "η_g", "learning rate at the server", above=0)
    beta1: float = hyper(0.9, "β₁", "decay of m, the mean of Δ", least=0, most=0.999)
    beta2: float = hyper(0.99, "β₂", "decay of v, the mean of Δ² (not adagrad)", least=0, most=1)
    tau: float = hyper(1e-3, "τ", "added to √v; smaller is more adaptive", above=0)
    variant: str = hyper("adam", "", "how v is updated", choices=("adam", "yogi", "adagrad"))

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        m = zeros(model, sizes.parameters)
        return {"m": m, "v": {n: torch.full_like(t, self.tau**2) for n, t in m.items()}}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        start, m, v = server.state["model"], server.state["m"], server.state["v"]
        delta = {n: mean[n] - start[n] for n in m}
        m = {n: self.beta1 * m[n] + (1 - self.beta1) * delta[n] for n in m}
        v = {n: self._next_v(v[n], delta[n].square()) for n in v}
        stepped = {n: start[n] + self.eta_g * m[n] / (v[n].sqrt() + self.tau) for n in m}
        return {"model": mean | stepped, "m": m, "v": v}

    def _next_v(self, v: Tensor, square: Tensor) -> Tensor:
        if self.variant == "adam":
            return self.beta2 * v + (1 - self.beta2) * square
        if self.variant == "yogi":
            return v - (1 - self.beta2) * square * torch.sign(v - square)
        return v + square
