"""DSU: the style of a sample is uncertain, by as much as the batch varies.

Li, Dai, Ge, Liu, Shan, Duan: "Uncertainty Modeling for Out-of-Distribution
Generalization", ICLR 2022.

The styles of a batch scatter around its mean; the next domain's may lie
elsewhere. So each sample's style is drawn from a Gaussian around its own, as
wide as the batch's scatter. Nothing travels but the model.

    style       μ_i, σ_i: mean and deviation of each channel of sample i's map
    scatter     Σ_μ² = variance of μ_i over the batch,  Σ_σ² likewise
    new         μ' = μ_i + ε Σ_μ,  σ' = σ_i + ε' Σ_σ,  ε, ε' ~ N(0, 1) per sample
                and channel
    map         x' = σ' (x − μ)/σ + μ'
    where       after the stem and every stage, each with probability p per
                batch; in training only
    gradient    through all of it
    server      as FedAvg

A batch of one sample has no scatter: it stays as it is.

Deviations
    Σ²   with B − 1 in its denominator and 1e-6 added; the paper prints B.
    σ'   may be negative, which inverts the map.
    where  the authors' ResNet has a sixth place, after the first convolution
         and before its norm.
    CNN  after every convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.method import Client, Method, chosen_stages, hyper, stages_hyper
from protofed.styles import EPS, restyle, style_of


@dataclass(frozen=True)
class DSU(Method):
    """FedAvg with noise on styles, as wide as the batch's own scatter."""

    name = "dsu"
    paper = "Li et al., ICLR 2022"
    size_limit = 50.0  # a gradient through the style of a nearly flat map can be huge

    p: float = hyper(
        0.5, "p", "probability per batch and stage (0 = off)", least=0, most=1, weight=True
    )
    stages: str = stages_hyper("all but pixels")

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        return chosen_stages(self.stages, stages[1:]) if self.p else ()

    def between(self, client: Client, stage: str, x: Tensor) -> Tensor:
        if len(x) == 1:
            return x
        own = style_of(x)
        noised_now = client.uniform(1) < self.p
        scatter = (own.var(0) + EPS).sqrt()
        noised = own + client.normal(*own.shape) * scatter
        return restyle(x, own, torch.where(noised_now, noised, own))
