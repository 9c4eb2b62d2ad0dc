"""``protofed deploy doctor``: looks at a deployment from inside a machine and from the network."""

from __future__ import annotations

import datetime
import email.utils
import importlib.metadata
import ipaddress
import os
import socket
import ssl
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from flwr.common.constant import SYSTEM_TIME_TOLERANCE
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from protofed.deploy.audit import AuditLog
from protofed.deploy.certificates import host_names, read_key
from protofed.deploy.gate import PATHS
from protofed.deploy.members import Members, read_members
from protofed.deploy.operator import site_status
from protofed.deploy.policy import Policy
from protofed.deploy.programs import host_port, join_address, operator_address
from protofed.deploy.site import SITE_FILE, SiteConfig, read_site_config
from protofed.errors import ProtofedError
from protofed.version import __version__

MIN_DAYS = 30
"""How long a certificate must still be valid."""
SECONDS = 10.0
"""How long a connection may take."""
FORBIDDEN = sorted({path for _, path in PROTOBUF_REQUEST_TYPES} - {p.decode() for p in PATHS})
"""Paths of Flower's server that the network must not reach."""


class Finding(NamedTuple):
    """What was found, and whether it is as it should be."""

    ok: bool
    text: str


def examine(folder: Path) -> Iterator[Finding]:
    """Look at the site or the server of this folder."""
    return examine_site(folder) if (folder / SITE_FILE).is_file() else examine_server(folder)


def examine_server(folder: Path) -> Iterator[Finding]:
    """Look at a server: its folder, its SuperLink, and what the network sees of it."""
    members = read_members(folder)
    yield from _machine(folder)
    host, _ = host_port(members.address)
    yield from _certificate(folder / "ca.crt")
    yield from _certificate(folder / "server.crt", folder / "server.key", host)
    if absent := [site.name for site in members.sites.values() if not site.key]:
        yield Finding(True, f"not admitted, or revoked: {', '.join(absent)}")
    yield from _superlink(folder, host)
    yield from _from_outside(members, folder, None)


def examine_site(folder: Path) -> Iterator[Finding]:
    """Look at a site: its folder, and what it sees of the server."""
    site = read_site_config(folder)
    yield from _machine(folder)
    try:
        key = read_key(load_ssh_private_key, folder / "node.key").public_key()
        own = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        fits = site.members.sites[site.name].key.split()[:2] == own.split()[:2]
        says = "is" if fits else "is not"
        yield Finding(fits, f"node.key {says} the key of site {site.name} in federation.toml")
    except (OSError, ValueError) as error:
        yield Finding(False, f"node.key cannot be read: {error}")
    yield from _decisions(site)
    yield from _certificate(folder / "ca.crt")
    pair = None
    if site.members.client_certificates:
        pair = folder / "client.crt", folder / "client.key"
        yield from _certificate(*pair)
    yield from _from_outside(site.members, folder, pair)


# ---- inside -------------------------------------------------------------------------------------


def _machine(folder: Path) -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    flower = importlib.metadata.version("flwr")
    needed = [r for r in importlib.metadata.requires("protofed") or () if r.startswith("flwr==")]
    fits = any(r.split(";")[0].strip() == f"flwr=={flower}" for r in needed)
    yield Finding(fits, f"versions: protofed {__version__}, Flower {flower}, Python {python}")
    loose = []
    for path in (folder, *sorted(folder.glob("*.key")), *sorted((folder / "flower").glob("*"))):
        forbidden = 0o077 if path == folder or path.suffix in (".key", ".secret") else 0o022
        try:
            about = path.stat()
        except FileNotFoundError:  # a link to nothing, or a file that a program has just replaced
            continue
        if stat.S_IMODE(about.st_mode) & forbidden:
            loose.append(path.name)
        if about.st_uid not in (os.getuid(), 0):
            loose.append(f"{path.name} (of user {about.st_uid})")
    yield Finding(not loose, f"permissions: {', '.join(loose) or 'only you can read the secrets'}")


