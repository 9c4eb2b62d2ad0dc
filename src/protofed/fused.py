"""Functions that an engine may compute with kernels of its own.

A function marked ``@replaceable`` is a tensor expression, which defines what it computes. While
``using(kernels)`` lasts, in this thread, a function of the same name among ``kernels`` is called in
its place and must give the same numbers up to rounding. If it is not made for its arguments, it
returns None; then the expression is computed. The same happens in transforms of ``torch.func``,
which kernels do not support.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

Kernels = Mapping[str, Callable[..., Any]]
_KERNELS: ContextVar[Kernels | None] = ContextVar("kernels", default=None)


def replaceable(function: Callable[P, R]) -> Callable[P, R]:
    name = function.__name__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        kernel = (_KERNELS.get() or {}).get(name)
        if torch._C._are_functorch_transforms_active():
            kernel = None
        result: R | None = None if kernel is None else kernel(*args, **kwargs)
        return function(*args, **kwargs) if result is None else result

    return call


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    before = _KERNELS.set(kernels)
    try:
        yield
    finally:
        _KERNELS.reset(before)
