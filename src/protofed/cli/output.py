"""What the commands print: tables, studies and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from protofed.errors import printable

if TYPE_CHECKING:
    from protofed.runs import Result
    from protofed.studies.folder import TaskTable

console = Console(emoji=False)  # folder:cat: would be drawn
"""Where all commands print."""


def say(line: str) -> None:
    """Print a line as it is: no markup, no wrapping."""
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Show progress: in place on a terminal, otherwise a line for each step that takes long."""
    with console.status("") if console.is_terminal else nullcontext() as live:

        def tell(text: str) -> None:
            if live is not None:
                live.update(escape(text))
            elif not text.startswith(("drawing", "reading", "packing")):
                say(text)

        yield tell


def wide_console() -> Console:
    """The console; without a terminal there is no width to respect."""
    return console if console.is_terminal else Console(file=console.file, width=400, emoji=False)


def print_table(header: Sequence[str], body: Any, caption: str = "") -> None:
    from protofed.studies.render import to_terminal

    wide = wide_console()
    for part in to_terminal(header, body, wide):
        console.print()
        wide.print(part)
    if caption:
        console.print(f"[dim]{escape(caption)}[/dim]")


def print_results(results: Sequence[Result]) -> None:
    from protofed.studies.tables import caption, cost_grid, grid, rows

    found = rows(results)
    print_table(*grid(found))
    print_table(*cost_grid(found), caption(results))


def print_tables(made: Sequence[TaskTable]) -> None:
    for table in made:
        if len(made) > 1:
            console.print(f"\n[bold]{escape(table.task)}[/bold]")
        print_table(*table.grid())
        if table.effects:
            print_table(*table.effect_grid(), table.effect_caption)
        if table.runs:
            print_table(*table.costs())
        console.print(f"[dim]{escape(table.caption)}[/dim]")
        for note in table.notes:
            console.print(f"[dim]note: {escape(note)}[/dim]", highlight=False)
