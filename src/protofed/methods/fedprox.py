"""FedProx: a spring between a client's weights and the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in
Heterogeneous Networks", MLSys 2020.

The spring damps client drift: over many local steps, clients with different
data move away from each other, and their average is worse than its parts.

    client    CE + (μ/2) ‖θ − θ^t‖², over the trainable entries (no buffers)
    server    as FedAvg
    cost      one pass over the weights per step

Deviations
    μ    The code behind FPL's and I²PFL's rows multiplies μ = 0.01 by another
         0.01 before halving it: the effective coefficient is 1e-4, which is
         the default here. `mu=0.01` is the textbook method.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofed.method import Batch, Client, Method, Terms, hyper, squared_distance


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with a proximal term."""

    name = "fedprox"
    paper = "Li et al., MLSys 2020"

    mu: float = hyper(
        1e-4, "μ", "weight of the proximal term (textbook: 0.01)", least=0, weight=True
    )

    def loss(self, client: Client, batch: Batch) -> Terms:
        logits = client.forward(batch.x).logits
        return {
            "ce": client.cross_entropy(logits, batch.y),
            "prox": self.mu / 2 * squared_distance(client.parameters, client.start),
        }
