"""``protofed study``, ``sweep`` and ``show``: many runs, and a look at one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protofed.cli.options import (
    DataOption,
    DeviceOption,
    FollowOption,
    ImagesOption,
    PrecisionOption,
    RoundsOption,
    TaskOption,
)
from protofed.cli.parse import at_least_one, print_outcome, print_study, settings, told, value
from protofed.errors import ProtofedError

if TYPE_CHECKING:
    from protofed.studies.definition import Study

console = Console()
study_app = typer.Typer(
    name="study",
    no_args_is_help=True,
    help="The papers' tables and figures, and studies of your own: list, show, run, table.",
)

NameArgument = Annotated[str, typer.Argument(help="A built-in study, or a TOML file of your own.")]
OutOption = Annotated[Path | None, typer.Option(help="The study's folder; default: runs/NAME.")]
JobsOption = Annotated[
    int | None,
    typer.Option(help="Runs at a time; default: one for each core, or two on a GPU with room."),
]
TasksOption = Annotated[
    str | None, typer.Option(metavar="T,...", help="Only these tasks of the study.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this file to the command line."""
    app.add_typer(study_app)
    app.command()(sweep)
    app.command()(show)


@study_app.command("list")
def list_() -> None:
    """List the built-in studies, and what this version lacks to run them."""
    from protofed.studies.definition import builtin, load

    table = Table("study", "what it shows", "tasks", "runs", box=None, header_style="bold")
    for name in builtin():
        study = load(name)
        lacks = [*study.missing, *_lacking_rows(study)]
        what = study.title.partition(": ")[2] or study.title  # its name says the rest
        title = escape(what) + "".join(f"\n[yellow]{escape(w)}[/]" for w in lacks)
        table.add_row(name, title, ", ".join(study.tasks), str(_runs(study)))
    console.print(table)
    console.print(
        "[dim]protofed study show NAME: its rows, the paper's numbers, what to know; "
        "protofed study run NAME --on glyphs --rounds 3: try it small.[/dim]"
    )


@study_app.command("show")
def show_study(name: NameArgument) -> None:
    """Show a study: rows, settings, the numbers the paper prints, and what to know about them."""
    from protofed.cli.parse import print_table
    from protofed.studies.definition import load
    from protofed.studies.folder import TaskTable
    from protofed.studies.plan import columns, study_tasks
    from protofed.studies.tables import printed_grid, row

    study = load(name)
    console.print(f"[bold]{escape(study.title)}[/bold]\n{escape(study.paper)}", highlight=False)
    for text in study.missing:
        console.print(f"[yellow]it cannot run: {escape(text)}[/]")
    table = Table("row", "method", "hyper-parameters and settings", "", box=None)
    for line in study.rows.values():
        given = {**line.options, **line.settings}
        words = ", ".join(f"{k}={v}" for k, v in given.items())
        table.add_row(escape(line.label), line.method, escape(words), f"[yellow]{line.missing}[/]")
    console.print(table)
    for swept in study.sweeps:
        over = "; ".join(f"{k} = {', '.join(map(str, v))}" for k, v in swept.over.items())
        console.print(escape(f"swept: {over} (of {', '.join(swept.rows)})"), highlight=False)
    seeds = ", ".join(map(str, study.seeds))
    console.print(f"seeds {seeds}; {_runs(study)} runs in all", highlight=False)
    shared = ", ".join(f"{k}={v}" for k, v in study.settings.items())
    for task in study_tasks(study):
        own = ", ".join(f"{k}={v}" for k, v in task.settings.items())
        console.print(
            f"\n[bold]{escape(task.name)}[/bold]  {escape(', '.join(filter(None, (shared, own))))}",
            highlight=False,
        )
        printed = study.printed.get(task.name, {})
        lines = [
            row(label, {}, {}, paper=p.values, paper_std=p.std) for label, p in printed.items()
        ]
        if lines:
            paper = TaskTable(task.name, columns(study, task), lines, study.baseline or "", "", ())
            print_table(console, *printed_grid(*paper.grid()), "printed by the paper")
        for note in task.notes:
            console.print(f"[dim]note: {escape(note)}[/dim]", highlight=False)
    for note in study.notes:
        console.print(f"[dim]note: {escape(note)}[/dim]", highlight=False)


