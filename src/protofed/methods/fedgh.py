"""FedGH: different extractors, one header that the server trains on class means.

Yi, Wang, Liu, Shi, Yu: "FedGH: Heterogeneous Federated Learning with Generalized
Global Header", ACM MM 2023. Client m has its own extractor f_m; the header
g: d features → K classes is common to all.

    (1) client m     CE of g(f_m(x)); its whole model trains
    (2) upload       C_m^k = mean of f_m(x) over its samples of class k
    (3) server       g ← g − η ∇ CE(g(C_m^k), k), SGD over all pairs (C_m^k, k)
                     in random batches of B, for E epochs
    (4) download     g, which replaces each client's header
    test             g(f_m(x)), with the header of (3)

Round 0 starts from one header for all. A class that a client does not have yields
no pair; without any pairs the header stays the same.

Deviations
    (3)  The authors' code steps the optimizer of a client's network here, so the
         header never changes. This is SGD on the header, without momentum; η = 0.01,
         B = 10 and E = 10 are hyper-parameters.
    (2)  A clean pass after training, which the authors' code makes too. `proto_pass`:
         post (default), last_epoch (features of the last local epoch, as in FedProto).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import (
    Client,
    Entry,
    Method,
    ServerView,
    Shared,
    Slot,
    Slots,
    Tree,
    Updates,
    clients_class_means,
    hyper,
    proto_pass_hyper,
    upload_class_means,
)

HEADER = "head."


@dataclass(frozen=True)
class FedGH(Method):
    """A generalized header for extractors that differ."""

    name = "fedgh"
    paper = "Yi et al., ACM MM 2023"
    slots = Slots(model="header (down)", up={"prototypes": "class means"})
    evaluates = "everyone"

    eta: float = hyper(0.01, "η", "learning rate at the server", above=0)
    header_epochs: int = hyper(10, "E", "the server's epochs over the class means", least=1)
    header_batch: int = hyper(10, "B", "class means in a batch at the server", least=1)
    proto_pass: str = proto_pass_hyper("features of (2)", "post")

    def shared(self, entry: Entry) -> Shared:
        return "down" if entry.name.startswith(HEADER) else "no"

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        return upload_class_means(client), {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """(3); ``mean`` has the header unchanged, since no client sends one."""
        z_Nd, y_N = clients_class_means(updates).labeled()
        weight, bias = (mean[f"{HEADER}{n}"] for n in ("weight", "bias"))
        for epoch in range(self.header_epochs):
            rng = server.generator(epoch, "header")
            order = torch.from_numpy(rng.permutation(len(y_N))).to(y_N.device)
            for rows in order.split(self.header_batch):
                if len(rows):
                    weight, bias = step(weight, bias, z_Nd[rows], y_N[rows], self.eta)
        return {"model": {f"{HEADER}weight": weight, f"{HEADER}bias": bias}}


def step(
    weight_Kd: Tensor, bias_K: Tensor, z_Bd: Tensor, y_B: Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    """One step of SGD on the mean cross-entropy of a linear header."""
    p_BK = F.linear(z_Bd.to(weight_Kd.dtype), weight_Kd, bias_K).softmax(1)
    error_BK = (p_BK - F.one_hot(y_B, len(bias_K))) / len(y_B)
    return weight_Kd - eta * error_BK.T @ z_Bd.to(weight_Kd.dtype), bias_K - eta * error_BK.sum(0)
