"""The command line's ``protofed deploy``: a federation between machines, on Flower."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli.groups import HELP, CommandGroup
from protofed.cli.options import MethodOption, SetOption, with_settings
from protofed.cli.output import say
from protofed.cli.parse import assignments, words
from protofed.errors import ProtofedError, unknown

DEPLOYED = (
    "seed", "protocol", "rounds", "epochs", "batch", "lr", "momentum", "weight_decay",
    "optimizer", "schedule", "step_every", "step_factor", "warmup_rounds", "label_smoothing",
    "clip_norm", "sampling", "model", "width", "norm", "weights", "train", "freeze_bn",
    "min_class_count", "samples", "participation", "average", "bounds", "robust",
    "robust_fraction", "proto_epsilon", "update_epsilon", "delta", "proto_clip", "update_clip",
    "precision", "flip", "augment", "checkpoint_every", "skip_bad",
    "max_image_pixels", "max_unpacked_gb",
)  # fmt: skip
"""The settings that a run across machines accepts; the others are for the simulator."""

deploy_app = typer.Typer(
    name="deploy",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=HELP,
    help="Run a federation across real machines (Flower, TLS, authenticated sites).\n\n"
    "[bold]deploy init DIR --sites a,b,c[/bold] writes everything; see DIR/README.md.",
)
DirOption = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="The folder that deploy init wrote.")
]

CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="DIR",
        help="The folder of ca.key; default: ca, next to the server's folder.",
    ),
]
SiteOption = Annotated[str | None, typer.Option("--site", help="The site's name.")]


def _need_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise ProtofedError("protofed deploy needs Flower", "pip install 'protofed[flower]'")


@deploy_app.command(context_settings=HELP)
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    sites: Annotated[str, typer.Option(help="The sites' names: a,b,c.")],
    classes: Annotated[
        str | None,
        typer.Option(help="Names of the class folders, in the order of the model's outputs: a,b."),
    ] = None,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where sites reach the server.")
    ] = "127.0.0.1:8000",
    hosts: Annotated[
        str | None, typer.Option(help="More names or addresses for the server's certificate.")
    ] = None,
    domains: Annotated[
        str | None,
        typer.Option(
            metavar="SITE=DOMAIN,...", help="The sites' domains; default: each site has its own."
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(
            min=8,
            max=1024,
            help="Height and width of the images in pixels; default: 224, and 32 with --task.",
        ),
    ] = None,
    pixel_range: Annotated[
        str | None,
        typer.Option(
            metavar="LOW:HIGH",
            help="The values that become black and white in images with more than 8 bits.",
        ),
    ] = None,
    minimum: Annotated[
        int | None, typer.Option(min=1, help="How many sites a round needs; default: 2.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="To try it out: the sites are clients of this task (scan-0, print-0, ...)."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The federation's name.")] = None,
    round_seconds: Annotated[
        float, typer.Option(min=1, help="How long a round waits for replies.")
    ] = 3600,
    wait_seconds: Annotated[
        float, typer.Option(min=1, help="How long a round waits for the minimum number of sites.")
    ] = 3600,
    gather_seconds: Annotated[
        float, typer.Option(min=1, help="How long the first round waits for all sites.")
    ] = 120,
    client_certificates: Annotated[
        bool,
        typer.Option(
            "--client-certificates",
            help="Give each site a TLS certificate; the server refuses sites without one.",
        ),
    ] = False,
    keys_at_sites: Annotated[
        bool,
        typer.Option(
            "--keys-at-sites",
            help="Do not make keys for the sites: each makes its own with deploy join, so that no "
            "private key leaves its machine.",
        ),
    ] = False,
) -> None:
    """Write certificates, keys, settings, and a README that says which command runs where."""
    _need_flower()
    from protofed.deploy.setup import init as write

    try:
        pairs = dict(p.split("=", 1) for p in words(domains))
    except ValueError:
        raise ProtofedError(f"cannot read --domains '{domains}'", "write a=scan,b=print") from None
    write(
        folder,
        words(sites),
        name=name,
        address=address,
        hosts=words(hosts),
        classes=words(classes),
        image_size=image_size or (32 if task else 224),
        pixel_range=pixel_range,
        domains=pairs,
        task=task,
        minimum=minimum,
        round_seconds=round_seconds,
        wait_seconds=wait_seconds,
        gather_seconds=gather_seconds,
        client_certificates=client_certificates,
        keys_at_sites=keys_at_sites,
    )
    if task is None and not classes:
        say(f"fill in classes = [...] in every federation.toml under {folder}, or use --classes")
    if task is None and image_size is None:
        say("every site resizes its images to 224×224 pixels; --image-size sets another size")
    say(f"{folder}/README.md says which command runs where")


@deploy_app.command(context_settings=HELP)
def server(
    folder: DirOption = Path(),
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default: the federation's.")
    ] = None,
    behind_proxy: Annotated[
        bool,
        typer.Option(
            "--behind-proxy",
            help="nginx (DIR/nginx.conf) listens on the federation's address; listen on "
            "127.0.0.1 behind it, one port higher.",
        ),
    ] = False,
) -> None:
    """Run the server (Flower's SuperLink behind a gate) until Ctrl-C or SIGTERM."""
    _need_flower()
    from protofed.deploy.programs import serve
    from protofed.deploy.setup import server_folder

    if behind_proxy and host:
        raise ProtofedError("--host contradicts --behind-proxy", "give only one of them")
    serve(server_folder(folder), host, behind_proxy, say)


@deploy_app.command(context_settings=HELP)
def site(
    folder: DirOption = Path(),
    name: SiteOption = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Images: class/image, or {train,test}/class/image."),
    ] = None,
    public: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Public images, for methods that need them: any folder tree of unlabeled images, "
            "the same at every site. They are never sent.",
        ),
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds without a connection before the site gives up.")
    ] = 300,
) -> None:
    """Run a site (Flower's SuperNode) until Ctrl-C or SIGTERM."""
    _need_flower()
    from protofed.deploy.programs import join
    from protofed.deploy.setup import site_folder
    from protofed.deploy.site import check_public, folder_images, read_site_config
    from protofed.files import expand_user

    found = site_folder(folder, name)
    given = (str(expand_user(path).resolve()) if path else None for path in (data, public))
    home = read_site_config(found, *given)
    if name is not None and home.name != name:
        raise ProtofedError(f"'{found}' is the folder of site '{home.name}', not of '{name}'")
    if home.members.task is None:  # report what is wrong with the images now, not in round 1
        task = home.members.skeleton()
        train, test = folder_images(home, task.classes, task.image_size)
        held = {*train.y.tolist(), *test.y.tolist()}
        absent = [c for label, c in enumerate(task.classes) if label not in held]
        none = f", none of {', '.join(absent)}" if absent else ""
        say(f"site {home.name}: {len(train)} training and {len(test)} test images{none}")
    if home.public is not None:
        say(f"site {home.name}: public folder: {check_public(home)}")
    join(home, patience, say)


