"""The command line's ``protofed data``: getting a task's files, checking and showing them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protofed.errors import ProtofedError

data_app = typer.Typer(
    name="data",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="The images of a task: fetch them, check them, look at them.",
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
    str | None, typer.Option("--test-split", help="Another way to divide the images.")
]


@data_app.command()
def show(
    task: TaskArgument,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The sheet; default: TASK.png.")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Images of each class and domain.")] = 4,
    data: DataOption = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels.")] = None,
    test_split: TestSplitOption = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out files that are no images.")
    ] = False,
) -> None:
    """Count a task's images by domain, class and split, and write a contact sheet of them."""
    from protofed.config import short_task
    from protofed.data import load_task
    from protofed.data.show import counts, sheet
    from protofed.files import write_atomic

    loaded = load_task(task, data, image_size=image_size, test_split=test_split, skip_bad=skip_bad)
    _say(f"{task}: {loaded.note}")
    table = Table("class", box=None, header_style="bold")
    found = counts(loaded)
    for domain in found:
        table.add_column(escape(domain), justify="right")
    for label, name in enumerate(loaded.classes):
        table.add_row(
            escape(name), *(f"{d['train'][label]} + {d['test'][label]}" for d in found.values())
        )
    totals = (f"{sum(d['train'])} + {sum(d['test'])}" for d in found.values())
    table.add_row("all", *totals, style="bold")
    console.print(table)
    _say("training + test images" + _skipped(loaded.skipped))
    path = out or Path(f"{short_task(task)}.png")
    try:
        write_atomic(path, sheet(loaded, images))
    except OSError as error:
        raise ProtofedError(f"cannot write '{path}': {error.strerror}") from None
    _say(f"the sheet is {path}")


@data_app.command()
def verify(task: TaskArgument, data: DataOption = None, test_split: TestSplitOption = None) -> None:
    """Check a task's images: counts, files that are no images, copies in training and test.

    Exit code 2 if there are files that cannot be decoded; all else is for a person to judge.
    """
    from protofed.data.verify import verify as look

    report = look(task, data, test_split)
    _say(f"{task}: {report.task.note}")
    for domain, (have, official) in report.counts.items():
        line = f"{domain}: {have[0]} training and {have[1]} test images"
        if official is not None:
            fits = have == official
            line += ", as published" if fits else f"; published: {official[0]} and {official[1]}"
        _say(line)
    _say(f"cannot be decoded: {len(report.bad) or 'none'}" + _names(report.bad))
    for pairs, words in (
        (report.crossing, "in training and test"),
        (report.disputed, "in two classes or domains"),
    ):
        examples = [f"{a} = {b}" for a, b in pairs]
        _say(f"same content {words}: {len(pairs) or 'none'}" + _names(examples))
    _say(f"same content twice in one split: {report.twins or 'none'}")
    if report.bad:
        raise typer.Exit(2)


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _names(names: Sequence[str], most: int = 10) -> str:
    shown = "".join(f"\n  {name}" for name in names[:most])
    return shown + (f"\n  and {len(names) - most} more" if len(names) > most else "")


def _skipped(names: Sequence[str]) -> str:
    return f"; {len(names)} files left out:{_names(names)}" if names else ""


@data_app.command()
def fetch(
    task: Annotated[str, typer.Argument(help="digits, office_caltech, pacs or vlcs.")],
    to: Annotated[
        Path | None,
        typer.Option(help="Folder of all data; default: $PROTOFED_DATA, else the cache folder."),
    ] = None,
    domain: Annotated[str | None, typer.Option(help="Only this domain's files.")] = None,
) -> None:
    """Download a task's files from their homes, check them, and say what is left to a person.

    Files that are there are checked and kept; a download that was cut goes on where it stopped.
    Exit code 1: something is to be downloaded by hand, where the home asks for a login.
    """
    from protofed.data.fetch import Fetcher, instructions, missing
    from protofed.data.find import data_root
    from protofed.data.homes import recipe

    files, root = recipe(task, domain), data_root(to)
    left = [m for m in files.manual if missing(task, m, root)]
    try:
        Fetcher(console).fetch(files.files, root / task)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from what is there")
        raise typer.Exit(130) from None
    finally:
        # Also after an error: the person can do their part meanwhile.
        for manual in left:
            text = instructions(task, manual, root)
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    if left:
        raise typer.Exit(1)
    console.print(
        f"{root / task} is complete; protofed data verify {task} looks into every image",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
