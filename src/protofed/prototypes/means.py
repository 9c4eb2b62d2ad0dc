"""Class means and tables of prototypes.

Shapes: B batch, K classes, d features, M clients, J prototypes of a class (padded).
A mask is float32, 1 where there is a prototype and 0 where there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def widened(value: Tensor) -> Tensor:
    """A floating tensor in float32 or wider; others as they are."""
    if value.is_floating_point():
        return value.to(torch.promote_types(value.dtype, torch.float32))
    return value


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` without autocast and with its floating tensors in float32 or wider.

    bfloat16 keeps three digits of a cosine, and a temperature of 0.02 then multiplies the error
    by 50; a sum of thousands of features loses its small terms. Neither shows as an error.
    """

    def wide(value: object) -> object:
        return widened(value) if isinstance(value, Tensor) else value

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        with torch.autocast(next(tensors).device.type, enabled=False):
            return cast(Callable[..., R], function)(
                *map(wide, args), **{name: wide(value) for name, value in kwargs.items()}
            )

    return wrapped


@full_precision
def class_sums(feature_Bd: Tensor, y_B: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Sum of the features of each class, and how many there were: ([K, d], [K])."""
    # A matrix product, not a scatter: its order of summation is fixed, and nothing in it depends
    # on the labels' values, so that a CUDA graph can hold it.
    own_BK = y_B[:, None] == torch.arange(classes, device=y_B.device)
    own_BK = own_BK.to(feature_Bd.dtype)
    return own_BK.T @ feature_Bd, own_BK.sum(0)


@full_precision
def class_means(sum_Kd: Tensor, count_K: Tensor) -> Tensor:
    """Means [K, d] from sums and counts; zeros for a class with count 0."""
    none_K = count_K <= 0
    mean_Kd = sum_Kd / count_K.masked_fill(none_K, 1)[:, None]
    return mean_Kd.masked_fill(none_K[:, None], 0)


@full_precision
def owners_mean(means_MKd: Tensor, counts_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Plain mean over the clients that have the class, and which classes anyone has.

    Every owner counts once, however many samples it has. Returns ([K, d], mask [K]).
    """
    owner_MK = counts_MK > 0
    sum_Kd = means_MKd.masked_fill(~owner_MK[..., None], 0).sum(0)
    return class_means(sum_Kd, owner_MK.sum(0)), owner_MK.any(0).to(torch.float32)


@full_precision
def reweighted_mean(means_MKd: Tensor, counts_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the owners of a class, each weighted by its squared distance to the plain mean.

    I²PFL, Eq. 3 and 4: a client far from the others counts more. Where all distances are 0 (one
    owner, or equal prototypes) it is the plain mean. Returns ([K, d], mask [K]).
    """
    plain_Kd, mask_K = owners_mean(means_MKd, counts_MK)
    owner_MK = counts_MK > 0
    distance_MK = (means_MKd - plain_Kd).square().sum(-1).masked_fill(~owner_MK, 0)
    total_K = distance_MK.sum(0)
    weight_MK = distance_MK / total_K.masked_fill(total_K <= 0, 1)
    mean_Kd = (weight_MK[..., None] * means_MKd.masked_fill(~owner_MK[..., None], 0)).sum(0)
    return torch.where((total_K > 0)[:, None], mean_Kd, plain_Kd), mask_K


def smoothed(
    new_Kd: Tensor, new_K: Tensor, old_Kd: Tensor, old_K: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """share · new + (1 − share) · old where both are there, else the one that is."""
    both = ((new_K > 0) & (old_K > 0))[:, None]
    either = torch.where((new_K > 0)[:, None], new_Kd, old_Kd)
    mixed = share * new_Kd + (1 - share) * old_Kd
    return torch.where(both, mixed, either), torch.maximum(new_K, old_K)


def pad(clusters: Sequence[Tensor], features: int) -> tuple[Tensor, Tensor]:
    """One table of the classes' prototypes [J_k, d], padded with zeros: ([K, J, d], mask [K, J]).

    J is the largest J_k and at least 1; a J_k may be 0. ``features`` is d, which a list without
    any prototype could not tell.
    """
    size = max([1, *(len(rows) for rows in clusters)])
    like = clusters[0] if clusters else torch.empty(0)
    mean_KJd = like.new_zeros(len(clusters), size, features)
    mask_KJ = torch.zeros(len(clusters), size, device=like.device)
    for k, rows_Jd in enumerate(clusters):
        if len(rows_Jd):
            mean_KJd[k, : len(rows_Jd)] = rows_Jd
            mask_KJ[k, : len(rows_Jd)] = 1
    return mean_KJd, mask_KJ


@full_precision
def per_class_mean(mean_KJd: Tensor, mask_KJ: Tensor) -> tuple[Tensor, Tensor]:
    """Plain mean of each class's prototypes, and which classes have any: ([K, d], mask [K]).

    Fed with clusters this is FPL's unbiased prototype: a cluster counts once, whatever its size.
    """
    some_KJ = mask_KJ > 0
    sum_Kd = mean_KJd.masked_fill(~some_KJ[..., None], 0).sum(1)
    return class_means(sum_Kd, some_KJ.sum(1)), some_KJ.any(1).to(torch.float32)