@deploy_app.command(context_settings=HELP)
def join(folder: DirOption = Path(), name: SiteOption = None) -> None:
    """At a site: make its key, and a request for the operator to admit it.

    For federations made with deploy init --keys-at-sites. The private key stays here.
    """
    _need_flower()
    from protofed.deploy.admission import make_request
    from protofed.deploy.setup import site_folder

    make_request(site_folder(folder, name), renew=False, tell=say)


@deploy_app.command(context_settings=HELP)
def admit(
    requests: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="The requests that deploy join wrote.")
    ],
    folder: DirOption = Path(),
    ca: CaOption = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="If the site already has a key, replace it.")
    ] = False,
) -> None:
    """On the server: let sites in with the keys in their requests.

    Compare each fingerprint with the one that the site saw, over the phone for example. If the
    server is running, it lets them in at once.
    """
    _need_flower()
    from protofed.deploy.admission import admit as let_in
    from protofed.deploy.setup import server_folder

    home = server_folder(folder)
    for request in requests:
        let_in(home, request, ca or home.parent / "ca", replace, say)


@deploy_app.command(context_settings=HELP)
def revoke(
    site: Annotated[str, typer.Argument(help="The site's name.")], folder: DirOption = Path()
) -> None:
    """On the server: shut a site out; its key is never let in again.

    If the server is running, it shuts the site out at once.
    """
    _need_flower()
    from protofed.deploy.admission import revoke as shut_out
    from protofed.deploy.setup import server_folder

    shut_out(server_folder(folder), site, say)


@deploy_app.command(context_settings=HELP)
def renew(folder: DirOption = Path(), name: SiteOption = None, ca: CaOption = None) -> None:
    """Make new keys: the server's, with its certificate, or a site's, with a request to admit.

    They are for a site if you name one or DIR is a site's folder; otherwise for the server.
    """
    _need_flower()
    from protofed.deploy.admission import make_request, renew_server
    from protofed.deploy.setup import own_folder
    from protofed.deploy.site import SITE_FILE

    home = own_folder(folder, name)
    if (home / SITE_FILE).is_file():
        make_request(home, renew=True, tell=say)
    else:
        renew_server(home, ca or home.parent / "ca", say)


