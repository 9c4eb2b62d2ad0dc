"""FedBN: every client keeps its own batch normalization.

Li, Jiang, Zhang, Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via
Local Batch Normalization", ICLR 2021.

    client m    CE, with its own BatchNorm: scale, shift, running statistics
    server      as FedAvg, over all other entries
    state       the BatchNorm entries at each client, never sent
    test        client m's model is the global one with its own BatchNorm; a
                domain's accuracy is the mean over the clients of that domain

Deviations
    BatchNorm is told by the layer's type. The authors look for "bn" in names,
    which would miss those in a ResNet's shortcuts.
    The authors weigh clients the same (they cut all to one size); here the
    protocol's rule holds.
    There is no single global model. A domain without clients is tested with
    the models of all clients; averaged BatchNorm would be another choice.
    With partial participation a client that has not trained yet is tested
    with the initial BatchNorm, and does badly.
    A model without BatchNorm makes this FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from protofed.method import Entry, Method


@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg of everything but BatchNorm."""

    name: ClassVar[str] = "fedbn"
    paper: ClassVar[str] = "Li et al., ICLR 2021"
    travels: ClassVar[str] = "model without BatchNorm"

    @property
    def evaluates(self) -> str:
        """Each client its own model."""
        return "clients"

    def shared(self, entry: Entry) -> Literal["both", "no"]:
        """All but BatchNorm."""
        return "no" if entry.kind == "bn" else "both"
