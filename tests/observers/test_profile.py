from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.commands import TINY as COMMAND
from tests.cli.commands import Done, call

from protofed.methods import FPL
from protofed.observers import profile as profiling
from protofed.observers.profile import Profile
from protofed.runs.records import without_times
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

QUICK: dict[str, Any] = {**TINY, "epochs": 1, "device": "cpu"}


def operations(path: Path) -> list[dict[str, Any]]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [e for e in events if e.get("ph") == "X" and e["name"].startswith("aten::")]


@pytest.mark.parametrize("engine", ["loop", "workers"])
def test_the_second_round_is_recorded(tmp_path: Path, engine: str) -> None:
    settings = {**QUICK, "rounds": 3, "engine": engine}
    settings |= {"workers": 2} if engine == "workers" else {}
    profile = Profile(tmp_path)
    watched = run(tiny_task(), FPL(), **settings, observers=[profile])
    assert profile.recorded == 2
    found = operations(profile.path)
    steps = watched.rounds[1]["steps"]
    convolutions = [e for e in found if e["name"] == "aten::convolution_backward"]
    assert len(convolutions) == 2 * steps, "cnn2 has two: one round"
    plain = run(tiny_task(), FPL(), **settings)
    assert without_times(watched.rounds) == without_times(plain.rounds)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="lanes run on a GPU")
def test_lanes_are_recorded_with_their_kernels(tmp_path: Path) -> None:
    profile = Profile(tmp_path)
    settings = {**QUICK, "rounds": 2, "device": "cuda", "engine": "lanes"}
    run(tiny_task(), FPL(), **settings, observers=[profile])
    events = json.loads(gzip.decompress(profile.path.read_bytes()))["traceEvents"]
    assert any(e.get("cat") == "kernel" for e in events)


def test_the_only_round_is_recorded(tmp_path: Path) -> None:
    profile = Profile(tmp_path)
    run(tiny_task(), FPL(), **{**QUICK, "rounds": 1}, observers=[profile])
    assert profile.recorded == 1
    assert operations(profile.path)


def test_a_long_round_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**QUICK, "rounds": 2, "engine": "loop"}
    whole, cut = Profile(tmp_path / "whole"), Profile(tmp_path / "cut")
    run(tiny_task(), FPL(), **settings, observers=[whole])
    monkeypatch.setattr(profiling, "LONGEST", 0.0)
    run(tiny_task(), FPL(), **settings, observers=[cut])
    assert cut.recorded == 2
    assert 0 < len(operations(cut.path)) < len(operations(whole.path)) / 2, "one client of four"


def test_on_the_command_line(tmp_path: Path) -> None:
    def protofed(*more: str) -> Done:
        return call("run", *COMMAND, "--rounds", 2, "--out", tmp_path / "a", *more)

    done = protofed("--profile")
    assert done.code == 0
    assert "round 2 is recorded in" in done.out and "perfetto" in done.out
    assert operations(tmp_path / "a" / "trace.json.gz")
    done = protofed("--profile")
    assert done.code == 2 and "no round to record" in done.err and "--overwrite" in done.err
    assert protofed("--overwrite", "--quiet").code == 0
    assert not (tmp_path / "a" / "trace.json.gz").exists()
