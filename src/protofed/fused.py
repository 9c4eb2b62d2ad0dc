"""Functions that an engine may compute by kernels of its own.

A function marked ``@replaceable`` is a tensor expression, and that is what it means. While
``using(kernels)`` lasts, in this thread, a function of the same name among ``kernels`` is called in
its place and must give the same numbers up to rounding. Given something that
it is not made for, it returns None, and the expression is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Kernels = Mapping[str, Callable[..., Any]]
_KERNELS: ContextVar[Kernels | None] = ContextVar("kernels", default=None)


def replaceable(function: Callable[P, R]) -> Callable[P, R]:
    name = function.__name__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        kernel = (_KERNELS.get() or {}).get(name)
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
