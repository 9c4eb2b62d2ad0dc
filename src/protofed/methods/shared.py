"""What several method files say in the same words: class means that travel, and sums over weights.

Shapes: M clients of the round, K classes, d features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from protofed.errors import NoSecondDerivative
from protofed.federation.client import Client
from protofed.federation.server import Update
from protofed.federation.tree import Slot, Tree
from protofed.methods.base import Sizes, hyper
from protofed.prototypes import cluster_means


def share_hyper() -> Any:
    """The hyper-parameter ``share`` of methods that exist with and without a common model."""
    return hyper(
        "auto",
        "",
        "what travels: model (and prototypes), prototypes (alone), auto: the model unless "
        "clients' models differ",
        choices=("auto", "model", "prototypes"),
    )


def proto_pass_hyper(features: str) -> Any:
    """The hyper-parameter ``proto_pass``; ``features`` names the equation it is about."""
    meaning = f"{features}: while training the last epoch, or a clean pass afterwards"
    return hyper("last_epoch", "", meaning, choices=("last_epoch", "post"))


def no_prototypes(sizes: Sizes) -> Slot:
    """The slot of one prototype a class before there is any: mask 0."""
    K, d = sizes.classes, sizes.features
    return {"mean": torch.zeros(K, d), "mask": torch.zeros(K)}


def upload_means(client: Client) -> Tree:
    """A client's class means and their counts; a class it does not have has count 0."""
    mean, count = client.class_means()
    return {"prototypes": {"mean": mean, "count": count}}


def uploaded_means(updates: Sequence[Update]) -> tuple[Tensor, Tensor]:
    """The class means [M, K, d] and counts [M, K] of a round's clients."""
    return (
        torch.stack([u["prototypes"]["mean"] for u in updates]),
        torch.stack([u["prototypes"]["count"] for u in updates]),
    )


def owned(means_MKd: Tensor, counts_MK: Tensor) -> list[Tensor]:
    """The class means of each class's owners, [M_k, d] each."""
    return [means_MKd[counts_MK[:, k] > 0, k] for k in range(means_MKd.shape[1])]


def clustered(classes: Iterable[Tensor], level: str = "last") -> list[Tensor]:
    """The means of FINCH's clusters of each class's rows; a class without rows stays without."""
    return [cluster_means(rows, level) if len(rows) else rows for rows in classes]


def zeros(model: Slot, names: Iterable[str]) -> Slot:
    """Zeros in the shape of these entries of a model."""
    return {n: torch.zeros_like(model[n]) for n in names if n in model}


class _KnownGradient(torch.autograd.Function):
    """A value whose gradient by each tensor is ``factor`` times a known direction.

    Sums over all weights are a dozen small operations for each of a network's tensors if autograd
    records them, which on a GPU costs a quarter of a small step; this is one call for all tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, factor: float, directions: Sequence[Tensor], *by: Tensor
    ) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(*directions)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # asked with create_graph
            raise NoSecondDerivative(
                "this sum over all weights has no second derivative: write it as tensor "
                "expressions, (p - start[n]).square().sum(), where one is needed"
            )
        return None, None, None, *torch._foreach_mul(ctx.saved_tensors, ctx.factor * gradient)


def squared_distance(parameters: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Tensor:
    """‖θ − θ^t‖² over the trainable entries; its gradient is 2 (θ − θ^t), at θ = θ^t too."""
    by = list(parameters.values())
    with torch.no_grad():
        difference = torch._foreach_sub(by, [start[n] for n in parameters])
        value = torch.stack(torch._foreach_norm(difference)).square().sum()
    distance: Tensor = _KnownGradient.apply(value, 2.0, difference, *by)
    return distance


def inner(parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> Tensor:
    """⟨direction, θ⟩: a linear term whose gradient is the direction itself."""
    by, directions = list(parameters.values()), [direction[n] for n in parameters]
    with torch.no_grad():
        value = torch.stack([p.sum() for p in torch._foreach_mul(by, directions)]).sum()
    product: Tensor = _KnownGradient.apply(value, 1.0, directions, *by)
    return product


def effective_steps(steps: int, momentum: float) -> float:
    """How many gradients the change of ``steps`` SGD steps holds, in units of the learning rate.

    With momentum ρ the gradient of step k enters this step and all later ones, 1 + ρ + ρ² + ...
    times; over τ steps that makes Σ_k (1 − ρ^k)/(1 − ρ) = (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ).
    """
    rho = momentum
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
