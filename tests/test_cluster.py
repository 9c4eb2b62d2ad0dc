"""Which Ray clusters are talked to."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import protofed
from protofed import cluster
from protofed.errors import ProtofedError
from protofed.studies.ray_runner import RayRunner

OPEN = """
import time
from ray.cluster_utils import Cluster
print("at", Cluster(True, head_node_args={"num_cpus": 1}).address, flush=True)
time.sleep(600)
"""


def test_without_ray_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ProtofedError, match=r"Ray is not installed.*protofed\[cluster\]"):
        protofed.compare("glyphs", ["fedavg"], ray="local", runs=tmp_path, progress=False)


def test_what_does_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ProtofedError, match="without a cluster"):
        protofed.compare("glyphs", ["fedavg"], gpus_per_run=0.5, runs=tmp_path, progress=False)
    for gpus in (-1, 1.5, math.nan, math.inf):
        with pytest.raises(ProtofedError, match=f"cannot have {gpus} GPUs"):
            RayRunner("local", tmp_path, gpus=gpus)
    pytest.importorskip("ray")
    with pytest.raises(ProtofedError, match="exclude each other"):
        protofed.compare("glyphs", ["fedavg"], ray="local", engine="ray", runs=tmp_path)


@pytest.mark.parametrize(
    ("code", "text", "error"),
    [
        (0, "", "is open: it executes anyone's code"),
        (1, "noise\nRpcError: timed out\n", "no Ray cluster answers at h:1: RpcError: timed out"),
        (1, "noise\ntoken\n", None),
    ],
)
def test_a_cluster_must_ask_for_a_token(
    monkeypatch: pytest.MonkeyPatch, code: int, text: str, error: str | None
) -> None:
    """Its answer to one who comes without."""
    asked: list[Any] = []

    def answer(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        asked.append((command[-1], env["RAY_AUTH_MODE"]))
        return SimpleNamespace(returncode=code, stderr=text)

    monkeypatch.setattr(cluster.subprocess, "run", answer)
    if error is None:
        cluster._require_token("h:1")
    else:
        with pytest.raises(ProtofedError, match=error):
            cluster._require_token("h:1")
    assert asked == [("h:1", "disabled")]


@pytest.mark.slow
def test_an_open_cluster_is_refused() -> None:
    pytest.importorskip("ray")
    started = subprocess.Popen(
        [sys.executable, "-c", OPEN],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    try:
        address = next(line.split()[1] for line in started.stdout if line.startswith("at "))
        with pytest.raises(ProtofedError, match="is open"), cluster.connected(address):
            pass
    finally:
        started.terminate()
        started.wait()
