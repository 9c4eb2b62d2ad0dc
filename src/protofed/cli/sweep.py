"""``protofed sweep``: a method over values of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli.compare import run_study
from protofed.cli.options import (
    RUNS_PANEL,
    JobsOption,
    PoolOption,
    SeedsOption,
    SetOption,
    ShardOption,
    TaskOption,
    TensorBoardOption,
    with_settings,
)
from protofed.cli.parse import assignments, at_least_one, parse_shard, parse_sweep


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
        typer.Option(
            rich_help_panel=RUNS_PANEL,
            help="Folder of the tables and figures; default: "
            "runs/sweep-<task>-<method>-<names>-<hash>.",
        ),
    ] = None,
    jobs: JobsOption = None,
    shard: ShardOption = None,
    tensorboard: TensorBoardOption = False,
    settings: dict[str, Any],
) -> None:
    """Run a method over values of a parameter (a line), or of two (a heat map), with a table.

    For three parameters and more there is only the table.

    [bold]protofed sweep --task glyphs --method fpl --over tau=0.02,0.05,0.1[/bold]
    """
    from protofed.config import short_task
    from protofed.methods import method_class
    from protofed.studies.launch import adhoc

    task = task or "glyphs"
    at_least_one(seeds=seeds, jobs=jobs)
    part = parse_shard(shard)
    grid: dict[str, list[Any]] = {}
    for name, values in map(parse_sweep, over):
        grid.setdefault(name, []).extend(values)
    own = method_class(method).name
    first = settings.pop("seed", 0)
    rows: dict[str, tuple[str, Mapping[str, Any]]] = {}
    if against is not None and method_class(against).name != own:
        rows[method_class(against).name] = (against, {})
    rows[own] = (method, assignments(set_))
    title = f"{own} over {' and '.join(grid)}"
    swept = [{"over": grid, "rows": [own]}]
    chosen = range(first, first + seeds)
    study = adhoc("sweep", title, task, rows, chosen, settings, swept)
    path = out or pool / f"sweep-{short_task(task)}-{own}-{'-'.join(grid)}-{study.hash}"
    run_study(study, path, pool, jobs=jobs, shard=part, tensorboard=tensorboard)
