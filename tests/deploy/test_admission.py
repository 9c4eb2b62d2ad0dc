"""Sites that make their own keys: joining, admission, revocation, renewal."""

from __future__ import annotations

import stat
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from tests.deploy.loopback_world import TINY, Deployment
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.deploy import admission, programs
from protofed.deploy.certificates import host_names
from protofed.deploy.members import Member, Members, read_members
from protofed.deploy.programs import NODES_FILE
from protofed.errors import ProtofedError
from protofed.files import read_json, write_json


def deploy(*words: str | Path) -> str:
    done = CliRunner().invoke(app, ["deploy", *map(str, words)])
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "f"
    deploy("init", folder, "--sites", "north,south", "--classes", "x,y", "--keys-at-sites",
           "--client-certificates", "--address", "fl.example.org:8000")  # fmt: skip
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the running server is told."""
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(admission, "is_serving", lambda folder: True)

    def register(folder: Path, members: list[Member]) -> dict[str, str]:
        seen.extend(("register", m.name) for m in members)
        return {m.name: "n2" for m in members}

    monkeypatch.setattr(admission, "register", register)
    monkeypatch.setattr(
        admission, "unregister", lambda folder, node: seen.append(("unregister", node))
    )
    return seen


def test_sites_that_are_admitted_while_the_server_starts_are_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "f"
    deploy("init", home, "--sites", "north,south", "--classes", "x,y", "--keys-at-sites")
    requests = [home / "sites" / site / f"{site}.request" for site in ("north", "south")]
    for site in ("north", "south"):
        deploy("join", "--dir", home, "--site", site)
    starting, registered = iter([True]), list[str]()
    monkeypatch.setattr(programs, "check_free", lambda *_: None)
    monkeypatch.setattr(programs, "running", lambda *_: nullcontext())
    monkeypatch.setattr(programs, "_until_one_ends", lambda **_: ("SuperLink", 0))
    monkeypatch.setattr(
        programs,
        "_until_listening",
        lambda *_: next(starting, False) and deploy("admit", *requests, "--dir", home),
    )
    monkeypatch.setattr(
        programs,
        "_register",
        lambda _, members: registered.extend(n for n, m in members.sites.items() if m.key),
    )
    with pytest.raises(ProtofedError, match="the SuperLink ended"):
        programs.serve(home / "server", tell=lambda _: None)
    assert registered == ["north", "south"]


def with_password(key: bytes) -> bytes:
    found = load_pem_private_key(key, None)
    return found.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_sites_private_keys_are_made_at_the_site(home: Path, tmp_path: Path) -> None:
    keys = {path.name for path in home.rglob("*.key")}
    assert keys == {"ca.key", "server.key"}
    assert "`protofed deploy join`" in (home / "README.md").read_text()
    assert all(not site.key for site in read_members(home / "server").sites.values())
    said = deploy("join", "--dir", home, "--site", "north")
    site = home / "sites" / "north"
    for secret in ("node.key", "client.key"):
        assert stat.S_IMODE((site / secret).stat().st_mode) == 0o600
    request = site / "north.request"
    assert "PRIVATE" not in request.read_text()
    again = deploy("admit", request, "--dir", home)
    (shown,) = [word for word in said.split() if word.startswith("SHA256:")]
    assert shown in again
    key = read_members(home / "server").sites["north"].key
    assert key == read_members(site).sites["north"].key
    assert f"{key} north\n" == (site / "node.key.pub").read_text()
    signed = certificate(site / "north.crt")
    signed.verify_directly_issued_by(certificate(home / "ca" / "ca.crt"))
    assert signed.subject.rfc4514_string() == "CN=north"
    with pytest.raises(ProtofedError, match="already has a key"):
        deploy("join", "--dir", site)


def test_requests_that_are_not_admitted(home: Path, tmp_path: Path) -> None:
    for site in ("north", "south"):
        deploy("join", "--dir", home, "--site", site)
    good = read_json(home / "sites" / "north" / "north.request")
    south = read_json(home / "sites" / "south" / "south.request")
    for change, words in (
        ({"site": "west"}, "unknown site"),
        ({"key": "ssh-rsa AAAA"}, "the key of site 'north' is invalid"),
        ({"key": ""}, "the request of site 'north' has no key"),
        ({"certificate_request": ""}, "the certificate request of site 'north' is invalid"),
        (
            {"certificate_request": good["certificate_request"].replace("M", "N", 3)},
            "certificate request of site 'north' is invalid",
        ),
    ):
        write_json(tmp_path / "x.request", good | change)
        with pytest.raises(ProtofedError, match=words):
            deploy("admit", tmp_path / "x.request", "--dir", home)
        assert not read_members(home / "server").sites["north"].key
    (tmp_path / "x.request").write_text("no request")
    with pytest.raises(ProtofedError, match="is damaged"):
        deploy("admit", tmp_path / "x.request", "--dir", home)
    for name in ("ca", "server"):  # the certificate is written beside a request, under its name
        write_json(home / "server" / f"{name}.request", good)
        before = (home / "server" / f"{name}.crt").read_bytes()
        with pytest.raises(ProtofedError, match=f"would replace {name}.crt"):
            deploy("admit", home / "server" / f"{name}.request", "--dir", home)
        assert (home / "server" / f"{name}.crt").read_bytes() == before
    deploy("admit", home / "sites" / "north" / "north.request", "--dir", home)
    write_json(tmp_path / "x.request", south | {"key": good["key"]})
    with pytest.raises(ProtofedError, match="two sites have the same key"):
        deploy("admit", tmp_path / "x.request", "--dir", home)
    with pytest.raises(ProtofedError, match=r"the authority in .* cannot be read"):
        deploy("admit", home / "sites" / "south" / "south.request", "--dir", home, "--ca", tmp_path)
    assert not read_members(home / "server").sites["south"].key


def test_a_revoked_key_never_returns(home: Path, calls: list[tuple[str, str]]) -> None:
    deploy("join", "--dir", home, "--site", "north")
    request, server = home / "sites" / "north" / "north.request", home / "server"
    write_json(server / NODES_FILE, {})
    deploy("admit", request, "--dir", home)
    key = read_members(server).sites["north"].key
    assert read_json(server / NODES_FILE) == {"north": "n2"}
    assert "is shut out" in deploy("revoke", "north", "--dir", home)
    assert calls == [("register", "north"), ("unregister", "n2")]
    assert read_json(server / NODES_FILE) == {}
    members = read_members(server)
    assert members.sites["north"].key == "" and members.revoked == (key,)
    assert members.clients() == {"north": 1, "south": 1}  # a run keeps its clients
    with pytest.raises(ProtofedError, match="site 'north' has a key that was revoked"):
        deploy("admit", request, "--dir", home)
    with pytest.raises(ProtofedError, match="site 'north' has no key"):
        deploy("revoke", "north", "--dir", home)
    with pytest.raises(ProtofedError, match="unknown site"):
        deploy("revoke", "west", "--dir", home)


def test_a_site_is_admitted_while_another_is_shut_out(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would otherwise write back the settings as they were before the other."""
    for site in ("north", "south"):
        deploy("join", "--dir", home, "--site", site)
    requests = {s: home / "sites" / s / f"{s}.request" for s in ("north", "south")}
    deploy("admit", requests["north"], "--dir", home)
    server, write = home / "server", admission.write_members
    shut_out = threading.Thread(target=admission.revoke, args=(server, "north", lambda _: None))

    def slow(folder: Path, members: Members) -> None:
        monkeypatch.setattr(admission, "write_members", write)
        shut_out.start()
        shut_out.join(0.5)  # it waits
        write(folder, members)

    monkeypatch.setattr(admission, "write_members", slow)
    deploy("admit", requests["south"], "--dir", home)
    shut_out.join()
    members = read_members(server)
    assert members.sites["south"].key and not members.sites["north"].key
    assert len(members.revoked) == 1


