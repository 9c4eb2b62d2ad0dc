"""Writing TOML that ``tomllib`` reads back as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


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
    # JSON's notation is TOML's, but for two things: TOML has no surrogate pairs (so characters
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
