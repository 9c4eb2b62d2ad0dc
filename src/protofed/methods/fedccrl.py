"""FedCCRL: copies of each image in other clients' colors, which must be read alike.

Wang et al.: "FedCCRL: Federated Domain Generalization with Cross-Client Representation
Learning", arXiv 2410.11267, 2024.

Every client sends the colors of some of its images, the mean and deviation of each channel.
A batch is trained on three times: as it is, and as two copies, each in colors mixed with
those of other clients' images and then changed by AugMix (Hendrycks et al., ICLR 2020).

    (1) sent        (μ, σ) of a share r of the client's images, 6 numbers each, drawn every round
    (2) colors      x' = σ' (x − μ)/σ + μ',  μ' = λμ + (1−λ)μ_j,  σ' = λσ + (1−λ)σ_j,
                    λ ~ Beta(α, α), j: one of the other clients' images, for each image and copy
    (3) AugMix      x̃ = m x' + (1−m) Σ_i w_i c_i(x'),  m ~ Beta(1, 1),  w ~ Dirichlet(1, ..., 1);
                    each chain c_i is 1 to D operations, drawn with their level ℓ ~ U(0.1, s):

                    rotate ±3ℓ°; shear x, y by ±0.03ℓ; translate x, y by ±ℓ/30 of the side;
                    autocontrast; equalize; posterize to 4 − ⌊0.4ℓ⌋ bits; solarize from 1 − ℓ/10;
                    brightness, contrast, color, sharpness by a factor of 1 ± 0.09ℓ
    (4) predictions JS = ⅓ Σ_v KL(p_v ‖ M),  M = ⅓ Σ_v p_v, of the three views' softmaxes
    (5) features    SC(a, b) = mean over the 2B features z of both of
                    log Σ_{j≠i} e^{cos(z_i,z_j)/τ} − 1/|P_i| Σ_{j ∈ P_i} cos(z_i,z_j)/τ,
                    P_i: all of the class of i, i included
    (6) objective   CE of the three views + λ₁ ½ Σ_copies SC(copy, original) + λ₂ JS
    server          θ as FedAvg; the last (1) of every client goes to all

(1) are images' mean colors and contrasts: little, but of single images, so a federation that
lets no prototype of few images out (`--min-class-count`) cannot run it. Images do not change,
so what went up in one round serves the next; in round 0, and for a single client, (2)
changes nothing. An operation is computed for all images and kept for those that drew it.

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
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
        up={"styles": "colors of some images"}, down={"pool": "colors of the clients' images"}
    )

    ratio: float = hyper(0.1, "r", "share of images whose colors are sent (1)", above=0, most=1)
    alpha: float = hyper(0.1, "α", "Beta(α,α) of the colors' mixture (2)", above=0)
    severity: float = hyper(3.0, "s", "AugMix's highest level (3)", least=0.1, most=10)
    chains: int = hyper(3, "", "AugMix's chains of operations (3)", least=1)
    depth: int = hyper(3, "D", "the most operations of a chain (3)", least=1)
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
        changed = augmix(pixels, client, self.severity, self.chains, self.depth)
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
        old, clients = server.state["pool"], len(server.clients)
        pairs = zip(old["style"], old["there"] > 0, strict=True)
        kept = [style[there] for style, there in pairs] * (clients // len(old["there"]))
        sent = {u.name: u["styles"][PIXELS] for u in updates}
        rows = [sent.get(name, last) for name, last in zip(server.clients, kept, strict=True)]
        there = [torch.ones(len(row), device=row.device) for row in rows]
        pool = {"style": pad_sequence(rows, True), "there": pad_sequence(there, True)}
        return {"model": mean, "pool": {**pool, "id": server.client_ids()}}


def _others(client: Client, own: Tensor) -> Tensor:
    """For each image the style of one of the other clients' images, or its own if there is none."""
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


# ---- AugMix (3): images [N, C, H, W] with pixels in [0, 1] ---------------------------------------


