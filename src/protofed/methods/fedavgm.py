"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification", arXiv 2019.

When clients' data differ, the average change swings from round to round.
Momentum at the server sums the changes of past rounds: what they share adds
up, and what swings cancels out.

    client    CE
    server    Δ = θ^t − Σ_m (n_m/Σn) θ_m
              v ← β v + Δ,  θ^{t+1} = θ^t − v
              buffers are replaced by their weighted mean
    state     v at the server, initially 0, kept between rounds

Deviations
    v    Holds the full Δ. The variant in MOON's code adds (1−β)Δ, a tenth of
         it. Flower's reproduction steps by Δ + βv (Nesterov).
    β    0.9; the paper tunes it. In the long run a step is 1/(1−β) = 10 times
         Δ, so a β or lr that is too large shows up as a late collapse.
    With β = 0 it is FedAvg, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofed.method import hyper
from protofed.methods.server_optimizer import ServerOptimizer


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """FedAvg with momentum at the server."""

    name = "fedavgm"
    paper = "Hsu, Qi, Brown, arXiv 2019"

    beta: float = hyper(0.9, "β", "momentum at the server", least=0, most=1)
