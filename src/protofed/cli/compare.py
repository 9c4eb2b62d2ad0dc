"""``protofed compare``: several methods on the same clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from protofed.cli.options import (
    RUNS_PANEL,
    JobsOption,
    PoolOption,
    SeedsOption,
    SetOfMethodOption,
    ShardOption,
    TaskOption,
    TensorBoardOption,
    with_settings,
)
from protofed.cli.output import console, print_outcome
from protofed.cli.parse import assignments, at_least_one, by_method, parse_shard, words
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
        typer.Option(
            rich_help_panel=RUNS_PANEL,
            help="Folder of the tables and figures; default: runs/compare-<task>-<hash>.",
        ),
    ] = None,
    jobs: JobsOption = None,
    shard: ShardOption = None,
    tensorboard: TensorBoardOption = False,
    settings: dict[str, Any],
) -> None:
    """Run several methods on the same clients and put them into one table and one figure.

    Runs that the pool (--runs) already has are not repeated; interrupted ones resume.

    [bold]--leave-out each[/bold] tests on domains that no client has: one run without each
    domain, and one table with the accuracy on each unseen domain and their average.
    """
    from protofed.config import EACH, short_task
    from protofed.methods import METHODS, method_class
    from protofed.studies.launch import adhoc

    task = task or "glyphs"
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
    at_least_one(seeds=seeds, jobs=jobs)
    part = parse_shard(shard)
    first = settings.pop("seed", 0)
    rows = {own: (name, options.get(name, {})) for own, name in references.items()}
    left_out = settings.get("leave_out")
    on = {None: "", EACH: ", unseen domains"}.get(left_out, f" without {left_out}")
    title = f"Methods on {task}{on}"
    study = adhoc("compare", title, task, rows, range(first, first + seeds), settings)
    path = out or pool / f"compare-{short_task(task)}-{study.hash}"
    run_study(study, path, pool, jobs=jobs, shard=part, tensorboard=tensorboard)


def run_study(
    study: Study,
    path: Path,
    pool: Path,
    *,
    jobs: int | None,
    shard: tuple[int, int] | None,
    selection: Selection | None = None,
    tensorboard: bool = False,
) -> None:
    """Run what the pool lacks, then write and print the tables; with ``shard`` only a part's runs.

    The study's folder is made before its runs: `protofed study table` can show what is there so
    far, and a folder that holds another study is an error now, not after hours.
    """
    from protofed.studies.execution import default_jobs, raise_failures, run_all
    from protofed.studies.folder import StudyFolder
    from protofed.studies.launch import prepare
    from protofed.studies.plan import Selection

    chosen = selection or Selection()
    study, work = prepare(study, pool, selection=chosen, shard=shard, tensorboard=tensorboard)
    folder = StudyFolder.create(path, study, pool) if shard is None else None
    failed = run_all(work, jobs or default_jobs(work), console)
    if folder is not None:
        print_outcome(folder, failed, chosen.tasks)
        return
    assert shard is not None
    console.print(
        f"part {shard[0]} of {shard[1]}: its runs are in [bold]{escape(str(pool))}[/bold]. When "
        "those of all parts are there, the same command without --shard writes the tables."
    )
    raise_failures(failed)