@full_precision
def augmix(x: Tensor, client: Client, severity: float, chains: int, depth: int) -> Tensor:
    """Each image mixed with chains of operations on it."""
    chained = x.repeat(chains, 1, 1, 1)
    images = len(chained)
    length = _each(1 + (client.uniform(images) * depth).floor())
    draws = client.uniform(depth, 3, images).to(x.dtype)
    for number, (which, level, sign) in enumerate(draws):
        operation = (which * (len(GEOMETRY) + len(COLORS))).long()
        level = 0.1 + (severity - 0.1) * level
        signed = level * (sign - 0.5).sign()
        changed = moved(chained, operation, signed)
        for i, change in enumerate(COLORS, len(GEOMETRY)):
            value = change(chained, _each(level), _each(signed))
            changed = torch.where(_each(operation == i), value, changed)
        chained = torch.where(number < length, changed, chained)
    weight = -client.uniform(chains, len(x)).to(x.dtype).log()
    weight = (weight / weight.sum(0)).view(chains, -1, 1, 1, 1)
    share = _each(client.uniform(len(x)).to(x.dtype))
    return share * x + (1 - share) * (weight * chained.view(chains, *x.shape)).sum(0)


def _each(values: Tensor) -> Tensor:
    """One value for each image, to broadcast."""
    return values[:, None, None, None]


GEOMETRY = ("rotate", "shear x", "shear y", "translate x", "translate y")


def moved(x: Tensor, operation: Tensor, signed: Tensor) -> Tensor:
    """The images through one of ``GEOMETRY`` each, black around them; others as they are."""
    rotate, shear_x, shear_y, right, down = (
        (signed * (operation == i))[:, None, None] for i in range(len(GEOMETRY))
    )
    cos, sin = (f(rotate * (math.pi / 60)) for f in (torch.cos, torch.sin))
    rows, columns = (
        (2 * torch.arange(n, device=x.device, dtype=x.dtype) + 1) / n - 1 for n in x.shape[2:]
    )
    rows = rows[:, None]
    # where a pixel comes from, in [-1, 1]; not F.affine_grid, a matrix product that TF32 would blur
    column = cos * columns + (0.03 * shear_x - sin) * rows + right / 15
    row = (sin + 0.03 * shear_y) * columns + cos * rows + down / 15
    where = torch.stack([column, row], 3)
    return F.grid_sample(x, where, "bilinear", "zeros", align_corners=False)


def autocontrast(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    """The darkest value of a channel becomes 0, the brightest 1."""
    low, high = x.amin((2, 3), True), x.amax((2, 3), True)
    flat = high <= low
    return torch.where(flat, x, (x - low) / (high - low).masked_fill(flat, 1))


def eight_bits(x: Tensor) -> Tensor:
    """Whole numbers up to 255; halves, of which autocontrast makes many, go up on every machine."""
    return (x * 255 + 1e-3).round()


def equalize(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    """All values of a channel about equally often, by the integer rule of Pillow."""
    value = eight_bits(x).long().flatten(2)
    count = value.new_zeros(*value.shape[:2], 256).scatter_add_(2, value, torch.ones_like(value))
    step = (value.shape[2] - count.gather(2, value.amax(2, True))) // 255
    below = count.cumsum(2) - count
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table.gather(2, value), value).view(x.shape).to(x.dtype) / 255


def posterize(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    """Only the upper bits of a value."""
    unit = 2.0 ** (4 + (0.4 * level).floor())
    return (eight_bits(x) / unit).floor() * unit / 255


def solarize(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    """Bright values inverted."""
    return torch.where(x >= 1 - level / 10, 1 - x, x)


def brightness(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return _away(x, torch.zeros_like(x), signed)


def contrast(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return _away(x, _gray(x).mean((2, 3), True), signed)


def color(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return _away(x, _gray(x), signed)


def sharpness(x: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    """Away from the images smoothed by 3 × 3 pixels, of which the middle one counts five times."""
    inner = x[:, :, 1:-1, 1:-1]
    smooth = (9 * F.avg_pool2d(x, 3, 1) + 4 * inner) / 13
    return _away(x, x + F.pad(smooth - inner, (1, 1, 1, 1)), signed)


def _away(x: Tensor, origin: Tensor, signed: Tensor) -> Tensor:
    factor = 1 + 0.09 * signed
    return (origin + factor * (x - origin)).clamp(0, 1)


def _gray(x: Tensor) -> Tensor:
    return 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]


COLORS = (
    autocontrast, equalize, posterize, solarize, brightness, contrast, color, sharpness,
)  # fmt: skip