def test_a_site_renews_its_keys(home: Path, calls: list[tuple[str, str]]) -> None:
    site = home / "sites" / "north"
    deploy("join", "--dir", site)
    write_json(home / "server" / NODES_FILE, {})
    deploy("admit", site / "north.request", "--dir", home)
    old = {name: (site / name).read_bytes() for name in ("node.key", "client.key", "north.crt")}
    deploy("renew", "--dir", site)
    assert (site / "node.key").read_bytes() != old["node.key"]
    assert stat.S_IMODE((site / "node.key").stat().st_mode) == 0o600
    assert (site / "client.key").read_bytes() == old["client.key"]  # fits the old certificate, too
    with pytest.raises(ProtofedError, match="already has a key"):
        deploy("admit", site / "north.request", "--dir", home)
    deploy("admit", site / "north.request", "--dir", home, "--replace")
    assert calls == [("register", "north"), ("unregister", "n2"), ("register", "north")]
    assert (site / "north.crt").read_bytes() != old["north.crt"]
    members = read_members(home / "server")
    assert members.sites["north"].key == read_members(site).sites["north"].key


def test_the_server_renews_its_certificate(home: Path) -> None:
    server = home / "server"
    before, key = certificate(server / "server.crt"), (server / "server.key").read_bytes()
    assert "restart" in deploy("renew", "--dir", home)
    after = certificate(server / "server.crt")
    assert host_names(after) == host_names(before) and "fl.example.org" in host_names(after)
    assert after.serial_number != before.serial_number
    assert (server / "server.key").read_bytes() != key
    assert stat.S_IMODE((server / "server.key").stat().st_mode) == 0o600
    authority = certificate(server / "ca.crt")
    after.verify_directly_issued_by(authority)
    assert authority.not_valid_after_utc > after.not_valid_after_utc
    (home / "ca" / "ca.key").write_bytes(key)
    with pytest.raises(ProtofedError, match=r"is not the key of ca\.crt"):
        deploy("renew", "--dir", home)
    (home / "ca" / "ca.key").write_bytes(with_password(key))
    with pytest.raises(ProtofedError, match=r"the authority in .* ca\.key: Password was not given"):
        deploy("renew", "--dir", home)
    (home / "ca" / "ca.key").unlink()
    with pytest.raises(ProtofedError, match=r"the authority in .* cannot be read"):
        deploy("renew", "--dir", home)
    (server / "server.crt").write_text("damaged")
    with pytest.raises(ProtofedError, match=r"server\.crt in .* cannot be read"):
        deploy("renew", "--dir", home)


