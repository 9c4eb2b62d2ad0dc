"""``deploy init``: what it writes, and what it refuses to write."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from cryptography.x509 import load_pem_x509_certificate
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.deploy.members import read_members
from protofed.deploy.setup import init
from protofed.deploy.site import read_site_config
from protofed.errors import ProtofedError


def test_init_writes_what_each_machine_needs(tmp_path: Path) -> None:
    out = tmp_path / "pets"
    words = ["deploy", "init", str(out), "--sites", "a,b,c", "--classes", "cat,dog"]
    done = CliRunner().invoke(app, [*words, "--domains", "a=north,b=north"])
    assert done.exit_code == 0, done.output
    members = read_members(out / "server")
    assert [m.domain for m in members.sites.values()] == ["north", "north", "c"]
    assert members.clients() == {"north": 2, "c": 1}
    assert members.minimum == 2 and members.classes == ("cat", "dog")
    assert members.image_size == 224 and "resizes its images to 224×224 pixels" in done.output
    for secret in ("server/server.key", "ca/ca.key", "sites/a/node.key"):
        assert stat.S_IMODE((out / secret).stat().st_mode) == 0o600
    for site in "abc":
        home = out / "sites" / site
        assert (home / "federation.toml").read_text() == (
            out / "server" / "federation.toml"
        ).read_text()
        assert (home / "node.key.pub").read_text().split()[0] == "ecdsa-sha2-nistp384"
        assert not (home / "ca.key").exists()
        assert read_site_config(home).name == site
        assert "# public = " in (home / "site.toml").read_text()
        unit = (home / "protofed-site.service").read_text()
        assert f"protofed deploy site --dir /srv/protofed/site --site {site} --data" in unit
        assert "EnvironmentFile=/srv/protofed/site/protofed.env" in unit
    env = (out / "server" / "protofed.env").read_text()
    assert "FLWR_TELEMETRY_ENABLED=0" in env and "FLWR_DISABLE_UPDATE_CHECK=1" in env
    assert "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1" in env
    page = (out / "README.md").read_text()
    for site in "abc":
        assert f"protofed deploy site --dir sites/{site} --site {site} --data" in page
    assert "`--public /path/to/public`" in page and "Without `--public`" not in page
    assert "protofed deploy confirm --dir server" in page and "the last fifth of each class" in page
    again = CliRunner().invoke(app, words)
    assert isinstance(again.exception, ProtofedError) and "already exists" in str(again.exception)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sites": ["a", "a"]}, "a different name"),
        ({"sites": ["../a"]}, "cannot be a site's name"),
        ({"sites": ["a b"]}, "cannot be a site's name"),
        ({"sites": ["scan-1"], "task": "glyphs"}, "numbered from 0"),
        ({"sites": ["scan"], "task": "glyphs"}, "not the name of a task"),
        ({"sites": ["moon-0"], "task": "glyphs"}, "unknown domain"),
        ({"sites": ["a"], "address": "here"}, "not host:port"),
        ({"sites": ["a"], "minimum": 2}, "minimum"),
        ({"sites": ["a"], "domains": {"b": "x"}}, "unknown site"),
        ({"sites": ["a"], "address": "münchen.example:8000"}, "'münchen.example' is not ASCII"),
        ({"sites": ["a"], "hosts": ["müller.example"]}, "'müller.example' is not ASCII"),
        ({"sites": ["a"], "classes": ["x"]}, "names only one class"),
        ({"sites": ["a"], "domains": {"a": ""}}, "site 'a' has an empty domain"),
        (
            {"sites": ["a"], "classes": ["x", "y"], "domains": {"a": "average"}},
            "cannot be called 'average'",
        ),
    ],
)
def test_invalid_settings_are_errors(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    sites = more.pop("sites")
    with pytest.raises(ProtofedError, match=words):
        init(tmp_path / "new", sites, **more)
    assert not (tmp_path / "new").exists()


def test_client_certificates_and_what_nginx_needs(tmp_path: Path) -> None:
    words = ["deploy", "init", str(tmp_path / "f"), "--sites", "a,b", "--classes", "x,y"]
    done = CliRunner().invoke(
        app, [*words, "--client-certificates", "--address", "fl.example.org:8443"]
    )
    assert done.exit_code == 0, done.output
    home = tmp_path / "f"
    assert read_members(home / "sites" / "a").client_certificates
    authority = load_pem_x509_certificate((home / "server" / "ca.crt").read_bytes())
    for site in "ab":
        certificate = load_pem_x509_certificate((home / "sites" / site / "client.crt").read_bytes())
        certificate.verify_directly_issued_by(authority)
        assert certificate.subject.rfc4514_string() == f"CN={site}"
        assert stat.S_IMODE((home / "sites" / site / "client.key").stat().st_mode) == 0o600
    assert not list((home / "server").glob("client.*"))
    nginx = (home / "server" / "nginx.conf").read_text()
    for text in ("listen 8443 ssl;", "127.0.0.1:8444", "ssl_verify_client on", "fleet/(activate-"):
        assert text in nginx, text
    assert "`client.crt`" in (home / "README.md").read_text()
    init(tmp_path / "g", ["a"], classes=["x", "y"], minimum=1)
    assert not list(tmp_path.glob("g/sites/a/client.*"))
    assert "ssl_verify_client" not in (tmp_path / "g" / "server" / "nginx.conf").read_text()
    toml = tmp_path / "g" / "server" / "federation.toml"
    toml.write_text(toml.read_text().replace("certificates = false", 'certificates = "no"'))
    with pytest.raises(ProtofedError, match="client_certificates must be true or false"):
        read_members(toml.parent)


def test_names_with_special_characters_survive(tmp_path: Path) -> None:
    name, domain, classes = 'größe "1" \\ \x7f \U0001f600', "north\n[sites]", ["a'b", 'c"d', "é"]
    init(
        tmp_path / "f", ["a.b"], name=name, classes=classes, domains={"a.b": domain}, minimum=1,
        round_seconds=1234567.5,
    )  # fmt: skip
    members = read_members(tmp_path / "f" / "server")
    assert (members.name, members.classes) == (name, tuple(classes))
    assert members.sites["a.b"].domain == domain and members.round_seconds == 1234567.5


def test_a_long_name_is_cut_in_certificates(tmp_path: Path) -> None:
    init(tmp_path / ("ü" * 60), ["a"], minimum=1)
    [path] = tmp_path.glob("*/ca/ca.crt")
    found = load_pem_x509_certificate(path.read_bytes()).subject
    assert found.rfc4514_string() == f"CN={'ü' * 32}"


def test_sites_of_a_task_are_in_the_simulators_order(tmp_path: Path) -> None:
    sites = ["photo-0", "scan-1", "print-0", "scan-0"]
    init(tmp_path / "f", sites, task="glyphs")
    raw = tomllib.loads((tmp_path / "f" / "sites" / "scan-1" / "federation.toml").read_text())
    assert list(raw["sites"]) == ["scan-0", "scan-1", "print-0", "photo-0"]
    assert raw["task"] == "glyphs" and "classes" not in raw
    page = (tmp_path / "f" / "README.md").read_text()
    assert "--data" not in page and "Without `--public`, the task's own" in page
