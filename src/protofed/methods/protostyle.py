"""ProtoStyle: every client trains in the styles of all the others, pseudo-domain by pseudo-domain.

Protofed contributors: "ProtoStyle", this package, 2026. Its parts were chosen on
validation images: benchmarks/styles/README.md.

A *style* is the mean and the deviation of each channel of an image, or of a network's early
features. Clients of one domain share it, and it is a few kilobytes. So it tells which clients
belong together without any label, and it lets a client see its images as the others would.

    (1) sent        s_m = mean over client m's samples of their styles [μ; σ], at pixels, stem and
                    stage 1, under the received model
    (2) domains     FINCH on [μ; log σ] of all clients' last styles, each number standardized over
                    the clients and all stages weighted equally: its first partition gives the
                    pseudo-domains; if there is only one, every client is its own
    (3) average     θ = Σ_g 1/G Σ_{m ∈ g} n_m/N_g θ_m: pseudo-domains count equally, and in each of
                    them clients count by their samples
    (4) two views   a batch is trained on twice: as it is, and with each sample in a style s_j: a
                    pseudo-domain at random, then a client j of it at random (m itself included);
                    x' = σ_j (x − μ)/σ + μ_j at all stages of (1), with the same j; gradients
                    go through the sample's own μ and σ
    (5) agreement   JS = ½ Σ_v KL(p_v ‖ M),  M = ½ (p_1 + p_2), of the views' softmaxes
    (6) prototypes  APA: both views' features are drawn to class means of mixed features, I²PFL's
                    (7) to (9), γ ~ Beta(α, α)
    (7) objective   CE of both views + λ_view JS + λ_intra APA
    travels         1 KB up with 64 channels, and as much for every client down: the mean color
                    and contrast of a client's images, and of its early features. That can give
                    away a camera, a scanner or a room, but not a class, nor one image among
                    several. Neither labels nor domains are used
    cost            a step has twice the samples; a clean pass through the first stage per round

In round 0 there are no styles: both views are alike. A client that sits out keeps its last
style. One with fewer samples than `--min-class-count` sends none; all of those count as one
pseudo-domain in (3).

Ablations
    (3)    `balanced=false`: the average is the protocol's
    (4)    `p`: the share of second views that take another style; 0: a single view, no styles
    (1)    `stages`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    chosen_stages,
    hyper,
    stages_hyper,
)
from protofed.methods.fedccrl import jensen_shannon
from protofed.methods.i2pfl import mixed_prototypes
from protofed.prototypes import consistency, finch
from protofed.styles import restyle, style_of

EARLY = ("pixels", "stem", "stage1")
UNTIL = "until"
"""The entry of the styles going down that is not a stage. Client j is drawn by a random number in
[0, 1] that is at most j's entry and more than the entries before it."""


