"""``protofed compare``, ``sweep`` and ``tune``: studies defined on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from protofed.cli.options import (
    Execution,
    MethodOption,
    SeedsOption,
    SetOfMethodOption,
    SetOption,
    TaskOption,
    output_option,
    with_execution,
    with_settings,
)
from protofed.cli.output import console, print_tables
from protofed.cli.parse import assignments, by_method, parse_over, words

if TYPE_CHECKING:
    from protofed.studies.launch import Asked


@with_settings()
@with_execution
def compare(
    *,
    task: TaskOption = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated names or file.py:Class; all: every method that needs no files."
        ),
    ] = "all",
    seeds: SeedsOption = 1,
    set_: SetOfMethodOption = None,
    out: Annotated[
        Path | None,
        output_option(
            help="Folder for the tables and figures; default: runs/compare-<task>-<hash>."
        ),
    ] = None,
    execution: Execution,
    settings: dict[str, Any],
) -> None:
    """Run several methods on the same clients and show them in one table and one figure.

    Runs that are already in the pool (--runs) are not repeated; interrupted ones resume.

    [bold]--leave-out each[/bold] tests on domains that no client has: one run without each
    domain, and one table with the accuracy on each unseen domain and their average.
    """
    from protofed.methods import WITHOUT_FILES
    from protofed.studies.adhoc import comparison, method_rows

    names = list(WITHOUT_FILES) if methods == "all" else words(methods)
    rows = method_rows(names)
    options = by_method(assignments(set_), {label: label for label in rows})
    asked = comparison(task or "glyphs", names, seeds, options, settings)
    run_and_print([asked], execution, out)


@with_settings()
@with_execution
def sweep(
    *,
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="NAME=V,V,...",
            help="A hyper-parameter of the method, or a setting, and its values; give it twice "
            "for a grid.",
        ),
    ],
    task: TaskOption = None,
    method: MethodOption = None,
    against: Annotated[
        str | None, typer.Option(help="Another method, drawn as a dashed line; it is not swept.")
    ] = None,
    seeds: SeedsOption = 1,
    set_: SetOption = None,
    out: Annotated[
        Path | None,
        output_option(
            help="Folder for the tables and figures; default: "
            "runs/sweep-<task>-<method>-<names>-<hash>.",
        ),
    ] = None,
    execution: Execution,
    settings: dict[str, Any],
) -> None:
    """Run a method over values of one parameter (a curve) or two (a heat map), with a table.

    With three or more parameters, there is only the table.

    [bold]protofed sweep --task glyphs --method fpl --over tau=0.02,0.05,0.1[/bold]
    """
    from protofed.studies.adhoc import parameter_sweep

    grid, options, method = parse_over(over), assignments(set_), method or "fedavg"
    asked = parameter_sweep(task or "glyphs", method, grid, seeds, options, settings, against)
    run_and_print([asked], execution, out)


@with_settings()
@with_execution
def tune(
    *,
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="NAME=VALUES",
            help="A hyper-parameter of the method, or a setting, and where to search: values "
            "(0.02,0.05), a range (0.1..1), or a range on a logarithmic scale (log:0.001..0.1); "
            "repeatable.",
        ),
    ],
    task: TaskOption = None,
    method: MethodOption = None,
    budget: Annotated[int, typer.Option(help="How many points to try at most.")] = 20,
    seeds: SeedsOption = 1,
    set_: SetOption = None,
    out: Annotated[
        Path | None,
        output_option(
            help="Folder for the tables and figures; default: "
            "runs/tune-<task>-<method>-<names>-<hash>.",
        ),
    ] = None,
    execution: Execution,
    settings: dict[str, Any],
) -> None:
    """Choose hyper-parameters by validation accuracy, and report the test accuracy of the choice.

    If a whole grid fits the budget, every point is tried; otherwise random points, drawn from
    --seed. Points are compared on images used neither for training nor for testing (--validate):
    by default training images that no client holds, or else a part of each client's. Test accuracy
    is shown for the chosen point only.

    [bold]protofed tune --method fpl --over tau=0.02,0.05,0.1 --over lr=log:0.001..0.1[/bold]
    """
    from protofed.studies.adhoc import tuning

    spaces, options = parse_over(over), assignments(set_)
    asked = tuning(task or "glyphs", method or "fedavg", spaces, budget, seeds, options, settings)
    run_and_print([asked], execution, out)


def run_and_print(asked: Sequence[Asked], execution: Execution, out: Path | None) -> None:
    """Run what the pool lacks and print the tables; with a shard, only run that part."""
    from protofed import api
    from protofed.studies.execution import raise_failures

    finished = api.run_studies(asked, execution, console, out)
    pool = f"[bold]{escape(str(execution.pool))}[/bold]"
    if execution.shard is not None:
        part, parts = execution.shard
        console.print(
            f"part {part} of {parts}: its runs are in {pool}. When the runs of all parts are "
            "there, the same command without --shard writes the tables."
        )
    for each, done in zip(asked, finished, strict=True):
        if done.folder is None or not done.files:
            continue
        if len(asked) > 1:
            console.print(f"\n[bold]{escape(each.study.title)}[/bold]", highlight=False)
        print_tables([t for t in done.folder.tables(each.selection.tasks) if t.runs])
        path = escape(str(done.folder.path))
        console.print(f"{', '.join(done.files)} are in [bold]{path}[/bold], the runs in {pool}")
        for run in done.folder.chosen_runs():
            console.print(f"the chosen run, with its model: [bold]{escape(str(run))}[/bold]")
    failed = {id(job): job for done in finished for job in done.failed}
    raise_failures(list(failed.values()))
