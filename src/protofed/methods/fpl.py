"""FPL: federated prototype learning with cluster and unbiased prototypes.

Huang, Ye, Shi, Li, Du: "Rethinking Federated Learning with Domain Shift: A
Prototype View", CVPR 2023. Equation numbers are the paper's.

    prototypes of client m   c_m^k = mean of z = f_m(x) over class k         (2)
    global prototypes        G^k = mean of c_m^k over the owners of class k  (3)
    cluster prototypes       FINCH on {c_m^k}_m with the cosine distance (4);
                             P^k = the means of its clusters                 (5)
    unbiased prototypes      U^k = mean of P^k: a cluster counts once,
                             however many clients are in it                  (6)
    CPCL                     −log Σ_{c ∈ P^y} e^{cos(z,c)/τ}
                                / Σ_{c ∈ P} e^{cos(z,c)/τ}                (7, 8)
    UPCR                     (1/d) ‖z − U^y‖²                               (10)
    client                   CE + CPCL + UPCR, means over the batch         (12)
    server                   θ averaged by sample counts, as FedAvg

Round 0 is CE alone. A sample whose class has no prototype adds 0 and still
counts in the mean. P travels; clients compute U from it at no cost in bytes.

Deviations between the paper and its published code, and what is done here
    (4)   One first-neighbor step in the paper; the code recurses and takes
          the coarsest partition. `finch_level`: last (the code, default), first.
    (7)   Printed so that τ multiplies the cosine; meant, and coded, is cos/τ.
    (8)   The code's exponentials overflow for τ < 0.0113 (its NaN at τ = 0.01);
          here sums go through logsumexp, and τ = 0.001 trains.
    (10)  A sum over d in the paper, a mean in the code. `upcr_reduction`: mean
          (default), sum.
    (2)   After training in algorithm 1; the code takes the features of the last
          local epoch while it trains. `proto_pass`: last_epoch (default), post.
The paper's ablations: `cpcl=0`, `upcr=0` (table 1); `cpcl=0` with
`upcr_prototypes=global` (table 3's G, which is FedProto);
`cpcl_prototypes=global` (figure 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import (
    Batch,
    Client,
    Method,
    ServerView,
    Sizes,
    Terms,
    Update,
    clustered,
    hyper,
    owned,
    proto_pass_hyper,
    upload_means,
    uploaded_means,
)
from protofed.prototypes import consistency, contrast, pad, per_class_mean
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class FPL(Method):
    """Contrast against cluster prototypes, consistency with unbiased ones."""

    name: ClassVar[str] = "fpl"
    paper: ClassVar[str] = "Huang et al., CVPR 2023"
    travels: ClassVar[str] = "model, class means (up), prototypes (down)"

    tau: float = hyper(0.02, "τ", "temperature of the contrast (7)", above=0)
    cpcl: float = hyper(1.0, "", "weight of CPCL (the paper: 1; 0 = off)", least=0, weight=True)
    upcr: float = hyper(1.0, "", "weight of UPCR (the paper: 1; 0 = off)", least=0, weight=True)
    cpcl_prototypes: str = hyper(
        "cluster", "P", "what CPCL contrasts with", choices=("cluster", "global")
    )
    upcr_prototypes: str = hyper(
        "unbiased", "U", "what UPCR draws to", choices=("unbiased", "global")
    )
    finch_level: str = hyper(
        "last", "", "FINCH partition: the first, or the last kept", choices=("first", "last")
    )
    upcr_reduction: str = hyper("mean", "", "(10) over the d dimensions", choices=("mean", "sum"))
    proto_pass: str = proto_pass_hyper("features of (2)")

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """No prototypes yet."""
        none = [torch.zeros(0, sizes.features)] * sizes.classes
        return self._prototypes(none, none, sizes.features)

    def loss(self, client: Client, batch: Batch) -> Terms:
        """(12)."""
        z, logits = client.forward(batch.x)
        terms = {"ce": F.cross_entropy(logits, batch.y)}
        if self.cpcl:  # (8)
            P = client.received[self.cpcl_prototypes]
            terms["cpcl"] = self.cpcl * contrast(z, batch.y, P["mean"], P["mask"], self.tau)
        if self.upcr:  # (6), (10)
            source = client.received[self._upcr_source]
            U, mask = per_class_mean(source["mean"], source["mask"])
            terms["upcr"] = self.upcr * consistency(z, batch.y, U, mask, self.upcr_reduction)
        return terms

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """(2)."""
        return upload_means(client), {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """FedAvg, and for every class the clusters of this round's prototypes (4, 5)."""
        c = owned(*uploaded_means(updates))
        clusters = clustered(c, self.finch_level)
        means = [c_k.mean(0, keepdim=True) if len(c_k) else c_k for c_k in c]  # (3)
        return {"model": mean, **self._prototypes(clusters, means, server.sizes.features)}

    @property
    def _upcr_source(self) -> str:
        """U is a mean of clusters; G is its own mean."""
        return "cluster" if self.upcr_prototypes == "unbiased" else "global"

    def _prototypes(self, clusters: list[Tensor], means: list[Tensor], features: int) -> Tree:
        """The slots that the switches ask for, each padded to [K, J, d], with its mask [K, J]."""
        used = {self.cpcl_prototypes} if self.cpcl else set()
        used |= {self._upcr_source} if self.upcr else set()
        slots = {"cluster": clusters, "global": means}
        return {
            slot: dict(zip(("mean", "mask"), pad(ragged, features), strict=True))
            for slot, ragged in slots.items()
            if slot in used
        }
