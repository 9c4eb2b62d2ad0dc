"""FedBN: every client keeps its own batch normalization.

Li, Jiang, Zhang, Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via
Local Batch Normalization", ICLR 2021.

BatchNorm statistics describe a domain's look. Averaged over domains they fit
none of them, so they stay at home.

    client m    CE, with its own BatchNorm: scale, shift, running statistics
    server      as FedAvg, over all other entries
    state       the BatchNorm entries at each client, never sent
    test        client m's model is the global one with its own BatchNorm; a
                domain's accuracy is the mean over the clients of that domain

Deviations
    BatchNorm is recognized by the layer's type. The authors look for "bn" in
    names, which would miss the layers in a ResNet's shortcuts.
    The authors weight clients equally (they cut all to one size); here the
    protocol's rule applies.
    There is no single global model. A domain without clients is tested with
    the models of all clients; averaging BatchNorm would be another choice.
    With partial participation, a client that has not trained yet is tested
    with the initial BatchNorm and does badly.
    With a model without BatchNorm, this is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofed.method import Entry, Method, Shared, Slots


@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg of everything but BatchNorm."""

    name = "fedbn"
    paper = "Li et al., ICLR 2021"
    slots = Slots(model="model without BatchNorm")
    evaluates = "clients"

    def shared(self, entry: Entry) -> Shared:
        return "no" if entry.kind == "bn" else "both"