def _certificate(
    path: Path, key_path: Path | None = None, host: str | None = None
) -> Iterator[Finding]:
    """Look at a certificate: its key, how long it is valid, and whether it names the host."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        key = read_key(load_pem_private_key, key_path) if key_path else None
    except (OSError, ValueError) as error:
        yield Finding(False, f"{path.name}: {error}")
        return
    if key is not None and key_path and key.public_key() != certificate.public_key():
        yield Finding(False, f"{path.name} does not belong to {key_path.name}")
    now = datetime.datetime.now(datetime.UTC)
    left = (certificate.not_valid_after_utc - now).days
    fresh = certificate.not_valid_before_utc <= now and left >= MIN_DAYS
    until = certificate.not_valid_after_utc.date()
    advice = "; protofed deploy renew makes a new one" if key is not None and not fresh else ""
    yield Finding(fresh, f"{path.name} is valid until {until} ({left} days){advice}")
    if host is not None:
        named = host in host_names(certificate)
        yield Finding(named, f"{path.name} {'names' if named else 'does not name'} {host}")


def _decisions(site: SiteConfig) -> Iterator[Finding]:
    """Look at what the site allows, and at what it wrote down."""
    limits = [f"{k} {v}" for k, v in vars(site.policy).items() if v != getattr(Policy, k)]
    yield Finding(True, f"policy: {', '.join(limits) or 'none, everything is allowed'}")
    try:
        yield Finding(True, f"audit.jsonl: {len(list(AuditLog(site.folder).entries()))} entries")
    except ProtofedError as error:
        yield Finding(False, error.message)


def _superlink(folder: Path, host: str) -> Iterator[Finding]:
    """Look at the SuperLink: it serves the operator on this machine, and nobody elsewhere."""
    try:
        status = site_status(folder)
        address, port = operator_address(folder)
    except ProtofedError as error:
        yield Finding(False, str(error))
        return
    sites = ", ".join(f"{name} {word}" for name, word in status.items())
    yield Finding(address == "127.0.0.1", f"the SuperLink serves this machine's operator: {sites}")
    if not _is_loopback(host):
        reached = _connects(host, port)
        words = "can be reached" if reached else "cannot be reached"
        yield Finding(not reached, f"the SuperLink {words} at {join_address(host, port)}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _connects(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), 3):
            return True
    except OSError:
        return False


# ---- from the network ---------------------------------------------------------------------------


def _from_outside(
    members: Members, folder: Path, pair: tuple[Path, Path] | None
) -> Iterator[Finding]:
    """Look at the federation's address with ``ca.crt`` and, for a site, its client certificate."""
    where = members.address
    try:
        trusted = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        if pair is not None:
            trusted.load_cert_chain(*pair)
    except (OSError, ssl.SSLError) as error:
        yield Finding(False, f"ca.crt: {error}")
        return
    if members.client_certificates:
        if not _connects(*host_port(where)):  # which is no refusal
            yield Finding(False, f"{where} does not respond")
            return
        refused = _refuses_strangers(where, folder / "ca.crt")
        words = "refuses" if refused else "serves"
        yield Finding(refused, f"{where} {words} callers without a client certificate")
        if pair is None:  # the server has none
            return
    try:
        with httpx.Client(base_url=f"https://{where}", verify=trusted, timeout=SECONDS) as client:
            yield from _paths(client, where)
    except httpx.HTTPError as error:
        yield Finding(False, f"{where} does not respond: {error}")


def _refuses_strangers(where: str, ca: Path) -> bool:
    try:
        context = ssl.create_default_context(cafile=str(ca))
        got = httpx.post(f"https://{where}{FORBIDDEN[0]}", verify=context, timeout=SECONDS)
    except httpx.TransportError:
        return True
    return got.status_code == 400  # nginx says so only after the handshake


def _paths(client: httpx.Client, where: str) -> Iterator[Finding]:
    kind = {"content-type": PROTOBUF_MEDIA_TYPE}
    began = time.time()
    answers = {path: client.post(path, headers=kind) for path in sorted(p.decode() for p in PATHS)}
    ended = time.time()
    silent = [path for path, got in answers.items() if got.status_code != 401]
    yield Finding(
        not silent,
        f"{where} does not serve {', '.join(silent)} as it should"
        if silent
        else f"{where} serves the {len(PATHS)} calls of sites, only to those with a key",
    )
    others = (*FORBIDDEN, "/docs", "/openapi.json", "/health")
    open_paths = [path for path in others if client.post(path, headers=kind).status_code != 404]
    yield Finding(
        not open_paths,
        f"{where} serves {', '.join(open_paths)}" if open_paths else f"{where} serves nothing else",
    )
    last = list(answers.values())[-1].headers.get("date")
    if last:  # in whole seconds
        try:
            there = email.utils.parsedate_to_datetime(last).timestamp()
        except (ValueError, OverflowError):
            yield Finding(False, f"{where} says that it is {last!r:.100}")
            return
        off = max(began - there - 1, there - ended, 0.0)
        yield Finding(
            off < SYSTEM_TIME_TOLERANCE, f"the clocks here and there differ by {off:.0f} s or less"
        )
