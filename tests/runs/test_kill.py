from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import protofed
from protofed import tree
from protofed.runs.records import Record, read_records, without_times

ROUNDS = 4
COMMAND = [
    *(sys.executable, "-m", "protofed", "run", "--task", "glyphs", "--method", "fpl"),
    *("--rounds", str(ROUNDS), "--epochs", "2", "--clients", "1", "--samples", "40"),
    *("--checkpoint-every", "2", "--device", "cpu", "--quiet"),
]
PATIENCE = 120.0


def start(out: Path, *more: str) -> subprocess.Popen[bytes]:
    # the very package under test, wherever the tests are run from
    path = str(Path(protofed.__file__).parents[1])
    return subprocess.Popen(
        [*COMMAND, "--out", str(out), *more],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors.decode()


def lines(out: Path) -> int:
    try:
        return (out / "rounds.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def numbers(out: Path) -> list[Record]:
    return without_times(read_records(out / "rounds.jsonl"))


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two uninterrupted runs, each in a process of its own."""
    folders = [tmp_path_factory.mktemp("whole") / "run" for _ in range(2)]
    for process in [start(folder) for folder in folders]:
        finish(process)
    return folders


def test_two_processes_give_the_same_bits(wholes: list[Path]) -> None:
    a, b = wholes
    assert len(numbers(a)) == ROUNDS
    assert numbers(a) == numbers(b)
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert (a / "config.toml").read_bytes() == (b / "config.toml").read_bytes()


def test_a_run_killed_in_the_middle_of_a_round_resumes_to_the_same_bits(
    wholes: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    victim = start(out)
    deadline = time.monotonic() + PATIENCE
    while lines(out) < ROUNDS - 1:
        assert victim.poll() is None, victim.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    inside = time.monotonic() + 0.03  # a client of the last round is training by now
    while time.monotonic() < inside:
        time.sleep(0.002)
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=PATIENCE)
    assert victim.returncode == -signal.SIGKILL
    # three rounds are recorded, the checkpoint is of the second, and nothing says "finished"
    assert lines(out) == ROUNDS - 1
    assert tree.load(out / "checkpoint.safetensors")[1]["round"] == 2
    assert not (out / "summary.json").exists()
    assert not (out / "model.safetensors").exists()

    finish(start(out, "--resume"))
    whole = wholes[0]
    assert numbers(out) == numbers(whole)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert {p.name for p in out.iterdir()} == {p.name for p in whole.iterdir()}
    assert not list(out.rglob("*.tmp")), "no half-written file is left"
