"""Class sums and class means, and the precision of all prototype arithmetic.

Shapes: B batch, K classes, d features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def widened(value: Tensor) -> Tensor:
    """A floating-point tensor in float32 or wider; any other tensor unchanged."""
    if value.is_floating_point():
        return value.to(torch.promote_types(value.dtype, torch.float32))
    return value


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` without autocast, with floating-point tensors in float32 or wider.

    bfloat16 keeps three digits of a cosine, and a temperature of 0.02 multiplies that error by
    50; a sum of thousands of features loses its small terms. Neither shows up as an error.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> R:
        values = (*args, *kwargs.values())
        groups = (value if _is_named_tuple(value) else (value,) for value in values)
        first = next(t for group in groups for t in group if isinstance(t, Tensor))
        with torch.autocast(first.device.type, enabled=False):
            wide = {name: _wide(value) for name, value in kwargs.items()}
            return function(*map(_wide, args), **wide)

    return wrapped


def _wide(value: Any) -> Any:
    if _is_named_tuple(value):
        return value._make(map(widened, value))
    return widened(value) if isinstance(value, Tensor) else value


def _is_named_tuple(value: Any) -> bool:
    """Whether these are tensors in a named tuple, such as ``Prototypes``."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


@full_precision
def class_sums(feature_Bd: Tensor, y_B: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The sum of each class's features and the number of its samples: ([K, d], [K])."""
    # A matrix product rather than a scatter: its order of summation is fixed, and it runs the same
    # kernels whatever the labels are, so a CUDA graph can capture it.
    one_hot_BK = y_B[:, None] == torch.arange(classes, device=y_B.device)
    one_hot_BK = one_hot_BK.to(feature_Bd.dtype)
    return one_hot_BK.T @ feature_Bd, one_hot_BK.sum(0)


@full_precision
def class_means(sum_Kd: Tensor, count_K: Tensor) -> Tensor:
    """Means [K, d] from sums and counts; zeros for a class with count 0."""
    absent_K = count_K <= 0
    mean_Kd = sum_Kd / count_K.masked_fill(absent_K, 1)[:, None]
    return mean_Kd.masked_fill(absent_K[:, None], 0)
