"""Groups of commands, and settings that all commands share."""

from __future__ import annotations

import inspect
import re

from click import Command, Context
from typer.core import TyperGroup

HELP = {"help_option_names": ["-h", "--help"]}
"""Settings of every command: ``-h`` works too."""


class CommandGroup(TyperGroup):
    """Shows a command's docstring in the width of the terminal, not with its own line breaks."""

    def get_command(self, ctx: Context, name: str) -> Command | None:
        found = super().get_command(ctx, name)
        if found is not None and found.help:
            found.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(found.help))
        return found