@study_app.command("run")
def run_(
    name: NameArgument,
    tasks: TasksOption = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="M,...", help="Only these rows, by their labels or their methods."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds, from 0 on.")] = None,
    rounds: RoundsOption = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="TASK", help="Another task in place of the study's: --on glyphs."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A setting for all runs, e.g. epochs=2; repeatable."
        ),
    ] = None,
    out: OutOption = None,
    jobs: JobsOption = None,
    data: DataOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = None,
    tensorboard: FollowOption = False,
) -> None:
    """Run a study, or what is left of it, and write its tables and figures.

    Runs that are complete, here or in the folder of a study beside this one, are not done again;
    interrupted ones go on. Several processes or machines may run the same study in the same
    folder: no run is done twice.
    """
    from dataclasses import replace

    from protofed.studies.compare import outside, run_study
    from protofed.studies.definition import load
    from protofed.studies.folder import with_seeds_of
    from protofed.studies.plan import Selection

    at_least_one(seeds=seeds, jobs=jobs)
    study = load(name)
    given = {"rounds": rounds, "device": device, "precision": precision, "data": data}
    changed = settings(set_) | {k: v for k, v in given.items() if v is not None}
    if on is not None or changed:
        study = study.overridden(on, changed)
    now = tuple(range(seeds)) if seeds is not None else study.seeds
    folder = out or _folder(study)
    study = with_seeds_of(folder, replace(study, seeds=now, raw={**study.raw, "seeds": list(now)}))
    chosen = Selection(_names(tasks), _names(methods, [n.label for n in study.lines]), now)
    if others := outside(study, folder):
        console.print(
            f"[yellow]{others} finished runs in {escape(str(folder))} were asked for with other "
            "settings: they stay, but are not in these tables[/yellow] (give the same options, or "
            "another --out)",
            highlight=False,
            soft_wrap=True,
        )
    names, failed = run_study(study, folder, jobs, console, chosen, tensorboard)
    print_outcome(console, study, folder, names, failed, chosen.tasks)
    if study.kind == "tsne":
        console.print(f"the t-SNE figures: protofed report {folder} -o report.html")


@study_app.command("table")
def table_(
    name: Annotated[str, typer.Argument(help="The study; with --out only its folder counts.")],
    out: OutOption = None,
    form: Annotated[
        str, typer.Option("--format", help="terminal, markdown, csv or latex.")
    ] = "terminal",
    tasks: TasksOption = None,
) -> None:
    """Print a study's tables from what its folder holds by now; what is missing is shown as —."""
    from protofed.errors import unknown
    from protofed.studies.folder import make_tables, open_study, to_text
    from protofed.studies.render import FORMATS

    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    folder = out or _study_folder(name)
    study = open_study(folder)
    made = make_tables(study, folder, _names(tasks))
    _tell_outside(study, folder)
    if form == "terminal":
        print_study(console, study, made)
    else:
        print(to_text(study, made, form), end="")


@study_app.command("pack")
def pack_(
    name: Annotated[str, typer.Argument(help="The study; with --out only its folder counts.")],
    to: Annotated[Path, typer.Option("--to", help="The new folder, e.g. results/NAME.")],
    out: OutOption = None,
    images: ImagesOption = 500,
) -> None:
    """Copy a study to keep it: configurations, summaries, compressed rounds, tables, report.

    Models, checkpoints and images stay behind. The tables and the report, with what it shows of
    the models, can be made again from the copy.
    """
    from protofed.studies.folder import open_study
    from protofed.studies.pack import pack

    folder = out or _study_folder(name)
    with told(console) as tell:
        packed = pack(folder, to, images, tell)
    _tell_outside(open_study(folder), folder)
    console.print(
        f"{packed.runs} runs, their tables, figures and report.html "
        f"({packed.report / 1e6:.1f} MB) are in [bold]{escape(str(to))}[/bold], "
        f"{packed.size / 1e6:.1f} MB in all",
        highlight=False,
        soft_wrap=True,
    )


