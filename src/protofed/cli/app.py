"""The command line: all commands, in the order in which a user meets them."""

from __future__ import annotations

import functools
import sys
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
from click import Command, Context
from rich.console import Console
from rich.markup import escape

from protofed.cli import INTERRUPTED, quiet_interrupt
from protofed.cli.groups import HELP, CommandGroup
from protofed.cli.output import console
from protofed.errors import ProtofedError, printable
from protofed.version import __version__

COMMANDS = {
    "tasks": "List the tasks: domains, classes, images, and the clients they are split into.",
    "data": "Download, check and show the images of a task.",
    "methods": "List the methods, show one (protofed methods fpl), or check one.",
    "run": "Run one method on one task and keep everything in a folder.",
    "show": "Print a run's summary, with a sparkline of every domain's accuracy over the rounds.",
    "predict": "Predict the classes of images: "
    "[bold]protofed predict runs/my-run photos/ -o out.csv[/bold].",
    "evaluate": "Evaluate a trained model on the test images of a task, per domain and class.",
    "export": "Export a trained model for other programs, with a card that says what it is.",
    "compare": "Run several methods on the same clients and show them in one table and one figure.",
    "sweep": "Run a method over values of one parameter (a curve) or two (a heat map), with a "
    "table.",
    "tune": "Choose hyper-parameters by validation accuracy, and report the test accuracy of the "
    "choice.",
    "study": "Reproduce the papers' tables and figures, or run studies of your own.",
    "runs": "Check runs for damaged files.",
    "report": "Write one self-contained HTML page: tables, curves, features, prototypes, "
    "configuration.",
    "deploy": "Run a federation across real machines (Flower, TLS, authenticated sites).",
}
"""Every command with the first paragraph of its help."""
_MODULES = {"show": "run", "predict": "model", "evaluate": "model", "export": "model"}
_MODULES |= {"sweep": "compare", "tune": "compare"}
"""Where in this package a command is, if its module is not named after it."""


class Commands(CommandGroup):
    """Imports a command when it is called: the list of all commands does without PyTorch."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = {name: Command(name, help=text) for name, text in COMMANDS.items()}

    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, Command | None, list[str]]:
        if args[0] in COMMANDS:
            self.commands[args[0]] = load(args[0])
        return super().resolve_command(ctx, args)


@functools.cache
def load(name: str) -> Command:
    """A command, or group of commands, from its module."""
    with quiet_interrupt():
        module = import_module(f"protofed.cli.{_MODULES.get(name, name)}")
    whole = typer.Typer(cls=CommandGroup, rich_markup_mode="rich")
    if (group := getattr(module, f"{name}_app", None)) is not None:
        whole.add_typer(group)
    else:
        whole.command(name, context_settings=HELP)(getattr(module, name))
    return typer.main.get_group(whole).commands[name]


app = typer.Typer(
    name="protofed",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=HELP,
    help="Federated learning when the clients' domains differ.\n\n"
    "Start with [bold]protofed compare --task glyphs --methods fedavg,fedproto,fpl[/bold]: "
    "three methods on a task that needs no download.",
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        console.print(f"protofed {__version__}")
        raise typer.Exit


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    text = f"[yellow]warning:[/yellow] {escape(printable(str(message)))}"
    Console(stderr=True, emoji=False).print(text, soft_wrap=True, highlight=False)


def main() -> None:
    """The entry point: errors are one line, with exit code 2, and so are warnings."""
    warnings.showwarning = _print_warning
    try:
        app()
    except ProtofedError as error:
        Console(stderr=True, emoji=False).print(
            f"[red]error:[/red] {escape(printable(str(error)))}", soft_wrap=True
        )
        sys.exit(error.exit_code)
    except OSError as error:  # about a path that only the operating system knows to be bad
        where = f": '{str(error.filename)[:200]}'" if error.filename else ""
        text = escape(printable(f"{error.strerror or error}{where}"))
        Console(stderr=True, emoji=False).print(f"[red]error:[/red] {text}", soft_wrap=True)
        sys.exit(ProtofedError.exit_code)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            text = "stopped; finished work is kept: the same command resumes (run: add --resume)"
            Console(stderr=True, emoji=False).print(text)
        raise
