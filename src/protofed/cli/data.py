"""``protofed data``: download a task's files, check them, look at them; the cache of images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from protofed.cli import INTERRUPTED
from protofed.cli.groups import CommandGroup
from protofed.cli.options import with_settings
from protofed.cli.output import console, say, wide_console
from protofed.config import SETTINGS
from protofed.errors import unknown

data_app = typer.Typer(
    name="data",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Download, check and show the images of a task.",
)

TaskArgument = Annotated[str, typer.Argument(help="A task's name, or folder:PATH.")]
FILES = ("data", "test_split", "max_image_pixels", "max_unpacked_gb")
"""The settings of all commands that read images."""


@data_app.command()
@with_settings(only=(*FILES, "image_size", "skip_bad", "pixel_range"))
def show(
    *,
    task: TaskArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write a contact sheet (PNG) to this file, which only you can read.",
        ),
    ] = None,
    images: Annotated[
        int, typer.Option(min=1, max=100, help="Images per class and domain on the contact sheet.")
    ] = 4,
    settings: dict[str, Any],
) -> None:
    """Count a task's images by domain, class and split; with --out, write a contact sheet."""
    from protofed.data import load_task
    from protofed.data.inspect import class_counts, contact_sheet
    from protofed.files import write_atomic

    loaded = load_task(task, **settings)
    say(f"{task}: {loaded.note}")
    table = Table("class", box=None, header_style="bold")
    found = class_counts(loaded)
    for domain in found:
        table.add_column(escape(domain), justify="right")
    for label, name in enumerate(loaded.classes):
        table.add_row(
            escape(name), *(f"{d['train'][label]} + {d['test'][label]}" for d in found.values())
        )
    totals = (f"{sum(d['train'])} + {sum(d['test'])}" for d in found.values())
    table.add_row("total", *totals, style="bold")
    console.print(table)
    skipped = loaded.skipped
    files = f"{len(skipped)} file{'s' * (len(skipped) > 1)}"
    left_out = f"; left out {files}:{_names(skipped)}" if skipped else ""
    say("training + test images" + left_out)
    if out is not None:
        write_atomic(out, contact_sheet(loaded, images), private=True)
        say(f"wrote the contact sheet to {out}")


@data_app.command()
@with_settings(only=FILES)
def verify(*, task: TaskArgument, settings: dict[str, Any]) -> None:
    """Check a task's images: counts, files that cannot be decoded, duplicates.

    Exits with code 2 if files cannot be decoded. Duplicates are listed for you to judge.
    """
    from protofed.data import inspect

    report = inspect.verify(task, **settings)
    say(f"{task}: {report.task.note}")
    for domain, (have, official) in report.counts.items():
        line = f"{domain}: {have[0]} training and {have[1]} test images"
        if official is not None:
            other = f"; published: {official[0]} and {official[1]}"
            line += ", as published" if have == official else other
        say(line)
    say(f"cannot be decoded: {len(report.bad) or 'none'}" + _names(report.bad))
    pairs = {"training and test": report.leaked, "two classes or domains": report.conflicting}
    for places, found in pairs.items():
        examples = [f"{a} = {b}" for a, b in found]
        say(f"same content in {places}: {len(found) or 'none'}" + _names(examples))
    say(f"same content twice in one split: {report.repeated or 'none'}")
    if report.bad:
        raise typer.Exit(2)


def _names(names: Sequence[str], most: int = 10) -> str:
    shown = "".join(f"\n  {name}" for name in names[:most])
    return shown + (f"\n  and {len(names) - most} more" if len(names) > most else "")


@data_app.command()
def fetch(
    task: Annotated[str, typer.Argument(help="digits, office_caltech, pacs or vlcs.")],
    to: Annotated[Path | None, typer.Option(help=SETTINGS["data"].help)] = None,
    domain: Annotated[str | None, typer.Option(help="Only this domain's files.")] = None,
) -> None:
    """Download a task's files, check them, and say what has to be downloaded by hand.

    Existing files are checked and kept. Exits with code 1 if something has to be downloaded by
    hand because its website requires a login.
    """
    from protofed.data.download import Downloader, instructions, is_missing, select
    from protofed.data.locate import data_root

    (files, manual), root = select(task, domain), data_root(to)
    left = [m for m in manual if is_missing(task, m, root)]
    try:
        Downloader(console).fetch(files, root / task)
    except KeyboardInterrupt:
        say("interrupted; run the command again for the remaining files")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        for by_hand in left:  # also after an error
            say(instructions(task, by_hand, root))
    if left:
        raise typer.Exit(1)
    say(f"{root / task} is complete; protofed data verify {task} checks every image")


@data_app.command()
def cache(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Entries; default: all.")
    ] = None,
    purge: Annotated[bool, typer.Option("--purge", help="Delete these entries.")] = False,
) -> None:
    """List the cache of decoded images: the pixels of every task and folder loaded so far.

    Only you can read it. Deleted images are decoded again when they are needed.
    """
    from protofed.data import cache
    from protofed.files import writing

    folder = cache.entries_folder()
    found = {entry.name: entry for entry in cache.entries()}
    for name in names or ():
        if name not in found:
            raise unknown("entry of the cache", name, found)
    chosen = [found[name] for name in names or found]
    table = Table("entry", "images", "size", "made", "from", box=None, header_style="bold")
    for entry in chosen:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))
        row = (entry.name, str(entry.images), decimal(entry.size), made, entry.source)
        table.add_row(*map(escape, row))
    if chosen:
        wide_console().print(table)
    count = f"{len(chosen)} {'entry' if len(chosen) == 1 else 'entries'}"
    total = f"{count}, {decimal(sum(entry.size for entry in chosen))}"
    if purge:
        with writing(folder):
            cache.purge([entry.name for entry in chosen])
    say(f"deleted {total} from {folder}" if purge else f"{total} in {folder}")
