"""A run at a glance: complete, unfinished, with a domain left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.text import Text
from tests.studies.made_runs import TINY, make_runs, make_study, rising, study

from protofed.errors import ProtofedError
from protofed.studies.show import BLOCKS, lines, sparkline


def text_of(folder: Path) -> str:
    return "\n".join(Text.from_markup(line).plain for line in lines(folder))


def test_sparklines() -> None:
    assert sparkline([0, 50, 100], 0, 100) == "▁▅█"
    assert sparkline([5, 5], 5, 5) == "▁▁"
    long = sparkline([float(i) for i in range(1000)], 0, 999)
    assert (len(long), long[0], long[-1]) == (48, "▁", "█")
    assert list(long) == sorted(long)
    assert sparkline([float("nan"), 1.0], 0, 1) == " █"


def test_what_was_found_is_shown_not_what_was_asked_for(tmp_path: Path) -> None:
    settings = {**study().settings, "device": "auto", "precision": "auto"}
    runs = make_runs(study(seeds=1, settings=settings), tmp_path, device="cuda", precision="bf16")
    text = text_of(runs["FPL", 0])
    assert "fpl on glyphs, seed 0, protocol glyphs, cnn2" in text
    assert "tau=0.02" in text
    assert "3 of 1 rounds" in text and "bf16 on cuda" in text
    assert "clients × samples: scan 1 × 10, print 1 × 10" in text
    (runs["FPL", 0] / "summary.json").unlink()  # facts are there from the start
    assert "bf16 on cuda" in text_of(runs["FPL", 0])


def test_an_unfinished_run(tmp_path: Path) -> None:
    run = make_runs(study(), tmp_path, rounds=1)["FedAvg", 0]
    (run / "summary.json").unlink()
    text = (run / "config.toml").read_text().partition("format = 2\n")[2]
    (run / "config.toml").write_text(text.replace("rounds = 1", "rounds = 9"))
    resume = f"protofed run --config {run / 'config.toml'} --out {run} --resume"
    assert f"1 of 9 rounds (not finished: {resume})" in text_of(run)
    (run / "rounds.jsonl").write_text("")
    assert "none of the 9 rounds is complete" in text_of(run)


def test_a_domain_left_out_comes_first(tmp_path: Path) -> None:
    made = study(tasks={"glyphs": {"leave_out": "photo"}}, seeds=1)
    run = make_runs(made, tmp_path, rising)["FedAvg", 0]
    first, *others = [x.split() for x in text_of(run).splitlines() if set(x) & set(BLOCKS)][:5]
    assert first[:2] == ["photo", "(unseen)"]
    assert others[-1][:2] == ["seen", "average"]
    assert "23.3" in others[-1]
    assert not any(line[0] == "average" for line in others)


def test_a_run_that_stopped_early_is_finished(tmp_path: Path) -> None:
    made = study(seeds=1, settings={**TINY, "rounds": 9, "validate": 0.1, "patience": 2})
    text = text_of(make_runs(made, tmp_path, validation=lambda run: 50.0)["FedAvg", 0])
    assert "3 of 9 rounds (stopped early)" in text


def test_a_domain_that_was_not_measured_in_every_round(tmp_path: Path) -> None:
    """In a deployment whose site answered late: NaN, which must not scale the blocks."""
    run = make_runs(study(seeds=1), tmp_path, rising)["FedAvg", 0]
    first, *others = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    first = first.replace('"scan": 10.0', '"scan": NaN')
    (run / "rounds.jsonl").write_text("".join([first, *others]))
    scan, *_ = (x.split() for x in text_of(run).splitlines() if set(x) & set(BLOCKS))
    assert scan == ["scan", "▁▁", "10.0", "nan", "→", "10.0"]


def test_what_is_not_a_run(tmp_path: Path) -> None:
    make_study(study(seeds=1), tmp_path / "s")
    with pytest.raises(ProtofedError, match=r"a study's folder \(protofed study table"):
        lines(tmp_path / "s")
    for path, words in (tmp_path, "not a run's folder"), (tmp_path / "nowhere", "no folder"):
        with pytest.raises(ProtofedError, match=words):
            lines(path)
