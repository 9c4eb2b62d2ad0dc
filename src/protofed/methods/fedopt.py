"""FedOPT: the server takes the clients' average change as a gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive
Federated Optimization", ICLR 2021, in the form that FPL compares with: SGD
with momentum at the server, and every client counts the same.

    client    CE
    server    Δ = θ^t − mean_m θ_m, a plain mean over the clients
              v ← β v + Δ,  θ^{t+1} = θ^t − η_g v
              buffers are replaced by their plain mean
    state     v at the server, initially 0, kept between rounds

Deviations
    η_g    0.25, the value in the published code's settings (its comments name
           0.5, 0.25 and 0.1; the paper behind the row names none).
    mean   Plain, as in that code, where other methods average by sample
           counts: this alone lifts small domains. Over the clients of the
           round; that code also counts those that sat out.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofed.method import hyper
from protofed.methods.server_optimizer import ServerOptimizer


@dataclass(frozen=True)
class FedOpt(ServerOptimizer):
    """SGD with momentum at the server, on the clients' plain mean change."""

    name = "fedopt"
    paper = "Reddi et al., ICLR 2021"
    weighting = "uniform"

    eta_g: float = hyper(0.25, "η_g", "learning rate at the server", above=0)
    beta: float = hyper(0.9, "β", "momentum at the server", least=0, most=1)
