"""docs/results.md: what it says of a distance to a paper, from runs with known accuracies."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from protofed.report.pack import pack
from protofed.studies.tables import Spread
from tests.studies.made_runs import PAPER, make_study, study

pytestmark = pytest.mark.usefixtures("no_drawing")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "docs")
    import results_page

    return results_page


def test_the_range_of_other_seeds_holds_95_percent_of_them() -> None:
    rng = random.Random(0)
    for ours, theirs in ((5, 1), (5, 3), (10, 1)):
        inside = 0
        for _ in range(4000):
            found = Spread.of([rng.gauss(3, 2) for _ in range(ours)])
            half = found.half_for(theirs)
            assert half is not None
            inside += abs(fmean(rng.gauss(3, 2) for _ in range(theirs)) - found.mean) <= half
        assert 0.935 < inside / 4000 < 0.965
    assert Spread.of([1.0]).half_for(1) is None


def test_a_verdict_names_the_seeds_only_where_they_can_explain_the_distance(page: Any) -> None:
    values = [4.0, 6.0, 5.0, 5.0, 5.0]  # mean 5, error 0.32
    ours = Spread.of(values)
    half = ours.half_for(1)
    # Student's t with 4 degrees of freedom is 2.776
    assert half == pytest.approx(2.776 * stdev(values) * math.sqrt(1 + 1 / 5), abs=1e-3)
    assert page.verdict(ours, 5.6, half) == "agrees"
    assert page.verdict(ours, 5.7, half) == "may be the seeds"
    assert page.verdict(ours, 5.0 - half - 0.01, half) == "differs"
    assert page.verdict(ours, 5.7, None) == "differs"
    assert page.verdict(Spread.of([5.0]), 5.0, None) == "one seed"
    # equal to the last bit with every seed: the paper's 0.9 can only be its noise
    assert page.verdict(Spread.of([0.0, 0.0]), 0.9, None) == "is the baseline"
    assert page.verdict(Spread.of([5.0, 5.0]), 5.9, None) == "differs"


def test_best_rounds_are_those_of_each_run(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = study(seeds=5, printed={"glyphs": PAPER})
    folder = make_study(made, tmp_path / "runs" / "made")
    for planned, stored in folder.runs.items():
        assert stored is not None and stored.folder is not None
        if planned.line.label == "FedAvg":  # one round is better than the others
            lines = stored.folder.rounds_file.read_text().splitlines(keepends=True)
            record = json.loads(lines[0])
            record["average"] += 7
            stored.folder.rounds_file.write_text("".join([json.dumps(record) + "\n", *lines[1:]]))
    pack(folder.path, tmp_path / "results" / "fpl-table2", 0)
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    results = page.Results()
    text = "\n".join(results._best_rounds())
    # accuracies are 40 to 44 for FedAvg and 45 to 49 for FPL; the paper has 40 and 50
    assert "| FedAvg | 40.0 | 42.0 | 49.0 |  |  |  |" in text
    assert "| FPL | 50.0 | 47.0 | 47.0 | +10.0 | +5.0 | -2.0 |" in text
    assert "would be 6.0 points in the mean instead of 2.5" in text
    assert "12.0 instead of 5.0" in text
    assert "+5.0 ± 0.0 | 5 | +10.00 |  | differs |" in "\n".join(results._differences())


def test_rows_with_few_seeds_are_not_compared_by_rounds(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = study(seeds=page.FEW - 1, printed={"glyphs": PAPER})
    pack(make_study(made, tmp_path / "runs" / "made").path, tmp_path / "results" / "made", 0)
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    assert page.Results()._best_rounds() == []
