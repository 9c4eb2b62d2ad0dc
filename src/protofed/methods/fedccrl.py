"""FedCCRL: copies of each image in other clients' colors, which must be classified alike.

Wang et al.: "FedCCRL: Federated Domain Generalization with Cross-Client Representation
Learning", arXiv 2410.11267, 2024.

Every client sends the colors of some of its images, the mean and deviation of each channel.
A batch is trained on three times: as it is, and as two copies, each in colors mixed with
those of other clients' images and then changed by AugMix (Hendrycks et al., ICLR 2020).

    (1) sent        (μ, σ) of a share r of the client's images, 6 numbers each, drawn every round
    (2) colors      x' = σ' (x − μ)/σ + μ',  μ' = λμ + (1−λ)μ_j,  σ' = λσ + (1−λ)σ_j,
                    λ ~ Beta(α, α), j: one of the other clients' images, for each image and copy
    (3) AugMix      x̃ = m x' + (1−m) Σ_i w_i c_i(x'),  m ~ Beta(1, 1),  w ~ Dirichlet(1, ..., 1);
                    each chain c_i is 1 to D of 13 operations on geometry and colors, drawn with
                    their level ℓ ~ U(0.1, s) (`protofed.augmix` lists them)
    (4) predictions JS = ⅓ Σ_v KL(p_v ‖ M),  M = ⅓ Σ_v p_v, of the three views' softmaxes
    (5) features    SC(a, b) = mean over the 2B features z of both of
                    log Σ_{j≠i} e^{cos(z_i,z_j)/τ} − 1/|P_i| Σ_{j ∈ P_i} cos(z_i,z_j)/τ,
                    P_i: all of the class of i, i included
    (6) objective   CE of the three views + λ₁ ½ Σ_copies SC(copy, original) + λ₂ JS
    server          θ as FedAvg; the last (1) of every client goes to all

(1) is little, mean colors and contrasts, but of single images. So a federation that holds back
prototypes of few images (`--min-class-count`) cannot run it. Images do not change, so what was
sent in one round serves the next; in round 0, and for a single client, (2) changes nothing.

Deviations
    (1)  The authors' code collects before round 0, and from all clients in each round.
    (2)  j is drawn with replacement. Where a channel leaves the range of a pixel it is clamped;
         the authors' code wraps around at 256.
    (3)  Operations, levels and weights are each image's own, as in AugMix; the authors' code
         draws operations and levels once for a batch. Its AugMix is torchvision's: those 13
         operations, s = 3, D = 3, three chains, levels of whole numbers (0, 1 or 2 of 9: weaker
         on average). Here levels are continuous, as in AugMix, geometry is bilinear, and pixels
         are rounded to 8 bits only where an operation needs it. No operation is left out.
    (4)  By log-sum-exp; the authors' code clamps M to at least 1e-7.
    (6)  BatchNorm's running statistics are those of the originals: further passes of a step
         do not move them. The authors use a pretrained MobileNetV3 and Adam.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from protofed.augmix import Draws, augmix
from protofed.method import (
    Batch,
    Client,
    Method,
    ProtofedError,
    ServerView,
    Sizes,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
    hyper,
)
from protofed.prototypes import cosine, full_precision
from protofed.styles import restyle, style_of

PIXELS = "pixels"


@dataclass(frozen=True)
class FedCCRL(Method):
    """Two copies of each batch in other clients' colors, aligned with the original."""

    name = "fedccrl"
    paper = "Wang et al., arXiv 2024"
    slots = Slots(
        up={"styles": "colors of some images"},
        down={"pool": "colors of the clients' images"},
        rows=("styles",),
    )

    ratio: float = hyper(0.1, "r", "share of images whose colors are sent (1)", above=0, most=1)
    alpha: float = hyper(0.1, "α", "Beta(α,α) of the colors' mixture (2)", above=0)
    severity: float = hyper(3.0, "s", "AugMix's highest level (3)", least=0.1, most=10)
    chains: int = hyper(3, "", "AugMix's chains of operations (3)", least=1)
    depth: int = hyper(3, "D", "the most operations in a chain (3)", least=1)
    tau: float = hyper(0.1, "τ", "temperature of the contrast (5)", above=0)
    lambda1: float = hyper(0.1, "λ₁", "weight of the contrast (5)", least=0)
    lambda2: float = hyper(0.1, "λ₂", "weight of the Jensen-Shannon divergence (4)", least=0)

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        return (PIXELS,)

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        style = torch.zeros(1, 1, 2, sizes.channels[PIXELS])
        none = torch.zeros(1, dtype=torch.int64)
        return {"pool": {"style": style, "there": torch.zeros(1, 1), "id": none}}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """(6)."""
        z, logits = client.forward(batch.x)
        copies = [client.forward(x) for x in self._copies(client, batch.x).chunk(2)]
        ce = [client.cross_entropy(view.logits, batch.y) for view in copies]
        contrasts = [supervised_contrast(c.feature, z, batch.y, self.tau) for c in copies]
        divergence = jensen_shannon(torch.stack([logits, *(c.logits for c in copies)]))
        return {
            "ce": client.cross_entropy(logits, batch.y),
            "copies": torch.stack(ce).sum(),
            "contrast": self.lambda1 * torch.stack(contrasts).mean(),
            "divergence": self.lambda2 * divergence,
        }

    def _copies(self, client: Client, x: Tensor) -> Tensor:
        """(2) and (3): both copies of a batch [2B, C, H, W], one after the other."""
        x = x.repeat(2, 1, 1, 1)
        own, λ = style_of(x), client.beta(self.alpha, len(x)).to(x.dtype)[:, None, None]
        mixed = restyle(x, own, λ * own + (1 - λ) * _others(client, own))
        pixels = (mixed * client.pixel_std + client.pixel_mean).clamp(0, 1)
        drawn = self.chains * len(x)
        draws = Draws(
            length=client.uniform(drawn),
            operation=client.uniform(self.depth, 3, drawn),
            weight=client.uniform(self.chains, len(x)),
            share=client.uniform(len(x)),
        )
        changed = augmix(pixels, draws, self.severity)
        return (changed - client.pixel_mean) / client.pixel_std

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """(1)."""
        if client.min_class_count > 1:
            raise ProtofedError(
                f"{self.name} sends the colors of single images",
                "it cannot run with --min-class-count above 1",
            )
        styles = client.sample_styles()[PIXELS]
        chosen = client.uniform(len(styles)).argsort()[: max(1, int(self.ratio * len(styles)))]
        return {"styles": {PIXELS: styles[chosen]}}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """FedAvg; the colors of the round's clients, and the last ones of the others."""
        old = server.each_client("pool")
        kept = [style[own] for style, own in zip(old["style"], old["there"] > 0, strict=True)]
        sent = {u.name: u["styles"][PIXELS] for u in updates}
        like = sent[updates[0].name]  # in float64 runs, the first zeros are float32
        last = [style.to(like) for style in kept]
        rows = [sent.get(name, own) for name, own in zip(server.clients, last, strict=True)]
        there = [torch.ones(len(row), device=row.device) for row in rows]
        pool = {"style": pad_sequence(rows, True), "there": pad_sequence(there, True)}
        return {"model": mean, "pool": {**pool, "id": server.client_ids()}}


