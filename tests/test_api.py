"""The commands as functions: compare, sweep, tune, and a run's progress."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

import protofed
from protofed.errors import ProtofedError
from protofed.federation.simulation import Observer
from protofed.methods.fpl import FPL
from protofed.report import plot
from protofed.studies import adhoc
from protofed.studies.definition import TUNE, parse
from protofed.studies.folder import StudyFolder
from protofed.studies.plan import PlannedRun
from tests.cli.commands import call
from tests.studies.in_process import run_in_process, start_nothing
from tests.studies.made_runs import DOMAINS, image_folder, make_runs

TINY: dict[str, Any] = {
    "rounds": 1, "epochs": 1, "clients": 1, "samples": 10, "device": "cpu", "model": "cnn2",
    "width": 4,
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """An empty folder, runs in this process, no drawing; returns the commands that are started."""

    def save(drawn: plot.Plot, folder: Path, *_: object, **__: object) -> list[Path]:
        return [folder / f"{drawn.name}.png"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plot, "save", save)
    return run_in_process(monkeypatch)


# ---- compare and sweep ---------------------------------------------------------------------------


def test_compare(here: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    methods = {"plain": "fedavg", "sharp": FPL(tau=0.03)}
    table = protofed.compare("glyphs", methods, seed=3, **TINY)
    assert len(here) == 2 and capsys.readouterr().out == ""
    assert {r.config.seed for r in table.results()} == {3}
    assert [r.config.method.options().get("tau") for r in table.results()] == [None, 0.03]
    assert [row.label for row in table.tables()[0].rows] == ["plain", "sharp"]
    assert "| plain |" in str(table) and "<td>sharp</td>" in table._repr_html_()
    assert table.chosen() is None and table.path.name.startswith("compare-glyphs-")
    again = protofed.compare(
        "glyphs", {"plain": "fedavg", "sharp": "fpl"}, options={"sharp": {"tau": 0.03}}, seed=3,
        out="again", progress=True, **TINY,
    )  # fmt: skip
    assert len(here) == 2, "the runs are there already"
    assert "2 of 2 runs are already complete" in capsys.readouterr().out
    assert again.path == Path("again")


def test_what_cannot_be_compared(here: list[list[str]]) -> None:
    with pytest.raises(ProtofedError, match=r"both named fpl.*label them"):
        protofed.compare("glyphs", [FPL(tau=0.03), FPL(tau=0.05)])
    with pytest.raises(ProtofedError, match="'fpl', which is not compared"):
        protofed.compare("glyphs", ["fedavg"], options={"fpl": {"tau": 1.0}})
    with pytest.raises(ProtofedError, match="there is no method to run"):
        protofed.compare("glyphs", [])
    for seeds in (0, [0, 1]):
        with pytest.raises(ProtofedError, match="seeds must be a whole number from 1 to 10000"):
            protofed.compare("glyphs", ["fedavg"], seeds=seeds)
    for jobs in (0, -1):  # the runs would wait for a place forever
        with pytest.raises(ProtofedError, match="jobs must be a whole number of at least 1"):
            protofed.compare("glyphs", ["fedavg"], jobs=jobs)

    class Own(FPL):
        name = "own"

    Own.__module__ = "__main__"
    with pytest.raises(ProtofedError, match=r"Own is defined in this script.*into a file"):
        protofed.compare("glyphs", [Own()])


def test_sweep(here: list[list[str]]) -> None:
    swept = protofed.sweep("glyphs", "fpl", over={"lr": [0.1, 0.2]}, against="fedavg", **TINY)
    labels = [row.label for row in swept.tables()[0].rows]
    assert labels == ["fedavg", "fpl, lr=0.1", "fpl, lr=0.2"] and len(here) == 3


def test_one_method_or_value_where_several_go(here: list[list[str]]) -> None:
    for methods in ("fpl", FPL()):
        compared = protofed.compare("glyphs", methods, **TINY)
        assert [row.label for row in compared.tables()[0].rows] == ["fpl"]
    for search in (protofed.sweep, protofed.tune):
        with pytest.raises(ProtofedError, match=r"values of tau must be a list \(write \[0\.05\]"):
            search("glyphs", "fpl", over={"tau": 0.05}, **TINY)
    with pytest.raises(ProtofedError, match="values of model must be a list"):
        protofed.sweep("glyphs", "fpl", over={"model": "cnn3"}, **TINY)


def test_failed_runs_are_an_error(here: list[list[str]]) -> None:
    with pytest.raises(ProtofedError, match="2 runs failed"):
        protofed.sweep("glyphs", "fedavg", over={"lr": [1e5, 1e6]}, **{**TINY, "epochs": 3})


# ---- tune ----------------------------------------------------------------------------------------


def tuned(pool: Path, skip: tuple[str, int] = ("", 0)) -> StudyFolder:
    """FPL at three τ: best on validation images at 0.05, on test images at 0.1."""
    points = [{"tau": t} for t in (0.02, 0.05, 0.1)]
    swept = [{"points": points, "rows": ["fpl"]}]
    settings = {**TINY, "validate": "unused"}
    rows = {"fpl": ("fpl", {})}
    study = adhoc.adhoc("tune", "Tuned", "glyphs", rows, [0, 1], settings, swept, TUNE)

    def tau(run: PlannedRun) -> float:
        return float(run.line.point["tau"])

    def test(run: PlannedRun) -> dict[str, float]:
        return dict.fromkeys(DOMAINS, 71.7 + 100 * tau(run))

    def validation(run: PlannedRun) -> float:
        return 60.0 - 200 * abs(tau(run) - 0.05)

    make_runs(study, pool, test, [skip], validation=validation)
    return StudyFolder.create(pool / "tuned", study, pool)


def test_validation_chooses_and_test_images_are_looked_at_once(tmp_path: Path) -> None:
    folder = tuned(tmp_path)
    chosen = folder.chosen()
    assert chosen is not None and chosen.point == {"tau": 0.05}
    search, test = folder.tables()
    assert [row.accuracy["average"].mean for row in search.rows] == [54.0, 60.0, 50.0]
    assert search.caption.startswith("Validation accuracy")
    assert test.caption.startswith("Test accuracy")
    assert [(row.label, row.accuracy["scan"].mean) for row in test.rows] == [
        ("fpl, tau=0.05", pytest.approx(76.7))
    ]
    assert any("of 3 tried: fpl, tau=0.05" in note for note in search.notes)
    folder.write_tables()
    for name in ("table.md", "table.csv", "table.tex"):
        text = (folder.path / name).read_text()
        assert "76.7" in text
        assert "73.7" not in text and "81.7" not in text, "of a point that was not chosen"
    lines = list(csv.DictReader((folder.path / "table.csv").open()))
    assert {line["task"] for line in lines} == {"glyphs", "glyphs, test accuracy of the choice"}
    assert [p.name for p in folder.chosen_runs()] == [
        r.folder.name for r in folder.results() if r.folder and "0.05" in repr(r.config.method)
    ]


def test_a_point_without_all_seeds_is_not_chosen(tmp_path: Path) -> None:
    chosen = tuned(tmp_path, skip=("fpl, tau=0.05", 1)).chosen()
    assert chosen is not None and chosen.point == {"tau": 0.02}


def test_a_report_shows_the_choice_alone(tmp_path: Path) -> None:
    from protofed.report.collect import collect

    folder = tuned(tmp_path)
    (group,) = collect([tmp_path]).groups
    assert list(group.methods) == ["fpl, tau=0.05"] and group.seeds == [0, 1]
    assert group.table == folder.test_tables()["glyphs"]


def test_the_figure_of_a_search(tmp_path: Path) -> None:
    from protofed.report.study_figures import write_figures

    folder = tuned(tmp_path)
    assert write_figures(folder, folder.tables(), kinds=["png"], dpi=50) == ["tune.png"]
    assert (folder.path / "tune.png").read_bytes().startswith(b"\x89PNG")


def test_tune(here: list[list[str]]) -> None:
    over = {"lr": "log:0.01..0.1", "norm": ["batch", "group"]}
    found = protofed.tune("glyphs", "fedavg", over=over, budget=2, **TINY)
    assert len(here) == 2 and found.study.settings["validate"] == "unused"
    chosen = found.chosen()
    assert chosen is not None and chosen.point.keys() == over.keys()
    best = max(found.results(), key=lambda r: r.validation["average"])
    assert best.config.lr == chosen.point["lr"] and best.config.norm == chosen.point["norm"]
    assert found.chosen_runs() == [best.folder]
    protofed.tune("glyphs", "fedavg", over=over, budget=3, **TINY)
    assert len(here) == 3, "a larger budget adds one point"


def test_a_diverged_point_is_a_result(here: list[list[str]]) -> None:
    done = call(
        "tune", "--over", "lr=0.05,1e6", "--budget", 2, "--rounds", 1, "--epochs", 3, "--clients",
        1, "--samples", 10, "--device", "cpu", "--model", "cnn2", "--width", 4,
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    assert "fedavg, lr=1e+06 (diverged)" in done.out
    assert "of 2 tried: fedavg, lr=0.05" in " ".join(done.out.split())
    assert "the chosen run, with its model: runs/glyphs-fedavg-0-" in " ".join(done.out.split())
    shown = [line for line in done.out.splitlines() if "round 1/1" in line]
    assert shown and all("scan" not in line and "validation average" in line for line in shown)


def test_images_to_choose_by(tmp_path: Path) -> None:
    """Where no image is unused, a part of each client's is held out."""
    images = image_folder(tmp_path / "pets")
    with pytest.raises(ProtofedError, match="lower --clients"):
        adhoc.tuning("glyphs", "fedavg", {"lr": [0.1]}, 1, 1, {}, {"samples": 1000})
    with pytest.raises(ProtofedError, match="too few images to choose by"):
        adhoc.tuning(f"folder:{images}", "fedavg", {"lr": [0.1]}, 1, 1, {}, {"clients": 1})
    settings = {"clients": 1, "samples": 240}  # of 250
    asked = adhoc.tuning("glyphs", "fedavg", {"lr": [0.1]}, 1, 1, {}, settings)
    assert asked.study.settings["validate"] == 0.1
    assert "held out of its training" in asked.says[1] and "since" in asked.says[1]
    given = adhoc.tuning("glyphs", "fedavg", {"lr": [0.1]}, 1, 1, {}, {"validate": 0.3})
    assert given.study.settings["validate"] == 0.3 and len(given.says) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": {}}, "chooses by validation accuracy"),
        ({"settings": {"validate": "unused", "leave_out": "each"}}, "at most one domain"),
        ({"kind": "table"}, "needs kind = 'tune'"),
        ({"sweep": [{"points": [{"tau": 1.0}, {"lr": 1.0}]}]}, "same parameters"),
        ({"sweep": [{"points": [{"tau": 1.0}], "over": {"tau": [1.0]}}]}, "over or points"),
        ({"sweep": [{}]}, "over or points"),
    ],
)
def test_studies_that_cannot_tune(change: dict[str, Any], said: str) -> None:
    raw = {
        "kind": "tune", "settings": {"validate": "unused"}, "tasks": {"glyphs": {}},
        "rows": {"FPL": "fpl"}, "sweep": [{"points": [{"tau": 0.1}]}],
    }  # fmt: skip
    parse(raw, "mine")
    with pytest.raises(ProtofedError, match=said):
        parse({**raw, **change}, "mine")


def test_nothing_is_run_for_a_bad_search(
    here: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_nothing(monkeypatch)
    for more, said in (
        (["--over", "tau=0.1"], "unknown hyper-parameter of fedavg, or setting"),
        (["--over", "lr"], "cannot read --over"),
        (["--over", "lr=0.1", "--budget", "0"], "budget must be a whole number from 1"),
    ):
        done = call("tune", *more)
        assert done.code == 2 and said in " ".join(done.err.split()), done.err


# ---- progress ------------------------------------------------------------------------------------


def test_progress_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Seen(Observer):
        rounds = 0

        def round(self, record: Any) -> None:
            self.rounds += 1

    seen = Seen()
    protofed.run("glyphs", "fedavg", observers=[seen], **TINY)
    assert seen.rounds == 1 and capsys.readouterr().out == "", "no terminal, no notebook"
    protofed.run("glyphs", "fedavg", progress=True, **TINY)
    out = capsys.readouterr().out
    assert "fedavg on glyphs, seed 0: 4 clients" in out and "round 1/1  scan " in out
