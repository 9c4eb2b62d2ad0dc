"""The command line: ``protofed run``, ``compare``, ``methods``, ``tasks``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protofed.cli.data import data_app
from protofed.cli.deploy import deploy_app
from protofed.cli.options import (
    AugmentOption,
    AverageOption,
    BatchOption,
    ClientsOption,
    DataOption,
    DecayOption,
    DeviceOption,
    DirichletOption,
    EngineOption,
    EpochsOption,
    EveryOption,
    FlipOption,
    FollowOption,
    KeepOption,
    LeaveOutOption,
    LeftoverOption,
    LrOption,
    ModelOption,
    MomentumOption,
    NormOption,
    ParticipationOption,
    PrecisionOption,
    ProtocolOption,
    QuantityOption,
    RepairOption,
    RoundsOption,
    SamplesOption,
    SetOption,
    SizeOption,
    SkipBadOption,
    TaskOption,
    TestSplitOption,
    WidthOption,
    WorkersOption,
)
from protofed.cli.parse import (
    assignments,
    at_least_one,
    by_method,
    per_domain,
    print_outcome,
    print_table,
    value,
)
from protofed.cli.report import report
from protofed.cli.study import register
from protofed.errors import ProtofedError
from protofed.version import __version__

app = typer.Typer(
    name="protofed",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Federated learning when the clients' domains differ.\n\n"
    "Start with [bold]protofed compare --task glyphs --methods fedavg,fedproto,fpl[/bold]: "
    "three methods on a task that needs no download.",
)
console = Console()
app.add_typer(data_app)
app.add_typer(deploy_app)
register(app)
app.command()(report)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        console.print(f"protofed {__version__}")
        raise typer.Exit


@app.command()
def run(
    task: TaskOption = None,
    method: Annotated[
        str | None, typer.Option(help="A method's name, or path/to/file.py:Class.")
    ] = None,
    set_: SetOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of split, start and training.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file, e.g. another run's config.toml; options given here win."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; default: runs/<task>-<method>-...")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's checkpoint.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew in a folder that holds a run.")
    ] = False,
    protocol: ProtocolOption = None,
    rounds: RoundsOption = None,
    epochs: EpochsOption = None,
    batch: BatchOption = None,
    lr: LrOption = None,
    momentum: MomentumOption = None,
    weight_decay: DecayOption = None,
    model: ModelOption = None,
    width: WidthOption = None,
    norm: NormOption = None,
    clients: ClientsOption = None,
    samples: SamplesOption = None,
    leave_out: LeaveOutOption = None,
    dirichlet: DirichletOption = None,
    quantity: QuantityOption = None,
    leftover: LeftoverOption = None,
    repair: RepairOption = None,
    participation: ParticipationOption = None,
    average: AverageOption = None,
    precision: PrecisionOption = None,
    device: DeviceOption = None,
    engine: EngineOption = None,
    workers: WorkersOption = None,
    data: DataOption = None,
    image_size: SizeOption = None,
    flip: FlipOption = None,
    augment: AugmentOption = None,
    test_split: TestSplitOption = None,
    skip_bad: SkipBadOption = None,
    keep_rounds: KeepOption = None,
    checkpoint_every: EveryOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write every round for TensorBoard, live.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Record what each thread and the GPU do in the second round: a Chrome trace, "
            "trace.json.gz, in the run's folder.",
        ),
    ] = False,
) -> None:
    """Run one method on one task and keep everything in a folder.

    Without --config and options this is FedAvg on glyphs. Ctrl-C writes a checkpoint; the same
    command with --resume goes on from it and ends with the very same numbers.
    """
    from protofed.config import merged_config
    from protofed.observers.progress import RunProgress
    from protofed.runs.folder import begins_anew
    from protofed.runs.run import Observer, is_finished, load_run
    from protofed.runs.run import run as run_federation

    given = _given(locals())
    complete = merged_config(config, task, method, assignments(set_), given)
    folder = out or Path("runs") / complete.label
    if is_finished(folder, complete) and not overwrite:
        if profile:
            raise ProtofedError(
                f"'{folder}' already holds this run, complete: there is no round to record",
                "--overwrite runs it again, --out takes another folder",
            )
        if not quiet:
            console.print(f"{folder} already holds this run, complete:")
            _print_results([load_run(folder)])
        return
    if resume and not quiet and begins_anew(folder, complete):
        console.print(f"no checkpoint in {folder} to go on from: the run begins anew")
    observers: list[Observer] = [] if quiet else [RunProgress(console)]
    if tensorboard:
        from protofed.observers.tensorboard import TensorBoard

        observers.append(TensorBoard(folder))
    recorder = None
    if profile:
        from protofed.observers.profile import Profile

        recorder = Profile(folder)
        observers.append(recorder)
    result = run_federation(
        config=complete, out=folder, resume=resume, overwrite=overwrite, observers=observers
    )
    if not quiet:
        result_plot = folder / "curves.png"
        result_plot.write_bytes(result.plot())
        _print_results([result])
        console.print(f"model, rounds, curves.png and config.toml are in [bold]{folder}[/bold]")
        if recorder is not None:
            console.print(
                f"round {recorder.recorded} is recorded in [bold]{recorder.path}[/bold]: open it "
                "in a browser at ui.perfetto.dev or chrome://tracing",
                soft_wrap=True,
            )


@app.command()
def compare(
    task: TaskOption = None,
    methods: Annotated[
        str, typer.Option(help="Names separated by commas, or all; file.py:Class works too.")
    ] = "all",
    seeds: Annotated[int, typer.Option(help="Number of seeds, from --seed on.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="METHOD.NAME=VALUE", help="A method's hyper-parameter; repeatable."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; default: runs/compare-<task>.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time; default: one for each core.")
    ] = None,
    protocol: ProtocolOption = None,
    rounds: RoundsOption = None,
    epochs: EpochsOption = None,
    batch: BatchOption = None,
    lr: LrOption = None,
    momentum: MomentumOption = None,
    weight_decay: DecayOption = None,
    model: ModelOption = None,
    width: WidthOption = None,
    norm: NormOption = None,
    clients: ClientsOption = None,
    samples: SamplesOption = None,
    leave_out: LeaveOutOption = None,
    dirichlet: DirichletOption = None,
    quantity: QuantityOption = None,
    leftover: LeftoverOption = None,
    repair: RepairOption = None,
    participation: ParticipationOption = None,
    average: AverageOption = None,
    precision: PrecisionOption = None,
    device: DeviceOption = None,
    engine: EngineOption = None,
    workers: WorkersOption = None,
    data: DataOption = None,
    image_size: SizeOption = None,
    flip: FlipOption = None,
    augment: AugmentOption = None,
    test_split: TestSplitOption = None,
    skip_bad: SkipBadOption = None,
    keep_rounds: KeepOption = None,
    tensorboard: FollowOption = False,
) -> None:
    """Run several methods on the same clients and put them into one table and one figure.

    Runs that are complete in the folder are not done again; interrupted ones go on.

    [bold]--leave-out each[/bold] tests on domains that nobody trained on: for every domain a run
    without it, and one table with the accuracy on each unseen domain and their average.
    """
    from protofed.config import EACH, short_task
    from protofed.methods import METHODS, method_class
    from protofed.studies.compare import adhoc, run_study

    given = _given(locals())
    task = task or "glyphs"
    names = list(METHODS) if methods == "all" else [m.strip() for m in methods.split(",")]
    names = list(dict.fromkeys(names))
    called: dict[str, str] = {}
    for name in names:
        own = method_class(name).name
        if own in called:
            raise ProtofedError(
                f"{called[own]} and {name} are both named {own}",
                "give one of the classes another name: ClassVar[str]",
            )
        called[own] = name
    options = by_method(assignments(set_), called)
    at_least_one(seeds=seeds, jobs=jobs)
    table = {own: (name, options.get(name, {})) for own, name in called.items()}
    without = {None: "", EACH: "-unseen"}.get(leave_out, f"-without-{leave_out}")
    on = {None: "", EACH: ", unseen domains"}.get(leave_out, f" without {leave_out}")
    title = f"Methods on {task}{on}"
    study = adhoc("compare", title, task, table, range(seed, seed + seeds), given)
    folder = out or Path("runs") / f"compare-{short_task(task)}{without}"
    names, failed = run_study(study, folder, jobs, console, tensorboard=tensorboard)
    print_outcome(console, study, folder, names, failed)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method to show; or the word check.")] = None,
    target: Annotated[
        str | None, typer.Argument(help="After check: the method, e.g. file.py:Class.")
    ] = None,
    task: Annotated[
        str, typer.Option(help="Show the defaults that the paper gives on this task.")
    ] = "",
) -> None:
    """List the methods, show one (protofed methods fpl), or check one.

    [bold]protofed methods check file.py:Class[/bold] runs the whole battery of tests on a method:
    gradients, weights at 0, a missing class, one client, resume, serialization, capture-safety.
    """
    from protofed.methods import METHODS

    if name == "check":
        if target is None:
            raise ProtofedError("check what?", "protofed methods check path/to/file.py:Class")
        _check(target)
    elif target is not None:
        raise ProtofedError(f"too many names: {name} {target}", "protofed methods fpl")
    elif name is not None:
        _show_method(name, task)
    else:
        table = Table("method", "paper", "what travels", box=None, header_style="bold")
        for cls in METHODS.values():
            table.add_row(cls.name, cls.paper, str(cls().slots))
        console.print(table)
        console.print("[dim]protofed methods NAME shows hyper-parameters and deviations.[/dim]")


@app.command()
def tasks() -> None:
    """List the tasks: domains, classes, images, and the clients they are split into.

    Images are counted as published; protofed data show TASK counts those that are there.
    """
    from protofed.data import TASKS, load_task, outline
    from protofed.data.find import DataMissing, find
    from protofed.data.specs import SPECS
    from protofed.protocols import TASK_PROTOCOL

    for name in TASKS:
        spec = SPECS.get(name)
        task = outline(name, spec.domains) if spec else load_task(name)
        console.print(
            f"[bold]{name}[/bold]: {len(task.classes)} classes, {task.image_size}×"
            f"{task.image_size} pixels, protocol {TASK_PROTOCOL[name]}. {escape(task.note)}"
        )
        table = Table("domain", "training", "test", "clients", "samples each", box=None)
        for domain, images in task.domains.items():
            counts = spec.official[domain] if spec else (len(images.train), len(images.test))
            row = (*counts, task.clients[domain])
            table.add_row(domain, *map(str, row), f"{task.samples[domain]:g}")
        console.print(table)
        if spec:
            try:
                where = f"files: {find(spec)[0]}"
            except DataMissing:
                where = f"not found, protofed data fetch {name}"
            console.print(f"[dim]{escape(where)}[/dim]", highlight=False, soft_wrap=True)
    console.print("[bold]folder:PATH[/bold]: any tree domain/class/image of your own.")


def main() -> None:
    """The entry point: errors are one line, with exit code 2."""
    try:
        app()
    except ProtofedError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == 130:  # typer's word for Ctrl-C
            text = "stopped; what is complete is kept: the same command goes on (run: --resume)"
            Console(stderr=True).print(text)
        raise


# ---- helpers -----------------------------------------------------------------------------------

_SETTINGS = (
    "seed", "protocol", "rounds", "epochs", "batch", "lr", "momentum", "weight_decay",
    "width", "norm", "leave_out", "dirichlet", "quantity", "leftover", "repair", "participation",
    "average", "precision", "device", "engine", "workers", "checkpoint_every",
    "data", "image_size", "flip", "augment", "test_split", "skip_bad",
)  # fmt: skip


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were typed."""
    given = {k: arguments[k] for k in _SETTINGS if arguments.get(k) is not None}
    for name in ("clients", "samples", "model"):
        if arguments[name] is not None:
            given[name] = per_domain(name, arguments[name])
    if (rounds := arguments["keep_rounds"]) is not None:
        given["keep_rounds"] = [value(r) for r in rounds.split(",")] if rounds != "none" else []
    if "seeds" in arguments:
        given.pop("seed", None)
    return given


