"""What a person sees while something runs."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.commands import TINY as OPTIONS
from tests.cli.commands import call

from protofed.federation.simulation import Observer
from protofed.observers.progress import RunProgress, accuracies, duration
from protofed.runs.records import shown
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task


def test_accuracies_under_the_names_a_person_reads() -> None:
    record = {"accuracy": {"scan": 90.0, "photo": 70.0, "inverse": 30.0}, "average": 190 / 3}
    assert accuracies(record) == "scan 90.0  photo 70.0  inverse 30.0  average 63.3"
    unseen = "inverse (unseen) 30.0  scan 90.0  photo 70.0  seen average 80.0"
    assert accuracies(record, "inverse") == unseen
    assert accuracies(record, brief=True) == "average 63.3"
    assert accuracies(record, "inverse", brief=True) == "inverse (unseen) 30.0"
    nan = float("nan")
    assert shown({"a": 1.0, "b": nan, "c": 3.0, "average": 2.0}, "a")["seen average"] == 3.0
    assert shown({"a": 1.0, "average": 1.0}, "elsewhere") == {"a": 1.0, "average": 1.0}


def test_durations() -> None:
    assert [duration(s) for s in (8.4, 200, 7500)] == ["8 s", "3:20 min", "2:05 h"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_is_followed(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=terminal)
    settings = {**TINY, "epochs": 1, "samples": 8, "leave_out": "right", "clients": "one",
                "clip_norm": 1.0, "schedule": "cosine"}  # fmt: skip
    run(tiny_task(), observers=[RunProgress(console)], **settings)
    said = file.getvalue()
    assert "left out: only tested on, with" in said
    assert "1 client × 8 samples, 4 of 4 classes" in said
    assert "engine loop" in said
    line = "protocol fpl: cnn2, 8×8 pixels, batch 8, epochs 1, rounds 3"
    line += ", schedule cosine, clip_norm 1\n"
    assert said.index(line) < said.index("samples")
    assert ("round 3/3  right (unseen)" in said) != terminal
    assert ("━" in said) == terminal


def test_a_narrow_terminal_shows_round_and_time() -> None:
    for width in (120, 80, 50):
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=True)
        settings = {**TINY, "epochs": 1, "samples": 8, "leave_out": "right", "clients": "one"}
        run(tiny_task(), observers=[RunProgress(console)], **settings)
        live = [line for line in file.getvalue().splitlines() if "round 3/3" in line]
        last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", live[-1])
        assert " s left" in last and "…" not in last, last
        assert ("seen average" in last, "unseen" in last) == (width > 100, width > 50)


class Clock(Observer):
    """Time that passes only while clients train and models are tested."""

    def __init__(self, client: float, tested: float) -> None:
        self.now, self.by_client, self.by_test = 0.0, client, tested

    def client(self, round: int, done: int, total: int) -> None:
        self.now += self.by_client

    def tested(self, round: int, done: int, total: int) -> None:
        self.now += self.by_test


@pytest.mark.parametrize(
    ("client", "tested", "terminal", "lines"),
    [
        (2, 0, False, []),
        (9, 0, False, ["2 of 4 clients trained, 18 s so far"]),
        (60, 0, False, ["1 of 4 clients trained, 1:00 min so far",
                        "3 of 4 clients trained, 3:00 min so far"]),
        (60, 0, True, []),
        (0, 9, False, ["2 of 4 models tested, 18 s so far"]),
    ],
)  # fmt: skip
def test_a_long_round_has_a_few_lines_where_there_is_no_bar(
    client: float,
    tested: float,
    terminal: bool,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, clock = io.StringIO(), Clock(client, tested)
    monkeypatch.setattr("protofed.silence.monotonic", lambda: clock.now)
    console = Console(file=file, width=120, force_terminal=terminal)
    settings = {**TINY, "epochs": 1, "samples": 8, "rounds": 2, "method": "local"}
    run(tiny_task(), observers=[clock, RunProgress(console)], **settings)
    said = [line for line in file.getvalue().splitlines() if "so far" in line]
    assert said == [f"round {t}/2  {line}" for t in (1, 2) for line in lines]
    assert terminal or not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", file.getvalue())


def test_quiet_says_nothing(tmp_path: Path) -> None:
    assert call("run", *OPTIONS, "--quiet", "--out", tmp_path / "x") == (0, "", "")


def test_an_interrupted_run_gives_the_cursor_back() -> None:
    file = io.StringIO()

    class Interrupt(Observer):
        def client(self, round: int, done: int, total: int) -> None:
            raise KeyboardInterrupt

    console = Console(file=file, width=120, force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_task(), observers=[RunProgress(console), Interrupt()], **TINY)
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") > 0
