"""FedPLVM: several prototypes a class at every client, clustered twice.

Wang, Bian, Zhang, Chen, Xu: "Taming Cross-Domain Representation Variance
in Federated Prototype Learning with Heterogeneous Data Domains", NeurIPS 2024.

    client     after training, features of all its samples (a clean pass); per
               class FINCH, last partition; the clusters' means travel
    server     per class the clusters of all clients, FINCH again: G^k;
               Ḡ^k = mean of G^k; θ as FedAvg
    α-sparsity contrast
               L_con = −log Σ_{c ∈ G^y} e^{cos(z,c)^α/τ} / Σ_c e^{cos(z,c)^α/τ}
    correction L_cor = 2 (cos(z, Ḡ^y) − 1)²
    objective  CE + λ (L_con + L_cor), means over the batch

Round 0 is CE alone. A sample whose class has no prototype adds 0 and still
counts in the mean. In cos^α cosines are clamped to [1e-6, 1].

Deviations
    λ    100 in the authors' code (lr 0.01, momentum 0.5, 2 epochs); 1 here,
         beside momentum 0.9 and 10 epochs.
    averaging   uniform in the authors' code for i.i.d. labels; by sample
         counts here, as for every method (`--average uniform` changes it).
    The rows printed by I²PFL come from another code: α = 0.75, τ = 0.02, the
    contrast divided by the running index inside the sample loop, and the
    correction summed and taken against every cluster. Not reproduced here.
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
)
from protofed.prototypes import contrast, pad, paired_cosine, per_class_mean
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class FedPLVM(Method):
    """Dual-level prototype clustering with an α-sparsity contrast."""

    name: ClassVar[str] = "fedplvm"
    paper: ClassVar[str] = "Wang et al., NeurIPS 2024"
    travels: ClassVar[str] = "model, local cluster prototypes (up), global ones (down)"

    alpha: float = hyper(0.25, "α", "power of the cosine in the contrast", above=0)
    tau: float = hyper(0.07, "τ", "temperature of the contrast", above=0)
    lam: float = hyper(
        1.0, "λ", "weight of both prototype terms (the authors' code: 100)", least=0, weight=True
    )

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """No prototypes yet."""
        return {"prototypes": _ragged([torch.zeros(0, sizes.features)] * sizes.classes)}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """CE, contrast, correction."""
        z, logits = client.forward(batch.x)
        terms = {"ce": F.cross_entropy(logits, batch.y)}
        if self.lam:
            G = client.received["prototypes"]
            con = contrast(z, batch.y, G["mean"], G["mask"], self.tau, self.alpha)
            mean_G, there = per_class_mean(G["mean"], G["mask"])
            cosine = paired_cosine(z, mean_G[batch.y])
            cor = 2 * ((cosine - 1).square() * there[batch.y]).mean()
            terms |= {"con": self.lam * con, "cor": self.lam * cor}
        return terms

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """The clusters of each class in the client's own features."""
        z, y = client.features()
        return {"prototypes": _ragged(clustered(z[y == k] for k in range(client.classes)))}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """FedAvg, and the clusters of all clients' clusters."""
        sent = [u["prototypes"] for u in updates]
        pooled = [
            torch.cat([p["mean"][k][p["mask"][k] > 0] for p in sent])
            for k in range(server.sizes.classes)
        ]
        return {"model": mean, "prototypes": _ragged(clustered(pooled))}


def _ragged(classes: list[Tensor]) -> Slot:
    mean, mask = pad(classes, classes[0].shape[1])
    return {"mean": mean, "mask": mask}
