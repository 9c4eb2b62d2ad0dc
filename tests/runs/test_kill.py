"""A process that is really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.runs.diary import numbers

import protofed
from protofed.runs.folder import RunFolder

ROUNDS = 4
COMMAND = [
    *(sys.executable, "-m", "protofed", "run", "--task", "glyphs", "--method", "fpl"),
    *("--rounds", str(ROUNDS), "--epochs", "1", "--clients", "1", "--samples", "24"),
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


def test_a_run_killed_in_the_middle_of_a_round_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """In another process than an uninterrupted run: two processes give the same bits, too."""
    out, whole = tmp_path / "run", tmp_path / "whole"
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
    checkpoint = RunFolder(out).checkpoint()
    assert checkpoint is not None and checkpoint.round == 2
    assert not RunFolder(out).is_finished() and not RunFolder(out).has_model

    for process in (start(out, "--resume"), start(whole)):  # a killed process leaves no lock
        finish(process)
    assert len(numbers(out)) == ROUNDS and numbers(out) == numbers(whole)
    for name in ("model.safetensors", "config.toml"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert {p.name for p in out.iterdir()} == {p.name for p in whole.iterdir()}
    assert not list(out.rglob("*.tmp")), "no half-written file is left"
