"""MixStyle: samples take on a mixture of their own style and another sample's.

Zhou, Yang, Qiao, Xiang: "Domain Generalization with MixStyle", ICLR 2021.

The mean and deviation of early channels carry the look of an image. Mixed
between the samples of a batch, they show the network looks that it has not
seen. Nothing travels but the model: in a federation whose clients have one
domain each, looks are mixed within that domain.

    style       μ_i, σ_i: mean and deviation of each channel of sample i's map
    mixture     μ' = λ_i μ_i + (1−λ_i) μ_π(i),  σ' likewise
                λ_i ~ Beta(α, α) per sample, π a random permutation of the batch
    map         x' = σ' (x − μ)/σ + μ'
    where       after stages 1 to 3 of a ResNet, never the last; each with
                probability p per batch; in training only
    gradient    none through μ and σ
    server      as FedAvg

A batch of one sample has nothing to mix with: it stays as it is.

Deviations
    π    any permutation. The paper's other form, where each half of a batch is
         mixed with the other, needs two domains in a batch.
    CNN  after every convolution but the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.method import Client, Method, chosen_stages, hyper, stages_hyper
from protofed.styles import restyle, style_of


@dataclass(frozen=True)
class MixStyle(Method):
    """FedAvg with the styles of a batch mixed."""

    name = "mixstyle"
    paper = "Zhou et al., ICLR 2021"
    detached_terms = ("ce",)
    size_limit = 50.0  # the gradient of a nearly flat map can be huge

    p: float = hyper(
        0.5, "p", "probability per batch and stage (0 = off)", least=0, most=1, weight=True
    )
    alpha: float = hyper(0.1, "α", "parameter of the mixture's Beta(α,α)", above=0)
    stages: str = stages_hyper("all but stem and last")

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        early = [s for s in stages[:-1] if s not in ("pixels", "stem")]
        return chosen_stages(self.stages, early) if self.p else ()

    def between(self, client: Client, stage: str, x: Tensor) -> Tensor:
        own = style_of(x).detach()
        mixed_now = client.uniform(1) < self.p
        weight = client.beta(self.alpha, len(x), 1, 1)
        other = own[client.uniform(len(x)).argsort(stable=True)]
        mixed = other + weight * (own - other)
        return restyle(x, own, torch.where(mixed_now, mixed, own))
