"""``protofed compare``: several methods on the same clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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

    Runs that the pool already has are not done again; interrupted ones resume.

    [bold]--leave-out each[/bold] tests on domains that nobody trained on: for every domain a run
    without it, and one table with the accuracy on each unseen domain and their average.
    """
    from protofed.config import EACH, short_task
    from protofed.methods import METHODS, method_class
    from protofed.studies.launch import adhoc, run_study

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
    failed = run_study(study, pool, console, jobs=jobs, shard=part, tensorboard=tensorboard)
    finish(path, study, pool, failed, shard)


def finish(path: Path, study: Any, pool: Path, failed: Any, shard: str | None) -> None:
    """Tables and figures of a study whose runs are done; none where this is only a part of it."""
    from protofed.studies.execution import raise_failures
    from protofed.studies.folder import StudyFolder

    if shard is None:
        print_outcome(StudyFolder.create(path, study, pool), failed)
        return
    console.print(f"part {shard} is done; the runs are in [bold]{pool}[/bold]")
    raise_failures(failed)
