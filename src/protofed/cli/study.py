"""``protofed study``: the papers' tables and figures, and studies of your own."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from protofed.cli.compare import run_and_print
from protofed.cli.groups import HELP, CommandGroup
from protofed.cli.options import (
    Execution,
    ImagesOption,
    PoolOption,
    SetOfMethodOption,
    TrustOption,
    output_option,
    with_execution,
    with_settings,
)
from protofed.cli.output import console, print_table, print_tables, status
from protofed.cli.parse import assignments, at_least_one, by_method, words
from protofed.errors import ProtofedError

if TYPE_CHECKING:
    from protofed.studies.definition import Study
    from protofed.studies.folder import StudyFolder
    from protofed.studies.launch import Asked

study_app = typer.Typer(
    name="study",
    cls=CommandGroup,
    no_args_is_help=True,
    context_settings=HELP,
    help="Reproduce the papers' tables and figures, or run studies of your own.",
)

NameArgument = Annotated[str, typer.Argument(help="A built-in study, or a TOML file of your own.")]
FolderArgument = Annotated[
    str, typer.Argument(help="The study's folder, or its name if the folder is in the pool.")
]
TasksOption = Annotated[
    str | None, typer.Option("--tasks", metavar="T,...", help="Only these tasks of the study.")
]


@study_app.command("list", context_settings=HELP)
def list_() -> None:
    """List the built-in studies, and what is missing to run them."""
    from protofed.studies.definition import builtin, load
    from protofed.studies.plan import plan

    table = Table("study", "what it shows", "tasks", "runs", box=None, header_style="bold")
    for name in builtin():
        study = load(name)
        lacks = study.missing or _lacking_rows(study)
        what = study.title.partition(": ")[2] or study.title  # the name says the rest
        title = escape(what) + "".join(f"\n[yellow]{escape(w)}[/]" for w in lacks)
        runs = len({run.config.hash for run in plan(study)})
        table.add_row(name, title, ", ".join(study.tasks), str(runs))
    console.print(table)
    console.print(
        "[dim]protofed study show NAME: its rows, the paper's numbers, notes; "
        "protofed study run NAME --on glyphs --rounds 3: a small trial.[/dim]"
    )


@study_app.command("show", context_settings=HELP)
def show_study(name: NameArgument, trust_code: TrustOption = False) -> None:
    """Show a study: rows, settings, the numbers that the paper prints, and notes."""
    from protofed.studies.definition import load
    from protofed.studies.plan import columns, plan, study_tasks
    from protofed.studies.tables import TableRow, printed_grid

    study = load(name)
    console.print(f"[bold]{escape(study.title)}[/bold]\n{escape(study.paper)}", highlight=False)
    for text in study.missing:
        console.print(f"[yellow]it cannot run: {escape(text)}[/]")
    table = Table("row", "method", "hyper-parameters and settings", "", box=None)
    for line in study.rows.values():
        given = {**line.options, **line.settings}
        text = ", ".join(f"{k}={v}" for k, v in given.items())
        table.add_row(escape(line.label), line.method, escape(text), f"[yellow]{line.missing}[/]")
    console.print(table)
    for swept in study.sweeps:
        over = "; ".join(f"{k} = {', '.join(map(str, v))}" for k, v in swept.over.items())
        few = swept.generators or swept.listed
        some = f"; {len(swept.points())} of the settings" if few else ""
        console.print(escape(f"swept: {over} (of {', '.join(swept.rows)}{some})"), highlight=False)
    runs = len({run.config.hash for run in plan(study)})
    console.print(f"seeds {_listed(study.seeds)}; {runs} runs in all", highlight=False)
    shared = ", ".join(f"{k}={v}" for k, v in study.settings.items())
    for task in study_tasks(study):
        own = ", ".join(f"{k}={v}" for k, v in task.settings.items())
        console.print(
            f"\n[bold]{escape(task.name)}[/bold]  {escape(', '.join(filter(None, (shared, own))))}",
            highlight=False,
        )
        if task.rows:
            console.print(escape(f"rows: {', '.join(task.rows)}"), highlight=False)
        if task.seeds:
            console.print(f"seeds {_listed(task.seeds)}", highlight=False)
        printed = study.printed.get(task.name, {}).items()
        rows = [TableRow(label, {}, paper=p.values, paper_std=p.std) for label, p in printed]
        if rows:
            shown = printed_grid(rows, columns(study, task), study.baseline or "")
            print_table(*shown, "as printed in the paper")
        for note in (*task.notes, *study.notes):
            console.print(f"[dim]note: {escape(note)}[/dim]", highlight=False)


@study_app.command("run", context_settings=HELP)
@with_settings(exclude=("seed",))
@with_execution
def run_(
    *,
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Built-in studies, or TOML files of your own."),
    ],
    tasks: TasksOption = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="M,...", help="Only these rows, by their labels or their methods."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Number of seeds: the study's own first, then the numbers after them."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="TASK", help="A task to use instead of the study's: --on glyphs."
        ),
    ] = None,
    trust_code: TrustOption = False,
    set_: SetOfMethodOption = None,
    out: Annotated[
        Path | None,
        output_option(
            help="Folder for the tables and figures of one study; default: runs/NAME, with a hash "
            "if options change the study.",
        ),
    ] = None,
    execution: Execution,
    settings: dict[str, Any],
) -> None:
    """Run studies, or what is left of them, and write their tables and figures.

    Runs that are already in the pool, whichever command made them, are not repeated; interrupted
    ones resume. With several studies, the next one starts while the last runs of the one before
    are still under way. Settings given here apply to all runs.
    """
    at_least_one(seeds=seeds)
    if out is not None and len(names) > 1:
        raise ProtofedError("--out is the folder of one study", "leave it out, or run one study")
    asked = [
        _asked(name, tasks, methods, seeds, on, settings, assignments(set_))
        for name in dict.fromkeys(names)
    ]
    run_and_print(asked, execution, out)
    for each in asked:
        if each.study.kind == "tsne" and execution.shard is None:
            path = out or execution.pool / each.name
            console.print(f"the t-SNE figures: protofed report {path} -o report.html")


def _asked(
    name: str,
    tasks: str | None,
    methods: str | None,
    seeds: int | None,
    on: str | None,
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Asked:
    """A study as the command line changes it, and the part of it that is meant."""
    from protofed.studies.definition import load
    from protofed.studies.launch import Asked
    from protofed.studies.plan import Selection, plan

    study = load(name)
    known = {row.method: row.method for row in study.rows.values() if not row.missing}
    known |= {row.make().name: row.method for row in study.rows.values() if not row.missing}
    study = study.overridden(on, settings, by_method(options, known))
    chosen = Selection(words(tasks), words(methods, [line.label for line in study.lines]))
    folder = _folder_name(study)
    if seeds is not None:
        own = {run.task for run in plan(study, chosen)}
        study = study.with_seeds(
            {
                name: study.first_seeds(seeds, task)
                for name, task in study.tasks.items()
                if on or name in own
            }
        )
    return Asked(study, folder, selection=chosen)


def _folder_name(study: Study) -> str:
    """The study's name, its other task, and a hash if settings or hyper-parameters are changed."""
    from protofed.config import short_task

    on = study.override.get("on")
    place = f"-on-{short_task(on)}" if on else ""
    return study.name + place + (f"-{study.hash}" if study.is_changed else "")


