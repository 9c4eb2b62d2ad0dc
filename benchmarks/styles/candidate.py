"""The candidates for ProtoStyle: prototypes and styles together, every part a switch.

    protofed run --task office_caltech --method benchmarks/styles/candidate.py:Candidate

A *style* is the mean and the deviation of each channel of an image, or of a network's early
features. Clients of one domain share it, and it is a few kilobytes. When styles travel beside the
weights, every client can train on its images in the styles of the others.

    styles   s_m = mean and deviation over a client's samples of their styles, at the stages
             `places`, under the received model
    server   a bank of all clients' styles; FINCH on [μ; log σ], each dimension standardized over
             the clients, gives pseudo-domains without any label (its first partition; three or
             fewer: one each)
    client   a share `p` of the samples takes a style drawn from the bank: a pseudo-domain
             at random, a client of it at random, then its mean plus `spread` deviations of noise
    average  by the protocol, or evenly over pseudo-domains
    loss     CE + λ_intra APA (I²PFL) + λ_inter contrast with global prototypes
             + λ_view disagreement of a sample's two views

README.md says what validation images said of each. What was kept is the method
``src/protofed/methods/protostyle.py``; this file stays so that the choice can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
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
    clients_class_means,
    hyper,
    upload_class_means,
)
from protofed.methods.i2pfl import I2PFL
from protofed.prototypes import Prototypes, contrast
from protofed.prototypes.finch import finch
from protofed.prototypes.losses import ABSENT, cosine
from protofed.styles import restyle, style_of

LEAST = 1e-3
"""The least deviation that a drawn style may have."""


@dataclass(frozen=True)
class Candidate(Method):
    """Styles, and prototypes in several forms."""

    name = "candidate"
    paper = "Protofed, 2026"
    protocol = "i2pfl"

    p: float = hyper(
        0.5, "p", "share of the samples that are restyled", least=0, most=1, weight=True
    )
    places: str = hyper("pixels,stem,stage1", "", "where features are restyled")
    mix: bool = hyper(False, "", "go a random part of the way to the drawn style")
    spread: float = hyper(1.0, "", "noise of a drawn style, in deviations of its client", least=0)
    joint: bool = hyper(True, "", "one client's style at all stages of a sample")
    evenly: str = hyper("clusters", "", "draw evenly over", choices=("clusters", "clients"))
    average: str = hyper(
        "protocol",
        "",
        "average models by the protocol, or evenly over pseudo-domains",
        choices=("protocol", "clusters"),
    )
    two_views: bool = hyper(False, "", "train with both the plain and the restyled samples")
    anchors: str = hyper(
        "clusters",
        "",
        "prototypes of the contrast: of every class in every style (completed by restyling), of "
        "the clients of a pseudo-domain, or I²PFL's",
        choices=("completed", "clusters", "reweight"),
    )
    tau: float = hyper(
        0.07, "τ", "temperature", above=0, per_task={"office_caltech": 0.02, "pacs": 0.04}
    )
    lambda_inter: float = hyper(0.0, "λ", "weight of the contrast", least=0, weight=True)
    lambda_intra: float = hyper(10.0, "", "weight of APA", least=0, weight=True)
    view_by: str = hyper(
        "head", "", "what says the classes of both views", choices=("head", "prototypes")
    )
    lambda_view: float = hyper(0.0, "", "weight of the agreement of views", least=0, weight=True)

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        # ``stages`` of the network that it has; a CNN has no stem
        return tuple(s for s in self.places.split(",") if s in stages) if self.p else ()

    @property
    def proto_pass(self) -> str:
        return "post" if self.lambda_inter and self.anchors != "completed" else "none"

    @property
    def slots(self) -> Slots:
        up, down = {}, {}
        if self.p:
            up["styles"], down["styles"] = "styles", "all clients' styles"
        if self.p and self._completes:
            down["centers"] = "styles of pseudo-domains"
        if self.lambda_inter:
            up["prototypes"], down["prototypes"] = "class means", "prototypes"
        return Slots(up=up, down=down)

    @property
    def _completes(self) -> bool:
        return bool(self.lambda_inter) and self.anchors == "completed"

    @property
    def detached_terms(self) -> tuple[str, ...]:
        return ("apa",) if self.lambda_intra else ()

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        state: Tree = {}
        if self.lambda_inter:
            state["prototypes"] = Prototypes.empty(sizes.classes, sizes.features).table().slot()
        return state

    def draws(self, rng: np.random.Generator, steps: int) -> Mapping[str, NDArray[Any]]:
        return {"gamma": rng.beta(0.4, 0.4, size=steps)} if self.lambda_intra else {}

    # ---- client --------------------------------------------------------------------------------

    def loss(self, client: Client, batch: Batch) -> Terms:
        x, y, rows = batch
        two = self.two_views and bool(self.p)
        n = len(y)
        if two:
            x, y, rows = torch.cat([x, x]), torch.cat([y, y]), torch.cat([rows, rows])
        go_B = client.uniform(len(y)) < self.p
        if two:
            go_B = torch.arange(2 * n, device=y.device) >= n
        pick = self._drawn(client, len(y))
        h, logits = client.forward(x, between=partial(self._view, client, go_B, pick))
        terms = {"ce": client.cross_entropy(logits, y)}
        if self.lambda_intra:
            terms["apa"] = self.lambda_intra * I2PFL()._apa(client, Batch(x, y, rows), h)
        if self.lambda_inter:
            P = Prototypes.of(client.received["prototypes"])
            terms["contrast"] = self.lambda_inter * contrast(h, y, P, self.tau)
        if two and self.lambda_view:
            log_2BK = F.log_softmax(logits.float(), 1)
            if self.view_by == "prototypes" and self.lambda_inter:
                log_2BK = _by_prototypes(h, Prototypes.of(client.received["prototypes"]), self.tau)
            terms["view"] = self.lambda_view * _disagreement(log_2BK)
        return terms

    def _drawn(self, client: Client, n: int) -> Tensor | None:
        if "weight" not in client.received.get("styles", {}):
            return None
        weight_M = client.received["styles"]["weight"]
        return (client.uniform(n, len(weight_M)).log() / weight_M).argmax(1)

    def _view(
        self, client: Client, go_B: Tensor, pick: Tensor | None, stage: str, x: Tensor
    ) -> Tensor:
        if pick is None:
            return x
        styles = client.received["styles"]
        if not self.joint:
            pick = self._drawn(client, len(x))
            if not self.two_views:
                go_B = client.uniform(len(x)) < self.p
        own = style_of(x)
        mean_B2C, std_B2C = styles[stage].to(own.dtype)[pick].unbind(1)
        new = mean_B2C
        if self.spread:
            new = new + self.spread * client.normal(*mean_B2C.shape).to(own.dtype) * std_B2C
        new = torch.stack([new[:, 0], new[:, 1].clamp(min=LEAST)], 1)
        part_B = go_B.to(own.dtype)
        if self.mix:
            part_B = part_B * client.uniform(len(x)).to(own.dtype)
        return restyle(x, own, own + part_B[:, None, None] * (new - own))

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        up: Tree = {}
        if self.p:
            up["styles"] = client.styles(client.start)
        if self._completes:
            centers = client.received.get("centers", {})
            count = len(next(iter(centers.values()))) if centers else 0
            styles = [{stage: c[i] for stage, c in centers.items()} for i in range(count)] or [{}]
            tables = [client.class_means(partial(_in_style, style)) for style in styles]
            mean_KSd = torch.stack([m for m, _ in tables], 1)
            mask_KS = torch.stack([(c > 0).float() for _, c in tables], 1)
            up["prototypes"] = Prototypes(mean_KSd, mask_KS).slot()
        elif self.lambda_inter:
            up |= upload_class_means(client)
        return up, {}

    # ---- server --------------------------------------------------------------------------------

    def weights(self, server: ServerView, updates: Updates) -> Sequence[float] | None:
        if self.average == "protocol" or not self.p:
            return super().weights(server, updates)
        label_M = _pseudo_domains(*_bank(server, updates))
        label = [int(label_M[server.clients.index(u.name)]) for u in updates]
        size = [
            sum(u.samples for u, k in zip(updates, label, strict=True) if k == g) for g in label
        ]
        return [u.samples / s for u, s in zip(updates, size, strict=True)]

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        state: Tree = {"model": mean}
        label_M = torch.zeros(0)
        if self.p:
            bank, there_M = _bank(server, updates)
            label_M = _pseudo_domains(bank, there_M)
            groups = int(label_M.max()) + 1
            size_G = torch.bincount(label_M[label_M >= 0], minlength=groups)
            weight_M = torch.where(there_M.cpu(), 1 / size_G[label_M.clamp(min=0)], 0.0)
            if self.evenly == "clients":
                weight_M = there_M.cpu().float()
            any_stage = next(iter(bank.values()))
            state["styles"] = {**bank, "weight": (weight_M / weight_M.sum()).to(any_stage)}
            if self._completes:
                state["centers"] = {
                    stage: torch.stack(
                        [b[label_M.to(b.device) == g, 0].mean(0) for g in range(groups)]
                    )
                    for stage, b in bank.items()
                }
        if self._completes:
            P = _joined([Prototypes.of(u["prototypes"]) for u in updates])
            state["prototypes"] = P.slot()
        elif self.lambda_inter:
            c = clients_class_means(updates)  # [K, M, d]
            if self.anchors == "clusters" and self.p:
                index = [server.clients.index(u.name) for u in updates]
                own_M = label_M[index]
                parts = [
                    Prototypes(c.mean[:, own_M == g], c.mask[:, own_M == g]).per_class_mean()
                    for g in own_M.unique().tolist()
                ]
                P = Prototypes(
                    torch.stack([t.mean for t in parts], 1), torch.stack([t.mask for t in parts], 1)
                )
            else:
                P = c.reweighted_mean().table()
            state["prototypes"] = P.slot()
        return state


def _in_style(style: Slot, stage: str, x: Tensor) -> Tensor:
    """Features in one style; as they are, if there is none."""
    own = style_of(x)
    return restyle(x, own, style[stage].to(own).expand_as(own)) if style else x


def _joined(tables: list[Prototypes]) -> Prototypes:
    """The mean over the owners of each class, style by style."""
    mask_MKS = torch.stack([t.mask for t in tables]) > 0
    mean_MKSd = torch.stack([t.mean for t in tables]).masked_fill(~mask_MKS[..., None], 0)
    count_KS = mask_MKS.sum(0)
    return Prototypes(mean_MKSd.sum(0) / count_KS.clamp(min=1)[..., None], (count_KS > 0).float())


def _bank(server: ServerView, updates: Updates) -> tuple[Slot, Tensor]:
    """All clients' styles, the new ones in their places, and which clients have one [M]."""
    bank = {n: t for n, t in server.state.get("styles", {}).items() if n != "weight"}
    for u in updates:
        m = server.clients.index(u.name)
        for stage, style in u["styles"].items():
            if stage not in bank:
                bank[stage] = style.new_zeros(len(server.clients), *style.shape)
            bank[stage] = bank[stage].clone()
            bank[stage][m] = style
    return bank, next(iter(bank.values()))[:, 0, 1].amax(1) > 0