@deploy_app.command(context_settings=HELP)
@with_settings(only=DEPLOYED)
def start(
    *,
    folder: DirOption = Path(),
    method: MethodOption = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; other options override it.")
    ] = None,
    set_: SetOption = None,
    public: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="This machine's copy of the public images that every site has (deploy site "
            "--public), for methods that need them. The run records their digest, and a site with "
            "other images is refused.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the run over.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Show the log until the run ends.")] = False,
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm", help="Accept the image counts that sites declare, without confirmation."
        ),
    ] = False,
    on_poison: Annotated[
        str,
        typer.Option(
            metavar="stop | rollback",
            help="If sites fail or losses jump after a round: stop, or go back and repeat the "
            "round without the replies that stood out.",
        ),
    ] = "stop",
    settings: dict[str, Any],
) -> None:
    """Start a run on the server; the sites that are connected take part."""
    _need_flower()
    from protofed.deploy import operator
    from protofed.deploy.members import read_members
    from protofed.deploy.run_log import log_path
    from protofed.deploy.setup import server_folder
    from protofed.federation.public_images import describe_digest
    from protofed.runs import RunFolder

    if on_poison not in (known := ("stop", "rollback")):
        raise unknown("value for --on-poison", on_poison, known)
    home = server_folder(folder)
    members = read_members(home)
    run = operator.plan_run(members, config, method, assignments(set_), settings, public)
    if run.facts.public_digest is not None:
        say(f"public: {describe_digest(run.facts.public_digest)}")
    out = operator.run_folder(home, run)
    if resume and not overwrite and not RunFolder(out).exists:
        say(f"there is no run to resume in {out}: it starts from the beginning")
    log = log_path(out)
    before = log.stat().st_size if log.is_file() else 0
    number = operator.start(home, run, resume, overwrite, confirm=confirm, on_poison=on_poison)
    say(f"run {number} is started; results: {out}, log: {log}")
    if wait:
        try:
            status = operator.follow(home, number, log, before, say)
        except KeyboardInterrupt:  # only stop watching
            say(f"run {number} continues; protofed deploy status shows it, deploy stop ends it")
            return
        if not status.startswith("finished:completed"):
            raise ProtofedError(f"run {number} has ended: {status}", f"see {log}")


@deploy_app.command(context_settings=HELP)
def status(folder: DirOption = Path()) -> None:
    """Show which sites are connected, and the runs."""
    _need_flower()
    from protofed.deploy import operator as deploy
    from protofed.deploy.members import read_members
    from protofed.deploy.run_log import last_line
    from protofed.deploy.setup import server_folder
    from protofed.observers.progress import accuracies
    from protofed.runs.folder import find_runs

    home = server_folder(folder)
    members = read_members(home)
    seen = deploy.site_status(home)
    for name, member in members.sites.items():
        say(f"site {name} (domain {member.domain}): {seen.get(name, 'not registered')}")
    found = deploy.runs(home)
    for run in found:
        say(f"run {run['run-id']}: {run['status']}")
    if not found:
        say("no run yet")
    for written in find_runs(home / "runs"):
        records = written.records()
        last = f": {accuracies(records[-1])}" if records else ""
        say(f"{written.path.name}: {len(records)} rounds{last}")
    if deploy.live(found) and (said := last_line(home / "runs")):
        say(f"last in the log: {said}")


@deploy_app.command(context_settings=HELP)
def stop(
    run: Annotated[int | None, typer.Argument(help="The run's number; default: the live one.")] = (
        None
    ),
    folder: DirOption = Path(),
) -> None:
    """Stop a run; deploy start --resume continues it."""
    _need_flower()
    from protofed.deploy import operator as deploy
    from protofed.deploy.setup import server_folder

    say(f"run {deploy.stop(server_folder(folder), run)} is stopped")


@deploy_app.command(context_settings=HELP)
def confirm(
    sites: Annotated[
        list[str] | None, typer.Argument(metavar="SITE...", help="Default: all that are waiting.")
    ] = None,
    folder: DirOption = Path(),
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="The images of these sites have changed: forget what they declared, so that they "
            "declare it again in the next run.",
        ),
    ] = False,
) -> None:
    """Confirm the image counts that sites declared: they decide a site's weight in every round."""
    _need_flower()
    if again and not sites:
        raise ProtofedError("--again needs the names of sites", "deploy confirm --again SITE...")
    from protofed.deploy.counts import Counts
    from protofed.deploy.members import read_members
    from protofed.deploy.setup import server_folder

    home = server_folder(folder)
    counts = Counts(home, {}, read_members(home).max_samples)
    if again:
        counts.forget(sites or ())
        say(f"{', '.join(sites or ())}: to declare again in the next run, and to be confirmed then")
        return
    new = counts.confirm(sites or ())
    for name, count in new.items():
        say(f"site {name}: {count}, confirmed")
    if not new:
        say("no site is waiting; sites declare their image counts when a run first reaches them")


