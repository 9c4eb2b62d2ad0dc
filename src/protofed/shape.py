"""Whether plain data that was read, from JSON or TOML, is what it should be.

A shape is a type (``float`` is any number, ``object`` anything but null), a type or None, a list of
one shape, a table of shapes by name, of which those whose name ends with ``?`` may be absent, or
``{str: shape}``, a table of any names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from protofed.files import Damaged

Shape = Any
Data = TypeVar("Data")

LARGEST = 2**63 - 1
"""Larger whole numbers are in no file of ours, and most arithmetic cannot take them."""

_WORDS = {
    str: "text",
    str | None: "text or null",
    int: "a whole number",
    int | None: "a whole number or null",
    float: "a number",
    bool: "true or false",
}


def require_shape(path: Path, found: Data, shape: Shape) -> Data:
    """What was found in a file, or an error that says where it has another shape."""
    if wrong := misfit(found, shape):
        raise Damaged(path, wrong)
    return found


def misfit(found: Any, shape: Shape, name: str = "") -> str:
    """In words, what of plain data does not have a shape; empty if all of it does."""
    within = f"{name}." if name else ""
    if isinstance(shape, Mapping):
        if not isinstance(found, Mapping):
            return f"{name or 'it'} is not a table"
        if str in shape:
            parts = ((within + str(key), value, shape[str]) for key, value in found.items())
        else:
            names = {key.removesuffix("?"): key for key in shape}
            if missing := [key for key, full in names.items() if key == full and key not in found]:
                return f"it lacks {', '.join(within + key for key in missing)}"
            here = [key for key in names if key in found]
            parts = ((within + key, found[key], shape[names[key]]) for key in here)
    elif isinstance(shape, list):
        if not isinstance(found, list):
            return f"{name or 'it'} is not a list"
        parts = ((f"{name}[{i}]", value, shape[0]) for i, value in enumerate(found))
    elif shape is object:
        return "" if found is not None else f"{name or 'it'} is null"
    else:
        right = isinstance(found, (int, float) if shape is float else shape)
        if isinstance(found, int):
            right = right and isinstance(found, bool) == (shape is bool) and abs(found) <= LARGEST
        return "" if right else f"{name or 'it'} is not {_WORDS[shape]}"
    return next((wrong for part in parts if (wrong := misfit(part[1], part[2], part[0]))), "")
