"""From a pool of (made-up) runs to a study's tables: what is shown, missing, or refused."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from tests.studies.made_runs import (
    DOMAINS,
    PAPER,
    TINY,
    image_folder,
    make_runs,
    make_study,
    rising,
    study,
)

from protofed.errors import ProtofedError
from protofed.federation.facts import NUMERICS
from protofed.files import Damaged
from protofed.report.study_figures import write_figures
from protofed.report.tuning import tuning
from protofed.studies.definition import FolderImages
from protofed.studies.folder import UNCHOSEN, StudyFolder, TaskTable, to_text
from protofed.studies.plan import PlannedRun

ALL = {(label, seed) for label in ("FedAvg", "FPL") for seed in (0, 1)}


def table_of(folder: StudyFolder) -> TaskTable:
    (table,) = folder.tables()
    return table


def texts(folder: StudyFolder) -> list[list[str]]:
    return [[cell.text for cell in line.cells] for line in table_of(folder).grid()[1]]


# ---- what a table shows -------------------------------------------------------------------------


def test_a_table_beside_the_paper(tmp_path: Path) -> None:
    made = study(printed={"glyphs": PAPER}, notes=["the paper did otherwise"])
    make_study(made, tmp_path / "s")
    table = table_of(StudyFolder.open(tmp_path / "s"))
    header, body = table.grid()
    assert header == [
        "method", "scan", "print", "photo", "inverse", "average", "worst", "spread", "Δ FedAvg",
    ]  # fmt: skip
    shown = [[cell.text for cell in line.cells] for line in body]
    assert shown[0][5] == "40.5 ± 0.7"
    assert shown[1][5] == "40.00 (+0.5)"
    assert [shown[2][i] for i in (5, 8)] == ["45.5 ± 0.7", "+5.0 ± 0.0 (±0.0)"]
    assert [shown[3][i] for i in (5, 8)] == ["50.00 ± 0.50 (-4.5)", "+10.00"]
    assert "fewer than 5 seeds" in table.caption
    assert table.notes == ("the paper did otherwise",)
    assert repr(StudyFolder.open(tmp_path / "s")) == f"<{tmp_path / 's'}: Two methods; 4 of 4 runs>"
    # on another task the paper's numbers and notes mean nothing
    moved = made.overridden("glyphs")
    make_study(moved, tmp_path / "moved")
    table = table_of(StudyFolder.open(tmp_path / "moved"))
    assert table.notes == () and not any(row.paper for row in table.rows)


def test_what_is_missing_is_shown_not_dropped(tmp_path: Path) -> None:
    made = study(rows={"FedAvg": "fedavg", "FPL": "fpl", "New": "fednew"})
    folder = make_study(made, tmp_path / "s", skip={("FPL", 1)})
    shown = texts(folder)
    assert shown[1][-1] == "1/2"
    assert shown[2][0] == "New (needs method fednew, which this version does not have)"
    assert {*shown[2][1:]} == {""}
    none = make_study(study(), tmp_path / "pool" / "none", skip=ALL)
    assert table_of(none).caption == "No run is there yet."
    assert texts(none) == []


def test_rows_that_were_not_run_are_named_once(tmp_path: Path) -> None:
    rows = {"FedAvg": "fedavg", "FPL": "fpl", "Prox": "fedprox", "MOON": "moon"}
    skip = {(label, seed) for label in ("Prox", "MOON") for seed in (0, 1)}
    folder = make_study(study(rows=rows), tmp_path / "s", skip=skip)
    assert [line[0] for line in texts(folder)] == ["FedAvg", "FPL"]
    assert table_of(folder).notes == ("2 of 4 rows were not run: Prox; MOON.",)


def test_what_a_target_takes(tmp_path: Path) -> None:
    folder = make_study(study(), tmp_path / "s")  # 3 rounds of 3 MB; FedAvg 40, FPL 45
    assert table_of(folder).costs()[0][3:] == ["rounds to 40.5 %", "MB to 40.5 %"]
    aimed = study(target=45.5)
    assert aimed.hash == study().hash
    table = table_of(StudyFolder.create(tmp_path / "s", aimed, tmp_path))
    header, (fedavg, fpl) = table.costs()
    assert header[3:] == ["rounds to 45.5 %", "MB to 45.5 %"]
    assert [c.text for c in fedavg.cells[3:]] == ["not reached", ""]
    assert [c.text for c in fpl.cells[3:]] == ["1 (1 of 2 seeds)", "3"]
    assert "rounds and MB to 45.5 %: until the mean of the last 5" in table.caption
    assert StudyFolder.open(tmp_path / "s").study.target == 45.5


def test_a_sweep_on_test_images_chooses_nothing(tmp_path: Path) -> None:
    swept = study(sweep=[{"over": {"tau": [0.1, 0.2]}, "rows": ["FPL"]}])
    assert table_of(make_study(swept, tmp_path / "s")).notes == (UNCHOSEN,)


def test_a_run_that_diverged_is_said_to_have(tmp_path: Path) -> None:
    runs = make_runs(study(), tmp_path)
    (runs["FPL", 1] / "summary.json").unlink()
    (runs["FPL", 1] / "diverged.txt").write_text("'ce' is nan")
    folder = StudyFolder.create(tmp_path / "s", study(), tmp_path)
    assert [row.state for row in table_of(folder).rows] == ["", "diverged"]
    assert "FPL (diverged)" in to_text(folder.study, folder.tables(), "markdown")


def test_a_row_defined_otherwise_does_not_mix_with_the_old_one(tmp_path: Path) -> None:
    make_runs(study(), tmp_path)
    rows = {"FedAvg": "fedavg", "FPL": {"method": "fpl", "options": {"tau": 1}}}
    changed = StudyFolder.create(tmp_path / "s", study(rows=rows), tmp_path)
    assert [row.seeds for row in table_of(changed).rows] == [2, 0]


def test_two_studies_take_the_same_runs_from_one_pool(tmp_path: Path) -> None:
    make_runs(study(), tmp_path)
    renamed = study(rows={"Base": "fedavg", "Prototypes": "fpl"}, title="another", seeds=1)
    other = StudyFolder.create(tmp_path / "other", renamed, tmp_path)
    assert [(row.label, row.seeds) for row in table_of(other).rows] == [
        ("Base", 1), ("Prototypes", 1),
    ]  # fmt: skip


def test_rows_are_named_in_the_caption_as_in_the_table(tmp_path: Path) -> None:
    lines = {"Plain": "fedavg", "As printed": {"method": "feddyn", "options": {"alpha": 0.1}},
             "As published": {"method": "feddyn", "options": {"variant": "reference"}}}  # fmt: skip
    runs = make_runs(study(rows=lines, seeds=1), tmp_path)
    for (label, _), folder in runs.items():
        summary = json.loads((folder / "summary.json").read_text())
        weights = "uniform" if label == "As printed" else "samples"
        (folder / "summary.json").write_text(json.dumps({**summary, "weights": weights}))
    table = table_of(StudyFolder.create(tmp_path / "s", study(rows=lines, seeds=1), tmp_path))
    assert "weights of the average: sample counts (As printed: uniform)." in table.caption


def test_the_caption_says_of_all_rows_only_what_is_so_of_all(tmp_path: Path) -> None:
    rows, over = {"FedAvg": "fedavg"}, {"dirichlet": [0.1, 10.0], "samples": [10, 20]}
    settings = {**TINY, "quantity": 1.0, "validate": 0.1}
    varied = study(rows=rows, sweep=[{"over": over}], settings=settings)
    (table,) = make_study(varied, tmp_path / "s", validation=lambda run: 50.0).tables()
    assert (
        "clients × samples: differ between runs, sizes Dirichlet(1), validated on 10 % of each "
        "client's images, held out of its training (scan 30, print 30, photo 30, inverse 30); the "
        "runs differ in label skew; seeds 0, 1"
    ) in table.caption


def test_the_caption_says_what_was_done_to_robustness_and_privacy(tmp_path: Path) -> None:
    lies = {"attack": "scale", "attackers": 0.3, "robust": "median", "bounds": "off"}
    runs = study(rows={"FedAvg": "fedavg"}, settings={**TINY, **lies, "proto_epsilon": 5.0})
    (table,) = make_study(runs, tmp_path / "s").tables()
    assert (
        ", 30 % of the clients lie (scale), robust aggregation (median), no bounds, differential "
        "privacy (prototypes ε 5); seeds"
    ) in table.caption
    plain = {"FedAvg": "fedavg", "Clipped": {"method": "fedavg", "settings": {"robust": "clip"}}}
    (table,) = make_study(study(rows=plain, settings=TINY), tmp_path / "t").tables()
    assert "; the runs differ in robust aggregation; seeds" in table.caption


def test_every_format(tmp_path: Path) -> None:
    made = study(printed={"glyphs": PAPER}, notes=["the paper did otherwise"])
    folder = make_study(made, tmp_path / "s")
    assert folder.write_tables() == ["table.md", "table.csv", "table.tex"]
    text = (tmp_path / "s" / "table.md").read_text()
    assert "| FPL | **45.5 ± 0.7** |" in text
    assert "<u>40.5 ± 0.7</u>" in text
    assert "- the paper did otherwise" in text
    latex = (tmp_path / "s" / "table.tex").read_text()
    for part in (r"\toprule", r"\textbf{45.5 $\pm$ 0.7}", r"\underline{40.5", r"$\Delta$ FedAvg",
                 r"accuracy in \%", r"\quad paper"):  # fmt: skip
        assert part in latex
    assert latex.count("{") == latex.count("}")
    # the caption stays short; what the numbers are stands in a note below the table
    first, costs = latex.split(r"\begin{table*}")[1:]
    said = first.split(r"\caption{")[1].split("\n")[0]
    assert len(said) < 200 and "protocol glyphs" not in said
    note = first.split(r"\end{tabular}")[1]
    assert "protocol glyphs" in note and "the paper did otherwise" in note
    assert r"rounds to 40.5 \%" in costs
    lines = list(csv.DictReader(io.StringIO((tmp_path / "s" / "table.csv").read_text())))
    assert len(lines) == 14
    assert [line["column"] for line in lines[-2:]] == ["worst", "spread"]
    last = lines[-3]
    assert (last["method"], last["column"], last["seeds"]) == ("FPL", "average", "2")
    assert last["values"] == "45.0000 46.0000"
    assert (float(last["target"]), float(last["rounds_to_target"])) == (40.5, 1)
    assert float(last["megabytes_to_target"]) == 3
    assert float(last["mean"]) == 45.5
    assert float(last["difference"]) == float(last["low"]) == float(last["high"]) == 5
    assert (float(last["paper"]), float(last["ours_minus_paper"])) == (50, -4.5)


def test_a_table_names_rows_that_a_frozen_backbone_made_equal(tmp_path: Path) -> None:
    make_study(study(settings={**TINY, "train": "head"}), tmp_path / "a", rising)
    (note,) = table_of(StudyFolder.open(tmp_path / "a")).notes
    assert note.startswith("FedAvg, FPL: equal losses and accuracies in every round.")
    make_study(study(settings={**TINY, "train": "head"}), tmp_path / "b")
    assert table_of(StudyFolder.open(tmp_path / "b")).notes == ()
    make_study(study(), tmp_path / "c", rising)
    assert table_of(StudyFolder.open(tmp_path / "c")).notes == ()


# ---- facts of the runs --------------------------------------------------------------------------


def test_a_table_says_in_which_facts_its_runs_differ(tmp_path: Path) -> None:
    settings = {k: v for k, v in TINY.items() if k != "device"}
    made = study(settings=settings, rows={"FedAvg": "fedavg"}, seeds=2)
    make_runs(made, tmp_path, skip={("FedAvg", 1)})
    seed_1 = {"device": "cuda", "precision": "bf16", "numerics": 0, "digest": "f" * 64}
    make_runs(made, tmp_path, skip={("FedAvg", 0)}, **seed_1)
    table = table_of(StudyFolder.create(tmp_path / "s", made, tmp_path))
    assert table.rows[0].seeds == 2
    assert table.notes == (
        "The runs of this table differ in the version of the arithmetic (numerics): "
        f"0 and {NUMERICS}.",
        "The runs of this table differ in device: cpu and cuda.",
        "The runs of this table differ in precision: bf16 and fp32.",
        "The runs of this table differ in images (digest): None and ffffffffffff.",
    )
    assert "fp32 or bf16 on cpu or cuda" in table.caption
    # where one more run makes the row of one kind, that is taken
    make_runs(made, tmp_path, skip={("FedAvg", 0)})
    assert table_of(StudyFolder.open(tmp_path / "s")).notes == ()


def test_a_device_or_precision_that_is_asked_for_counts(tmp_path: Path) -> None:
    settings = {**TINY, "precision": "fp64"}
    make_runs(study(), tmp_path, precision="fp32")
    folder = StudyFolder.create(tmp_path / "s", study(settings=settings), tmp_path)
    assert [row.seeds for row in table_of(folder).rows] == [0, 0]
    make_runs(study(settings=settings), tmp_path, precision="fp64")
    assert [row.seeds for row in table_of(StudyFolder.open(tmp_path / "s")).rows] == [2, 2]


# ---- the folder ---------------------------------------------------------------------------------


def test_a_folder_knows_where_its_pool_is(tmp_path: Path) -> None:
    make_runs(study(), tmp_path / "pool")
    StudyFolder.create(tmp_path / "elsewhere" / "s", study(), tmp_path / "pool")
    assert 'pool = "../../pool"' in (tmp_path / "elsewhere" / "s" / "study.toml").read_text()
    found = StudyFolder.open(tmp_path / "elsewhere" / "s")
    assert found.pool.path == tmp_path / "pool"
    assert [row.seeds for row in table_of(found).rows] == [2, 2]


def test_seeds_of_before_are_kept_and_another_study_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    StudyFolder.create(folder, study(seeds=[0, 1]), tmp_path)
    StudyFolder.create(folder, study(seeds=[3], title="said otherwise"), tmp_path)
    assert StudyFolder.open(folder).study.seeds == (0, 1, 3)
    for other in (study(rows={"FedAvg": "fedavg"}), study().overridden(settings={"lr": 0.5})):
        with pytest.raises(ProtofedError, match=r"holds another study: .*choose another --out"):
            StudyFolder.create(folder, other, tmp_path)
    assert StudyFolder.open(folder).study.seeds == (0, 1, 3)
    runs = make_runs(study(seeds=1), tmp_path)
    with pytest.raises(ProtofedError, match="is a run's folder"):
        StudyFolder.create(runs["FPL", 0], study(), tmp_path)
    images = image_folder(tmp_path / "images")
    with pytest.raises(ProtofedError, match=r"holds files and no study .*choose another --out"):
        StudyFolder.create(images, study(), tmp_path)
    assert {path.name for path in images.iterdir()} == {"day", "night"}


def test_another_folder_of_the_same_name_is_other_images(tmp_path: Path) -> None:
    made = study(tasks={"pets": {"task": "folder:pets"}})
    before = made.with_images({"folder:pets": FolderImages(("a", "b"), ("old",))})
    StudyFolder.create(tmp_path / "s", before, tmp_path)
    after = made.with_images({"folder:pets": FolderImages(("a", "b"), ("new",))})
    with pytest.raises(ProtofedError, match="with other images of folder:pets"):
        StudyFolder.create(tmp_path / "s", after, tmp_path)


def test_what_holds_no_study(tmp_path: Path) -> None:
    with pytest.raises(ProtofedError, match=r"holds no study \(run one"):
        StudyFolder.open(tmp_path / "none")
    StudyFolder.create(tmp_path / "none-on-glyphs", study(), tmp_path)
    with pytest.raises(ProtofedError, match=r"there is .*none-on-glyphs"):
        StudyFolder.open(tmp_path / "none")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("summary.json", text) for text in ("", "x", "[]", "{}")),
        *(("config.toml", text) for text in ("", "seed = 1")),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, content: str) -> None:
    runs = make_runs(study(seeds=1), tmp_path)
    (runs["FedAvg", 0] / file).write_text(content)
    folder = StudyFolder.create(tmp_path / "s", study(seeds=1), tmp_path)
    with pytest.raises(ProtofedError, match=file.replace(".", r"\.")):
        folder.write_tables()
    assert not (tmp_path / "s" / "table.md").exists()


def test_damaged_rounds_are_named_where_they_are_read(tmp_path: Path) -> None:
    for content in ("", "{}\n", "[1]\n"):
        runs = make_runs(study(seeds=1), tmp_path)
        (runs["FedAvg", 0] / "rounds.jsonl").write_text(content)
        folder = StudyFolder.create(tmp_path / "s", study(seeds=1), tmp_path)
        with pytest.raises(Damaged, match=r"rounds\.jsonl"):
            folder.histories("glyphs")


# ---- domains that no client has -----------------------------------------------------------------


def test_unseen_domains_are_a_column_each(tmp_path: Path) -> None:
    def unseen(run: PlannedRun) -> dict[str, float]:
        return {d: a + (d == run.unseen) for d, a in rising(run).items()}

    made = study(tasks={"glyphs": {"leave_out": "each"}}, seeds=1)
    folder = make_study(made, tmp_path / "s", unseen)
    table = table_of(folder)
    means = {c: s.mean for c, s in table.rows[0].accuracy.items()}
    assert means == {"scan": 11, "print": 21, "photo": 31, "inverse": 41, "average": 26}
    assert table.rows[0].megabytes == 36  # of four runs
    assert "on the column's domain by a model trained without it" in table.caption
    assert "scan 1 × 10, print 1 × 10, photo 1 × 10, inverse 1 × 10" in table.caption
    assert "test images: scan 200, print 200, photo 200, inverse 200" in table.caption
    header, body = table.grid()
    assert header[5:9] == ["unseen average", "worst", "spread", "Δ FedAvg, unseen"]
    assert [c.text for c in body[1].cells[6:]] == ["11.0", "11.2", "+0.0"]
    # the bytes of all four runs
    assert [c.text for c in table.costs()[1][0].cells[3:]] == ["1", "12"]
    # the curves are joined as the columns are: each domain's is of the run without it
    (history, _) = folder.histories("glyphs")
    assert history.rounds[0]["accuracy"] == {d: means[d] for d in DOMAINS}


def test_a_seed_without_a_run_for_each_domain_does_not_count(tmp_path: Path) -> None:
    made = study(tasks={"glyphs": {"leave_out": "each"}}, seeds=1, rows={"FedAvg": "fedavg"})
    folder = make_study(made, tmp_path / "s")
    gone = next(p for p in tmp_path.glob("*/config.toml") if 'leave_out = "photo"' in p.read_text())
    gone.with_name("summary.json").unlink()
    assert table_of(StudyFolder.open(folder.path)).rows[0].seeds == 0
    assert StudyFolder.open(folder.path).histories("glyphs") == []


def test_one_domain_left_out_in_the_csv(tmp_path: Path) -> None:
    made = study(tasks={"glyphs": {"leave_out": "photo"}}, seeds=1)
    folder = make_study(made, tmp_path / "s", rising)
    lines = to_text(made, folder.tables(), "csv").splitlines()
    assert [line.split(",")[2:4] for line in lines[1:6]] == [
        ["photo", "30.0000"], ["scan", "10.0000"], ["print", "20.0000"], ["inverse", "40.0000"],
        ["seen average", "23.3333"],
    ]  # fmt: skip


def test_rows_with_and_without_a_left_out_domain_share_a_table(tmp_path: Path) -> None:
    lines = {"All": "fedavg", "Less": {"method": "fedavg", "settings": {"leave_out": "photo"}}}
    folder = make_study(study(rows=lines, baseline="All", seeds=1), tmp_path / "s", rising)
    header, body = table_of(folder).grid()
    assert header[1:9] == [*DOMAINS, "average", "worst", "spread", "seen average"]
    assert [c.text for c in body[0].cells][5:9] == ["25.0", "10.0", "11.2", "—"]
    assert [c.text for c in body[1].cells][5:] == ["25.0", "", "", "23.3", "+0.0"]
    # but not a figure
    assert [run.label for run in folder.histories("glyphs")] == ["All"]


def test_the_runs_are_found_by_task_row_and_seed(tmp_path: Path) -> None:
    made = study(tasks={"glyphs": {}, "more": {"task": "glyphs", "lr": 0.02}})
    folder = make_study(made, tmp_path / "s", skip={("FPL", 0)})
    found = {(run.task, run.line.label, run.seed): stored for run, stored in folder.runs.items()}
    assert len(found) == 8
    assert {key for key, stored in found.items() if stored is None} == {
        ("glyphs", "FPL", 0), ("more", "FPL", 0),
    }  # fmt: skip
    assert [table.task for table in folder.tables(["more"])] == ["more"]
    assert to_text(made, folder.tables(), "markdown").count("## ") == 2
    stored = found["more", "FedAvg", 1]
    assert stored is not None and set(stored.summary["accuracy"].values()) == {41.0}


# ---- validation ---------------------------------------------------------------------------------

VALIDATED = {**TINY, "validate": "unused"}


def by_tau(run: PlannedRun) -> float:
    """Validation prefers tau = 0.1; methods without one are better still."""
    return {None: 90.0, 0.1: 61.0, 0.2: 60.0}[run.line.row.options.get("tau")]


def test_a_sweep_is_chosen_by_validation_not_by_test(tmp_path: Path) -> None:
    def by_test(run: PlannedRun) -> dict[str, float]:
        return dict.fromkeys(DOMAINS, 100 * run.line.row.options.get("tau", 0))

    sweep = [{"over": {"tau": [0.1, 0.2]}, "rows": ["FPL"]}]
    rows = {"FedAvg": "fedavg", "FedProx": "fedprox", "FPL": "fpl"}
    made = study(settings=VALIDATED, sweep=sweep, seeds=1, rows=rows)
    table = table_of(make_study(made, tmp_path / "s", by_test, validation=by_tau))
    assert table.notes == ("Chosen by validation accuracy: FPL, tau=0.1.",)
    header, body = table.grid()
    place = header.index("validation average")
    assert [line.cells[place].text for line in body] == ["90.0", "90.0", "61.0", "60.0"]
    assert [line.cells[place].mark for line in body] == ["best", "best", "second", ""]
    assert not any(cell.mark for line in body for cell in line.cells[:place])
    assert "validated on training images that no client holds (scan 30, " in table.caption
    assert "Chosen by validation accuracy" in to_text(made, [table], "markdown")
    lines = csv.DictReader(io.StringIO(to_text(made, [table], "csv")))
    found = [line["mean"] for line in lines if line["column"] == "validation average"]
    assert found == ["90.0000", "90.0000", "61.0000", "60.0000"]


def test_of_methods_one_is_chosen_and_only_among_complete_rows(tmp_path: Path) -> None:
    def validation(run: PlannedRun) -> float:
        return {"FedAvg": 50.0, "FPL": 60.0, "Prox": 70.0}[run.line.label]

    rows = {"FedAvg": "fedavg", "FPL": "fpl", "Prox": "fedprox"}
    made = study(settings=VALIDATED, rows=rows)
    folder = make_study(made, tmp_path / "s", skip={("Prox", 1)}, validation=validation)
    assert table_of(folder).notes == ("Chosen by validation accuracy: FPL.",)
    one = study(settings=VALIDATED, rows={"FPL": "fpl"})
    assert table_of(StudyFolder.create(tmp_path / "one", one, tmp_path)).notes == ()


def test_unseen_domains_are_validated_on_the_seen_ones(tmp_path: Path) -> None:
    def validation(run: PlannedRun) -> float:
        return 50.0 + DOMAINS.index(str(run.unseen))

    made = study(tasks={"glyphs": {"leave_out": "each"}}, seeds=1, settings=VALIDATED)
    table = table_of(make_study(made, tmp_path / "s", rising, validation=validation))
    assert table.rows[0].beside["validation average"].mean == 51.5
    assert "(scan 30, print 30, photo 30, inverse 30)" in table.caption


def test_a_study_that_tunes_chooses_for_each_row(tmp_path: Path) -> None:
    sweeps = [
        {"rows": ["FedAvg"], "points": [{"lr": 0.01}, {"lr": 0.1}]},
        {"rows": ["FPL"], "points": [{"lr": 0.01, "tau": 0.02}, {"lr": 0.03, "tau": 0.1}]},
    ]
    made = study(kind="tune", sweep=sweeps, seeds=[100], settings={**TINY, "validate": "unused"})
    best = {"FedAvg, lr=0.1", "FPL, lr=0.01, tau=0.02"}
    folder = make_study(
        made, tmp_path / "s", validation=lambda run: 50.0 + 10 * (run.line.label in best)
    )
    assert {line.label for line in folder.choices()} == best
    validated, tested = folder.tables()
    assert len(validated.rows) == 4 and [row.label for row in tested.rows] == sorted(
        best, key=lambda label: "FPL" in label
    )
    assert any("FedAvg, lr=0.1 (of 2 tried); FPL, " in note for note in validated.notes)
    assert "Runs: 4, " in validated.details
    assert "Runs: 2, " in tested.details and "9 s in all" in tested.details  # 4.5 s each
    assert len(folder.chosen_runs()) == 2
    plot = tuning(made, validated.rows, folder.choices(), "")
    assert [panel.title for panel in plot.panels] == [
        "FedAvg: lr = 0.1", "FPL: lr = 0.01", "FPL: tau = 0.02",
    ]  # fmt: skip
    assert write_figures(folder, folder.tables(), ("png",), 50) == ["tune.png"]


def test_what_a_paper_prints_stands_beside_test_accuracies_alone(tmp_path: Path) -> None:
    best = "FPL, tau=0.1"
    made = study(
        kind="tune",
        sweep=[{"rows": ["FPL"], "over": {"tau": [0.02, 0.1]}}],
        settings={**TINY, "validate": "unused"},
        printed={"glyphs": {"columns": ["average"], best: [50.0]}},
    )
    validated, tested = make_study(
        made, tmp_path / "s", validation=lambda run: 50.0 + 10 * (run.line.label == best)
    ).tables()
    assert not any(line.paper for line in validated.grid()[1])
    assert "50.00 (-4.5)" in [c.text for line in tested.grid()[1] if line.paper for c in line.cells]


def test_each_task_counts_its_own_seeds(tmp_path: Path) -> None:
    more = {"task": "glyphs", "lr": 0.02, "seeds": 1, "rows": ["FPL"]}
    made = study(tasks={"glyphs": {}, "more": more})
    folder = make_study(made, tmp_path / "s")
    glyphs, other = folder.tables()
    assert [(row.seeds, row.wanted) for row in glyphs.rows] == [(2, 2), (2, 2)]
    assert [(row.label, row.seeds, row.wanted) for row in other.rows] == [("FPL", 1, 1)]
    # seeds of before are kept, task by task
    again = StudyFolder.create(tmp_path / "s", made.with_seeds({"more": [0, 1, 2]}), tmp_path)
    assert [row.wanted for table in again.tables() for row in table.rows] == [2, 2, 3]


def test_accuracies_may_be_of_the_last_round_alone(tmp_path: Path) -> None:
    made = study(last_rounds=1, seeds=1)
    folder = make_study(made, tmp_path / "s", rounds=3)
    for file in tmp_path.glob("glyphs-*/rounds.jsonl"):
        lines = [json.loads(text) for text in file.read_text().splitlines()]
        for t, line in enumerate(lines):
            line["accuracy"] = dict.fromkeys(line["accuracy"], 10.0 * (t + 1))
            line["average"] = 10.0 * (t + 1)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (table,) = folder.tables()
    assert table.rows[0].accuracy["average"].mean == 30.0
    assert table.rows[0].reached is not None and table.rows[0].reached[0].mean == 3
    assert table.head == "Test accuracy in %, last round."
    assert "until a round reaches it" in table.details


def test_a_value_that_a_row_s_name_says_is_not_said_again(tmp_path: Path) -> None:
    sweep = [{"rows": ["FPL"], "over": {"upcr": [3.0, 10.0]}}]
    (table,) = make_study(study(kind="sweep", sweep=sweep), tmp_path / "s").tables()
    assert (
        "hyper-parameters: each method's defaults but for what a row's name says;" in table.details
    )