def _others(client: Client, own: Tensor) -> Tensor:
    """For each image, the style of an image of another client, or its own if there is none."""
    pool = client.received["pool"]
    other_N = ((pool["id"] != client.id)[:, None] & (pool["there"] > 0)).flatten()
    place_N = other_N.cumsum(0)
    number = (client.uniform(len(own)) * place_N[-1]).long() + 1
    drawn = torch.searchsorted(place_N, torch.minimum(number, place_N[-1]))
    styles = pool["style"].flatten(0, 1)[drawn].to(own.dtype)
    return torch.where(place_N[-1] > 0, styles, own)


@full_precision
def jensen_shannon(logits_VBK: Tensor) -> Tensor:
    """(4), for any number of views."""
    log_VBK = logits_VBK.log_softmax(2)
    log_mean_BK = log_VBK.logsumexp(0) - math.log(len(logits_VBK))
    return (log_VBK.exp() * (log_VBK - log_mean_BK)).sum(2).mean()


@full_precision
def supervised_contrast(a_Bd: Tensor, b_Bd: Tensor, y_B: Tensor, tau: float) -> Tensor:
    """(5)."""
    z, y = torch.cat([a_Bd, b_Bd]), y_B.repeat(2)
    s = cosine(z, z) / tau
    same = (y[:, None] == y).to(s.dtype)
    itself = torch.eye(len(y), dtype=torch.bool, device=y.device)
    others = s.masked_fill(itself, -math.inf).logsumexp(1)
    return (others - (s * same).sum(1) / same.sum(1)).mean()
