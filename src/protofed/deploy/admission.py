"""How a site gets its key into the federation, and how keys and certificates change or end.

A site makes its own keys (``deploy join``) and sends a *request*: its public key and, where sites
need TLS certificates, a signing request. The operator compares the fingerprint over a channel they
trust, and admits it. No private key ever leaves its machine.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cryptography import x509

from protofed.deploy.certificates import Authority, certificate_request, host_names, node_key
from protofed.deploy.locking import locked
from protofed.deploy.members import Members, read_members, write_members
from protofed.deploy.programs import NODES_FILE, is_serving, register, unregister
from protofed.deploy.site import read_site_config
from protofed.errors import ProtofedError, unknown
from protofed.files import read_json, write_atomic, write_json

Tell = Callable[[str], None]


def fingerprint(public: str) -> str:
    """A public key's fingerprint, as ``ssh-keygen -l`` shows it."""
    digest = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


# ---- at a site ----------------------------------------------------------------------------------


def make_request(folder: Path, renew: bool, tell: Tell = print) -> Path:
    """Make a site's key, here and for it alone, and the request that the operator admits."""
    site = read_site_config(folder)
    if not renew and (folder / "node.key").exists():
        raise ProtofedError(
            f"site '{site.name}' already has a key", "protofed deploy renew makes a new one"
        )
    private, public = node_key()
    request = {"site": site.name, "key": public}
    if site.members.client_certificates:
        own = certificate_request(folder / "client.key", site.name)
        request["certificate_request"] = own
    write_atomic(folder / "node.key", private, private=True)
    write_atomic(folder / "node.key.pub", f"{public} {site.name}\n")
    with locked(folder):
        write_members(folder, _with_key(read_members(folder), site.name, public))
    path = folder / f"{site.name}.request"
    write_json(path, request)
    tell(f"the key of site {site.name}: {fingerprint(public)}")
    tell(f"send {path} to the operator, who runs: protofed deploy admit {path.name}")
    return path


def _with_key(members: Members, site: str, key: str) -> Members:
    sites = dict(members.sites)
    sites[site] = replace(sites[site], key=key)
    return replace(members, sites=sites)


# ---- at the server ------------------------------------------------------------------------------


def admit(
    folder: Path, request: Path, ca: Path, replace_key: bool = False, tell: Tell = print
) -> None:
    """Let a site in with the key in its request, and sign its certificate if it needs one."""
    about = read_json(request, ("site", "key"))
    site, key = str(about["site"]), str(about["key"])
    with locked(folder):
        members = read_members(folder)
        if site not in members.sites:
            raise unknown("site", site, members.sites)
        if not key:
            raise ProtofedError(f"the request of site '{site}' has no key")
        if members.sites[site].key and not replace_key:
            raise ProtofedError(
                f"site '{site}' already has a key",
                "if it asked for a new one, and you compared the fingerprint: --replace",
            )
        admitted = _with_key(members, site, key)  # an error if the key is invalid or was revoked
        if members.client_certificates:
            certificate = request.with_suffix(".crt")
            if certificate.name in ("ca.crt", "server.crt"):  # whoever sent it chose its name
                raise ProtofedError(f"'{request}' would replace {certificate.name}", "rename it")
            signed = Authority.load(ca).client_for(site, str(about.get("certificate_request", "")))
            write_atomic(certificate, signed)
            tell(f"send {certificate} to site {site}, to be client.crt in its folder")
        write_members(folder, admitted)
    if is_serving(folder):
        _unregister(folder, site)
        new = register(folder, [admitted.sites[site]])
        with locked(folder):
            write_json(folder / NODES_FILE, read_json(folder / NODES_FILE) | new)
    tell(f"site {site} is admitted with the key {fingerprint(key)}")


def revoke(folder: Path, site: str, tell: Tell = print) -> None:
    """Shut a site out, at once if the server runs; its key is never admitted again."""
    with locked(folder):
        members = read_members(folder)
        if site not in members.sites:
            raise unknown("site", site, members.sites)
        key = members.sites[site].key
        if not key:
            raise ProtofedError(f"site '{site}' has no key")
        shut = replace(_with_key(members, site, ""), revoked=(*members.revoked, key))
        write_members(folder, shut)
    if is_serving(folder):
        _unregister(folder, site)
    tell(f"site {site} is shut out; the key {fingerprint(key)} is revoked")


def _unregister(folder: Path, site: str) -> None:
    node = read_json(folder / NODES_FILE).get(site)
    if node is not None:
        unregister(folder, node)
        with locked(folder):
            nodes = read_json(folder / NODES_FILE)
            write_json(folder / NODES_FILE, {s: n for s, n in nodes.items() if s != site})


def renew_server(folder: Path, ca: Path, tell: Tell = print) -> None:
    """Make a new key and certificate for the server, for the same names as now."""
    try:
        old = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    except ValueError as error:
        raise ProtofedError(f"server.crt in '{folder}' cannot be read: {error}") from None
    certificate, key = Authority.load(ca).server(host_names(old))
    write_atomic(folder / "server.key", key, private=True)
    write_atomic(folder / "server.crt", certificate)
    tell("server.crt and server.key are new: restart protofed deploy server")