@study_app.command("table", context_settings=HELP)
def table_(
    folder: FolderArgument,
    form: Annotated[
        str, typer.Option("--format", help="terminal, markdown, csv or latex.")
    ] = "terminal",
    tasks: TasksOption = None,
    pool: PoolOption = Path("runs"),
    target: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="Show the rounds and MB needed to reach this accuracy; default: the baseline's.",
        ),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Also write the tables and figures into the folder.")
    ] = False,
    trust_code: TrustOption = False,
) -> None:
    """Print a study's tables from the runs in the pool so far.

    If a built-in study or a TOML file has no folder yet, its runs in the pool are shown.
    """
    from protofed.config import require_known
    from protofed.report.study_figures import write_figures
    from protofed.studies.folder import FORMATS, StudyFolder, to_text

    require_known("format", [form], ("terminal", *FORMATS))
    found = _find_study(folder, pool)
    if target is not None:
        found = replace(found, study=found.study.with_target(target))
    made = found.tables(words(tasks))
    if form == "terminal":
        print_tables(made)
    else:
        print(to_text(found.study, made, form), end="")
    if write:
        if not found.pool.packed:
            found = StudyFolder.create(found.path, found.study, found.pool.path)
        names = found.write_tables() + write_figures(found, found.tables())
        console.print(f"{', '.join(names)} are in [bold]{escape(str(found.path))}[/bold]")


