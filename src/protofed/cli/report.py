"""``protofed report``: one page about runs, comparisons and studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from protofed.cli.options import ImagesOption, TrustOption
from protofed.cli.output import console, status
from protofed.errors import ProtofedError


def report(
    paths: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or of comparisons and studies.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for every figure as PDF and PNG; default: next to the page.",
        ),
    ] = None,
    images: ImagesOption = 500,
    title: Annotated[str, typer.Option(help="The page's title; default: methods and task.")] = "",
    trust_code: TrustOption = False,
) -> None:
    """Write one self-contained HTML page: tables, curves, features, prototypes, configuration.

    [bold]protofed report runs/compare-glyphs -o report.html[/bold]. The page needs no network; the
    folder next to it has its figures in the form that a paper needs.
    """
    from protofed.report.collect import collect
    from protofed.report.page import write_report

    if out.is_dir():
        raise ProtofedError(f"'{out}' is a folder", "give a file: -o report.html")
    folder = figures or out.with_name(f"{out.stem}-figures")
    with status() as tell:
        given = collect(paths, tell)
        try:
            written = write_report(given, out, folder, images=images, title=title, progress=tell)
        except OSError as error:
            raise ProtofedError(f"cannot write '{error.filename}': {error.strerror}") from None
    runs = sum(len(group.results) for group in given.groups)
    count = len(given.skipped)
    skipped = f"; {count} folder{'s' * (count > 1)} skipped" if count else ""
    console.print(
        f"{runs} run{'s' * (runs != 1)}{skipped}: [bold]{escape(str(out))}[/bold], "
        f"and {len(written) - 1} figure files in [bold]{escape(str(folder))}[/bold]",
        highlight=False,
        soft_wrap=True,
    )
