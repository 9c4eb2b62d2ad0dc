"""FedNova: each client's change is divided by the number of gradients in it.

Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization", NeurIPS 2020.

    client m    CE, τ_m steps of SGD with momentum ρ
                a_m = (τ_m − ρ(1−ρ^τ_m)/(1−ρ))/(1−ρ), which is τ_m at ρ = 0:
                how many gradients its change θ^t − θ_m holds
    server      θ^{t+1} = θ^t − (Σ_m p_m a_m) Σ_m p_m (θ^t − θ_m)/a_m,
                p_m = n_m/Σn

In FedAvg, clients with more samples count twice: by p_m and by their longer
path. Here they count by p_m alone. With θ̄, the mean by weights p_m/a_m, the
step is θ^t + γ (θ̄ − θ^t),  γ = (Σ p_m a_m)(Σ p_m/a_m) ≥ 1. When all clients
take the same number of steps, γ = 1 and the method is FedAvg, up to rounding.

Deviations
    ρ          Also the momentum that the clients train with, whatever the
               protocol says: the two cannot disagree.
    p_m        By sample counts, even with `--average uniform`. MarsFL takes
               the number of batches.
    buffers    Averaged by p_m/a_m like θ̄, without the step beyond it: a
               variance must not turn negative.
    The paper's server momentum and proximal form are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from protofed.method import Method, Phase, ServerView, Slot, Tree, Updates, effective_steps, hyper


@dataclass(frozen=True)
class FedNova(Method):
    """FedAvg of normalized changes."""

    name = "fednova"
    paper = "Wang et al., NeurIPS 2020"
    weighting = "samples over steps"
    sgd_only = "it counts the gradients in a client's change, which only SGD adds up"

    rho: float = hyper(0.9, "ρ", "momentum of the clients' SGD", least=0, most=0.999)

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        """One phase, with the momentum that a_m is computed for."""
        return (Phase(self.loss, momentum=self.rho),)

    def weights(self, server: ServerView, updates: Updates) -> Sequence[float]:
        """p_m/a_m, up to the factor 1/Σn."""
        return [u.samples / effective_steps(u.steps, self.rho) for u in updates]

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """γ times the way from θ^t to the mean."""
        samples = [u.samples for u in updates]
        a = [effective_steps(u.steps, self.rho) for u in updates]
        longer = math.fsum(n * a_m for n, a_m in zip(samples, a, strict=True)) / sum(samples)
        shorter = math.fsum(n / a_m for n, a_m in zip(samples, a, strict=True)) / sum(samples)
        start, gamma = server.state["model"], longer * shorter
        stepped = {n: torch.lerp(start[n], mean[n], gamma) for n in server.sizes.parameters}
        return {"model": mean | stepped}
