"""``protofed deploy init``: the folders of a new federation, and how they are found again.

``server/`` goes to the server's machine and ``sites/<name>/`` to each site's; ``README.md`` says
which command runs where.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from protofed.data import describe, load_task
from protofed.deploy.certificates import Authority, node_key, write_secret
from protofed.deploy.gate import CALLS
from protofed.deploy.installed import InstalledMethod
from protofed.deploy.locking import locked
from protofed.deploy.members import (
    FEDERATION_FILE,
    Member,
    Members,
    members_text,
    read_members,
    write_members,
)
from protofed.deploy.programs import FLOWER_SWITCHES, host_port
from protofed.deploy.site import SITE_FILE
from protofed.deploy.templating import render
from protofed.errors import ProtofedError, unknown
from protofed.files import FORMAT, write_atomic
from protofed.methods import method_class
from protofed.user_code import is_file


def init(
    folder: Path,
    sites: Sequence[str],
    *,
    name: str | None = None,
    address: str = "127.0.0.1:8000",
    hosts: Sequence[str] = (),
    classes: Sequence[str] = (),
    domains: Mapping[str, str] | None = None,
    task: str | None = None,
    minimum: int | None = None,
    keys_at_sites: bool = False,
    **rules: Any,
) -> None:
    """Write everything that a federation of these sites needs into a new folder.

    ``name`` is the federation's, by default the folder's. ``hosts`` are additional names for the
    server's certificate. ``domains`` gives the domain of a site, by default the site's name. With
    ``task`` the sites are clients of that built-in task, which then decides their domains.
    ``minimum`` is the number of sites that a round needs. With ``keys_at_sites`` no keys are made
    for the sites: they make their own (``admission``). ``rules`` are other fields of
    ``Members``: the image size, the time limits, whether sites need client certificates.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ProtofedError(f"'{folder}' already exists", "choose a new folder")
    if len(set(sites)) != len(sites):
        raise ProtofedError("each site needs a different name")
    for site in domains or {}:
        if site not in sites:
            raise unknown("site", site, sites)
    if task is not None:
        domain_of = _client_domains(task, sites)
    else:
        domain_of = {site: (domains or {}).get(site, site) for site in sites}
    host, port = host_port(address)
    keys = {site: (b"", "") if keys_at_sites else node_key() for site in domain_of}
    title = folder.resolve().name
    members = Members(
        name=name or re.sub(r"[^A-Za-z0-9._-]", "-", title) or "federation",
        address=address,
        sites={s: Member(s, domain, keys[s][1]) for s, domain in domain_of.items()},
        minimum=min(2, len(sites)) if minimum is None else minimum,
        classes=tuple(classes),
        task=task,
        **rules,
    )
    if members.classes:
        members.skeleton()  # an error if it is no task
    authority = Authority(title)
    certificate, server_key = authority.server([host, *hosts])
    # all input has been checked by now, so a wrong argument leaves no half-written folder
    values = {**vars(members), "format": FORMAT}
    common: dict[str, str | bytes] = {
        "ca.crt": authority.certificate,
        FEDERATION_FILE: members_text(members),
        "protofed.env": "".join(f"{k}={v}\n" for k, v in FLOWER_SWITCHES.items()),
    }
    files: dict[str, str | bytes] = {
        "README.md": render("README.md", **values, keys_at_sites=keys_at_sites),
        "ca/ca.crt": authority.certificate,
        "server/server.crt": certificate,
        "server/protofed-server.service": _service("server", "server"),
        "server/nginx.conf": render("nginx.conf", **values, port=port, host=host, calls=CALLS),
        **{f"server/{file}": content for file, content in common.items()},
    }
    secrets = {"ca/ca.key": authority.key, "server/server.key": server_key}
    for site, (private, public) in keys.items():
        options = ["--site", site, *([] if task else ["--data", "/srv/images"])]
        own: dict[str, str | bytes] = {
            SITE_FILE: render("site.toml", **values, site=site),
            "protofed-site.service": _service("site", f"site {site}", *options),
        }
        if private:
            secrets[f"sites/{site}/node.key"] = private
            own["node.key.pub"] = f"{public} {site}\n"
        if private and members.client_certificates:
            own["client.crt"], secrets[f"sites/{site}/client.key"] = authority.client(site)
        files |= {f"sites/{site}/{file}": content for file, content in (common | own).items()}
    for part in ("", "ca", "server", "sites", *(f"sites/{site}" for site in keys)):
        (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, secret in secrets.items():
        write_secret(folder / path, secret)
    for path, content in files.items():
        write_atomic(folder / path, content)


def _client_domains(task: str, sites: Sequence[str]) -> dict[str, str]:
    """The domain of each site that is a client of a built-in task: ``scan-0`` belongs to ``scan``.

    They are in the simulator's client order, so that sums are rounded in the same way.
    """
    known = describe(task).domains or tuple(load_task(task).domains)
    domains: dict[str, str] = {}
    for site in sites:
        domain, _, number = site.rpartition("-")
        if not domain or not number.isdecimal():
            raise ProtofedError(
                f"'{site}' is not the name of a task's client",
                "with --task, call the sites scan-0, print-0, ...",
            )
        if domain not in known:
            raise unknown(f"domain of {task}", domain, known)
        domains[site] = domain
    counts = Counter(domains.values())
    ordered = {f"{d}-{i}": d for d in known for i in range(counts[d])}
    if ordered.keys() != domains.keys():
        raise ProtofedError(f"the clients of {task} are numbered from 0: {', '.join(ordered)}")
    return ordered


def _service(kind: str, title: str, *options: str) -> str:
    """An example of a systemd unit for ``deploy server`` or ``deploy site`` (the ``kind``)."""
    home = f"/srv/protofed/{kind}"
    command = ["deploy", kind, "--dir", home, *options]
    return render("service", title=title, home=home, command=command)


def install_method(folder: Path, named: str) -> InstalledMethod:
    """Copy a method's file into a server's or a site's folder, and pin it in its settings."""
    if not is_file(named):
        raise ProtofedError(f"'{named}' is not path/to/file.py:Class", "name a file of your own")
    made = method_class(named)
    made.require_plain_hypers()
    file, _, its_class = named.rpartition(":")
    content = Path(file).read_bytes()
    about = {
        "file": Path(file).name, "class": its_class, "sha256": hashlib.sha256(content).hexdigest()
    }  # fmt: skip
    method = InstalledMethod.read(folder, made.name, about)
    write_atomic(method.path, content, private=True)
    with locked(folder):
        members = read_members(folder)
        write_members(folder, replace(members, methods={**members.methods, method.name: method}))
    return method


def own_folder(folder: Path, site: str | None) -> Path:
    """The folder of a site, if one is named or this is one; otherwise the server's."""
    at_site = site is not None or (folder / SITE_FILE).is_file()
    return site_folder(folder, site) if at_site else server_folder(folder)


def server_folder(folder: Path) -> Path:
    """The server's folder: the given one, or ``server/`` in a folder that ``init`` wrote."""
    for found in (folder, folder / "server"):
        if (found / "server.crt").is_file() and (found / FEDERATION_FILE).is_file():
            return found.resolve()
    raise ProtofedError(
        f"'{folder}' is not a server's folder",
        "protofed deploy init writes one: name it with --dir",
    )


def site_folder(folder: Path, site: str | None) -> Path:
    """A site's folder: the given one, or that of the ``site`` in a folder that ``init`` wrote."""
    for found in (folder, *([folder / "sites" / site, folder / site] if site else [])):
        if (found / SITE_FILE).is_file():
            return found.resolve()
    if site and (folder / "sites").is_dir():
        raise unknown("site", site, [path.name for path in (folder / "sites").iterdir()])
    whose = f"site '{site}'" if site else "a site"
    raise ProtofedError(
        f"'{folder}' is not the folder of {whose}",
        "name the folder with --dir, and the site with --site",
    )
