"""Renders the files in ``templates/``: TOML, systemd units, the page of a federation.

Every value that goes into TOML or into a systemd command passes through a filter that escapes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, /, **values: Any) -> str:
    """The text of ``templates/<template>.j2`` with these values filled in."""
    return _environment().get_template(f"{template}.j2").render(values)


def toml(value: str | bool | float | Sequence[str]) -> str:
    """A value as TOML writes it; a string is a valid key, too."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # JSON's notation is TOML's, but for two things: TOML has no surrogate pairs (so characters
    # stay as they are), and its strings may not hold a raw DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def systemd(words: Sequence[str]) -> str:
    """The words of a command as systemd's ``ExecStart`` reads them."""
    return " ".join(map(_systemd_word, words))


def _systemd_word(word: str) -> str:
    if re.fullmatch(r"[\w./:@=+-]+", word, re.ASCII):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + escaped.replace("%", "%%").replace("$", "$$") + '"'


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("protofed.deploy"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # no HTML here
    )
    environment.filters |= {"toml": toml, "systemd": systemd}
    return environment
