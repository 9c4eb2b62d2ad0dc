"""FedPLVM: several prototypes per class at every client, clustered twice.

Wang, Bian, Zhang, Chen, Xu: "Taming Cross-Domain Representation Variance
in Federated Prototype Learning with Heterogeneous Data Domains", NeurIPS 2024.

A hard domain spreads its features wider than an easy one. Several prototypes
per class at each client keep that spread, which a single mean would lose.

    client     after training, features of all its samples (a clean pass); per
               class FINCH, last partition; the clusters' means travel
    server     per class the clusters of all clients, FINCH again: G^k;
               Ḡ^k = mean of G^k; θ as FedAvg
    α-sparsity contrast
               L_con = −log Σ_{c ∈ G^y} e^{cos(z,c)^α/τ} / Σ_c e^{cos(z,c)^α/τ}
    correction L_cor = 2 (cos(z, Ḡ^y) − 1)²
    objective  CE + λ (L_con + L_cor), means over the batch
    cost       a clean pass and FINCH per round

Round 0 is CE alone. A sample whose class has no prototype adds 0 and still
counts in the mean. Prototypes are those of the round's clients. In cos^α
cosines are clamped to [1e-6, 1].

Deviations
    λ    100 in the authors' code (lr 0.01, momentum 0.5, 2 epochs); 1 here,
         with momentum 0.9 and 10 epochs.
    averaging   plain in the authors' code for i.i.d. labels; by sample counts
         here, as for every method (`--average uniform` changes it).
    The rows printed by I²PFL come from other code: α = 0.75, τ = 0.02, the
    contrast divided by the running index inside the sample loop, and the
    correction summed and taken against every cluster. Not reproduced here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from protofed.method import (
    Batch,
    Client,
    Method,
    ServerView,
    Sizes,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
    hyper,
)
from protofed.prototypes import Prototypes, contrast, paired_cosine


@dataclass(frozen=True)
class FedPLVM(Method):
    """Dual-level prototype clustering with an α-sparsity contrast."""

    name = "fedplvm"
    paper = "Wang et al., NeurIPS 2024"
    protocol: ClassVar = {"batch": 32, "epochs": 2, "momentum": 0.5}
    slots = Slots(up={"prototypes": "local clusters"}, down={"prototypes": "global clusters"})

    alpha: float = hyper(0.25, "α", "power of the cosine in the contrast", above=0)
    tau: float = hyper(0.07, "τ", "temperature of the contrast", above=0)
    lam: float = hyper(
        1.0, "λ", "weight of both prototype terms (the authors' code: 100)", least=0, weight=True
    )

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        return {"prototypes": Prototypes.empty(sizes.classes, sizes.features).table().slot()}

    def loss(self, client: Client, batch: Batch) -> Terms:
        z, logits = client.forward(batch.x)
        terms = {"ce": client.cross_entropy(logits, batch.y)}
        if self.lam:
            G = Prototypes.of(client.received["prototypes"])
            con = contrast(z, batch.y, G, self.tau, self.alpha)
            mean_G = G.per_class_mean()
            cosine = paired_cosine(z, mean_G.mean[batch.y])
            cor = 2 * ((cosine - 1).square() * mean_G.mask[batch.y]).mean()
            terms |= {"con": self.lam * con, "cor": self.lam * cor}
        return terms

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """The clusters of each class in the client's own features."""
        z, y = client.features()
        of_class = (z[y == k] for k in range(client.classes))
        own = Prototypes.clusters(of_class, least=client.min_class_count)
        return {"prototypes": own.slot()}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """FedAvg, and the clusters of all clients' clusters."""
        sent = [Prototypes.of(u["prototypes"]).rows() for u in updates]
        G = Prototypes.clusters(torch.cat(of_class) for of_class in zip(*sent, strict=True))
        return {"model": mean, "prototypes": G.slot()}