def test_a_clients_key_with_a_password(home: Path) -> None:
    site = home / "sites" / "north"
    deploy("join", "--dir", site)
    path = site / "client.key"
    path.write_bytes(with_password(path.read_bytes()))
    with pytest.raises(ProtofedError, match=r"client\.key' cannot be read: .*Password was not"):
        deploy("renew", "--dir", site)


def test_folders_are_their_owners_alone(home: Path) -> None:
    for folder in (home, *(p for p in home.rglob("*") if p.is_dir())):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    unit = (home / "sites" / "north" / "protofed-site.service").read_text()
    for line in ("UMask=0077", "NoNewPrivileges=true", "ProtectSystem=strict"):
        assert line in unit.splitlines()


@pytest.mark.drill
def test_keys_and_approval_of_a_running_federation(deployment: Deployment) -> None:
    """Sites are admitted to a server that runs, one approves its run, one is shut out."""
    sites, home = ("scan-0", "print-0"), deployment.home
    deployment.init(
        "--keys-at-sites", "--client-certificates", "--gather-seconds", "60",
        "--wait-seconds", "200", "--minimum", "2", sites=sites,
    )  # fmt: skip
    deployment.server()
    assert "without a key, and so shut out: scan-0, print-0" in deployment.text("server")
    for name in sites:
        folder = home / "sites" / name
        assert deployment.cli("join", "--dir", str(folder)).returncode == 0
        done = deployment.cli("admit", str(folder / f"{name}.request"), "--dir", str(home))
        assert done.returncode == 0, done.stderr
        (folder / f"{name}.crt").rename(folder / "client.crt")
    site = home / "sites" / "print-0"
    with (site / "site.toml").open("a") as file:
        file.write("[policy]\napproval = true\nmax_rounds = 2\n")
    for name in sites:
        deployment.site(name)
    words = ("--method", "fpl", "--rounds", "2", *TINY, "--samples", "scan=30,print=24")
    assert deployment.start(*words).returncode == 0
    deployment.until(
        lambda: "waits for the run's approval at print-0" in deployment.log(), 200, "the question"
    )
    asked = deployment.cli("approve", "--dir", str(site)).stdout
    assert "waits: glyphs-fpl" in asked, asked
    assert deployment.cli("approve", asked.split()[0], "--dir", str(site)).returncode == 0
    deployment.until(lambda: "the run is complete" in deployment.log(), 200, "the run")
    audit = deployment.cli("audit", "--dir", str(site))
    assert audit.returncode == 0 and "none altered" in audit.stdout, audit.stderr
    for event in ("asked", "refused", "approved", "sent"):
        assert f"  {event} " in audit.stdout
    examined = deployment.cli("doctor", "--dir", str(site))
    assert examined.returncode == 0, examined.stdout
    # outside the policy
    assert deployment.start(*words[:3], "3", *words[4:]).returncode == 0
    said = "site print-0: error 100: rounds = 3: the site's policy allows at most 2"
    deployment.until(lambda: said in deployment.log(), 200, "the refusal")
    deployment.until(lambda: "failed 3 times" in deployment.log(), 200, "the end of the run")
    assert said.partition(": error 100: ")[2] in deployment.text("print-0")
    # shut out, while it is connected
    assert deployment.cli("revoke", "print-0", "--dir", str(home)).returncode == 0
    deployment.until(
        lambda: "SuperNode: exit code" in deployment.text("print-0"), 120, "the end of its session"
    )
    assert "print-0 (domain print): not registered" in deployment.status()