def sweep(
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
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 0 on.")] = 1,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A hyper-parameter of the method, or else a setting of all runs; repeatable.",
        ),
    ] = None,
    rounds: RoundsOption = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder; default: runs/sweep-<task>-<method>-<names>.")
    ] = None,
    jobs: JobsOption = None,
    data: DataOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = None,
    tensorboard: FollowOption = False,
) -> None:
    """Run a method over values of a parameter (a line), or of two (a heat map), with a table.

    Of three parameters and more there is the table alone.

    [bold]protofed sweep --task glyphs --method fpl --over tau=0.02,0.05,0.1[/bold]
    """
    from protofed.config import short_task
    from protofed.methods import method_class
    from protofed.studies.compare import adhoc, run_study

    task = task or "glyphs"
    at_least_one(seeds=seeds, jobs=jobs)
    grid: dict[str, list[Any]] = {}
    for name, values in map(_values, over):
        grid.setdefault(name, []).extend(values)
    own = method_class(method).name
    typed = settings(set_)
    options = {k: v for k, v in typed.items() if k in method_class(method).hypers()}
    given = {"rounds": rounds, "device": device, "precision": precision, "data": data}
    shared = {k: v for k, v in typed.items() if k not in options}
    shared |= {k: v for k, v in given.items() if v is not None}
    rows: dict[str, tuple[str, Mapping[str, Any]]] = {}
    if against is not None and method_class(against).name != own:
        rows[method_class(against).name] = (against, {})
    rows[own] = (method, options)
    title = f"{own} over {' and '.join(grid)}"
    swept = [{"over": grid, "rows": [own]}]
    study = adhoc("sweep", title, task, rows, range(seeds), shared, swept)
    folder = out or Path("runs") / f"sweep-{short_task(task)}-{own}-{'-'.join(grid)}"
    names, failed = run_study(study, folder, jobs, console, tensorboard=tensorboard)
    print_outcome(console, study, folder, names, failed)


def show(
    run: Annotated[Path, typer.Argument(help="A run's folder, finished or not.")],
) -> None:
    """Print a run's summary, with the course of every domain's accuracy as a sparkline."""
    from protofed.studies.show import lines

    for text in lines(run):
        console.print(text, highlight=False, soft_wrap=True)


def _values(text: str) -> tuple[str, list[Any]]:
    name, equals, words = text.partition("=")
    found = [value(w.strip()) for w in words.split(",") if w.strip()]
    if not equals or not found:
        raise ProtofedError(f"cannot read --over '{text}'", "write --over tau=0.02,0.05")
    return name.strip(), found


def _names(text: str | None, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Names separated by commas; of the known ones some have commas of their own."""
    parts = [n.strip() for n in (text or "").split(",") if n.strip()]
    found = []
    while parts:
        joined = ((end, ", ".join(parts[:end])) for end in range(len(parts), 0, -1))
        end, name = next(((e, n) for e, n in joined if n in known), (1, parts[0]))
        found.append(name)
        parts = parts[end:]
    return tuple(found)


def _tell_outside(study: Study, folder: Path) -> None:
    """Say on stderr that runs are left out: a table may be read by a program."""
    from protofed.studies.compare import outside

    if others := outside(study, folder):
        Console(stderr=True).print(
            f"[yellow]{others} finished runs in {escape(str(folder))} are left out:[/yellow] they "
            "were asked for with other settings, or a method's file has changed since",
            highlight=False,
            soft_wrap=True,
        )


def _study_folder(name: str) -> Path:
    return Path(name) if Path(name).is_dir() else Path("runs") / Path(name).stem


def _folder(study: Study) -> Path:
    on = study.override.get("on")
    return Path("runs") / (f"{study.name}-on-{on.replace(':', '-').replace('/', '-')}" if on
                           else study.name)  # fmt: skip


def _lacking_rows(study: Study) -> list[str]:
    """What rows need, said once for each method."""
    if study.missing:
        return []
    found: dict[str, list[str]] = {}
    for label, why in study.missing_rows.items():
        found.setdefault(why, []).append(label)
    return [f"{', '.join(labels)}: {why}" for why, labels in found.items()]


def _runs(study: Study) -> int:
    from protofed.data import DataMissing
    from protofed.studies.plan import cells

    try:
        return len({cell.key for cell in cells(study)})
    except DataMissing:
        return 0
