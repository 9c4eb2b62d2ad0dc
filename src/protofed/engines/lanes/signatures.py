"""What a recorded program depends on, and the shapes and addresses it keeps.

A program is recorded once for all inputs of the same shapes, and for one loss over one set of
trainable parameters: whatever else changes, changes inside tensors that stay where they are.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from protofed.method import Phase
from protofed.tree import Tree

FEWEST_PROTOTYPES = 16  # a class's are padded to this many, or the next power of two


def trainable_of(network: nn.Module, phase: Phase) -> dict[str, bool]:
    """Whether each parameter moves in a phase."""
    return {
        name: phase.trainable is None or phase.trainable(name)
        for name, _ in network.named_parameters()
    }


def told_apart(loss: Any) -> Hashable:
    """What tells a phase's loss from another one's.

    Not the object, which a method may make anew each round, but its code and what it was made of.
    If that cannot be compared, the loss is like no other.
    """
    code, made_of = _made_of(loss)
    try:
        hash(made_of)
    except TypeError:
        return object()
    return code, made_of


def _made_of(loss: Any) -> tuple[Any, Any]:
    if isinstance(loss, partial):
        code, made_of = _made_of(loss.func)
        return code, (made_of, loss.args, tuple(sorted(loss.keywords.items())))
    function = getattr(loss, "__func__", loss)
    cells = getattr(function, "__closure__", None) or ()
    named = getattr(function, "__kwdefaults__", None) or {}
    made_of = (
        getattr(loss, "__self__", None),
        getattr(function, "__defaults__", None),
        tuple(sorted(named.items())),
        *(cell.cell_contents for cell in cells),
    )
    return getattr(function, "__code__", function), made_of


def padded(content: Tree) -> Tree:
    """Ragged slots (those with a mask [K, J]) with J padded, so that few graphs serve all J."""
    result = {}
    for slot, entries in content.items():
        mask = entries.get("mask")
        if mask is None or mask.ndim != 2:
            result[slot] = entries
            continue
        size = mask.shape[1]
        more = max(FEWEST_PROTOTYPES, 1 << (size - 1).bit_length()) - size
        result[slot] = {
            n: F.pad(t, (0, 0) * (t.ndim - 2) + (0, more)) if t.shape[:2] == mask.shape else t
            for n, t in entries.items()
        }
    return result


def shapes_of(content: Tree) -> Hashable:
    """Slots, names, shapes and types."""
    return tuple(
        (s, n, tuple(t.shape), t.dtype) for s, slot in content.items() for n, t in slot.items()
    )


def copy_into(static: Tree, content: Tree) -> None:
    """Fill tensors that stay where they are."""
    for slot, entries in static.items():
        torch._foreach_copy_(list(entries.values()), [content[slot][n] for n in entries])
