"""``protofed deploy init``: the folders of a new federation, and how they are found again.

``server/`` goes to the server's machine and ``sites/<name>/`` to each site's; ``README.md`` says
which command runs where.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from protofed.data import load_task
from protofed.deploy.certificates import Authority, node_key, private_pem, write_secret
from protofed.deploy.members import FEDERATION_FILE, Member, Members, client_domain, parse_members
from protofed.deploy.programs import FLOWER_SWITCHES, host_port
from protofed.deploy.site import SITE_FILE
from protofed.deploy.templating import render
from protofed.errors import ProtofedError, unknown
from protofed.files import write_atomic

_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def init(
    folder: Path,
    sites: Sequence[str],
    *,
    name: str | None = None,
    address: str = "127.0.0.1:8000",
    hosts: Sequence[str] = (),
    classes: Sequence[str] = (),
    image_size: int = Members.image_size,
    domains: Mapping[str, str] | None = None,
    task: str | None = None,
    minimum: int | None = None,
    gather_seconds: float = Members.gather_seconds,
    wait_seconds: float = Members.wait_seconds,
    round_seconds: float = Members.round_seconds,
) -> None:
    """Write everything that a federation of these sites needs into a new folder.

    ``hosts`` are further names for the server's certificate; ``domains`` gives the domain of a
    site, by default its own name. With ``task`` the sites are clients of that built-in task.
    """
    _check_names(sites)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ProtofedError(f"'{folder}' already exists", "choose a new folder")
    domain_of = dict(domains or {})
    for site in domain_of:
        if site not in sites:
            raise unknown("site", site, sites)
    if task is not None:
        domain_of = _task_domains(task, sites)
        sites = list(domain_of)
    host, _ = host_port(address)
    keys = {site: node_key() for site in sites}
    federation = render(
        "federation.toml",
        name=name or re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name) or "federation",
        address=address,
        sites=[Member(site, domain_of.get(site, site), keys[site][1]) for site in sites],
        classes=list(classes),
        image_size=image_size,
        task=task,
        minimum=min(2, len(sites)) if minimum is None else minimum,
        gather_seconds=gather_seconds,
        wait_seconds=wait_seconds,
        round_seconds=round_seconds,
    )
    members = parse_members(federation, folder / "server" / FEDERATION_FILE)
    authority = Authority(folder.resolve().name)
    certificate, server_key = authority.server([host, *hosts])
    # all input has been checked by now: an error leaves nothing half-written
    write_secret(folder / "ca" / "ca.key", private_pem(authority.key))
    write_atomic(folder / "ca" / "ca.crt", authority.pem)
    common: dict[str, str | bytes] = {
        "ca.crt": authority.pem,
        FEDERATION_FILE: federation,
        "protofed.env": "".join(f"{k}={v}\n" for k, v in FLOWER_SWITCHES.items()),
    }
    write_secret(folder / "server" / "server.key", server_key)
    own: dict[str, str | bytes] = {
        "server.crt": certificate,
        "protofed-server.service": _server_service(),
    }
    _write_all(folder / "server", common | own)
    for site, (private, public) in keys.items():
        write_secret(folder / "sites" / site / "node.key", private)
        own = {
            "node.key.pub": f"{public} {site}\n",
            SITE_FILE: render("site.toml", site=site, task=task),
            "protofed-site.service": _site_service(site, task),
        }
        _write_all(folder / "sites" / site, common | own)
    write_atomic(folder / "README.md", render("README.md", **vars(members)))


def _check_names(sites: Sequence[str]) -> None:
    for site in sites:
        if not _SITE_NAME.fullmatch(site):
            raise ProtofedError(
                f"'{site}' cannot be a site's name", "use letters, digits, dots and dashes"
            )
    if len(set(sites)) != len(sites) or not sites:
        raise ProtofedError("a federation needs sites, each with a different name")


def _task_domains(task: str, sites: Sequence[str]) -> dict[str, str]:
    """The domain of each site that is a client of a task, in the simulator's client order.

    The order matters: sums must come out the same.
    """
    known = load_task(task).domains
    domains = {site: client_domain(site) for site in sites}
    for domain in domains.values():
        if domain not in known:
            raise unknown(f"domain of {task}", domain, known)
    counts = Counter(domains.values())
    ordered = {f"{d}-{i}": d for d in known for i in range(counts[d])}
    if ordered.keys() != domains.keys():
        raise ProtofedError(f"the clients of {task} are numbered from 0: {', '.join(ordered)}")
    return ordered


def _server_service() -> str:
    home = "/srv/protofed/server"
    return render("service", title="server", home=home, command=["deploy", "server", "--dir", home])


def _site_service(site: str, task: str | None) -> str:
    home = "/srv/protofed/site"
    command = ["deploy", "site", "--dir", home, "--site", site]
    if task is None:
        command += ["--data", "/srv/images"]
    return render("service", title=f"site {site}", home=home, command=command)


def _write_all(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        write_atomic(folder / name, content)


def server_folder(folder: Path) -> Path:
    """The server's folder: the given one, or the one inside what ``init`` wrote."""
    for found in (folder, folder / "server"):
        if (found / "server.crt").is_file() and (found / FEDERATION_FILE).is_file():
            return found.resolve()
    raise ProtofedError(
        f"'{folder}' is not a server's folder",
        "protofed deploy init writes one; point --dir at it",
    )


def site_folder(folder: Path, site: str | None) -> Path:
    """A site's folder: the given one, or the one inside what ``init`` wrote."""
    for found in (folder, *([folder / "sites" / site, folder / site] if site else [])):
        if (found / SITE_FILE).is_file():
            return found.resolve()
    if site and (folder / "sites").is_dir():
        raise unknown("site", site, [path.name for path in (folder / "sites").iterdir()])
    raise ProtofedError(
        f"'{folder}' has no folder of site '{site}'", "name it with --dir, and the site with --site"
    )