@study_app.command("pack", context_settings=HELP)
def pack_(
    folder: FolderArgument,
    to: Annotated[Path, typer.Option("--to", help="The new folder, e.g. results/NAME.")],
    pool: PoolOption = Path("runs"),
    images: ImagesOption = 500,
    trust_code: TrustOption = False,
) -> None:
    """Pack a study into a few small files: its definition, runs, table and figures.

    Models, checkpoints and images stay behind. The tables and the report, including what it shows
    of the models, can be made again from the packed study.
    """
    from protofed.report.pack import pack
    from protofed.studies.folder import StudyFolder

    path = _changed_path(_study_path(folder, pool))
    with ExitStack() as stack:
        if not (path / "study.toml").is_file():  # the pool may still have its runs
            found = _find_study(folder, pool)
            # a folder in the pool would stand for this study from then on, whatever it becomes
            path = Path(stack.enter_context(TemporaryDirectory())) / path.name
            StudyFolder.create(path, found.study, pool.resolve())
        tell = stack.enter_context(status())
        packed = pack(path, to, images, tell)
    console.print(
        f"{packed.runs} runs with their tables and figures are in [bold]{escape(str(to))}[/bold], "
        f"{packed.size / 1e6:.1f} MB in all; protofed report {escape(str(to))} shows them",
        highlight=False,
        soft_wrap=True,
    )


@study_app.command("unpack", context_settings=HELP)
def unpack_(
    folders: Annotated[list[Path], typer.Argument(help="Packed studies: results/NAME ...")],
    pool: PoolOption = Path("runs"),
) -> None:
    """Put the runs of packed studies into the pool, to continue a study elsewhere.

    They have no models. Runs with other numerics are left out: they would mix with new ones.
    """
    from protofed.runs.pool import PACKED, unpack

    for folder in folders:
        if not (folder / PACKED).is_file():
            raise ProtofedError(f"'{folder}' holds no packed study", "write results/NAME")
    for folder in folders:
        done = unpack(folder, pool)
        parts = [f"{done.taken} runs are in [bold]{escape(str(pool))}[/bold] now"]
        parts += [f"{done.known} were there already"] * bool(done.known)
        parts += [f"{done.other} with other numerics were left out"] * bool(done.other)
        console.print(f"{escape(str(folder))}: {', '.join(parts)}", highlight=False, soft_wrap=True)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _study_path(name: str, pool: Path) -> Path:
    return Path(name) if Path(name).is_dir() else pool / Path(name.removesuffix(".toml")).name


def _changed_path(path: Path) -> Path:
    """The study's folder, or the only one of that name with options: NAME-<hash>."""
    if (path / "study.toml").is_file():
        return path
    found = [
        file.parent
        for file in path.parent.glob(f"{glob.escape(path.name)}-*/study.toml")
        if re.fullmatch("-[0-9a-f]{10}", file.parent.name.removeprefix(path.name))
    ]
    return found[0] if len(found) == 1 else path


def _find_study(name: str, pool: Path) -> StudyFolder:
    """The study in a folder; if it has no folder, what the pool holds of it."""
    from protofed.runs.pool import Pool
    from protofed.studies.definition import builtin, load
    from protofed.studies.folder import StudyFolder

    path = _study_path(name, pool)
    if not (path / "study.toml").is_file() and (name in builtin() or name.endswith(".toml")):
        found = StudyFolder(path, load(name), Pool(pool))
        if any(run is not None for run in found.runs.values()):
            return found
    return StudyFolder.open(path)


def _lacking_rows(study: Study) -> list[str]:
    found: dict[str, list[str]] = {}
    for label, why in study.missing_rows.items():
        found.setdefault(why, []).append(label)
    return [f"{', '.join(labels)}: {why}" for why, labels in found.items()]
