"""COPA: one extractor for all, one head per client, an ensemble of the heads.

Wu, Gong: "Collaborative Optimization and Aggregation for Decentralized Domain
Generalization and Adaptation", ICCV 2021.

A feature that every client's head can read is one that carries over to domains
nobody has seen.

    client m     CE(h_m(f(x))) + Σ_{j≠m} CE(h_j(f(x))),
                 h_m its own head; the others' heads h_j are frozen, and their
                 gradient reaches f alone
    server       f averaged by sample counts; heads collected, not averaged
    inference    mean over the heads of softmax h_j(f(x))
    cost         M heads on each feature

Until a client has sent a head, the common initial one takes its place; in
round 0 all h_j are that one. A client that sits out keeps its head, at home
and at the server. The ensemble is of the heads that have been sent; before
round 0, it is the initial one.

Deviations
    normalization   The paper's extractor mixes batch and instance
         normalization (BIN). Its details were not available, and all methods
         share one network here: BIN is left out.
    The sum over j is the form in which a public benchmark runs COPA, without a
    weight. There the global network is tested with a head that was never
    trained; here the ensemble is tested.
    All M heads go to every client in one broadcast; it skips its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import (
    Batch,
    Client,
    Entry,
    Method,
    ServerView,
    Shared,
    Sizes,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
)
from protofed.prototypes import full_precision


@dataclass(frozen=True)
class COPA(Method):
    """A feature that every client's head can read."""

    name = "copa"
    paper = "Wu, Gong, ICCV 2021"
    slots = Slots(
        model="extractor", up={"head": "its own head"}, down={"heads": "the heads of all clients"}
    )

    def shared(self, entry: Entry) -> Shared:
        """The head is the client's own: it is sent in a slot of its own and never averaged."""
        return "no" if entry.name.startswith("head.") else "both"

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """The common head, which stands for every client's until it sends its own."""
        weight, bias = model["head.weight"], model["head.bias"]
        return {"heads": {"weight": weight[None], "bias": bias[None], "mask": torch.zeros(1)}}

    def loss(self, client: Client, batch: Batch) -> Terms:
        z, logits = client.forward(batch.x)
        heads = client.received["heads"]
        logits_BMK = every_head(z, heads)
        y_BM = batch.y[:, None].expand(logits_BMK.shape[:2])
        ce = client.cross_entropy(logits_BMK.flatten(0, 1), y_BM.flatten(), reduction="none")
        ce_BM = ce.view(y_BM.shape)
        others_B = ce_BM.masked_fill(heads["id"] == client.id, 0).sum(1)
        return {"ce": client.cross_entropy(logits, batch.y), "others": others_B.mean()}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        weight, bias = client.parameters["head.weight"], client.parameters["head.bias"]
        return {"head": {"weight": weight, "bias": bias}}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """The averaged extractor, and the round's heads in their clients' places."""
        heads = {n: t.clone() for n, t in server.each_client("heads").items()}
        for update in updates:
            place, sent = server.clients.index(update.name), update["head"]
            heads["weight"][place], heads["bias"][place] = sent["weight"], sent["bias"]
            heads["mask"][place] = 1
        return {"model": mean, "heads": heads}

    def broadcast(self, server: ServerView) -> Tree:
        """The extractor and all heads, with the clients' ids so that each finds its own."""
        heads = {**server.each_client("heads"), "id": server.client_ids()}
        return {"model": server.state["model"], "heads": heads}

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """The mean of the heads' softmax, as logits."""
        heads = client.received["heads"]
        return ensemble(every_head(client.forward(x).feature, heads), heads["mask"]).log()


def every_head(z_Bd: Tensor, heads: Slot) -> Tensor:
    """The logits [B, M, K] of all heads; no gradient reaches the heads."""
    weight_MKd, bias_MK = heads["weight"].detach(), heads["bias"].detach()
    logits = F.linear(z_Bd, weight_MKd.flatten(0, 1), bias_MK.flatten())
    return logits.view(-1, *bias_MK.shape)


@full_precision
def ensemble(logits_BMK: Tensor, mask_M: Tensor) -> Tensor:
    """Class probabilities [B, K], averaged over the heads that were sent, or all if none was."""
    mask_M = mask_M.masked_fill((mask_M <= 0).all(), 1)
    return (logits_BMK.softmax(2) * mask_M[:, None]).sum(1) / mask_M.sum()
