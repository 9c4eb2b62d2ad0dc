"""Changes to bytes, lines of TOML, and plain data."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.harness import Choices

EVIL = "evil.py"
"""A file that is never to be executed; every fuzzer's folder has it."""

TOKENS = (
    "1", "0", "-1", "2", "3", "0.5", "1.0", "1e-3", "-0.0", "nan", "inf", "-inf", "+inf", "1e308",
    "1e309", "-1e400", "5e-324", "1e26", "100000000000", "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "9" * 4299, "9" * 4301,
    "7" * 20_000, "0x" + "f" * 5000, "0b1", "1_000", "true", "false", '""', '"a"', '"auto"',
    '"each"', '"last"', '"all"', '"none"', '"skewed"', '"random"', '"uniform"', '"glyphs"',
    '"digits"', '"folder:"', '"folder:missing"', '"folder:."', '"fpl"', '"fedmd"', '"cnn2"',
    '"resnet10"', '"cnn3,cnn2"', '"bf16"', '"workers"', f'"{EVIL}:Evil"', f'"./{EVIL}:Evil"',
    '"x.py:"', '":"', '".py:"', '"../../up"', '"/"', '"\\u0000"', '"\\u007f"', '"é"', '"\\u202e"',
    '"' + "x" * 30_000 + '"', '"[bold]"', '"{0}"', '"%s"', "[]", "[1]", "[1, 2, 3]", '["last", 2]',
    '["a", 1, true]', "[[1], [2]]", "[nan]", "{}", "{a = 1}", "{scan = 1}", '{scan = "a"}',
    "{scan = 99999999999}", "{scan = -1}", "{scan = 0.5, print = 0.1}", "{a = {b = {c = [1]}}}",
    "1979-05-27T07:32:00Z", "1979-05-27", "07:32:00", "[" * 90 + "]" * 90,
    "[" * 1500 + "]" * 1500, "{a = " * 400 + "1" + "}" * 400, "'''x\ny'''",
)  # fmt: skip
"""Values as TOML writes them, plain and hostile."""

_WORDS = (b"nan", b"inf", b"-1", b"1e20", b"1e400", b"9" * 400, b"9" * 5000, b"0x10", b"\0", b"\n",
          b"\r", b" ", b"=", b"[", b"]", b"{", b"}", b'"', b":", b",", b"\xff", b"\xc3\x28",
          b"[" * 1200, b"{\"a\":" * 1200)  # fmt: skip
_NUMBERS = (0, 1, 2, 3, 7, 127, 128, 255, 256, 32767, 65535, 65536, 13_300, 100_000, 2**31 - 1,
            2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip


def mutated(content: bytes, choices: Choices, others: Sequence[bytes] = ()) -> bytes:
    """The content after one to four changes."""
    for _ in range(1 + choices.number(4)):
        at = choices.number(2**16) * len(content) // 2**16
        kind = choices.number(10)
        if kind == 0 and content:
            flipped = content[at] ^ (1 << choices.number(8))
            content = content[:at] + bytes([flipped]) + content[at + 1 :]
        elif kind == 1:
            content = content[:at] + bytes([choices.number(256)]) + content[at + 1 :]
        elif kind == 2:
            content = content[:at]
        elif kind == 3:
            content = content[:at] + content[at + 1 + choices.number(64) :]
        elif kind == 4:
            part = content[at : at + 1 + choices.number(64)]
            content = content[:at] + part * (1 + choices.number(8)) + content[at:]
        elif kind in (5, 6):
            order = "big" if kind == 5 else "little"
            size = choices.pick((2, 4, 8))
            number = choices.pick(_NUMBERS) % 256**size
            content = content[:at] + number.to_bytes(size, order) + content[at + size :]
        elif kind == 7:
            content = content[:at] + choices.pick(_WORDS) + content[at:]
        elif kind == 8:
            word = choices.pick(_WORDS)
            content = content[:at] + word + content[at + len(word) :]
        elif others:
            other = choices.pick(others)
            content = content[:at] + other[choices.number(2**16) * len(other) // 2**16 :]
    return content


def toml(
    lines: Sequence[str], keys: Sequence[str], choices: Choices, plain: dict[str, Sequence[str]]
) -> bytes:
    """The lines of a TOML file after some changes; ``plain`` has good values of certain keys."""
    lines = list(lines)
    for _ in range(choices.number(6)):
        at, kind = choices.number(max(1, len(lines))), choices.number(8)
        if kind == 0 and lines:
            del lines[at]
        elif kind == 1 and lines:
            lines.insert(choices.number(len(lines)), lines[at])
        elif kind <= 4:
            key = choices.pick(keys)
            value = choices.pick(plain.get(key, TOKENS)) if kind == 4 else choices.pick(TOKENS)
            lines.insert(at, f"{key} = {value}")
        elif lines:
            key, equals, old = lines[at].partition(" = ")
            if kind == 5:
                key = choices.pick(keys)
            else:
                old = choices.pick(TOKENS)
            lines[at] = key + equals + old if equals else lines[at]
    text = ("\n".join(lines) + "\n").encode()
    return mutated(text, choices) if choices.chance(6) else text


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**70), 10**26, 10**400, 0.0, -0.0, 0.5,
    1e308, 5e-324, math.nan, math.inf, -math.inf, 99.5, "", "a", "nan", "1", "average", "scan",
    "auto", "cpu", "fp32", "fpl", "glyphs", "folder:", "folder:missing", f"{EVIL}:Evil",
    f"./{EVIL}:Evil", "../../up",
    "/etc", "\0", "\x7f", "é", "\u202e", "\ud800", "x" * 30_000, "[bold]", "[/]",
    "<script>", [], [1], [None], ["a"], [[]], [{}], {}, {"a": 1}, {"a": None}, {"": ""},
    {"average": {}}, {"scan": "a"}, deep(50), deep(900),
)  # fmt: skip
"""Values as JSON has them, plain and hostile."""


def changed(data: Any, choices: Choices) -> Any:
    """Plain data after one to three changes, each anywhere in it."""
    data = copy.deepcopy(data)
    for _ in range(1 + choices.number(3)):
        at, parent, key = data, None, None
        while isinstance(at, (dict, list)) and at and not (parent and choices.chance(5)):
            parent, key = at, choices.pick(list(at) if isinstance(at, dict) else range(len(at)))
            at = at[key]
        kind = choices.number(8)
        if parent is None:
            data = copy.deepcopy(choices.pick(VALUES))
        elif kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[choices.pick(("", "a", "average", "é", "\0", "x" * 2000))] = at
        elif kind == 1:
            parent.append(at)
        elif kind == 2 and isinstance(at, (int, float)) and not isinstance(at, bool):
            parent[key] = choices.pick((-at, at + 1, -at - 1, str(at), [at], [at, at]))
        else:
            parent[key] = copy.deepcopy(choices.pick(VALUES))
    return data


def json_text(data: Any) -> bytes:
    """As a hostile writer would: NaN, surrogates, and whatever else JSON's notation allows."""
    return json.dumps(data).encode()


def plant(folder: Path) -> None:
    """Put the file into a folder that is never to be executed."""
    text = (
        "from dataclasses import dataclass\nfrom protofed.method import Method\n"
        "@dataclass(frozen=True)\nclass Evil(Method):\n    name = 'evil'\n"
    )
    (folder / EVIL).write_text(text)


def lines_of(text: str) -> list[str]:
    return [line for line in re.split(r"\n", text) if line]
