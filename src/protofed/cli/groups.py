"""Groups of commands, and settings that all commands share."""

from __future__ import annotations

import inspect
import re

from click import Command, Context, UsageError
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

    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            if "Did you mean" in error.message:  # by typer; click would say it again
                vars(error)["possibilities"] = None
            raise
