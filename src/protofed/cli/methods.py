"""``protofed methods``: list the methods, show one, or check one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from protofed.cli.options import SetOption
from protofed.cli.output import console
from protofed.cli.parse import assignments
from protofed.data.info import TASKS
from protofed.errors import ProtofedError, unknown
from protofed.method import READING, READINGS
from protofed.methods import METHODS, create, method_class

CHECK = "check"


def methods(
    name: Annotated[str | None, typer.Argument(help="A method to show, or the word check.")] = None,
    target: Annotated[
        str | None, typer.Argument(help="After check: the method to check, e.g. file.py:Class.")
    ] = None,
    task: Annotated[
        str, typer.Option(help="Show the defaults that the paper gives for this task.")
    ] = "",
    set_: SetOption = None,
) -> None:
    """List the methods, show one (protofed methods fpl), or check one.

    [bold]protofed methods check file.py:Class[/bold] runs all checks on a method: gradients,
    weights at 0, a missing class, one client, resume, serialization, CUDA graph capture. Its
    hyper-parameters are the defaults, or those of --set.
    """
    if set_ and name != CHECK:
        raise ProtofedError("--set is for protofed methods check", "leave it out")
    if name == CHECK:
        if target is None:
            raise ProtofedError("check what?", "protofed methods check path/to/file.py:Class")
        _check(target, assignments(set_))
    elif target is not None:
        raise ProtofedError(
            f"'{name} {target}' is not a method",
            f"protofed methods {CHECK} {target} checks one, protofed methods {target} shows one",
        )
    elif name is not None:
        _show(name, task)
    else:
        table = Table("method", "paper", "what travels", box=None, header_style="bold")
        for cls in METHODS.values():
            table.add_row(cls.name, cls.paper, str(cls().slots))
        console.print(table)
        console.print("[dim]protofed methods NAME shows hyper-parameters and deviations.[/dim]")


def _show(name: str, task: str) -> None:
    if task and task not in TASKS:
        raise unknown("task", task, TASKS)
    cls = method_class(name)
    module = sys.modules[cls.__module__]
    console.print(
        f"[bold]{cls.name}[/bold]   {escape(cls.paper)}\ntravels: {escape(str(cls().slots))}\n"
    )
    text = escape((module.__doc__ or cls.__doc__ or "").strip())
    console.print(text, highlight=False, soft_wrap=True)
    if not cls.hypers():
        console.print("\nno hyper-parameters")
        return
    switches = cls.switches()
    columns = {r: cls.defaults(task, r) for r in READINGS}
    if not switches:
        columns = {"default": cls.defaults(task)}
    titles = [f"{title} on {task}" if task else title for title in columns]
    table = Table("hyper-parameter", "symbol", *titles, "meaning", box=None, header_style="bold")
    for key, hyper in cls.hypers().items():
        meaning = hyper.meaning
        if hyper.choices:
            meaning += f" [{' | '.join(hyper.choices)}]"
        if hyper.per_task and not task:
            meaning += f" ({', '.join(f'{t}: {v}' for t, v in hyper.per_task.items())})"
        values = [
            "must be given" if hyper.file else str(column[key]) for column in columns.values()
        ]
        style = "bold" if key in switches else ""
        table.add_row(key, hyper.symbol, *values, escape(meaning), style=style)
    console.print()
    console.print(table)
    if switches:
        console.print(
            f"[dim]published is the default; --set {READING}=printed takes the other column. A "
            "hyper-parameter that is set by name overrides either.[/dim]"
        )


def _check(target: str, options: Mapping[str, Any]) -> None:
    from protofed.testing import CheckResult, run_checks

    def show(verdict: CheckResult) -> None:
        console.print(escape(verdict.line()), highlight=False, soft_wrap=True)

    method = create(target, options) if options else method_class(target)
    verdicts = run_checks(method, show)
    failed = [v for v in verdicts if v.failed]
    if failed:
        faults = sum(not v.same_as for v in failed)
        hint = f"{faults} fault{'s' * (faults > 1)}, each shown once" * (faults < len(failed))
        raise ProtofedError(f"{len(failed)} of {len(verdicts)} checks failed for {target}", hint)
    skipped = sum(v.status == "skipped" for v in verdicts)
    apart = f" ({skipped} do{'es' * (skipped == 1)} not apply)" if skipped else ""
    passed = len(verdicts) - skipped
    console.print(f"[green]all {passed} checks passed[/green]{apart} for {escape(target)}")
