"""FedDAP: a prototype for every class and domain, to move toward or to contrast with.

Le, Nguyen, Qiao, Kim, Huh, Hong: "FedDAP: Domain-Aware Prototype Learning for Federated
Learning under Domain Shift", CVPR 2026.

One global prototype per class forgets the domains. Here clients of the same domain make a
prototype of each class together; a client draws its features to those of its own domain
and contrasts them with those of all others. Both sides know every client's domain: in a
simulation it is the task's, in a deployment the one that the federation declares for the site.

    (1) prototype of client m    p_m^k = mean of f(x) over its samples of class k
    (2) of a domain D            P^{k,D} = Σ_{m ∈ D} w_m p_m^k,
                                 w = softmax over the owners in D of Σ_{j ∈ D} cos(p_m^k, p_j^k)/T
    (3) alignment                L_own = mean of 1 − cos(z, P^{y,own}),  z = f(x)
    (4) contrast                 L_others = −log Σ_{D ≠ own} e^{cos(z, P^{y,D})/τ}
                                            / Σ_k Σ_{D ≠ own} e^{cos(z, P^{k,D})/τ}
    (5) local objective          CE + λ₁ L_own + λ₂ L_others, means over the batch
    server                       θ averaged by sample counts, as FedAvg

T = 0.001 makes (2) nearly the most central client; two clients always have equal weights. A
sample whose class has no prototype in its own domain (3) or in any other (4) adds 0 and
still counts in the mean: round 0 is CE alone. Prototypes are those of the round's clients;
those of earlier rounds are forgotten.

Deviations
    (1)  Features of the last local epoch, as in the code that the authors' code builds on.
         `proto_pass`: last_epoch (default), post (a clean pass after training).
    (4)  All domains' prototypes of the class are in one sum, as in FPL (8).
    λ₁   10; the released code, which does not run as is, has 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    clients_class_means,
    hyper,
    proto_pass_hyper,
    upload_class_means,
)
from protofed.prototypes import Prototypes, contrast, cosine, full_precision, paired_cosine


@dataclass(frozen=True)
class FedDAP(Method):
    """Features move toward their own domain's prototypes and contrast with those of others."""

    name = "feddap"
    paper = "Le et al., CVPR 2026"
    slots = Slots(up={"prototypes": "class means"}, down={"prototypes": "prototypes of domains"})

    lambda1: float = hyper(10.0, "λ₁", "weight of the alignment (3)", least=0, weight=True)
    lambda2: float = hyper(1.0, "λ₂", "weight of the contrast (4)", least=0, weight=True)
    tau: float = hyper(0.02, "τ", "temperature of the contrast (4)", above=0)
    fusion: float = hyper(0.001, "T", "temperature of the clients' weights (2)", above=0)
    proto_pass: str = proto_pass_hyper("features of (1)")

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        none = Prototypes.empty(sizes.classes, sizes.features).table()
        nowhere = torch.zeros(sizes.classes, 1, dtype=torch.int64)
        return {"prototypes": {**none.slot(), "domain": nowhere}}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """(5)."""
        z, logits = client.forward(batch.x)
        mean, mask = Prototypes.of(client.received["prototypes"])
        own = client.received["prototypes"]["domain"] == client.domain
        here = Prototypes(mean, mask * own).per_class_mean()
        far = (1 - paired_cosine(z, here.mean[batch.y])) * here.mask[batch.y]
        others = Prototypes(mean, mask * ~own)
        return {
            "ce": client.cross_entropy(logits, batch.y),
            "own": self.lambda1 * far.mean(),
            "others": self.lambda2 * contrast(z, batch.y, others, self.tau),
        }

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        return upload_class_means(client), {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """FedAvg, and (2) for each domain, in the order of the federation's clients."""
        domain_of = dict(zip(server.clients, server.domain_ids().tolist(), strict=True))
        domains = list(dict.fromkeys(domain_of.values()))
        p = clients_class_means(updates)
        of_domain = [
            fused(p, torch.tensor([domain_of[u.name] == d for u in updates]), self.fusion)
            for d in domains
        ]
        P = Prototypes(*(torch.stack(parts, 1) for parts in zip(*of_domain, strict=True)))
        ids = torch.tensor(domains).expand(len(P.mask), -1)
        return {"model": mean, "prototypes": {**P.slot(), "domain": ids}}


def fused(p: Prototypes, here_M: Tensor, temperature: float) -> Prototypes:
    """(2): one per class, of those clients whose class means ``p`` are a domain's."""
    here_M = here_M.to(p.mask.device)
    rows = Prototypes(p.mean[:, here_M], p.mask[:, here_M]).rows()
    return Prototypes.pad([central(rows_Nd, temperature) for rows_Nd in rows]).per_class_mean()


@full_precision
def central(rows_Nd: Tensor, temperature: float) -> Tensor:
    """The rows' weighted sum [1, d]; empty if there are no rows."""
    weight_N = (cosine(rows_Nd, rows_Nd).sum(1) / temperature).softmax(0)
    return (weight_N @ rows_Nd)[None][: len(rows_Nd)]
