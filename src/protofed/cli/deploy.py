"""The command line's ``protofed deploy``: a federation between machines, on Flower."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofed.cli.options import (
    AugmentOption,
    AverageOption,
    BatchOption,
    DecayOption,
    EpochsOption,
    FlipOption,
    LrOption,
    ModelOption,
    MomentumOption,
    NormOption,
    ParticipationOption,
    PrecisionOption,
    ProtocolOption,
    RoundsOption,
    SamplesOption,
    SetOption,
    SkipBadOption,
    WidthOption,
)
from protofed.errors import ProtofedError

deploy_app = typer.Typer(
    name="deploy",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Run a federation across real machines (Flower, TLS, authenticated sites).\n\n"
    "[bold]deploy init DIR --sites a,b,c[/bold] writes everything; DIR/README.md goes on.",
)
console = Console()

DirOption = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="The folder that deploy init wrote.")
]


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _need_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise ProtofedError("protofed deploy needs Flower", "pip install 'protofed[flower]'")


def _words(text: str | None) -> list[str]:
    return [w.strip() for w in text.split(",") if w.strip()] if text else []


@deploy_app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    sites: Annotated[str, typer.Option(help="The sites' names: a,b,c.")],
    classes: Annotated[
        str | None, typer.Option(help="Names of the class folders, in the model's order.")
    ] = None,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where sites find the server.")
    ] = "127.0.0.1:8000",
    hosts: Annotated[
        str | None, typer.Option(help="Further names or addresses for the server's certificate.")
    ] = None,
    domains: Annotated[
        str | None,
        typer.Option(metavar="SITE=DOMAIN,...", help="Domains; default: each site its own."),
    ] = None,
    image_size: Annotated[int, typer.Option(min=8, max=1024, help="Pixels of an image's side.")] = (
        32
    ),
    minimum: Annotated[
        int | None, typer.Option(min=1, help="Sites a round needs; default 2.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="For trying out: sites are clients of this task (scan-0, print-0, ...)."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The federation's name.")] = None,
    round_seconds: Annotated[
        float, typer.Option(min=1, help="How long a round waits for replies.")
    ] = 3600,
    wait_seconds: Annotated[
        float, typer.Option(min=1, help="How long a round waits for the minimum of sites.")
    ] = 3600,
    gather_seconds: Annotated[
        float, typer.Option(min=1, help="How long the first round waits for all sites.")
    ] = 120,
) -> None:
    """Write certificates, keys, settings and a page that says which command runs where."""
    _need_flower()
    from protofed.deploy.setup import init as write

    try:
        pairs = dict(p.split("=", 1) for p in _words(domains))
    except ValueError:
        raise ProtofedError(f"cannot read --domains '{domains}'", "write a=scan,b=print") from None
    times = {
        "round_seconds": round_seconds,
        "wait_seconds": wait_seconds,
        "gather_seconds": gather_seconds,
    }
    write(
        folder,
        _words(sites),
        name=name,
        address=address,
        hosts=_words(hosts),
        classes=_words(classes),
        image_size=image_size,
        domains=pairs,
        task=task,
        minimum=minimum,
        **times,
    )
    if task is None and not classes:
        _say(f"fill in classes = [...] in every federation.toml under {folder}, or use --classes")
    _say(f"{folder}/README.md says which command runs where")


@deploy_app.command()
def server(
    folder: DirOption = Path(),
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default: that of the federation.")
    ] = None,
) -> None:
    """Run the server (Flower's SuperLink) until Ctrl-C or SIGTERM."""
    _need_flower()
    from protofed.deploy.programs import serve
    from protofed.deploy.setup import server_folder

    serve(server_folder(folder), host, _say)


@deploy_app.command()
def site(
    folder: DirOption = Path(),
    name: Annotated[str | None, typer.Option("--site", help="The site's name.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Images: class/image, or {train,test}/class/image."),
    ] = None,
    public: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Public images, for methods that need some: any tree of images without labels, "
            "the same at every site. They do not travel.",
        ),
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds without a connection before it gives up.")
    ] = 300,
) -> None:
    """Run a site (Flower's SuperNode) until Ctrl-C or SIGTERM."""
    _need_flower()
    from protofed.deploy.programs import join
    from protofed.deploy.setup import site_folder
    from protofed.deploy.site import check_public, folder_images, read_site_config

    found = site_folder(folder, name)
    given = (str(path.expanduser().resolve()) if path else None for path in (data, public))
    home = read_site_config(found, *given)
    if name is not None and home.name != name:
        raise ProtofedError(f"'{found}' is the folder of site '{home.name}', not of '{name}'")
    if home.members.task is None:  # what is wrong with the images is said now, not in round 1
        task = home.members.skeleton()
        train, test = folder_images(home, task.classes, task.image_size)
        _say(f"site {home.name}: {len(train)} training and {len(test)} test images")
    if home.public is not None:
        _say(f"site {home.name}: public folder: {check_public(home)}")
    join(home, patience, _say)


