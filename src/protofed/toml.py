"""TOML: reading it within limits, and writing it so that it reads back unchanged."""

from __future__ import annotations

import datetime
import json
import math
import tomllib
from collections.abc import Mapping
from typing import Any

from protofed.shape import LARGEST_INT

DEEPEST = 16
"""How deep tables and lists may be nested; ours need four levels."""


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML file holds; a ``ValueError`` if it is not TOML, or not usable here."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _require_usable(found, DEEPEST)
    return found


def _require_usable(value: Any, depth: int) -> None:
    if isinstance(value, (dict, list)):
        if not depth:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        for part in value.values() if isinstance(value, dict) else value:
            _require_usable(part, depth - 1)
    elif isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ValueError("it has a number of more than 64 bits")  # which TOML itself forbids
    elif isinstance(value, (datetime.date, datetime.time)):
        raise ValueError(f"no setting is a date or a time ({value}): put it in quotes")


def toml_key(name: str) -> str:
    """A name as a key, quoted where it must be."""
    plain = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if plain else toml_value(name)


def toml_value(value: Any) -> str:
    """Text, numbers, booleans, lists, and tables on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    # JSON's notation is TOML's, except for two things: TOML has no surrogate pairs (so characters
    # stay as they are), and its strings may not hold a raw DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_text(content: Mapping[str, Any], nested: tuple[str, ...] = ()) -> str:
    """A whole file; the tables named in ``nested`` have tables of their own as sections."""
    flat = {k: v for k, v in content.items() if not isinstance(v, Mapping)}
    lines = [f"{toml_key(k)} = {toml_value(v)}" for k, v in flat.items()]
    for name, table in content.items():
        if isinstance(table, Mapping):
            lines += _section((name,), table, name in nested)
    return "\n".join(lines) + "\n"


def _section(path: tuple[str, ...], table: Mapping[str, Any], deep: bool) -> list[str]:
    lines = ["", f"[{'.'.join(map(toml_key, path))}]"]
    if not deep:
        return lines + [f"{toml_key(k)} = {toml_value(v)}" for k, v in table.items()]
    for name, inner in table.items():
        lines += _section((*path, name), inner, deep=False)
    return lines
