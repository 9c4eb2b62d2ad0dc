"""The command line: all commands, in the order in which a user meets them."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer
from click import Context
from rich.console import Console
from rich.markup import escape

from protofed.cli.compare import compare, sweep, tune
from protofed.cli.data import data_app
from protofed.cli.deploy import deploy_app
from protofed.cli.methods import methods
from protofed.cli.model import evaluate, export, predict
from protofed.cli.options import HELP, CommandGroup
from protofed.cli.output import console
from protofed.cli.report import report
from protofed.cli.run import run, show
from protofed.cli.runs import runs_app
from protofed.cli.study import study_app
from protofed.cli.tasks import tasks
from protofed.errors import ProtofedError, printable
from protofed.version import __version__

ORDER = (
    "tasks", "data", "methods", "run", "show", "predict", "evaluate", "export", "compare", "sweep",
    "tune", "study", "runs", "report", "deploy",
)  # fmt: skip


class InOrder(CommandGroup):
    """Lists the commands in ``ORDER``; typer would list groups of commands last."""

    def list_commands(self, ctx: Context) -> list[str]:
        return sorted(self.commands, key=ORDER.index)


app = typer.Typer(
    name="protofed",
    cls=InOrder,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=HELP,
    help="Federated learning when the clients' domains differ.\n\n"
    "Start with [bold]protofed compare --task glyphs --methods fedavg,fedproto,fpl[/bold]: "
    "three methods on a task that needs no download.",
)
for command in (tasks, methods, run, show, predict, evaluate, export, compare, sweep, tune, report):
    app.command(context_settings=HELP)(command)
for group in (data_app, study_app, runs_app, deploy_app):
    app.add_typer(group)


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
        if end.code == 130:  # typer's code for Ctrl-C
            text = "stopped; finished work is kept: the same command resumes (run: add --resume)"
            Console(stderr=True, emoji=False).print(text)
        raise