def _pseudo_domains(bank: Slot, there_M: Tensor) -> Tensor:
    """A label [M] for each client by its style, −1 for those that have none."""
    rows = []
    for b in bank.values():
        mean_M2C = b[there_M, 0].double().cpu()
        flat = torch.cat([mean_M2C[:, 0], mean_M2C[:, 1].log()], 1)
        flat = (flat - flat.mean(0)) / flat.std(0, correction=0).clamp(min=1e-12)
        rows.append(flat / flat.shape[1] ** 0.5)
    row_Nd = torch.cat(rows, 1)
    label_N = finch(row_Nd)[0]
    if label_N.max() == 0:
        label_N = torch.arange(len(row_Nd))
    label_M = torch.full(there_M.shape, -1)
    label_M[there_M.cpu()] = label_N.cpu()
    return label_M


def _by_prototypes(h: Tensor, P: Prototypes, tau: float) -> Tensor:
    """Log-probabilities [2B, K] of the classes: a softmax over prototypes, summed by class."""
    mean_KSd, mask_KS = P.table()
    K, S, d = mean_KSd.shape
    cosine_BKS = cosine(h, mean_KSd.detach().to(h.dtype).reshape(-1, d)).view(-1, K, S)
    logit_BK = (cosine_BKS / tau).masked_fill(mask_KS <= 0, ABSENT).logsumexp(2)
    return F.log_softmax(logit_BK.float(), 1)


def _disagreement(log_2BK: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of the first and the second half, sample by sample."""
    one, two = log_2BK.chunk(2)
    middle = torch.logaddexp(one, two) - math.log(2)
    return ((one.exp() * (one - middle) + two.exp() * (two - middle)).sum(1) / 2).mean()
