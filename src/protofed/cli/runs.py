"""``protofed runs verify``: whether the files of runs are as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from protofed.cli.groups import HELP, CommandGroup
from protofed.cli.output import say, status, wide_console
from protofed.errors import ProtofedError

runs_app = typer.Typer(
    name="runs",
    cls=CommandGroup,
    no_args_is_help=True,
    context_settings=HELP,
    help="Check runs for damaged files.",
)


@runs_app.callback()
def _group() -> None:
    """Without a callback, typer mistakes a group of one command for that command."""


@runs_app.command(context_settings=HELP)
def verify(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Runs, pools, packed studies, or studies, to verify their pools."),
    ],
) -> None:
    """Read every file of runs and compare it with its checksum; exit code 1 if one is damaged."""
    from protofed.runs.folder import started_runs
    from protofed.runs.pool import PACKED, read_packed
    from protofed.studies.folder import StudyFolder

    table = Table(box=None, header_style="bold")
    for column in ("run", "file", "damage"):
        table.add_column(column, overflow="fold")
    checked = running = unsealed = 0
    with status() as tell:
        for folder in folders:
            packed = sorted(folder.rglob(PACKED))
            if not packed and (folder / "study.toml").is_file():
                folder = StudyFolder.open(folder).pool.path
            runs = started_runs(folder)
            if not runs and not packed:
                raise ProtofedError(f"'{folder}' holds no run")
            for run in runs:
                tell(f"reading {run.path}")
                if run.is_locked():
                    running += 1
                    continue
                checked += 1
                unsealed += not run.has_checksums
                for name, damage in run.damage().items():
                    table.add_row(escape(str(run.path)), escape(name), escape(damage))
            for file in packed:
                tell(f"reading {file}")
                try:
                    checked += len(read_packed(file))
                except ProtofedError as error:
                    table.add_row(escape(str(file.parent)), PACKED, escape(error.message))
    if table.row_count:
        wide_console().print(table)
    if running:
        say(f"runs in progress, left out: {running}")
    if unsealed:
        say(f"runs of an earlier version, whose files have no checksums: {unsealed}")
    say(f"runs verified: {checked}; damaged files: {table.row_count}")
    raise typer.Exit(1 if table.row_count else 0)
