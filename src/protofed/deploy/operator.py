"""``protofed deploy``: a federation's files, and its runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from protofed.config import Config, merged_config
from protofed.data import Task
from protofed.data.info import FOLDER
from protofed.deploy import texts
from protofed.deploy.certificates import Authority, node_key, private_pem, write_secret
from protofed.deploy.members import FILE, Members, read_members, share_domain, task_of
from protofed.deploy.programs import CONNECTION, NODES, SWITCHES, flwr, host_port
from protofed.deploy.site import SITE_FILE
from protofed.deploy.spec import pack
from protofed.errors import ProtofedError, unknown
from protofed.federation.public_images import public_digest, told
from protofed.files import write_atomic

ENDS = ("the run is complete", "the run ends")
"""What the last line of a run's log has in it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def init(
    folder: Path,
    sites: Sequence[str],
    *,
    name: str | None = None,
    address: str = "127.0.0.1:8000",
    hosts: Sequence[str] = (),
    classes: Sequence[str] = (),
    image_size: int = 32,
    domains: Mapping[str, str] | None = None,
    task: str | None = None,
    minimum: int | None = None,
    times: Mapping[str, float] | None = None,
) -> None:
    """Write all that a federation of these sites needs into a new folder."""
    from protofed.data import load_task

    host, _ = host_port(address)
    for site in sites:
        if not _NAME.fullmatch(site):
            raise ProtofedError(
                f"'{site}' cannot be a site's name", "use letters, digits, dots and dashes"
            )
    if len(set(sites)) != len(sites) or not sites:
        raise ProtofedError("sites must have different names, and there must be some")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ProtofedError(f"'{folder}' is there already", "choose a new folder")
    of = dict(domains or {})
    for site in of:
        if site not in sites:
            raise unknown("site", site, sites)
    if task is not None:
        known = load_task(task)
        of = {site: share_domain(site) for site in sites}
        for domain in of.values():
            if domain not in known.domains:
                raise unknown(f"domain of {task}", domain, known.domains)
        wanted = {f"{d}-{i}" for d in of.values() for i in range(list(of.values()).count(d))}
        if wanted != set(sites):
            raise ProtofedError(
                f"the clients of {task} are numbered from 0: {', '.join(sorted(wanted))}"
            )
        # in the order in which the simulator has them: sums must be the same
        sites = [s for d in known.domains for s in sorted(sites, key=_number) if of[s] == d]
    keys = {site: node_key() for site in sites}
    text = texts.federation(
        name or re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name) or "federation",
        address,
        {site: (of.get(site, site), keys[site][1]) for site in sites},
        classes,
        image_size,
        task,
        minimum if minimum is not None else min(2, len(sites)),
        times or {},
    )
    authority = Authority(folder.resolve().name)
    certificate, key = authority.server([host, *hosts])
    ca = authority.certificate.public_bytes(_pem())
    write_secret(folder / "ca" / "ca.key", private_pem(authority.key))
    (folder / "ca" / "ca.crt").write_bytes(ca)
    env = "".join(f"{k}={v}\n" for k, v in SWITCHES.items())
    server = folder / "server"
    write_secret(server / "server.key", key)
    for at, content in {"server.crt": certificate, "ca.crt": ca}.items():
        write_atomic(server / at, content)
    write_atomic(server / FILE, text)
    write_atomic(server / "protofed.env", env)
    write_atomic(server / "protofed-server.service", texts.server_unit())
    for site, (private, public) in keys.items():
        home = folder / "sites" / site
        write_secret(home / "node.key", private)
        write_atomic(home / "node.key.pub", f"{public} {site}\n")
        write_atomic(home / "ca.crt", ca)
        write_atomic(home / FILE, text)
        write_atomic(home / SITE_FILE, texts.site(site, task))
        write_atomic(home / "protofed.env", env)
        write_atomic(home / "protofed-site.service", texts.site_unit(site, task))
    members = read_members(server / FILE)
    write_atomic(folder / "README.md", texts.readme(members))


def _number(site: str) -> int:
    return int(site.rpartition("-")[2])


def _pem() -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.PEM


def server_folder(folder: Path) -> Path:
    """The server's folder: the one that is given, or in what ``init`` wrote."""
    for found in (folder, folder / "server"):
        if (found / "server.crt").is_file() and (found / FILE).is_file():
            return found.resolve()
    raise ProtofedError(
        f"'{folder}' is no server's folder", "protofed deploy init writes one; name it with --dir"
    )


def site_folder(folder: Path, site: str | None) -> Path:
    """A site's folder: the one that is given, or in what ``init`` wrote."""
    for found in (folder, *([folder / "sites" / site, folder / site] if site else [])):
        if (found / SITE_FILE).is_file():
            return found.resolve()
    if site and (folder / "sites").is_dir():
        raise unknown("site", site, [path.name for path in (folder / "sites").iterdir()])
    raise ProtofedError(
        f"'{folder}' has no folder of site '{site}'", "name it with --dir, and the site with --site"
    )


