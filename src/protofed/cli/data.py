"""``protofed data``: download a task's files, check them, look at them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from protofed.cli.output import console, say

data_app = typer.Typer(
    name="data",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Download, check and show the images of a task.",
)

TaskArgument = Annotated[str, typer.Argument(help="A task's name, or folder:PATH.")]
ALL_DATA = "Folder of all data; default: $PROTOFED_DATA, else the cache folder."
DataOption = Annotated[Path | None, typer.Option(metavar="DIR", help=ALL_DATA)]
TestSplitOption = Annotated[
    str | None,
    typer.Option("--test-split", help="Another way to divide the images into training and test."),
]


@data_app.command()
def show(
    task: TaskArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Write a contact sheet (PNG) to this file."
        ),
    ] = None,
    images: Annotated[
        int, typer.Option(min=1, help="Images per class and domain on the contact sheet.")
    ] = 4,
    data: DataOption = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels.")] = None,
    test_split: TestSplitOption = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out files that cannot be decoded.")
    ] = False,
) -> None:
    """Count a task's images by domain, class and split; with --out, write a contact sheet."""
    from protofed.data import load_task
    from protofed.data.inspect import class_counts, contact_sheet
    from protofed.files import write_atomic

    loaded = load_task(task, data, image_size=image_size, test_split=test_split, skip_bad=skip_bad)
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
    left_out = f"; left out {len(skipped)} files:{_names(skipped)}" if skipped else ""
    say("training + test images" + left_out)
    if out is not None:
        write_atomic(out, contact_sheet(loaded, images))
        say(f"wrote the contact sheet to {out}")


@data_app.command()
def verify(task: TaskArgument, data: DataOption = None, test_split: TestSplitOption = None) -> None:
    """Check a task's images: counts, files that cannot be decoded, duplicates.

    Exits with code 2 if files cannot be decoded. Duplicates are listed for you to judge.
    """
    from protofed.data import inspect

    report = inspect.verify(task, data, test_split)
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
    to: Annotated[Path | None, typer.Option(help=ALL_DATA)] = None,
    domain: Annotated[str | None, typer.Option(help="Only this domain's files.")] = None,
) -> None:
    """Download a task's files, check them, and say what has to be downloaded by hand.

    Existing files are checked and kept. Exits with code 1 if something has to be downloaded by
    hand, because its home asks for a login.
    """
    from protofed.data.download import Downloader, instructions, is_missing, select
    from protofed.data.locate import data_root

    (files, manual), root = select(task, domain), data_root(to)
    left = [m for m in manual if is_missing(task, m, root)]
    try:
        Downloader(console).fetch(files, root / task)
    except KeyboardInterrupt:
        say("interrupted; run the command again for the remaining files")
        raise typer.Exit(130) from None
    finally:
        for by_hand in left:  # also after an error
            say(instructions(task, by_hand, root))
    if left:
        raise typer.Exit(1)
    say(f"{root / task} is complete; protofed data verify {task} checks every image")