def _print_results(results: Any) -> None:
    from protofed.studies.tables import caption, grid, rows

    print_table(console, *grid(rows(results)), caption(results))


def _show_method(name: str, task: str) -> None:
    from protofed.data import TASKS
    from protofed.errors import unknown
    from protofed.methods import method_class

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
    default = f"on {task}" if task else "default"
    table = Table("hyper-parameter", "symbol", default, "meaning", box=None, header_style="bold")
    defaults = cls.defaults(task)
    for key, hyper in cls.hypers().items():
        meaning = hyper.meaning
        if hyper.choices:
            meaning += f" [{' | '.join(hyper.choices)}]"
        if hyper.per_task and not task:
            meaning += f" ({', '.join(f'{t}: {v}' for t, v in hyper.per_task.items())})"
        table.add_row(key, hyper.symbol, str(defaults[key]), escape(meaning))
    console.print()
    console.print(table)


def _check(target: str) -> None:
    from protofed.methods import method_class
    from protofed.testing.checks import run_checks

    verdicts = run_checks(method_class(target), lambda v: console.print(v.line(), highlight=False))
    failed = [v for v in verdicts if v.failed]
    if failed:
        raise ProtofedError(f"{len(failed)} of {len(verdicts)} checks failed for {target}")
    apart = [v for v in verdicts if v.status == "skipped"]
    told = f" ({len(apart)} does not apply)" if len(apart) == 1 else ""
    told = f" ({len(apart)} do not apply)" if len(apart) > 1 else told
    passed = len(verdicts) - len(apart)
    console.print(f"[green]all {passed} checks passed[/green]{told} for {escape(target)}")
