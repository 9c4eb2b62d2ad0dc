"""FedProto: features drawn to the global prototype, with or without a common model.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning
across Heterogeneous Clients", AAAI 2022.

A prototype, the mean feature of a class, gives the class one address for all
domains. `share` selects the form of the method:

    model         as FPL, I²PFL and FedSeProto compare with it: the model is averaged
                  as in FedAvg, and prototypes travel with it
    prototypes    the paper's own: only prototypes travel; clients keep their models,
                  which may differ in everything but the size d of the feature
    auto          model; prototypes where the clients' models differ

    (1) prototype of client m    C_m^k = mean of f_m(x) over its samples of class k
    (2) global prototype         C^k   = mean of C_m^k over the round's clients with class k
    (3) local objective          CE + λ · (1/d) ‖f_m(x) − C^y‖²,  mean over the batch

In round 0, and for a sample whose class has no prototype, the term is 0; the sample
still counts in the mean. With `share=prototypes` every client's own model is tested on
every domain: by its head, so that its accuracy compares with that of other methods, and
also by the paper's rule, recorded as `nearest`:

    (4) inference                ŷ = argmin_k ‖f_m(x) − C^k‖

Deviations
    (2) The paper weights by sample counts and then divides by the number of owners once
        more; its code takes the plain mean, as do the papers that compare with it.
    (3) The paper's distance is per class; the code's is the squared error per sample,
        averaged over the d dimensions (with a sum over d, λ would be d times stronger).
    (4) does not decide the main accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from protofed.method import (
    Batch,
    Client,
    PrototypeMethod,
    Terms,
    hyper,
    proto_pass_hyper,
    share_hyper,
)
from protofed.prototypes import Prototypes, consistency, nearest


@dataclass(frozen=True)
class FedProto(PrototypeMethod):
    """FedAvg, with every feature drawn to the global prototype of its class."""

    name = "fedproto"
    paper = "Tan et al., AAAI 2022"

    weight: float = hyper(1.0, "λ", "weight of the prototype term", least=0, weight=True)
    proto_pass: str = proto_pass_hyper("features of (1)")
    share: str = share_hyper()

    def loss(self, client: Client, batch: Batch) -> Terms:
        """(3)."""
        z, logits = client.forward(batch.x)
        C = Prototypes.of(client.received["prototypes"])
        return {
            "ce": client.cross_entropy(logits, batch.y),
            "proto": self.weight * consistency(z, batch.y, C, "mean"),
        }

    def rules(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        """The head's scores; without a common model, also those of (4)."""
        z, logits = client.forward(x)
        if self.share != "prototypes":
            return {"accuracy": logits}
        C = Prototypes.of(client.received["prototypes"])
        return {"accuracy": logits, "nearest": nearest(z, C)}
