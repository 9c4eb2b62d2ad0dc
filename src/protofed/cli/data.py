"""``protofed data``: download a task's files, check them, look at them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

data_app = typer.Typer(
    name="data",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Download, check and show the images of a task.",
)
console = Console()


TaskArgument = Annotated[str, typer.Argument(help="A task's name, or folder:PATH.")]
DataOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder of all data; default: $PROTOFED_DATA, else the cache folder."
    ),
]
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
    from protofed.data.contact_sheet import class_counts, contact_sheet
    from protofed.files import write_atomic

    loaded = load_task(task, data, image_size=image_size, test_split=test_split, skip_bad=skip_bad)
    _say(f"{task}: {loaded.note}")
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
    _say("training + test images" + _skipped(loaded.skipped))
    if out is not None:
        write_atomic(out, contact_sheet(loaded, images))
        _say(f"wrote the contact sheet to {out}")


@data_app.command()
def verify(task: TaskArgument, data: DataOption = None, test_split: TestSplitOption = None) -> None:
    """Check a task's images: counts, files that cannot be decoded, duplicates.

    Exits with code 2 if files cannot be decoded. Duplicates are listed for you to judge.
    """
    from protofed.data.verify import verify as verify_task

    report = verify_task(task, data, test_split)
    _say(f"{task}: {report.task.note}")
    for domain, (have, official) in report.counts.items():
        line = f"{domain}: {have[0]} training and {have[1]} test images"
        if official is not None:
            same = have == official
            line += ", as published" if same else f"; published: {official[0]} and {official[1]}"
        _say(line)
    _say(f"cannot be decoded: {len(report.bad) or 'none'}" + _names(report.bad))
    for pairs, words in (
        (report.leaked, "in training and test"),
        (report.conflicting, "in two classes or domains"),
    ):
        examples = [f"{a} = {b}" for a, b in pairs]
        _say(f"same content {words}: {len(pairs) or 'none'}" + _names(examples))
    _say(f"same content twice in one split: {report.repeated or 'none'}")
    if report.bad:
        raise typer.Exit(2)


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _names(names: Sequence[str], most: int = 10) -> str:
    shown = "".join(f"\n  {name}" for name in names[:most])
    return shown + (f"\n  and {len(names) - most} more" if len(names) > most else "")


def _skipped(names: Sequence[str]) -> str:
    return f"; left out {len(names)} files:{_names(names)}" if names else ""


@data_app.command()
def fetch(
    task: Annotated[str, typer.Argument(help="digits, office_caltech, pacs or vlcs.")],
    to: Annotated[
        Path | None,
        typer.Option(help="Folder of all data; default: $PROTOFED_DATA, else the cache folder."),
    ] = None,
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
        _say("interrupted; run the command again for the remaining files")
        raise typer.Exit(130) from None
    finally:
        for by_hand in left:  # also after an error
            _say(instructions(task, by_hand, root))
    if left:
        raise typer.Exit(1)
    _say(f"{root / task} is complete; protofed data verify {task} checks every image")
