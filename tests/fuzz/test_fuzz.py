"""The fuzzing job's short form, and that it finds what it looks for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import protofed
from protofed.errors import ProtofedError
from tests.fuzz import driver, harness
from tests.fuzz.driver import State, fuzz, table
from tests.fuzz.harness import FUZZERS, Choices, Fuzzer, Tally, Wrong, inputs

ROOT = Path(__file__).parents[2]


def test_the_short_form_finds_no_fault() -> None:
    """In a process of its own: it forks, and it watches all that its process does."""
    source = str(Path(protofed.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--short"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 faults" in done.stdout


# ---- the job itself -----------------------------------------------------------------------------


@pytest.fixture
def no_fuzzers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the fuzzers that a test registers, in processes that do not warm up."""
    kept = dict(FUZZERS)
    FUZZERS.clear()
    monkeypatch.setattr(driver, "_warm_up", lambda root: None)
    yield
    FUZZERS.clear()
    FUZZERS.update(kept)


def number(choices: Choices) -> int:
    return choices.number(256)


def test_an_error_of_another_type_is_shrunk_and_can_be_repeated(
    no_fuzzers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "EXAMPLES", 5)
    monkeypatch.setattr(harness, "SHRINK_SECONDS", 0.5)

    def check(value: int, folder: Path) -> None:
        if value % 2:
            raise ProtofedError("odd")
        if value > 9:
            raise KeyError(value)

    inputs("numbers", number, check)
    tally = FUZZERS["numbers"].batch(0, tmp_path)
    (fault,) = tally.faults.values()
    assert fault.signature == "numbers: KeyError outside the package" and int(fault.input) in range(
        10, 256, 2
    )
    assert tally.tried == tally.ok + tally.refused + fault.hits
    assert tally.tried > 500 and min(tally.ok, tally.refused) > 20
    again = FUZZERS["numbers"].repeat
    assert again is not None
    assert again(bytes.fromhex(fault.repeat.partition(":x")[2]), tmp_path).faults


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("wrong", "silently wrong: 1 is 2"),
        ("outside", "written outside the folder"),
        ("code", "code of a file that was only read was executed"),
        ("slow", "TookTooLong outside the package"),
        ("verbose", "a message of more than 100000 characters"),
    ],
)
def test_what_counts_as_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, what: str
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "x.py").write_text("1")

    def attempt() -> None:
        if value == "wrong":
            raise Wrong("1 is 2")
        if value == "outside":
            (inside / ".." / "up").write_text("")
        if value == "code":
            exec(compile("1", str(inside / "x.py"), "exec"))
        if value == "slow":
            time.sleep(5)
        if value == "verbose":
            raise ProtofedError("x" * 200_000)

    monkeypatch.setattr(harness, "PATIENCE_SECONDS", 0.1)
    harness.Guard.install(inside)
    try:
        fault = harness.judged(attempt, Tally())
    finally:
        harness.Guard.root = ""
    assert fault is not None and fault[0] == what


def test_counts_add_up_over_runs_and_no_batch_is_repeated(no_fuzzers: None, tmp_path: Path) -> None:
    def batch(number: int, folder: Path) -> Tally:
        return Tally(tried=10 + number, ok=10 + number)

    FUZZERS["steps"] = Fuzzer("steps", "kills", batch, 10)
    state = tmp_path / "state.json"
    for runs in (1, 2):
        done = fuzz(jobs=2, batches={"kills": 3}, state=state)
        assert len(done.before) + 1 == runs
    total = State(state, 1).total("steps")
    assert (total.batches, total.tried) == (6, sum(10 + n for n in range(6)))
    assert not done.faults and "75" in table(State(state, 1))


def test_a_worker_that_dies_or_hangs_is_a_fault_and_is_replaced(
    no_fuzzers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch(number: int, folder: Path) -> Tally:
        if number == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 1:
            time.sleep(60)
        return Tally(tried=1, ok=1)

    monkeypatch.setattr(driver, "BATCH_SECONDS", 3)
    FUZZERS["steps"] = Fuzzer("steps", "kills", batch, 1)
    done = fuzz(jobs=1, batches={"kills": 4})
    assert [f.repeat for f in done.faults.values()] == ["steps:0", "steps:1"]
    died, hangs = done.faults
    assert "died with -11" in died and "hangs" in hangs
    assert done.total("steps").ok == 2


def test_the_goals_of_the_long_form_end_it(
    no_fuzzers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, size in (("inputs", 300), ("kills", 1), ("corruptions", 5)):
        FUZZERS[kind] = Fuzzer(kind, kind, lambda n, f, size=size: Tally(size, size), size)
    monkeypatch.setattr(driver, "GOALS", {"inputs": 1000, "kills": 10, "corruptions": 20})
    done = fuzz(jobs=2, to_goals=True)
    tried = {name: done.total(name).tried for name in FUZZERS}
    assert tried["inputs"] >= 1000 and tried["kills"] >= 10 and tried["corruptions"] >= 20
    assert tried["kills"] <= 12 and tried["corruptions"] <= 30
