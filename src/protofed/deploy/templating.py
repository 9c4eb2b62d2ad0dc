"""Renders the files in ``templates/``: TOML, systemd units, a federation's README.

Every value that goes into TOML or into a systemd command passes through a filter that escapes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from protofed.toml import toml_value


def render(template: str, /, **values: Any) -> str:
    """The text of ``templates/<template>.j2`` with these values filled in."""
    return _environment().get_template(f"{template}.j2").render(values)


def systemd(words: Sequence[str]) -> str:
    """The words of a command as systemd's ``ExecStart`` reads them."""
    return " ".join(
        word if re.fullmatch(r"[\w./:@=+-]+", word, re.ASCII) else f'"{word.translate(_ESCAPES)}"'
        for word in words
    )


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "%": "%%", "$": "$$"})


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
    environment.filters |= {"toml": toml_value, "systemd": systemd}
    return environment
