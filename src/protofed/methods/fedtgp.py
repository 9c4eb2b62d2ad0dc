"""FedTGP: global prototypes that the server trains to keep classes apart.

Zhang, Liu, Hua, Cao: "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced
Contrastive Learning for Data and Model Heterogeneity in Federated Learning", AAAI 2024.

The mean of the clients' prototypes (FedProto) shrinks the distance between classes. Here
the server trains the global prototypes against those of the clients instead, with a
margin as wide as the classes lie apart at the clients. Only prototypes travel, so models
may differ in everything but the size d of the feature.

    (1) prototype of client m    C_m^k = mean of f_m(x) over its samples of class k
    (2) margin                   δ = min(max_k min_{j≠k} ‖Q_k − Q_j‖, δ_max),
                                 Q_k = mean of C_m^k over the clients that have class k
    (3) global prototype         P_k = W₂ ReLU(W₁ e_k + b₁) + b₂
    (4) server                   CE of the logits −(‖C_m^y − P_k‖ + δ [k = y]) and y, by SGD
                                 over e, W and b: all pairs (C_m^y, y) in random batches of B,
                                 for E epochs
    (5) local objective          CE + λ · (1/d) ‖f_m(x) − P_y‖²,  mean over the batch
    (6) inference                ŷ = argmin_k ‖f_m(x) − P_k‖

e, W and b stay at the server from round to round. Every client's own model is tested on
every domain: by (6), and also by its own head, recorded as `head`. (1) is a clean
pass after training. In round 0, and for a sample whose class has no prototype, the term
of (5) is 0; the sample still counts in the mean. Per round the server takes E · (pairs/B)
steps over K·d + 2·d² numbers: 2,000 for 20 clients that have all of 10 classes.

`share=model` is a variant of ours that compares with averaging methods: the model is
averaged as in FedAvg, and prototypes travel with it.

Deviations
    (2)  Where only one class is known, δ = δ_max, as in the authors' code.
    (3)  A class is among the logits of (4) and the answers of (6) once some client has sent a
         prototype of it; in the authors' code all K are from the start.
    (4)  η = 0.01; the authors' code takes the clients' learning rate, 0.01 as well. E = 100
         is that of its scripts (the program's own default is 1000). The root is taken of a
         number clamped to at least 1e-12: at a distance of 0 its gradient is not finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import (
    Batch,
    Client,
    PrototypeMethod,
    ServerView,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
    clients_class_means,
    hyper,
    proto_pass_hyper,
)
from protofed.prototypes import Prototypes, consistency, nearest


@dataclass(frozen=True)
class FedTGP(PrototypeMethod):
    """Trained global prototypes with an adaptive margin; only prototypes travel."""

    name = "fedtgp"
    paper = "Zhang et al., AAAI 2024"

    lam: float = hyper(10.0, "λ", "weight of the prototype term (5)", least=0, weight=True)
    margin: float = hyper(100.0, "δ_max", "the largest margin (2)", least=0)
    eta: float = hyper(0.01, "η", "learning rate at the server (4)", above=0)
    server_epochs: int = hyper(100, "E", "the server's epochs over the prototypes (4)", least=1)
    server_batch: int = hyper(10, "B", "prototypes in a batch at the server (4)", least=1)
    proto_pass: str = proto_pass_hyper("features of (1)", "post")
    share: str = hyper(
        "prototypes",
        "",
        "what travels: prototypes (alone), or the model too",
        choices=("prototypes", "model"),
    )

    @property
    def slots(self) -> Slots:
        return Slots(
            model="" if self.without_model else "model",
            up={"prototypes": "class means"},
            down={"prototypes": "trained prototypes"},
            server={"generator": "what makes the prototypes (3)"},
        )

    def loss(self, client: Client, batch: Batch) -> Terms:
        """(5)."""
        z, logits = client.forward(batch.x)
        P = Prototypes.of(client.received["prototypes"])
        return {
            "ce": client.cross_entropy(logits, batch.y),
            "proto": self.lam * consistency(z, batch.y, P, "mean"),
        }

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """(2) to (4)."""
        C = clients_class_means(updates)
        C_Nd, y_N = C.labeled()
        sent_K = (C.mask > 0).any(1).float()
        known_K = torch.maximum(server.state["prototypes"]["mask"], sent_K)
        delta = margin(C, self.margin)
        generator = server.state.get("generator") or _initial(server, C_Nd)
        moving = {name: t.clone().requires_grad_() for name, t in generator.items()}
        for epoch in range(self.server_epochs):
            rng = server.generator(epoch, "prototypes")
            order = torch.from_numpy(rng.permutation(len(y_N))).to(y_N.device)
            for rows in order.split(self.server_batch):
                if len(rows):
                    with torch.enable_grad():
                        loss = server_loss(moving, C_Nd[rows], y_N[rows], known_K, delta)
                        gradients = torch.autograd.grad(loss, list(moving.values()))
                    with torch.no_grad():
                        torch._foreach_add_(list(moving.values()), gradients, alpha=-self.eta)
        generator = {name: t.detach() for name, t in moving.items()}
        P = Prototypes(generated(generator), known_K)
        return {"model": mean, "prototypes": P.slot(), "generator": generator}

    def broadcast(self, server: ServerView) -> Tree:
        return {slot: t for slot, t in server.state.items() if slot != "generator"}

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """(6)."""
        return self.rules(client, x)["accuracy"]

    def rules(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        z, logits = client.forward(x)
        P = Prototypes.of(client.received["prototypes"])
        return {"accuracy": nearest(z, P), "head": logits}


def margin(C: Prototypes, most: float) -> float:
    """(2)."""
    Q = C.per_class_mean()
    Q_Nd = Q.mean[Q.mask > 0]
    if len(Q_Nd) < 2:
        return most
    # row by row: [N, N, d] would be gigabytes for a thousand classes
    distance_NN = torch.stack([(q_d - Q_Nd).norm(dim=-1) for q_d in Q_Nd])
    distance_NN.fill_diagonal_(math.inf)
    return min(float(distance_NN.min(1).values.max()), most)


def generated(generator: Slot) -> Tensor:
    """(3): the prototypes [K, d]."""
    hidden = F.linear(generator["embedding"], generator["weight1"], generator["bias1"]).relu()
    return F.linear(hidden, generator["weight2"], generator["bias2"])


def server_loss(
    generator: Slot, C_Bd: Tensor, y_B: Tensor, known_K: Tensor, delta: float
) -> Tensor:
    """The loss of (4) for some pairs."""
    square_BK = (C_Bd[:, None] - generated(generator)).square().sum(-1)
    own_BK = F.one_hot(y_B, len(known_K)).to(square_BK.dtype)
    logits_BK = -(square_BK.clamp(min=1e-12).sqrt() + delta * own_BK)
    return F.cross_entropy(logits_BK.masked_fill(known_K <= 0, -math.inf), y_B)


def _initial(server: ServerView, like: Tensor) -> Slot:
    """e, W and b before the first round, initialized like PyTorch's own layers."""
    K, d = server.sizes.classes, server.sizes.features
    rng, bound = server.generator("generator"), 1 / math.sqrt(d)
    drawn = {
        "embedding": rng.standard_normal((K, d)),
        **{f"weight{i}": rng.uniform(-bound, bound, (d, d)) for i in (1, 2)},
        **{f"bias{i}": rng.uniform(-bound, bound, d) for i in (1, 2)},
    }
    return {name: torch.from_numpy(array).to(like) for name, array in drawn.items()}
