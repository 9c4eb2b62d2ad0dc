"""Turns what the user typed into values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from protofed.config import AUTO, MOST_SEEDS, SETTINGS
from protofed.errors import ProtofedError, unknown
from protofed.toml import parse_toml


def value(text: str) -> Any:
    """A number or a boolean as TOML reads it; anything else is a word."""
    try:
        return parse_toml(f"v = {text}")["v"]
    except ValueError:
        return text


def per_domain(name: str, text: str) -> Any:
    """``scan=4,print=3`` as a dictionary; a number or a word as it is."""
    if "=" not in text:
        return value(text)
    pairs = [part.split("=") for part in text.split(",")]
    found = {pair[0].strip(): value(pair[-1]) for pair in pairs}
    if len(found) < len(pairs) or any(len(pair) != 2 for pair in pairs):
        raise ProtofedError(
            f"cannot read --{name} '{text}'",
            f"write --{name} {'scan-0=cnn3,scan-1=cnn2' if name == 'model' else 'scan=4,print=3'}",
        )
    return found


def assignments(texts: Sequence[str] | None) -> dict[str, Any]:
    """The values of all ``--set tau=0.05``, by name."""
    values = {}
    for text in texts or []:
        name, equals, word = text.partition("=")
        if not equals:
            raise ProtofedError(f"cannot read --set '{text}'", "write --set tau=0.05")
        values[name.strip()] = value(word.strip())
    return values


def by_method(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """``fpl.tau`` → the options of the method whose name is fpl."""
    options: dict[str, dict[str, Any]] = {}
    for key, given in values.items():
        method, dot, name = key.partition(".")
        if not dot:
            raise ProtofedError(f"--set {key}: which method?", f"write --set METHOD.{key}={given}")
        if method not in names:
            raise unknown("method in --set", method, names)
        options.setdefault(names[method], {})[name] = given
    return options


def parse_setting(name: str, typed: Any) -> Any:
    """The value of what was typed for a setting; tables, rounds and parts are typed as text."""
    kind = SETTINGS[name].kind
    if kind == "table":
        return per_domain(name, typed)
    if kind == "part":
        return value(typed)
    if kind == "rounds":
        return [value(r) for r in typed.split(",")] if typed != "none" else "none"
    return typed


def at_least_one(**numbers: int | None) -> None:
    """Raise an error if one of these options is given and is below 1 or absurdly large."""
    for name, number in numbers.items():
        if number is not None and not 1 <= number <= MOST_SEEDS:
            raise ProtofedError(
                f"--{name} must be at least 1 and at most {MOST_SEEDS}, got {number!r:.100}"
            )


def parse_jobs(text: str) -> int | None:
    """``4`` as a number, ``auto`` as None."""
    if text == AUTO:
        return None
    if not re.fullmatch(r"\d{1,4}", text) or not int(text):
        raise ProtofedError(f"cannot read --jobs '{text:.100}'", "write --jobs 4 or --jobs auto")
    return int(text)


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """``2/5`` as (2, 5)."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise ProtofedError(f"cannot read --shard '{text:.100}'", "write --shard 1/4, up to 4/4")
    return part, parts


def words(text: str | None, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Names separated by commas; some of the known names contain commas themselves."""
    parts = [n.strip() for n in (text or "").split(",") if n.strip()]
    found = []
    while parts:
        joined = ((end, ", ".join(parts[:end])) for end in range(len(parts), 0, -1))
        end, name = next(((e, n) for e, n in joined if n in known), (1, parts[0]))
        found.append(name)
        parts = parts[end:]
    return tuple(found)


def parse_over(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of all ``--over tau=0.02,0.05``, by name."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        own = [value(w.strip()) for w in values.split(",") if w.strip()]
        if not equals or not own:
            raise ProtofedError(f"cannot read --over '{text}'", "write --over tau=0.02,0.05")
        found.setdefault(name.strip(), []).extend(own)
    return found