@dataclass(frozen=True)
class ProtoStyle(Method):
    """Styles of all clients, balanced over pseudo-domains, and prototypes within a batch."""

    name = "protostyle"
    paper = "Protofed contributors, this package 2026"
    protocol = "i2pfl"
    detached_terms = ("apa",)
    size_limit = 50.0  # a gradient through the style of a nearly flat map can be huge

    p: float = hyper(
        1.0, "p", "share of second views in another style (0 = one view)", least=0, most=1,
        weight=True,
    )  # fmt: skip
    lambda_view: float = hyper(1.0, "λ_view", "weight of (5) (0 = off)", least=0, weight=True)
    lambda_intra: float = hyper(10.0, "λ_intra", "weight of APA (0 = off)", least=0, weight=True)
    alpha: float = hyper(0.4, "α", "MixUp's Beta(α,α) in APA", above=0)
    balanced: bool = hyper(True, "", "pseudo-domains count equally in the average (3)")
    stages: str = stages_hyper("pixels, stem and stage 1")

    @property
    def slots(self) -> Slots:
        if not self.p:
            return Slots()
        return Slots(up={"styles": "its mean style"}, down={"styles": "all clients' styles"})

    @property
    def weighting(self) -> str:
        return "pseudo-domains alike, samples within" if self._balances else ""

    @property
    def _balances(self) -> bool:
        return bool(self.p) and self.balanced

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        early = [stage for stage in EARLY if stage in stages]  # a CNN has no stem
        return chosen_stages(self.stages, early) if self.p else ()

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """No client has a style."""
        styles = {
            n: torch.zeros(1, 2, sizes.channels[n]) for n in self.restyles((*sizes.channels,))
        }
        return {"styles": {**styles, UNTIL: torch.zeros(1)}} if self.p else {}

    def draws(self, rng: np.random.Generator, steps: int) -> Mapping[str, NDArray[Any]]:
        """γ, one per batch."""
        return {"gamma": rng.beta(self.alpha, self.alpha, size=steps)} if self.lambda_intra else {}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """(7)."""
        if not self.p:
            y = batch.y
            h, logits = client.forward(batch.x)
            terms = {"ce": client.cross_entropy(logits, y)}
        else:
            y = torch.cat([batch.y, batch.y])
            view = partial(_in_style, client.received["styles"], *self._drawn(client, len(y)))
            h, logits = client.forward(torch.cat([batch.x, batch.x]), view)
            terms = {"ce": client.cross_entropy(logits, y)}
            if self.lambda_view:
                views = torch.stack(logits.chunk(2))
                terms["view"] = self.lambda_view * jensen_shannon(views)  # (5)
        if self.lambda_intra:
            p = mixed_prototypes(client, y, h.detach())
            terms["apa"] = self.lambda_intra * consistency(h, y, p, "mean", detach=True)  # (6)
        return terms

    def _drawn(self, client: Client, samples: int) -> tuple[Tensor, Tensor]:
        """For each sample of both views, the client whose style it takes, and whether it does."""
        until_M = client.received["styles"][UNTIL]
        drawn = torch.searchsorted(until_M, client.uniform(samples).to(until_M.dtype))
        takes = client.uniform(samples) < self.p
        second = torch.arange(samples, device=until_M.device) >= samples // 2
        return drawn.clamp(max=len(until_M) - 1), second & takes & (until_M[-1] > 0)

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """(1)."""
        if not self.p:
            return {}, {}
        return {"styles": {n: s[0] for n, s in client.styles(client.start).items()}}, {}

    def weights(self, server: ServerView, updates: Updates) -> Sequence[float] | None:
        """(3)."""
        if not self._balances:
            return super().weights(server, updates)
        label_M = pseudo_domains(_known(server, updates)).tolist()
        label = [label_M[server.clients.index(u.name)] for u in updates]
        samples = dict.fromkeys(label, 0)
        for k, u in zip(label, updates, strict=True):
            samples[k] += u.samples
        return [u.samples / samples[k] for k, u in zip(label, updates, strict=True)]

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """The average, and all clients' styles with the chance of each to be drawn."""
        if not self.p:
            return {"model": mean}
        styles = _known(server, updates)
        label_M = pseudo_domains(styles)
        there_M = label_M >= 0
        clients_G = label_M[there_M].bincount().double()
        until_M = (there_M / clients_G[label_M]).cumsum(0) if there_M.any() else label_M * 0.0
        until = (until_M / until_M[-1].clamp(min=1)).to(next(iter(styles.values())))
        return {"model": mean, "styles": {**styles, UNTIL: until}}


def _in_style(styles: Slot, drawn_B: Tensor, other_B: Tensor, stage: str, x: Tensor) -> Tensor:
    """(4)."""
    own_B2C = style_of(x)
    drawn_B2C = styles[stage].to(own_B2C.dtype)[drawn_B]
    return restyle(x, own_B2C, torch.where(other_B[:, None, None], drawn_B2C, own_B2C))


def _known(server: ServerView, updates: Updates) -> Slot:
    """The last style [M, 2, C] of every client at each stage; 0 for those without."""
    kept = server.each_client("styles")
    known = {n: t.clone() for n, t in kept.items() if n != UNTIL}
    for update in updates:
        for stage, style in update["styles"].items():
            known[stage] = known[stage].to(style)  # in float64 runs, the first zeros are float32
            known[stage][server.clients.index(update.name)] = style
    return known


def pseudo_domains(styles: Slot) -> Tensor:
    """(2): a label [M] from 0 for each client by its styles [M, 2, C]; −1 for those without."""
    there_M = (next(iter(styles.values()))[:, 1].cpu() > 0).any(1)
    label_M = there_M.long() - 1
    if not there_M.any():
        return label_M
    rows = []
    for style in styles.values():
        μ_NC, σ_NC = style.cpu()[there_M].double().unbind(1)
        row = torch.cat([μ_NC, σ_NC.log()], 1)
        row = (row - row.mean(0)) / row.std(0, correction=0).clamp(min=1e-12)
        rows.append(row / row.shape[1] ** 0.5)
    label_N = finch(torch.cat(rows, 1))[0]
    label_M[there_M] = label_N if label_N.any() else torch.arange(len(label_N))
    return label_M
