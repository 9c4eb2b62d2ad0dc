"""``protofed compare`` and ``protofed sweep``: studies written on the spot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from protofed.cli.options import (
    JobsOption,
    PoolOption,
    SeedsOption,
    SetOfMethodOption,
    SetOption,
    ShardOption,
    TaskOption,
    TensorBoardOption,
    output_option,
    with_settings,
)
from protofed.cli.output import console, print_tables, say
from protofed.cli.parse import assignments, at_least_one, by_method, parse_shard, parse_sweep, words
from protofed.errors import ProtofedError

if TYPE_CHECKING:
    from protofed.studies.definition import Study
    from protofed.studies.plan import Selection


@with_settings()
def compare(
    *,
    task: TaskOption = None,
    methods: Annotated[
        str, typer.Option(help="Names separated by commas, or all; file.py:Class works too.")
    ] = "all",
    seeds: SeedsOption = 1,
    set_: SetOfMethodOption = None,
    pool: PoolOption = Path("runs"),
    out: Annotated[
        Path | None,
        output_option(
            help="Folder of the tables and figures; default: runs/compare-<task>-<hash>."
        ),
    ] = None,
    jobs: JobsOption = None,
    shard: ShardOption = None,
    tensorboard: TensorBoardOption = False,
    settings: dict[str, Any],
) -> None:
    """Run several methods on the same clients and show them in one table and one figure.

    Runs that the pool (--runs) already has are not repeated; interrupted ones resume.

    [bold]--leave-out each[/bold] tests on domains that no client has: one run without each
    domain, and one table with the accuracy on each unseen domain and their average.
    """
    from protofed.config import EACH, short_task
    from protofed.methods import METHODS, method_class
    from protofed.studies.launch import adhoc, protocol_note

    task = task or "glyphs"
    at_least_one(seeds=seeds)
    names = dict.fromkeys(METHODS if methods == "all" else words(methods))
    references: dict[str, str] = {}
    for name in names:
        own = method_class(name).name
        if own in references:
            raise ProtofedError(
                f"{references[own]} and {name} are both named {own}",
                "give one of the classes another name: ClassVar[str]",
            )
        references[own] = name
    options = by_method(assignments(set_), references)
    first = settings.pop("seed", 0)
    rows = {own: (name, options.get(name, {})) for own, name in references.items()}
    left_out = settings.get("leave_out")
    on = {None: "", EACH: ", unseen domains"}.get(left_out, f" without {left_out}")
    title = f"Methods on {task}{on}"
    study = adhoc("compare", title, task, rows, range(first, first + seeds), settings)
    study = study.with_note(warning := protocol_note(study))
    path = out or pool / f"compare-{short_task(task)}-{study.hash}"
    run_study(study, path, pool, jobs, shard, tensorboard, warning=warning)


@with_settings()
def sweep(
    *,
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="NAME=V,V,...",
            help="A hyper-parameter of the method, or a setting, and its values; given twice: a "
            "grid.",
        ),
    ],
    task: TaskOption = None,
    method: Annotated[
        str, typer.Option(help="A method's name, or path/to/file.py:Class.")
    ] = "fedavg",
    against: Annotated[
        str | None, typer.Option(help="Another method, not swept, as a dashed line.")
    ] = None,
    seeds: SeedsOption = 1,
    set_: SetOption = None,
    pool: PoolOption = Path("runs"),
    out: Annotated[
        Path | None,
        output_option(
            help="Folder of the tables and figures; default: "
            "runs/sweep-<task>-<method>-<names>-<hash>.",
        ),
    ] = None,
    jobs: JobsOption = None,
    shard: ShardOption = None,
    tensorboard: TensorBoardOption = False,
    settings: dict[str, Any],
) -> None:
    """Run a method over values of one parameter (a curve) or two (a heat map), with a table.

    For three parameters and more there is only the table.

    [bold]protofed sweep --task glyphs --method fpl --over tau=0.02,0.05,0.1[/bold]
    """
    from protofed.config import short_task
    from protofed.methods import method_class
    from protofed.studies.launch import adhoc

    task = task or "glyphs"
    at_least_one(seeds=seeds)
    grid: dict[str, list[Any]] = {}
    for name, values in map(parse_sweep, over):
        grid.setdefault(name, []).extend(values)
    own = method_class(method).name
    first = settings.pop("seed", 0)
    rows: dict[str, tuple[str, Mapping[str, Any]]] = {}
    if against is not None and method_class(against).name != own:
        rows[method_class(against).name] = (against, {})
    rows[own] = (method, assignments(set_))
    title, swept = f"{own} over {' and '.join(grid)}", [{"over": grid, "rows": [own]}]
    study = adhoc("sweep", title, task, rows, range(first, first + seeds), settings, swept)
    path = out or pool / f"sweep-{short_task(task)}-{own}-{'-'.join(grid)}-{study.hash}"
    run_study(study, path, pool, jobs, shard, tensorboard)


def run_study(
    study: Study,
    path: Path,
    pool: Path,
    jobs: int | None,
    shard: str | None,
    tensorboard: bool,
    selection: Selection | None = None,
    warning: str = "",
) -> None:
    """Run what the pool lacks, then write and print the tables; with ``shard`` only a part's runs.

    The study's folder is made before its runs: `protofed study table` can show what is there so
    far, and a folder that holds another study is an error now, not after hours.
    """
    from protofed.observers.progress import protocol_line
    from protofed.report.study_figures import write_figures
    from protofed.studies.execution import default_jobs, raise_failures, run_all
    from protofed.studies.folder import StudyFolder
    from protofed.studies.launch import folder_preview, prepare
    from protofed.studies.plan import Selection

    at_least_one(jobs=jobs)
    part, chosen = parse_shard(shard), selection or Selection()
    study, work = prepare(study, pool, selection=chosen, shard=part, tensorboard=tensorboard)
    folder = StudyFolder.create(path, study, pool) if part is None else None
    for line in dict.fromkeys(f"{job.config.task}, {protocol_line(job.config)}" for job in work):
        say(line)
    for line in folder_preview(work):
        say(line)
    if warning:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False)
    failed = run_all(work, jobs or default_jobs(work), console)
    made = folder.tables() if folder is not None else []
    if part is not None:
        console.print(
            f"part {part[0]} of {part[1]}: its runs are in [bold]{escape(str(pool))}[/bold]. When "
            "those of all parts are there, the same command without --shard writes the tables."
        )
    elif folder is not None and any(table.runs for table in made):
        names = folder.write_tables() + write_figures(folder, made)
        print_tables([t for t in folder.tables(chosen.tasks) if t.runs])
        console.print(
            f"{', '.join(names)} are in [bold]{escape(str(path))}[/bold], the runs in "
            f"[bold]{escape(str(pool))}[/bold]"
        )
    raise_failures(failed)
