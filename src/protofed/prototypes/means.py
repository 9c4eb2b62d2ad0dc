"""Class sums and class means.

Shapes: B batch, K classes, d features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protofed.prototypes.precision import full_precision


@full_precision
def class_sums(feature_Bd: Tensor, y_B: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The sum of each class's features and the number of its samples: ([K, d], [K])."""
    # A matrix product rather than a scatter: its order of summation is fixed, and nothing in it
    # depends on the values of the labels, so a CUDA graph can hold it.
    own_BK = y_B[:, None] == torch.arange(classes, device=y_B.device)
    own_BK = own_BK.to(feature_Bd.dtype)
    return own_BK.T @ feature_Bd, own_BK.sum(0)


@full_precision
def class_means(sum_Kd: Tensor, count_K: Tensor) -> Tensor:
    """Means [K, d] from sums and counts; zeros for a class with count 0."""
    none_K = count_K <= 0
    mean_Kd = sum_Kd / count_K.masked_fill(none_K, 1)[:, None]
    return mean_Kd.masked_fill(none_K[:, None], 0)
