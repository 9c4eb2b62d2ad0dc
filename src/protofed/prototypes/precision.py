"""Prototype arithmetic runs in float32 or wider, whatever the network computes in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

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
    """Run ``function`` without autocast, its floating-point tensors in float32 or wider.

    bfloat16 keeps three digits of a cosine, and a temperature of 0.02 multiplies that error by
    50; a sum of thousands of features loses its small terms. Neither shows up as an error.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(t for a in (*args, *kwargs.values()) for t in _tensors(a))
        with torch.autocast(first.device.type, enabled=False):
            return cast(Callable[..., R], function)(
                *map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()}
            )

    return wrapped


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return widened(value)
    return value._make(map(widened, value)) if _is_table(value) else value


def _tensors(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    return tuple(value) if _is_table(value) else ()


def _is_table(value: Any) -> bool:
    """Whether this is a named tuple of tensors, such as ``Prototypes``."""
    return isinstance(value, tuple) and hasattr(value, "_fields")
