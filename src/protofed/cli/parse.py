"""What a person typed, as values; and tables as they are printed."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from protofed.config import SETTINGS
from protofed.errors import ProtofedError, unknown


def value(text: str) -> Any:
    """A number or a boolean as TOML reads it; anything else is a word."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def per_domain(name: str, text: str) -> Any:
    """``scan=4,print=3`` as a dictionary; a number or a word as it is."""
    if "=" not in text:
        return value(text)
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {domain.strip(): value(number) for domain, number in pairs}
    except ValueError:
        raise ProtofedError(
            f"cannot read --{name} '{text}'",
            f"write --{name} {'scan-0=cnn3,scan-1=cnn2' if name == 'model' else 'scan=4,print=3'}",
        ) from None


def assignments(texts: Sequence[str] | None) -> dict[str, Any]:
    """``tau=0.05`` for each ``--set``."""
    values = {}
    for text in texts or []:
        name, equals, word = text.partition("=")
        if not equals:
            raise ProtofedError(f"cannot read --set '{text}'", "write --set tau=0.05")
        values[name.strip()] = value(word.strip())
    return values


def by_method(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """``fpl.tau`` → the options of the method whose name is fpl."""
    options: dict[str, dict[str, Any]] = {}
    for key, given in values.items():
        method, dot, name = key.partition(".")
        if not dot:
            raise ProtofedError(f"--set {key}: which method?", f"write --set METHOD.{key}={given}")
        if method not in names:
            raise unknown("method in --set", method, names)
        options.setdefault(names[method], {})[name] = given
    return options


def parse_setting(name: str, typed: Any) -> Any:
    """What was typed for a setting, as its value; only tables and rounds are typed as text."""
    kind = SETTINGS[name].kind
    if kind == "table":
        return per_domain(name, typed)
    if kind == "rounds":
        return [value(r) for r in typed.split(",")] if typed != "none" else "none"
    return typed


def at_least_one(**numbers: int | None) -> None:
    """An error where one of these options is given and below 1."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ProtofedError(f"--{name} must be at least 1, got {number}")


@contextmanager
def told(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows what is under way: in place on a terminal, else a line for what takes long."""
    with console.status("") if console.is_terminal else nullcontext() as live:

        def tell(text: str) -> None:
            if live is not None:
                live.update(escape(text))
            elif not text.startswith(("drawing", "reading", "packing")):
                console.print(text, highlight=False, markup=False, soft_wrap=True)

        yield tell


def print_table(console: Console, header: Sequence[str], body: Any, caption: str) -> None:
    """A table with its caption below."""
    from protofed.studies.render import to_terminal

    # where there is no terminal there is no width to keep to either
    wide = console if console.is_terminal else Console(file=console.file, width=400)
    for part in to_terminal(header, body, wide):
        console.print()
        wide.print(part)
    console.print(f"[dim]{escape(caption)}[/dim]")


def print_outcome(
    console: Console,
    study: Any,
    folder: Path,
    names: Sequence[str],
    failed: Sequence[Any],
    tasks: Sequence[str] = (),
) -> None:
    """What a study gave: the tables that have runs, where the files are, and what failed."""
    from protofed.studies.execution import raise_failures
    from protofed.studies.folder import make_tables

    print_study(console, study, [t for t in make_tables(study, folder, tasks) if t.runs])
    if names:
        console.print(f"{', '.join(names)} and the runs are in [bold]{folder}[/bold]")
    raise_failures(failed)


def print_study(console: Console, study: Any, made: Sequence[Any]) -> None:
    """The tables of a study."""
    for table in made:
        if len(made) > 1:
            console.print(f"\n[bold]{escape(table.task)}[/bold]")
        header, body = table.grid()
        print_table(console, header, body, table.caption)
        for note in table.notes:
            console.print(f"[dim]note: {escape(note)}[/dim]", highlight=False)
