"""FPL: federated prototype learning with cluster and unbiased prototypes.

Huang, Ye, Shi, Li, Du: "Rethinking Federated Learning with Domain Shift: A Prototype View",
CVPR 2023. Equation numbers are the paper's.

    prototypes of client m    O_m^k = mean of z = f_m(x) over its samples of class k        (Eq. 3)
    cluster prototypes        FINCH on {O_m^k}_m with the cosine distance; P^k = the means
                              of its clusters, J_k of them                             (Eq. 4 to 6)
    cluster contrast (CPCL)   L = −log Σ_{c ∈ P^y} e^{cos(z,c)/τ} / Σ_{c ∈ P} e^{cos(z,c)/τ} (Eq. 7)
    unbiased prototype        U^k = mean of P^k: every cluster counts once, however many
                              clients are in it                                             (Eq. 9)
    consistency (UPCR)        L = (1/d) ‖z − U^y‖²                                         (Eq. 10)
    local objective           CE + CPCL + UPCR, means over the batch                       (Eq. 11)
    server                    θ averaged by sample counts, as FedAvg

Round 0 is CE alone. A sample whose class has no prototype adds 0 and still counts in the mean.
P travels; clients compute U from it, so it costs no bytes.

Deviations between the paper and its published code, and what is done here
    FINCH     Eq. 4 is one first-neighbour step; the code recurses and takes the coarsest
              partition. `finch_level`: last (the code, default) or first (Eq. 4).
    Eq. 10    a sum over d in the paper, a mean in the code. `upcr_reduction`: mean (default), sum.
    Eq. 3     "after local training" in the paper; the code takes the features of the last local
              epoch while it trains. `proto_pass`: last_epoch (default) or post.
    Eq. 7     the code's exponentials overflow for τ < 0.0113 (its NaN at τ = 0.01); here sums go
              through logsumexp and τ = 0.001 trains.
The paper's ablations: `cpcl=0`, `upcr=0` (table 1), `upcr_prototypes=global` (table 3; with
`cpcl=0` that is FedProto), `cpcl_prototypes=global` (figure 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.federation.client import Client
from protofed.federation.server import ServerView, Update
from protofed.federation.tree import Slot, Tree
from protofed.methods.base import Batch, Method, Sizes, Terms, hyper
from protofed.prototypes import cluster_means, consistency, contrast, pad, per_class_mean


@dataclass(frozen=True)
class FPL(Method):
    """Contrast against cluster prototypes, consistency with unbiased ones."""

    name: ClassVar[str] = "fpl"
    paper: ClassVar[str] = "Huang et al., CVPR 2023"
    travels: ClassVar[str] = "model, class means (up), cluster prototypes (down)"

    tau: float = hyper(0.02, "τ", "temperature of the contrast (Eq. 7)", above=0)
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
    upcr_reduction: str = hyper("mean", "", "Eq. 10 over the d dimensions", choices=("mean", "sum"))
    proto_pass: str = hyper(
        "last_epoch",
        "",
        "features of Eq. 3: while training the last epoch, or a clean pass afterwards",
        choices=("last_epoch", "post"),
    )

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """No prototypes yet."""
        none = [torch.zeros(0, sizes.features)] * sizes.classes
        return self._prototypes(none, none, sizes.features)

    def loss(self, client: Client, batch: Batch) -> Terms:
        """Eq. 11."""
        z, logits = client.forward(batch.x)
        terms = {"ce": F.cross_entropy(logits, batch.y)}
        if self.cpcl:  # Eq. 7
            P = client.received[self.cpcl_prototypes]
            terms["cpcl"] = self.cpcl * contrast(z, batch.y, P["mean"], P["mask"], self.tau)
        if self.upcr:  # Eq. 9 and 10
            P = client.received["cluster" if self.upcr_prototypes == "unbiased" else "global"]
            U, mask = per_class_mean(P["mean"], P["mask"])
            terms["upcr"] = self.upcr * consistency(z, batch.y, U, mask, self.upcr_reduction)
        return terms

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """Eq. 3."""
        mean, count = client.class_means()
        return {"prototypes": {"mean": mean, "count": count}}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """FedAvg, and for every class the clusters of this round's prototypes (Eq. 4 to 6)."""
        O_MKd = torch.stack([u["prototypes"]["mean"] for u in updates])
        has_MK = torch.stack([u["prototypes"]["count"] for u in updates]) > 0
        owned = [O_MKd[has_MK[:, k], k] for k in range(server.sizes.classes)]
        clusters = [cluster_means(O_k, self.finch_level) if len(O_k) else O_k for O_k in owned]
        means = [O_k.mean(0, keepdim=True) if len(O_k) else O_k for O_k in owned]
        return {"model": mean, **self._prototypes(clusters, means, server.sizes.features)}

    def _prototypes(self, clusters: list[Tensor], means: list[Tensor], features: int) -> Tree:
        """The slots that the switches ask for, each ragged [K, J, d] with its mask [K, J]."""
        used = {
            "cluster" if self.upcr_prototypes == "unbiased" else "global",
            self.cpcl_prototypes,
        }
        slots = {"cluster": clusters, "global": means}
        return {
            slot: dict(zip(("mean", "mask"), pad(ragged, features), strict=True))
            for slot, ragged in slots.items()
            if slot in used
        }
