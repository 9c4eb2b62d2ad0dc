"""Check that plain data read from JSON or TOML has the expected shape.

A shape is a type (``float`` accepts any number, ``object`` anything but null), a type or None, a
list of one shape, or a table ``{name: shape}``, in which a name that ends with ``?`` is optional
and ``str: shape`` stands for any other name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from protofed.files import Damaged

Shape = Any
Data = TypeVar("Data")

LARGEST_INT = 2**63 - 1
"""No file that Protofed writes has a larger integer, and most arithmetic would overflow."""

_TYPE_NAMES = {
    str: "text",
    str | None: "text or null",
    int: "a whole number",
    int | None: "a whole number or null",
    float: "a number",
    bool: "true or false",
}


def require_shape(path: Path, found: Data, shape: Shape) -> Data:
    """Return the data found in a file, or raise an error that says where it does not fit."""
    if problem := mismatch(found, shape):
        raise Damaged(path, problem)
    return found


def mismatch(found: Any, shape: Shape, name: str = "") -> str:
    """The first place where the data does not have the shape, in words; empty if it all fits."""
    prefix = f"{name}." if name else ""
    if isinstance(shape, Mapping):
        if not isinstance(found, Mapping):
            return f"{name or 'it'} is not a table"
        names = {key.removesuffix("?"): key for key in shape if key is not str}
        if missing := [key for key, full in names.items() if key == full and key not in found]:
            return f"it lacks {', '.join(prefix + key for key in missing)}"
        known = ((key, names.get(key, str)) for key in found)
        parts = ((f"{prefix}{key}", found[key], shape[k]) for key, k in known if k in shape)
    elif isinstance(shape, list):
        if not isinstance(found, list):
            return f"{name or 'it'} is not a list"
        parts = ((f"{name}[{i}]", value, shape[0]) for i, value in enumerate(found))
    elif shape is object:
        return "" if found is not None else f"{name or 'it'} is null"
    else:
        fits = isinstance(found, (int, float) if shape is float else shape)
        if isinstance(found, int):  # bool is a subclass of int
            fits = fits and isinstance(found, bool) == (shape is bool) and abs(found) <= LARGEST_INT
        return "" if fits else f"{name or 'it'} is not {_TYPE_NAMES[shape]}"
    return next((bad for name, value, part in parts if (bad := mismatch(value, part, name))), "")
