"""``protofed show``: a run at a glance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.output import console


def show(
    run: Annotated[Path, typer.Argument(help="A run's folder, finished or not.")],
) -> None:
    """Print a run's summary, with a sparkline of every domain's accuracy over the rounds."""
    from protofed.studies.show import lines

    for text in lines(run):
        console.print(text, highlight=False, soft_wrap=True)