@deploy_app.command(context_settings=HELP)
def rollback(
    run: Annotated[
        str | None, typer.Argument(help="The run's folder in runs/; default: the latest.")
    ] = None,
    folder: DirOption = Path(),
    rounds: Annotated[int, typer.Option(min=0, help="How many rounds to undo.")] = 1,
    without: Annotated[
        str | None,
        typer.Option(metavar="SITE,...", help="Sites to leave out from then on; default: none."),
    ] = None,
) -> None:
    """Undo the last rounds of a run that has ended or was stopped."""
    _need_flower()
    from protofed.deploy import operator as deploy
    from protofed.deploy.setup import server_folder

    left_out = words(without)
    found, now = deploy.roll_back(server_folder(folder), run, rounds, left_out)
    without_them = f", without {', '.join(left_out)}" if left_out else ""
    say(f"{found.path.name} is back after round {now}{without_them}")
    say("deploy start ... --resume continues it")


@deploy_app.command(context_settings=HELP)
def method(
    named: Annotated[str, typer.Argument(metavar="FILE.py:CLASS", help="A method of your own.")],
    folder: DirOption = Path(),
    name: SiteOption = None,
) -> None:
    """Install a method of your own on this machine, pinned by its file's hash.

    The server and every site need it; then `deploy start --method NAME` runs it.
    """
    _need_flower()
    from protofed.deploy.setup import install_method, own_folder

    made = install_method(own_folder(folder, name), named)
    say(f"method {made.name} is installed, SHA-256 {made.sha256}")


@deploy_app.command(context_settings=HELP)
def approve(
    run: Annotated[
        str | None, typer.Argument(help="The run's hash; without it, the runs are listed.")
    ] = None,
    folder: DirOption = Path(),
    name: SiteOption = None,
) -> None:
    """At a site whose policy has approval = true: list the requested runs, or approve one."""
    _need_flower()
    from protofed.deploy.policy import Approvals
    from protofed.deploy.run_log import one_line
    from protofed.deploy.setup import site_folder

    approvals = Approvals(site_folder(folder, name))
    if run is not None:
        approvals.approve(run)
        say(f"run {run} is approved")
        return
    found = approvals.list()
    for asked in found:
        word = f"approved {asked['approved']}" if asked["approved"] else "waits"
        say(f"{asked['run']}  {word}: {asked['name']}, first asked {asked['asked']}")
        asked_for = ", ".join(f"{key} {value}" for key, value in asked["settings"].items())
        say(f"  {one_line(asked_for, most=10**5)}")
    if not found:
        say("no run has been requested")


@deploy_app.command(context_settings=HELP)
def audit(folder: DirOption = Path(), name: SiteOption = None) -> None:
    """Print a site's audit log, and verify that no line was changed, removed or inserted."""
    _need_flower()
    from protofed.deploy.audit import AuditLog
    from protofed.deploy.run_log import one_line
    from protofed.deploy.setup import site_folder

    log = AuditLog(site_folder(folder, name))
    count = 0
    for entry in log.entries():
        time, event, _ = (entry.pop(key) for key in ("time", "event", "before"))
        say(f"{time}  {event:8}  {one_line(json.dumps(entry, ensure_ascii=False), most=10**7)}")
        count += 1
    say(f"{count} entries, none altered; the last one's hash is {log.head}")


@deploy_app.command(context_settings=HELP)
def doctor(
    folder: DirOption = Path(),
    name: SiteOption = None,
) -> None:
    """Check a deployment from inside and outside: paths, certificates, keys, versions, clocks.

    It looks from a site if you name one or DIR is a site's folder; otherwise from the server.
    """
    _need_flower()
    from protofed.deploy.doctor import examine
    from protofed.deploy.setup import own_folder

    problems = 0
    for ok, text in examine(own_folder(folder, name)):
        say(f"{'ok     ' if ok else 'PROBLEM'} {text}")
        problems += not ok
    if problems:
        raise ProtofedError(f"{problems} of the checks failed", "docs/deploy.md says what to do")
