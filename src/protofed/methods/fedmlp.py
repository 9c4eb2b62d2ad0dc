"""FedMLP-style: class prototypes, and prototypes of groups of similar classes.

A reconstruction from the abstract, not a replication. Guo, Wang, Geng:
"Dynamic Heterogeneous Federated Learning with Multi-Level Prototypes",
Pattern Recognition 2024: neither equations nor code were available. The paper
names prototypes of classes, "semantic" prototypes, and three regularizers:
prototype-based, semantic-prototype-based, inter-task. The equations are ours:

    prototypes    C_m^k = mean of z = f_m(x) over class k                   (1)
                  C^k = mean of C_m^k over the owners of class k            (2)
    semantic      FINCH's first partition of the rows C^k groups the classes;
                  S_s = mean of C^k over group s; s(k) is the group of k    (3)
    client        CE + λ1 (1/d) ‖z − C^y‖²
                  + λ2 [−log softmax_s (cos(z, S_s)/τ) at s(y)],            (4)
                  means over the batch
    server        as FedAvg, then (2) and (3)

Round 0 is CE alone. A sample whose class has no prototype adds 0 and still
counts in the mean. A class absent from a round has no C in the next.

Deviations
    The paper is about tasks that change; here there is one, and the
    inter-task regularizer is 0.
    λ1 = λ2 = 1, τ = 0.5 and the groups by FINCH are ours. Say so when you report
    its accuracy: it is no evidence about the paper.
    (1)  `proto_pass` as in FPL.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protofed.method import (
    Batch,
    Client,
    PrototypeMethod,
    ServerView,
    Sizes,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
    hyper,
    proto_pass_hyper,
)
from protofed.prototypes import Prototypes, class_means, class_sums, consistency, contrast, finch


@dataclass(frozen=True)
class FedMLP(PrototypeMethod):
    """Consistency with class prototypes, contrast of groups of classes (a reconstruction)."""

    name = "fedmlp"
    paper = "Guo, Wang, Geng, Pattern Recognition 2024"
    slots = Slots(
        up={"prototypes": "class means"},
        down={"prototypes": "class prototypes", "semantic": "semantic prototypes"},
    )

    lambda1: float = hyper(1.0, "λ1", "weight of the class prototypes", least=0, weight=True)
    lambda2: float = hyper(1.0, "λ2", "weight of the semantic contrast", least=0, weight=True)
    tau: float = hyper(0.5, "τ", "temperature of the semantic contrast", above=0)
    proto_pass: str = proto_pass_hyper("features of (1)")

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        none = Prototypes.empty(sizes.classes, sizes.features)
        return {"prototypes": none.slot(), "semantic": semantic(none)}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """(4)."""
        z, logits = client.forward(batch.x)
        terms = {"ce": client.cross_entropy(logits, batch.y)}
        if self.lambda1:
            C = Prototypes.of(client.received["prototypes"])
            terms["proto"] = self.lambda1 * consistency(z, batch.y, C, "mean")
        if self.lambda2:
            S = client.received["semantic"]
            between_groups = contrast(z, S["group"][batch.y], Prototypes.of(S), self.tau)
            terms["semantic"] = self.lambda2 * between_groups
        return terms

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """FedAvg, (2) and (3)."""
        state = super().aggregate(server, mean, updates)
        return {**state, "semantic": semantic(Prototypes.of(state["prototypes"]))}


def semantic(C: Prototypes) -> Slot:
    """(3): centers [K, d] of the groups, which of them exist, and the group [K] of each class.

    There are at most as many groups as classes with a prototype. So if a class has none, the last
    row is empty; that is its group, and the contrast counts it as 0.
    """
    classes, known = len(C.mask), C.mask > 0
    group = torch.full_like(C.mask, classes - 1, dtype=torch.int64)
    if known.any():
        group[known] = finch(C.mean[known])[0]
    sums, counts = class_sums(C.mean[known], group[known], classes)
    return {
        "mean": class_means(sums, counts).to(C.mean.dtype),
        "mask": (counts > 0).to(C.mask.dtype),
        "group": group,
    }
