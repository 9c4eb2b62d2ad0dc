"""``deploy doctor`` on a server in this process: what it finds right, and what wrong."""

from __future__ import annotations

import contextlib
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
import uvicorn
from flwr.superlink.main import create_app
from tests.deploy.loopback_world import free_port
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.deploy import certificates, doctor
from protofed.deploy.certificates import node_key
from protofed.deploy.doctor import _paths
from protofed.deploy.gate import PATHS, Gate
from protofed.deploy.setup import init


@contextlib.contextmanager
def served(folder: Path, port: int, application: Any, **more: Any) -> Iterator[None]:
    """The application at this port, with the certificate of a server's folder."""
    files = {"ssl_certfile": str(folder / "server.crt"), "ssl_keyfile": str(folder / "server.key")}
    config = uvicorn.Config(
        application, "127.0.0.1", port, lifespan="off", log_level="error", **files, **more
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(autouse=True)
def few_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for two of the paths that must not answer: all of them take seconds."""
    few = ["/v1/control/start-run", "/v1/runtime/acquire-task"]
    assert len(doctor.FORBIDDEN) > 50 and set(few) < set(doctor.FORBIDDEN)
    monkeypatch.setattr(doctor, "FORBIDDEN", few)


@pytest.fixture(scope="module")
def link() -> Any:
    made = create_app()
    made.state.enable_supernode_auth = True
    return made


@pytest.fixture
def federation(tmp_path: Path) -> Callable[..., tuple[Path, int]]:
    def make(**more: Any) -> tuple[Path, int]:
        port = free_port()
        init(tmp_path / "f", ["a"], classes=["x", "y"], address=f"127.0.0.1:{port}", minimum=1,
             **more)  # fmt: skip
        return tmp_path / "f", port

    return make


def look(folder: Path, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["deploy", "doctor", "--dir", str(folder), *words])
    return sum(line.startswith("PROBLEM") for line in done.output.splitlines()), done.output


def test_a_site_finds_the_gate_shut_and_says_what_is_wrong(
    federation: Callable[..., tuple[Path, int]], link: Any
) -> None:
    folder, port = federation()
    site = folder / "sites" / "a"
    with served(folder / "server", port, Gate(link)):
        problems, said = look(folder, "--site", "a")
        assert problems == 0, said
        for words in ("the 10 calls of sites", "serves nothing else", "clocks", "node.key is the",
                      "versions: ", "only you can read the secrets"):  # fmt: skip
            assert words in said, words
        found, again = look(site)  # the folder as it lies on the site's machine
        assert found == 0
        # an answer takes seconds on a busy machine, and the clocks are compared by it
        assert re.sub(r"by \d+ s", "", again) == re.sub(r"by \d+ s", "", said)
        (site / "node.key").chmod(0o640)
        problems, said = look(site)
        assert problems == 1 and "PROBLEM permissions: node.key" in said
        (site / "node.key").chmod(0o600)
        site.chmod(0o750)
        assert "PROBLEM permissions: a" in look(site)[1]
        site.chmod(0o700)
        assert (
            "ok      policy: none, everything is allowed" in said
            and "audit.jsonl: 0 entries" in said
        )
        settings = (site / "site.toml").read_text()
        (site / "site.toml").write_text(f"{settings}\n[policy]\nmax_rounds = 9\n")
        (site / "audit.jsonl").write_text("{}\n")
        problems, said = look(site)
        assert problems == 1 and "PROBLEM" in said and "audit.jsonl' has been altered" in said
        assert "ok      policy: max_rounds 9" in said
        (site / "audit.jsonl").unlink()
        (site / "node.key").write_bytes(node_key()[0])
        problems, said = look(site)
        assert problems == 1 and "PROBLEM node.key is not the key of site a" in said
        (site / "node.key").unlink()
        assert "PROBLEM node.key cannot be read" in look(site)[1]
    problems, said = look(site)
    assert f"PROBLEM 127.0.0.1:{port} does not respond" in said


def test_what_cannot_be_read_is_a_problem(
    federation: Callable[..., tuple[Path, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = federation(client_certificates=True)
    site = folder / "sites" / "a"
    (site / "gone.key").symlink_to("nowhere")

    def no_password(*_: Any) -> None:
        raise TypeError("Password was not given but private key is encrypted")

    for name in ("load_ssh_private_key", "load_pem_private_key"):
        monkeypatch.setattr(f"protofed.deploy.doctor.{name}", no_password)
    _, said = look(site)
    assert "PROBLEM node.key cannot be read: node.key: Password was not given" in said
    assert "PROBLEM client.crt: client.key: Password was not given" in said


@pytest.mark.parametrize("date", ["yesterday", "Mon, 99 Jan 2026 00:00:00 GMT"])
def test_a_server_that_does_not_know_the_date(date: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        known = request.url.path.encode() in PATHS
        return httpx.Response(401 if known else 404, headers={"date": date})

    with httpx.Client(base_url="https://x", transport=httpx.MockTransport(answer)) as client:
        assert list(_paths(client, "x"))[-1] == (False, f"x says that it is {date!r}")


def test_flower_without_the_gate_is_a_problem(
    federation: Callable[..., tuple[Path, int]], link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, port = federation()
    with served(folder / "server", port, link):
        problems, said = look(folder, "--site", "a")
        assert problems == 1 and "PROBLEM" in said and "/v1/control/start-run" in said
        monkeypatch.setattr(doctor, "time", SimpleNamespace(time=lambda: time.time() - 60))
        problems, said = look(folder, "--site", "a")
        assert problems == 2 and "PROBLEM the clocks here and there differ by" in said


def test_client_certificates_are_asked_for(
    federation: Callable[..., tuple[Path, int]], link: Any
) -> None:
    folder, port = federation(client_certificates=True)
    words = "callers without a client certificate"
    with served(folder / "server", port, Gate(link)):
        problems, said = look(folder, "--site", "a")
        assert problems == 1 and f"PROBLEM 127.0.0.1:{port} serves {words}" in said
    need = {"ssl_ca_certs": str(folder / "server/ca.crt"), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    with served(folder / "server", port, Gate(link), **need):
        problems, said = look(folder, "--site", "a")
        assert problems == 0 and f"ok      127.0.0.1:{port} refuses {words}" in said, said
    assert "client.crt is valid until" in said
    problems, said = look(folder, "--site", "a")  # nobody there is not somebody who refuses
    assert problems == 1 and f"PROBLEM 127.0.0.1:{port} does not respond" in said, said


def test_a_server_looks_at_its_certificate_and_its_superlink(
    federation: Callable[..., tuple[Path, int]], link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "DAYS", 20)
    folder, port = federation()
    with served(folder / "server", port, Gate(link)):
        problems, said = look(folder)
        assert problems == 2, said
        assert "PROBLEM server.crt is valid until" in said and "(19 days)" in said
        assert "protofed deploy renew makes a new one" in said
        assert "ok      ca.crt is valid until" in said
        assert "ok      server.crt names 127.0.0.1" in said
        assert "PROBLEM no server of f is running on this machine" in said
    other = certificates.Authority("x").server(["h"])
    (folder / "server" / "server.crt").write_bytes(other[0])
    toml = folder / "server" / "federation.toml"
    toml.write_text(toml.read_text().replace("127.0.0.1:", "192.0.2.1:"))
    monkeypatch.setattr(doctor, "SECONDS", 0.1)
    said = look(folder)[1]
    assert "PROBLEM server.crt does not belong to server.key" in said
    assert "PROBLEM server.crt does not name 192.0.2.1" in said