@deploy_app.command()
def start(
    folder: DirOption = Path(),
    method: Annotated[str | None, typer.Option(help="A method's name.")] = None,
    set_: SetOption = None,
    public: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="This machine's copy of the public images that every site has (deploy site "
            "--public), for methods that need some: a digest of them goes into the run, and a "
            "site with others is refused.",
        ),
    ] = None,
    skip_bad: SkipBadOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of start and training.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file; options here win.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the run anew.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Show the log until the run ends.")] = False,
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
    samples: SamplesOption = None,
    participation: ParticipationOption = None,
    average: AverageOption = None,
    precision: PrecisionOption = None,
    flip: FlipOption = None,
    augment: AugmentOption = None,
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", help="Rounds between checkpoints.")
    ] = None,
) -> None:
    """Start a run on the server; sites take part as they are connected."""
    _need_flower()
    from protofed.cli.parse import assignments, per_domain
    from protofed.deploy import operator as deploy
    from protofed.deploy.members import FEDERATION_FILE, read_members
    from protofed.deploy.run_log import log_path
    from protofed.deploy.setup import server_folder
    from protofed.federation.public_images import told

    given: dict[str, Any] = {
        "seed": seed, "protocol": protocol, "rounds": rounds, "epochs": epochs, "batch": batch,
        "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "model": model,
        "width": width, "norm": norm, "participation": participation, "average": average,
        "precision": precision, "flip": flip, "augment": augment,
        "checkpoint_every": checkpoint_every, "skip_bad": skip_bad,
        "samples": per_domain("samples", samples) if samples else None,
    }  # fmt: skip
    home = server_folder(folder)
    members = read_members(home / FEDERATION_FILE)
    settings = {k: v for k, v in given.items() if v is not None}
    options = assignments(set_)
    complete, task = deploy.run_config(members, config, method, options, settings, public)
    if complete.public_digest is not None:
        _say(f"public: {told(complete.public_digest)}")
    out = deploy.run_folder(home, complete)
    log = log_path(out)
    number = deploy.start(home, complete, task, resume, overwrite)
    _say(f"run {number} is started; results: {out}, log: {log}")
    if wait:
        try:
            status = deploy.follow(home, number, log, _say)
        except KeyboardInterrupt:  # only the watching ends
            _say(f"run {number} goes on; protofed deploy status shows it, deploy stop ends it")
            return
        if not status.startswith("finished:completed"):
            raise ProtofedError(f"run {number} has ended: {status}", f"see {log}")


@deploy_app.command()
def status(folder: DirOption = Path()) -> None:
    """Show which sites are connected, and the runs."""
    _need_flower()
    from protofed.deploy import operator as deploy
    from protofed.deploy.members import FEDERATION_FILE, read_members
    from protofed.deploy.run_log import last_line
    from protofed.deploy.setup import server_folder
    from protofed.observers.progress import accuracies
    from protofed.runs.records import read_records

    home = server_folder(folder)
    members = read_members(home / FEDERATION_FILE)
    seen = deploy.site_status(home)
    for name, member in members.sites.items():
        _say(f"site {name} (domain {member.domain}): {seen.get(name, 'not registered')}")
    found = deploy.runs(home)
    for run in found:
        _say(f"run {run['run-id']}: {run['status']}")
    if not found:
        _say("no run yet")
    for rounds in sorted((home / "runs").glob("*/rounds.jsonl")):
        records = read_records(rounds)
        last = f": {accuracies(records[-1])}" if records else ""
        _say(f"{rounds.parent.name}: {len(records)} rounds{last}")
    if any(not deploy.has_ended(run) for run in found) and (said := last_line(home / "runs")):
        _say(f"last in the log: {said}")


@deploy_app.command()
def stop(
    run: Annotated[int | None, typer.Argument(help="The run's number; default: the live one.")] = (
        None
    ),
    folder: DirOption = Path(),
) -> None:
    """Stop a run; deploy start --resume goes on with it."""
    _need_flower()
    from protofed.deploy import operator as deploy
    from protofed.deploy.setup import server_folder

    _say(f"run {deploy.stop(server_folder(folder), run)} is stopped")
