"""Which Ray clusters are talked to."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import protofed
from protofed import cluster
from protofed.errors import ProtofedError
from protofed.studies.ray_runner import RayRunner

CLUSTER = """
import time
from ray.cluster_utils import Cluster
print("at", Cluster(True, head_node_args={"num_cpus": 1}).address, flush=True)
time.sleep(600)
"""
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-for-tests-of-32-characters"}


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of someone who accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def running_cluster(**environment: str) -> Iterator[str]:
    """The address of a cluster in a process of its own."""
    started = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    try:
        yield next(line.split()[1] for line in started.stdout if line.startswith("at "))
    finally:
        started.terminate()
        started.wait()


def test_without_ray_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ProtofedError, match=r"Ray is not installed.*protofed\[cluster\]"):
        protofed.compare("glyphs", ["fedavg"], ray="local", runs=tmp_path, progress=False)


def test_what_does_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ProtofedError, match="without a cluster"):
        protofed.compare("glyphs", ["fedavg"], gpus_per_run=0.5, runs=tmp_path, progress=False)
    for gpus in (-1, 1.5, math.nan, math.inf):
        with pytest.raises(ProtofedError, match=f"cannot have {gpus} GPUs"):
            RayRunner("local", tmp_path, Console(), gpus=gpus)
    pytest.importorskip("ray")
    with pytest.raises(ProtofedError, match="exclude each other"):
        protofed.compare("glyphs", ["fedavg"], ray="local", engine="ray", runs=tmp_path)


@pytest.mark.parametrize(
    ("without", "with_token", "error"),
    [
        ("", "", "is open: it executes anyone's code"),
        ("RpcError: timed out", "", "no Ray cluster answers at .*: RpcError: timed out"),
        ("token", "token", "asks for a token that this machine does not have"),
        (
            "token",
            "exit code -6",
            "asks for a token that this machine does not have",
        ),  # Ray aborts without one
        ("token", "", None),
    ],
)
def test_a_cluster_must_ask_for_our_token(
    monkeypatch: pytest.MonkeyPatch,
    listener: str,
    without: str,
    with_token: str,
    error: str | None,
) -> None:
    """By its answers to one who comes without a token, and to one with ours."""
    answers = {"disabled": without, "token": with_token}
    monkeypatch.setattr(cluster, "_ask", lambda _, mode: answers[mode])
    if error is None:
        cluster._require_token(listener)
    else:
        with pytest.raises(ProtofedError, match=error):
            cluster._require_token(listener)


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [(0, "noise\n", ""), (1, "noise\ntoken\n", "token"), (-6, "", "exit code -6")],
)
def test_how_a_cluster_is_asked(
    monkeypatch: pytest.MonkeyPatch, code: int, text: str, said: str
) -> None:
    def answer(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        assert (command[-1], env["RAY_AUTH_MODE"]) == ("h:1", "disabled")
        return SimpleNamespace(returncode=code, stderr=text)

    monkeypatch.setattr(cluster.subprocess, "run", answer)
    assert cluster._ask("h:1", "disabled") == said


@pytest.mark.parametrize("address", ["nonsense", ":1", "h:", "h:b", "h:65536", "ray://h:1"])
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ProtofedError, match=f"no Ray cluster answers at {address}: "):
        cluster._require_token(address)


def test_auto_takes_a_cluster_that_runs(monkeypatch: pytest.MonkeyPatch, listener: str) -> None:
    """One that has ended is not taken, unless it was asked for by name: then that is an error."""
    ray, ended = pytest.importorskip("ray"), "127.0.0.1:1"
    services = ray._private.services
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "resolve_ip_for_localhost", lambda host: host)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for noted, taken in ((None, "local"), (listener, listener), (ended, "local")):
        monkeypatch.setattr(services, "find_bootstrap_address", lambda _, noted=noted: noted)
        assert cluster._running(ray) == taken
    monkeypatch.setenv("RAY_ADDRESS", ended)
    assert cluster._running(ray) == ended


@pytest.mark.slow
def test_an_open_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    with running_cluster(RAY_AUTH_MODE="disabled") as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        for given in (address, "auto"):
            with pytest.raises(ProtofedError, match="is open"), cluster.connected(given):
                pass


@pytest.mark.slow
def test_our_token_opens_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also after a local cluster, which has a token of its own."""
    pytest.importorskip("ray")
    with running_cluster(**TOKEN) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
        for token in (None, "another-token-of-some-32-characters"):
            if token is None:
                monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
            else:
                monkeypatch.setenv("RAY_AUTH_TOKEN", token)
            for given in (address, "auto"):
                with (
                    pytest.raises(ProtofedError, match=f"{address} asks for a token"),
                    cluster.connected(given),
                ):
                    pass
        monkeypatch.delenv("RAY_AUTH_TOKEN")
        with cluster.connected("local") as ray:
            assert ray.get_runtime_context().gcs_address != address
        assert "RAY_AUTH_TOKEN" not in os.environ
        (tmp_path / "token").write_text(TOKEN["RAY_AUTH_TOKEN"])
        for given in (address, "auto"):
            with cluster.connected(given) as ray:
                assert ray.get_runtime_context().gcs_address == address
