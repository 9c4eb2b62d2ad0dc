"""What distinguishes one recorded program from another.

A program is recorded once for all inputs of the same shapes, and for one loss over one set of
trainable parameters. Everything else changes inside tensors that keep their addresses.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from protofed.tree import Tree


def tree_signature(content: Tree) -> Hashable:
    """Slots, names, shapes and types."""
    return tuple(
        (s, n, tuple(t.shape), t.dtype) for s, slot in content.items() for n, t in slot.items()
    )


def loss_signature(loss: Any) -> Hashable:
    """Equal for two losses that compute the same: their code and the values bound to it.

    The object itself will not do, since a method may make a new one each round. A loss with
    values that cannot be compared is like no other.
    """
    code, values = _code_and_values(loss)
    try:
        hash(values)
    except TypeError:
        return object()
    return code, values


def _code_and_values(loss: Any) -> tuple[Any, Any]:
    if isinstance(loss, partial):
        code, values = _code_and_values(loss.func)
        return code, (values, loss.args, tuple(sorted(loss.keywords.items())))
    function = getattr(loss, "__func__", loss)
    cells = getattr(function, "__closure__", None) or ()
    named = getattr(function, "__kwdefaults__", None) or {}
    values = (
        getattr(loss, "__self__", None),
        getattr(function, "__defaults__", None),
        tuple(sorted(named.items())),
        *(cell.cell_contents for cell in cells),
    )
    return getattr(function, "__code__", function), values
