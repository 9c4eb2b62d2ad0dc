"""docs/styles.md: what the race of styles has to show is computed from the runs, met or not."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from protofed.report.figures import differences, gains
from protofed.report.pack import pack
from protofed.studies.definition import Study, load, parse
from protofed.studies.folder import StudyFolder
from protofed.studies.plan import PlannedRun
from protofed.studies.tables import Spread
from tests.studies.made_runs import make_runs

DOCS = Path(__file__).parents[1] / "docs"
GAINS = {"fedavg": -6.0, "i2pfl": 0.0, "fedrdn": 5.0, "protostyle": 9.0}
"""Points above I²PFL on every task; all others have −2."""
TUNED = {"I²PFL, tuned": ("i2pfl", 2.0), "ProtoStyle, tuned": ("protostyle", 3.0)}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCS)
    import styles_page

    return styles_page


def styles() -> Study:
    """The study with two rows tuned, two seeds everywhere."""
    raw = dict(load("styles").raw)
    more = {n: {"method": m, "settings": {"lr": 0.03}} for n, (m, _) in TUNED.items()}
    raw["rows"] = {**raw["rows"], **more}
    return parse(raw, "styles").with_seeds([0, 1])


def accuracy(gained: Mapping[str, float] = GAINS) -> Callable[[PlannedRun], dict[str, float]]:
    def of(run: PlannedRun) -> dict[str, float]:
        label, method = run.line.label, run.config.method.name
        gain = 4.0 if label.startswith("color jitter") else gained.get(method, -2.0)
        gain += 1.0 if label.endswith(", color jitter") else 0.0
        gain += TUNED[label][1] if label in TUNED else 0.0
        noise = random.Random(f"{label} {run.task} {run.seed}").uniform(-0.1, 0.1)
        return dict.fromkeys(run.config.domain_clients, 50.0 + 3 * run.seed + gain + noise)

    return of


def made(path: Path, gained: Mapping[str, float] = GAINS, **more: Any) -> StudyFolder:
    study = styles()
    make_runs(study, path / "pool", accuracy(gained), **more)
    return StudyFolder.create(path / "pool" / "styles", study, path / "pool")


def verdicts(page: Any, folder: StudyFolder) -> list[bool | None]:
    found = page.checks({table.task: table for table in folder.tables()})
    return [check.met for check in found]


def test_what_was_asked_for_is_met_or_not(page: Any, tmp_path: Path) -> None:
    # nine points: enough on every task, and above FedRDN's five, tuned or not
    assert verdicts(page, made(tmp_path / "a")) == [True] * 6
    few = made(tmp_path / "b", {**GAINS, "protostyle": 4.5})
    office, pacs, digits, domains, above, tuned = verdicts(page, few)
    assert (office, pacs, digits) == (False, True, True)
    assert domains is True and above is False and tuned is True
    worse = made(tmp_path / "c", {**GAINS, "protostyle": -3.0})
    assert verdicts(page, worse)[3] is False


def test_a_rival_with_fewer_tasks_is_compared_on_those(page: Any, tmp_path: Path) -> None:
    tables = {table.task: table for table in made(tmp_path).tables() if table.task != "unseen"}
    found = {rival.label: rival for rival in page.rivals(tables)}
    assert set(found["StableFDG"].by_task) == {"office_caltech", "digits"}
    assert found["FedRDN"].mean == pytest.approx(4, abs=0.2)
    assert found["color jitter"].mean == pytest.approx(5, abs=0.2)
    assert next(iter(page.rivals(tables))).label == "FedRDN"  # the closest first
    assert "ProtoStyle, tuned" not in found
    assert not any(label.startswith("ProtoStyle") for label in found)
    assert {"FedAvg, uniform", "color jitter, uniform"} <= found.keys()


def test_what_is_not_run_is_not_met(page: Any, tmp_path: Path) -> None:
    skip = {("ProtoStyle", 0), ("ProtoStyle", 1)}
    assert verdicts(page, made(tmp_path, skip=skip)) == [None] * 5 + [True]
    assert [check.met for check in page.checks({})] == [None] * 5


def test_one_seed_shows_nothing(page: Any, tmp_path: Path) -> None:
    study = styles().with_seeds([0])
    make_runs(study, tmp_path, accuracy())
    folder = StudyFolder.create(tmp_path / "styles", study, tmp_path)
    assert verdicts(page, folder)[:3] == [None] * 3


def test_tuned_rows_are_compared_with_the_tuned_baseline(tmp_path: Path) -> None:
    office, *others = made(tmp_path).tables()
    found = gains(office)
    assert found["ProtoStyle"].mean == pytest.approx(9, abs=0.2)
    assert found["ProtoStyle, tuned"].mean == pytest.approx(10, abs=0.2)  # 12 − 2
    assert found["I²PFL, tuned"].mean == pytest.approx(2, abs=0.2)
    assert "I²PFL" not in found
    plot = differences([office, *others])
    assert [panel.title for panel in plot.panels] == [
        "office_caltech, 2 seeds", "digits, 2 seeds", "pacs, 2 seeds", "unseen, 2 seeds",
    ]  # fmt: skip
    assert [key.label for key in plot.legend] == ["default settings", "tuned"]


def test_a_difference_is_of_the_seeds_that_both_have(tmp_path: Path) -> None:
    skip = {("I²PFL", 0), ("ProtoStyle", 1)}
    office, *_ = made(tmp_path, skip=skip).tables()
    found = gains(office)
    assert "ProtoStyle" not in found  # no seed in common
    assert found["FedRDN"].seeds == 1 and found["FedRDN"].mean == pytest.approx(5, abs=0.2)


def test_rows_that_lack_seeds_are_not_ranked_with_the_others(page: Any, tmp_path: Path) -> None:
    """FedRDN's 5 points are of one seed: FedAvg's −6 comes before them."""
    folder = made(tmp_path, skip={("FedRDN", 1)})
    office, *others = folder.tables()
    labels = list(gains(office))
    assert labels[0] == "ProtoStyle, color jitter"
    assert labels.index("FedAvg") < labels.index("FedRDN") == len(labels) - 1
    assert labels.index("I²PFL, tuned") < labels.index("FedRDN")
    plot = differences([office, *others])
    assert "Rows below the line lack seeds of office_caltech" in plot.caption
    axis = Figure().subplots()
    plot.panels[0].draw(axis)
    names = [text.get_text() for text in axis.get_yticklabels()]
    assert names[-1] == "FedRDN"
    assert [len(names) - 1.5] * 2 in [list(line.get_ydata()) for line in axis.lines]
    assert "below the line" not in differences(made(tmp_path / "whole").tables()).caption


def test_the_page_says_first_what_controls_explain(page: Any, tmp_path: Path) -> None:
    folder = made(tmp_path, {**GAINS, "protostyle": 4.0})
    pack(folder.path, tmp_path / "results" / "styles", images=0)
    (tmp_path / "results" / "styles" / "notes.md").write_text("Written by hand.\n")
    assert page.StylesPage.is_there(tmp_path / "results")
    text = page.StylesPage(tmp_path / "results").text()
    jitter = text.index("Color jitter alone")
    assert jitter < text.index("## What it had to show")
    assert "**it explains ProtoStyle's gain**" in text[jitter:].splitlines()[0]
    assert "| **not met** |" in text and "Written by hand." in text
    assert (tmp_path / "results" / "styles" / "differences.png").is_file()
    assert not page.StylesPage.is_there(tmp_path)


def test_a_row_with_fewer_seeds_is_compared_on_those(page: Any, tmp_path: Path) -> None:
    """With seed 0 FedAvg is at −6, the control at 4 and ProtoStyle at 9: it has 10 of 15."""

    def of(run: PlannedRun) -> dict[str, float]:
        more = 20.0 if run.line.label == "ProtoStyle" and run.seed == 1 else 0.0
        return {domain: value + more for domain, value in accuracy()(run).items()}

    make_runs(styles(), tmp_path, of, skip={("color jitter", 1)})
    office, *_ = StudyFolder.create(tmp_path / "styles", styles(), tmp_path).tables()
    jitter, uniform, *_ = page.controls(office)
    assert "on office_caltech (1 of 2 seeds);" in jitter and "it has 67 %" in jitter
    assert "on office_caltech;" in uniform and "it has 40 %" in uniform  # of 25, both seeds
    assert differences([office]).panels[0].title == "office_caltech, 1 to 2 seeds"


def test_variants_are_compared_with_their_like(page: Any, tmp_path: Path) -> None:
    office, digits, *_ = made(tmp_path).tables()
    unbalanced, line = page.variants(office)
    assert re.search(r"by samples.*\+(9\.|8\.[89])", unbalanced)
    assert re.search(r"its own average gives [+-]0\.\d", unbalanced)
    against = dict(zip(("I²PFL", "FedAvg"), re.findall(r"([+-]\d+\.\d) ±", line), strict=True))
    # 10 points against I²PFL's one and FedAvg's four
    assert float(against["I²PFL"]) == pytest.approx(9, abs=0.3)
    assert float(against["FedAvg"]) == pytest.approx(6, abs=0.3)
    assert not list(page.variants(digits))


@pytest.mark.usefixtures("page")
def test_the_results_page_has_no_negative_zero() -> None:
    import results_page

    assert results_page._pm(Spread.of([-0.02, -0.04])) == "+0.0 ± 0.0"
    assert results_page._pm(Spread.of([-0.3])) == "-0.3"
