"""Flower's programs: what they are told, and what is said when they cannot start."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.supercore.control import ControlHttpClient

from protofed.deploy import programs
from protofed.deploy.members import read_members
from protofed.deploy.setup import init
from protofed.deploy.site import read_site_config
from protofed.errors import ProtofedError


def test_where_the_server_cannot_listen_it_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ProtofedError, match="in use") as caught:
            programs.check_free("127.0.0.1", port)
        assert "another server" in str(caught.value)
    for host in ("192.0.2.1", "no-such-host.invalid"):  # neither is this machine
        with pytest.raises(ProtofedError, match=f"cannot listen on {host}:8000") as caught:
            programs.check_free(host, 8000)
        assert "--host 0.0.0.0" in str(caught.value)
    assert programs.join_address("::1", 8000) == "[::1]:8000"


@pytest.mark.parametrize("file", ["ca.crt", "node.key"])
def test_a_site_without_its_key_or_certificate_does_not_start(tmp_path: Path, file: str) -> None:
    init(tmp_path / "f", ["scan-0"], task="glyphs", minimum=1)
    (tmp_path / "f" / "sites" / "scan-0" / file).unlink()
    with pytest.raises(ProtofedError, match=f"there is no '.*{file}'"):
        programs.join(read_site_config(tmp_path / "f" / "sites" / "scan-0"))


def test_without_a_server_it_says_how_to_start_one(tmp_path: Path) -> None:
    init(tmp_path / "f", ["a"], classes=["x", "y"], address="127.0.0.1:9", minimum=1)
    home = tmp_path / "f" / "server"
    for _ in range(2):  # never started, and no longer running
        with pytest.raises(
            ProtofedError, match="no server of f is running on this machine"
        ) as caught:
            programs.flwr(home, "ls", programs.CONNECTION, seconds=60)
        assert "protofed deploy server --dir" in str(caught.value)
        programs.write_connection(home, "127.0.0.1:9", str(home / "ca.crt"))


def test_keys_are_registered_over_one_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(tmp_path / "f", ["a", "b"], classes=["x", "y"], minimum=1)
    home, sites = tmp_path / "f" / "server", ["a", "b"]
    members = [read_members(home).sites[name] for name in sites]
    programs.write_connection(home, "127.0.0.1:9", str(home / "ca.crt"))
    with pytest.raises(ProtofedError, match="no server of f is running on this machine"):
        programs.register(home, members)
    seen: list[Any] = []

    def register(client: ControlHttpClient, request: Any) -> Any:
        seen.append((client, request.name, request.public_key))
        if request.name == "b" and len(seen) > 2:
            url = httpx.Request("POST", "https://127.0.0.1:9")
            raise httpx.HTTPStatusError("", request=url, response=httpx.Response(409, text="taken"))
        return SimpleNamespace(node_id=len(seen))

    monkeypatch.setattr(ControlHttpClient, "RegisterNode", register)
    assert programs.register(home, members) == {"a": "1", "b": "2"}
    clients, names, keys = zip(*seen, strict=True)
    assert len(set(map(id, clients))) == 1 and names == ("a", "b")
    assert [read_members(home).site_with_key(key) for key in keys] == sites
    with pytest.raises(ProtofedError, match="refused the key of site 'b': taken"):
        programs.register(home, members)


def test_flower_is_told_nothing_but_where_the_server_is(tmp_path: Path) -> None:
    programs.write_connection(tmp_path, "127.0.0.1:1", "ca.crt")
    text = (tmp_path / "operator" / "config.toml").read_text()
    assert "127.0.0.1:1" in text and "flower.ai" not in text
    env = programs.environment(tmp_path / "home")
    assert env["FLWR_TELEMETRY_ENABLED"] == "0" and env["FLWR_HOME"] == str(tmp_path / "home")