def run_config(
    members: Members,
    file: Path | None,
    method: str | None,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    public: Path | None = None,
) -> tuple[Config, Task]:
    """The configuration of a run of this federation, and its task.

    ``public`` is this machine's copy of the folder of public images that all sites have.
    """
    if public is not None and "public" in options:
        raise ProtofedError("--public and --set public=... say two things", "give one of them")
    chosen = {k: settings[k] for k in ("flip", "augment") if settings.get(k) is not None}
    if members.task is not None:
        more = ("data", "test_split", "skip_bad")
        chosen |= {k: settings[k] for k in more if settings.get(k)}
    task = task_of(members, **chosen)
    given = {"checkpoint_every": 1, "device": "cpu", "engine": "loop", **settings}
    given["clients"] = members.clients()
    config = merged_config(file, task, method, options, given)
    if members.task is None:
        asked = {name: getattr(config, name) for name in ("dirichlet", "quantity", "leave_out")}
        asked["samples"] = None if config.samples == task.samples else config.samples
        for name, value in asked.items():
            if value is not None:
                raise ProtofedError(f"{name} is for the simulator: sites train on all they have")
    return _with_public(config, task, public), task


def _with_public(config: Config, task: Task, folder: Path | None) -> Config:
    """The configuration with what stands for its public images, if they are of other files.

    The images are read here once, for their digest; they do not travel.
    """
    wanted = config.method.public_images
    if wanted is None:
        if folder is not None:
            raise ProtofedError(
                f"method '{config.method.name}' takes no public images", "leave out --public"
            )
        return config
    if folder is not None:
        source = f"{FOLDER}{folder.expanduser().resolve()}"
        config = replace(config, method=config.method.with_public(source))
        wanted = wanted._replace(source=source)
    if wanted.source == FOLDER and config.public_digest is not None:
        return config  # the configuration of an earlier run knows them
    found = public_digest(wanted, task, config.data, config.skip_bad)
    if config.public_digest not in (None, found):
        raise ProtofedError(
            f"the public images are {told(found)}, those of the configuration "
            f"{told(config.public_digest)}",
            "point --public at the same images, or remove the configuration's line 'public_digest'",
        )
    return replace(config, public_digest=found)


def start(folder: Path, config: Config, task: Task, resume: bool, overwrite: bool) -> int:
    """Hand a run to Flower; returns its number there."""
    app, spec = folder / "apps" / config.label, pack(config, task)
    out = run_folder(folder, config)
    if out.is_dir() and any(out.iterdir()) and not (resume or overwrite):
        raise ProtofedError(
            f"'{out}' already holds a run", "--resume goes on with it, --overwrite starts anew"
        )
    for run in runs(folder):
        if not ended(run):
            raise ProtofedError(
                f"run {run['run-id']} is {run['status']}", "wait for it, or: protofed deploy stop"
            )
    write_atomic(app / "pyproject.toml", texts.app(spec, resume, overwrite))
    answer = flwr(folder, "run", str(app), CONNECTION)
    number = answer.get("run-id")
    if number is None:
        raise ProtofedError(f"Flower did not start the run: {answer}")
    return int(number)


def run_folder(folder: Path, config: Config) -> Path:
    """Where the server keeps that run."""
    return folder / "runs" / config.label


def runs(folder: Path) -> list[dict[str, Any]]:
    """The runs that the SuperLink knows, the newest first."""
    found: list[dict[str, Any]] = flwr(folder, "ls", CONNECTION).get("runs", [])
    return found


def ended(run: Mapping[str, Any]) -> bool:
    """Whether a run that the SuperLink knows is over."""
    return str(run["status"]).startswith("finished")


def last_words(folder: Path) -> str:
    """The last line of the log that was written to last."""
    logs = sorted((folder / "runs").glob("*.log"), key=lambda path: path.stat().st_mtime)
    lines = logs[-1].read_text("utf-8", errors="replace").splitlines() if logs else []
    return lines[-1] if lines else ""


def connected(folder: Path) -> dict[str, str]:
    """Of each site whether it is online, as the SuperLink sees it."""
    try:
        known = json.loads((folder / NODES).read_text("utf-8"))
    except (OSError, ValueError):
        known = {}
    found = flwr(folder, "supernode", "ls", CONNECTION).get("nodes", [])
    status = {str(node["node-id"]): str(node["status"]) for node in found}
    words = {"registered": "never connected", "online": "connected", "offline": "lost"}
    of = {site: status.get(number, "unknown") for site, number in known.items()}
    return {site: words.get(word, word) for site, word in of.items()}


def follow(folder: Path, number: int, log: Path, tell: Callable[[str], None] = print) -> str:
    """Show a run's log until the run ends; returns its last status."""
    at = log.stat().st_size if log.is_file() else 0  # what earlier attempts said is old
    looked, ending, status = 0.0, False, ""
    while True:
        if log.is_file():
            with log.open(encoding="utf-8", errors="replace") as file:
                file.seek(at)
                new = file.read()
                at = file.tell()
            for text in new.splitlines():
                tell(text)
                ending = ending or ENDS[0] in text or ENDS[1] in text
        if status.startswith("finished"):
            return status
        # asking Flower costs seconds of a processor: rarely, while nothing points to the end
        if time.monotonic() - looked > (2 if ending else 15):
            known = {int(r["run-id"]): str(r["status"]) for r in runs(folder)}
            status, looked = known.get(number, "finished:unknown"), time.monotonic()
        time.sleep(0.5)


def stop(folder: Path, number: int | None) -> int:
    """Stop a run: the one of that number, or the one that is running."""
    if number is None:
        live = [r for r in runs(folder) if not ended(r)]
        if not live:
            raise ProtofedError("no run is running")
        number = int(live[0]["run-id"])
    flwr(folder, "stop", str(number), CONNECTION)
    return number
