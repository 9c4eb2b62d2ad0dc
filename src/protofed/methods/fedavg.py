"""FedAvg: the reference of every comparison.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning
of Deep Networks from Decentralized Data", AISTATS 2017.

    client m   minimizes CE over its own samples, starting from the global θ^t
    server     θ^{t+1} = Σ_m (n_m / Σn) θ_m

Deviations: none. The whole state is averaged, BatchNorm statistics included; of
the integer batch counter, the largest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofed.method import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """The average of the clients' models, weighted by their samples; ``Method`` as it stands."""

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017"
