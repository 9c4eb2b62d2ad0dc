"""The figures of a study as files: which there are, what they are called, what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image
from tests.studies.made_runs import DOMAINS, PAPER, make_study, rising, study

from protofed.report import plot
from protofed.report.figures import against_paper, file_name, sweep
from protofed.report.figures import sweeps as sweeps_of
from protofed.report.study_figures import write_figures
from protofed.studies.folder import StudyFolder
from protofed.studies.plan import PlannedRun


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[plot.Plot]:
    """The figures, which are not drawn."""
    found: list[plot.Plot] = []

    def save(made: plot.Plot, folder: Path, **_: object) -> list[Path]:
        found.append(made)
        return [folder / f"{made.name}.png"]

    monkeypatch.setattr(plot, "save", save)
    return found


def names(folder: StudyFolder) -> list[str]:
    return write_figures(folder, folder.tables())


def test_curves_are_pictures(tmp_path: Path) -> None:
    folder = make_study(study(), tmp_path / "s")
    assert names(folder) == ["curves.png", "curves.pdf"]
    with Image.open(tmp_path / "s" / "curves.png") as image:
        image.load()
        assert min(image.size) > 300
    assert (tmp_path / "s" / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_curves_say_how_many_seeds_the_rows_have(tmp_path: Path, drawn: list[plot.Plot]) -> None:
    names(make_study(study(), tmp_path / "all"))
    names(make_study(study(), tmp_path / "pool" / "some", skip={("FPL", 1)}))
    assert [each.heading.rpartition(", ")[2] for each in drawn] == [
        "2 seeds (band: their range)", "1 to 2 seeds (band: their range)",
    ]  # fmt: skip


@pytest.mark.parametrize("over", [{"tau": [0.02, 0.5]}, {"tau": [0.02, 0.5], "upcr": [0, 1]}])
def test_a_sweep_is_a_line_or_a_heat_map(tmp_path: Path, over: dict[str, Any]) -> None:
    made = study(kind="sweep", sweep=[{"rows": ["FPL"], "over": over}])
    folder = make_study(made, tmp_path / "s", skip={("FPL, tau=0.5, upcr=1", 0)})
    assert write_figures(folder, folder.tables(), kinds=("png",)) == ["sweep.png"]
    with Image.open(tmp_path / "s" / "sweep.png") as image:
        image.load()
        assert min(image.size) > 200


def test_figures_have_names_of_their_own(tmp_path: Path, drawn: list[plot.Plot]) -> None:
    bars = make_study(study(kind="bars"), tmp_path / "bars")
    assert names(bars) == ["curves.png", "bars.png"]
    sweeps = [{"rows": ["FPL"], "over": {"tau": [0.1]}}, {"rows": ["FPL"], "over": {"upcr": [0]}}]
    swept = make_study(study(kind="sweep", sweep=sweeps), tmp_path / "swept")
    assert names(swept) == ["sweep-tau.png", "sweep-upcr.png"]
    tasks = {"a/b": {"task": "glyphs"}, "glyphs": {"lr": 0.02}}
    two = make_study(study(tasks=tasks), tmp_path / "two")
    assert names(two) == ["curves-a-b.png", "curves-glyphs.png"]
    assert file_name("sweep-../../x") == "sweep-..-..-x"  # whatever a study from elsewhere says
    every = {(label, seed) for label in ("FedAvg", "FPL") for seed in (0, 1)}
    none = make_study(study(), tmp_path / "pool" / "none", skip=every)
    assert names(none) == []


def test_curves_show_the_unseen_domains(tmp_path: Path, drawn: list[plot.Plot]) -> None:
    def unseen(run: PlannedRun) -> dict[str, float]:
        return {**rising(run), str(run.unseen): 50.0 + run.seed}

    for left_out in ("photo", "each"):
        made = study(tasks={"glyphs": {"leave_out": left_out}})
        assert names(make_study(made, tmp_path / left_out, unseen)) == ["curves.png"]
    one, each = drawn
    assert one.panels[0].title == "photo (unseen)"
    assert [panel.title for panel in each.panels][1:] == [f"{d} (unseen)" for d in DOMAINS]
    assert "FPL ends at 50.5 %" in each.panels[1].alt  # two seeds: 50 and 51
    assert "each domain left out in turn, 2 seeds" in each.heading
    # rows that trained on all domains are not drawn over one that did not
    lines = {"All": "fedavg", "Less": {"method": "fedavg", "settings": {"leave_out": "photo"}}}
    mixed = make_study(study(rows=lines, baseline="All", seeds=1), tmp_path / "mixed", rising)
    names(mixed)
    assert drawn[-1].panels[0].alt.count("ends at") == 1


def swept_over(tmp_path: Path, left_out: str, over: dict[str, Any]) -> plot.Plot:
    made = study(
        tasks={"glyphs": {"leave_out": left_out}}, seeds=1, sweep=[{"rows": ["FPL"], "over": over}]
    )
    (table,) = make_study(made, tmp_path / "pool" / made.hash, rising).tables()
    drawn = sweep(made, 0, table)
    assert drawn is not None
    return drawn


def test_a_sweep_is_drawn_over_the_unseen_domain(tmp_path: Path) -> None:
    line = swept_over(tmp_path, "photo", {"tau": [0.02, 0.5]})
    assert line.legend[0].label == "FPL, photo (unseen)"
    assert "30.0 %" in line.panels[0].alt
    heat = swept_over(tmp_path, "photo", {"tau": [0.02, 0.5], "lr": [0.01, 0.1]})
    assert "photo (unseen)" in heat.caption
    assert "30.0 to 30.0 %" in heat.panels[0].alt
    labels = [key.label for key in swept_over(tmp_path, "each", {"tau": [0.02, 0.5]}).legend]
    assert (labels[0], labels[-1]) == ("FPL, unseen average", "FedAvg, unseen average")


@pytest.mark.parametrize("over", [{"tau": [0.02, 0.5]}, {"tau": [0.02, 0.5], "upcr": [0, 1]}])
def test_a_sweep_is_read_by_its_validation_accuracy(tmp_path: Path, over: dict[str, Any]) -> None:
    def by_test(run: PlannedRun) -> dict[str, float]:
        return dict.fromkeys(DOMAINS, 10.0 + run.line.row.options.get("tau", 0))

    def validation(run: PlannedRun) -> float:
        return 50.0 - run.line.row.options.get("tau", 0)

    settings = {**study().settings, "validate": "unused"}
    made = study(kind="sweep", sweep=[{"rows": ["FPL"], "over": over}], settings=settings)
    folder = make_study(made, tmp_path / "s", by_test, validation=validation)
    drawn = sweep(made, 0, folder.tables()[0])
    assert drawn is not None
    if len(over) == 1:
        (panel,) = drawn.panels
        assert panel.alt == (
            "Accuracy over tau: FPL is best on validation images with 50.0 % at tau = 0.02."
        )
        assert "validation" in [key.label for key in drawn.legend]
    else:
        test, chosen = drawn.panels
        assert "validation average" in chosen.title and "best at tau = 0.02" in chosen.alt
        assert "best" not in test.alt
    for panel in drawn.panels:
        panel.draw(Figure().subplots())


def test_switches_are_drawn_as_effects(tmp_path: Path) -> None:
    over = {"tau": [0.02, 0.5], "flip": [True, False], "lr": [0.1, 0.2]}
    shared = {name: over[name] for name in ("flip", "lr")} | {"batch": [8, 4]}
    sweeps = [{"rows": ["FPL"], "over": over}, {"rows": ["FedAvg"], "over": shared}]

    def plain(run: PlannedRun) -> dict[str, float]:
        effect = 3.0 + run.seed * (run.line.row.method == "fedavg")
        return dict.fromkeys(DOMAINS, 40.0 + effect * (not run.line.point["flip"]))

    folder = make_study(study(kind="sweep", sweep=sweeps), tmp_path / "s", plain)
    assert write_figures(folder, folder.tables(), kinds=("png",)) == ["effects.png"]
    (drawn,) = sweeps_of(folder.study, folder.tables()[0])
    assert [key.label for key in drawn.legend] == ["FPL", "FedAvg", "FPL − FedAvg"]
    assert drawn.panels[0].alt == (
        "Effects whose interval does not contain 0: FPL, flip: True → False: +3.0."
    )


def test_what_a_paper_prints_is_drawn_beside_ours(tmp_path: Path) -> None:
    folder = make_study(study(printed={"glyphs": PAPER}), tmp_path / "s")
    (table,) = folder.tables()
    assert {label: (s.mean, paper) for label, (s, paper) in table.beside_paper().items()} == {
        "FPL": (5.0, 10.0)
    }
    made = against_paper({"mine, glyphs": table})
    cells, differences = made.panels
    # FedAvg is 0.5 above the paper, FPL 4.5 below it, in four domains and on average
    assert cells.alt == (
        "Ours − paper: 10 cells between -4.5 and +0.5 points, averages -2.0 in the mean."
    )
    assert "1 of 1 have an interval of our seeds without 0" in differences.alt
    assert [key.label for key in made.legend] == ["FedAvg", "FPL", "a domain"]
    for panel in made.panels:
        panel.draw(Figure().subplots())


def test_a_row_that_is_the_baseline_has_no_interval(tmp_path: Path) -> None:
    """Its distance to the paper is the noise of the paper: it has no spread to be judged by."""
    rows = {"FedAvg": "fedavg", "Same": {"method": "feddyn", "options": {"variant": "reference"}}}
    paper = {"columns": ["average"], "FedAvg": 40.0, "Same": 42.0}
    made = study(rows=rows, printed={"glyphs": paper})
    folder = make_study(made, tmp_path / "s", lambda run: dict.fromkeys(DOMAINS, 40.0 + run.seed))
    _, differences = against_paper({"mine, glyphs": folder.tables()[0]}).panels
    assert "0 of 1 have an interval" in differences.alt
