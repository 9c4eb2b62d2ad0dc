"""Domains that no client has, in tables, on the command line and in ``show``."""

import json
import subprocess
from pathlib import Path

import pytest
from protofed.studies.compare import adhoc

from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.methods import METHODS, FedDyn, Method, create
from protofed.observers.progress import accuracies
from protofed.report import plot
from protofed.report.figures import sweep
from protofed.runs.records import Records, shown
from protofed.runs.result import Result
from protofed.runs.run import run
from protofed.studies import folder as folders
from protofed.studies import plan
from protofed.studies.definition import load, parse
from protofed.studies.render import to_markdown
from protofed.studies.show import BLOCKS
from protofed.studies.tables import caption, grid, rows
from protofed.testing.checks import TINY, tiny_task

ORDER = ("scan", "print", "photo", "inverse")
SMALL = {"rounds": 1, "epochs": 1, "samples": 10, "width": 4, "model": "cnn2", "device": "cpu"}
OPTIONS = [word for k, v in SMALL.items() for word in (f"--{k}", str(v))]


def result(method, seed, scan, photo, inverse, leave_out="inverse"):
    """A made-up run of one round that left a domain out."""
    values = {"scan": scan, "photo": photo, "inverse": inverse}
    lines = [{"round": 0, "accuracy": values, "average": sum(values.values()) / 3}]
    config = make_config(method=method, leave_out=leave_out, seed=seed, samples=10, device="cpu")
    summary = {
        "method": method, "bytes_up": 1, "bytes_down": 2, "seconds": 3.0, "data": "made up",
        "batchnorm": "averaged", "tested": {"inverse": 450}, "weights": "samples",
    }  # fmt: skip
    return Result(config, Records(lines), {}, summary)


# ---- one domain left out ------------------------------------------------------------------------


def test_the_unseen_domain_comes_first_and_the_average_is_of_the_others():
    runs = [result("fedavg", s, 90.0, 70.0 + 2 * s, 30.0 + s) for s in (0, 1)]
    runs += [result("fpl", s, 80.0, 60.0, 34.0 + s) for s in (0, 1)]
    table = rows(runs)
    header, lines = grid(table)
    body = [[cell.text for cell in line.cells] for line in lines]
    assert header == ["method", "inverse (unseen)", "scan", "photo", "seen average",
                      "Δ FedAvg, unseen", "MB", "s"]  # fmt: skip
    # seeds 30 and 31; seen averages 80 and 81
    assert body[0][1:6] == ["30.5 ± 0.7", "90.0 ± 0.0", "71.0 ± 1.4", "80.5 ± 0.7", ""]
    # paired by seed on the unseen domain: +4 twice, where the seen ones lose 10.5
    assert body[1][1:6] == ["34.5 ± 0.7", "80.0 ± 0.0", "60.0 ± 0.0", "70.0 ± 0.0",
                            "+4.0 ± 0.0 (±0.0)"]  # fmt: skip
    # best of the unseen is not best of the seen
    assert "| fpl | **34.5" in to_markdown(header, lines)
    assert "Δ: on inverse, which no client trained on; seen average: on the others" in caption(runs)
    # who reads rows as numbers finds the average of all domains where it was
    assert table[0].accuracy["average"].mean == pytest.approx((190 / 3 + 193 / 3) / 2)
    assert table[0].main == "inverse"


def test_without_one_a_table_is_as_ever():
    header, (line,) = grid(rows([result("fedavg", 0, 90.0, 70.0, 30.0, leave_out=None)]))
    assert header[1:5] == ["scan", "photo", "inverse", "average"]
    assert line.cells[4].text == "63.3"


def test_accuracies_under_the_names_a_person_reads():
    record = {"accuracy": {"scan": 90.0, "photo": 70.0, "inverse": 30.0}, "average": 190 / 3}
    assert accuracies(record) == "scan 90.0  photo 70.0  inverse 30.0  average 63.3"
    assert (
        accuracies(record, "inverse")
        == "inverse (unseen) 30.0  scan 90.0  photo 70.0  seen average 80.0"
    )
    nan = float("nan")
    assert shown({"a": 1.0, "b": nan, "c": 3.0, "average": 2.0}, "a")["seen average"] == 3.0
    assert shown({"a": 1.0, "average": 1.0}, "elsewhere") == {"a": 1.0, "average": 1.0}


def flat(cell):
    return {d: 10.0 * (1 + i) for i, d in enumerate(ORDER)}


def test_a_study_of_one_left_out_domain(raw, make_runs, tmp_path, protofed):
    study = parse(raw(tasks={"glyphs": {"leave_out": "photo"}}, seeds=1), "mine")
    make_runs(study, tmp_path / "s", flat)
    folders.write_outputs(study, tmp_path / "s")
    lines = (tmp_path / "s" / "table.csv").read_text().splitlines()
    assert [line.split(",")[2:4] for line in lines[1:6]] == [
        ["photo", "30.0000"], ["scan", "10.0000"], ["print", "20.0000"], ["inverse", "40.0000"],
        ["seen average", "23.3333"],
    ]  # fmt: skip
    one = next(p for p in (tmp_path / "s").iterdir() if (p / "config.toml").is_file())
    code, out, _ = protofed("show", one)
    assert code == 0
    first, *others = [line.split() for line in out.splitlines() if set(line) & set(BLOCKS)][:5]
    assert first[:2] == ["photo", "(unseen)"]
    assert others[-1][:2] == ["seen", "average"]
    assert "23.3" in others[-1]
    assert not any(line[0] == "average" for line in others)


def test_the_curves_of_a_study_show_the_unseen_domains(raw, make_runs, tmp_path, monkeypatch):
    drawn = []

    def save(plot, folder):
        drawn.append(plot)
        return [folder / f"{plot.name}.png"]

    monkeypatch.setattr(plot, "save", save)
    for left_out in ("photo", "each"):
        study = parse(raw(tasks={"glyphs": {"leave_out": left_out}}), "mine")
        make_runs(study, tmp_path / left_out, lambda c: {**flat(c), c.unseen: 50.0 + c.seed})
        assert "curves.png" in folders.write_outputs(study, tmp_path / left_out)
    one, each = drawn
    assert one.panels[0].title == "photo (unseen)"
    assert [panel.title for panel in each.panels][1:] == [f"{d} (unseen)" for d in ORDER]
    assert "FPL ends at 50.5 %" in each.panels[1].alt  # two seeds: 50 and 51
    assert "each domain left out in turn, 2 seeds" in each.heading
    # rows that trained on all domains are not drawn over one that did not
    lines = {"All": "fedavg", "Less": {"method": "fedavg", "settings": {"leave_out": "photo"}}}
    study = parse(raw(rows=lines, baseline="All", seeds=1), "mine")
    make_runs(study, tmp_path / "mixed", flat)
    folders.write_outputs(study, tmp_path / "mixed")
    assert [key.label for key in drawn[-1].legend] == ["All"]


def test_a_sweep_is_drawn_over_the_unseen_domain(raw, make_runs, tmp_path):
    over = [{"rows": ["FPL"], "over": {"tau": [0.02, 0.5]}}]
    study = parse(raw(tasks={"glyphs": {"leave_out": "photo"}}, seeds=1, sweep=over), "mine")
    make_runs(study, tmp_path, flat)
    (table,) = folders.make_tables(study, tmp_path)
    assert table.columns[0] == "photo"
    plot = sweep(study, 0, table)
    assert plot.legend[0].label == "FPL, photo (unseen)"
    assert "30.0 %" in plot.panels[0].alt
    over[0]["over"]["lr"] = [0.01, 0.1]
    study = parse(raw(tasks={"glyphs": {"leave_out": "photo"}}, seeds=1, sweep=over), "mine")
    make_runs(study, tmp_path / "grid", flat)
    (table,) = folders.make_tables(study, tmp_path / "grid")
    plot = sweep(study, 0, table)
    assert "photo (unseen)" in plot.caption
    assert "30.0 to 30.0 %" in plot.panels[0].alt
    del over[0]["over"]["lr"]
    study = parse(raw(tasks={"glyphs": {"leave_out": "each"}}, seeds=1, sweep=over), "mine")
    make_runs(study, tmp_path / "each", flat)
    (table,) = folders.make_tables(study, tmp_path / "each")
    labels = [key.label for key in sweep(study, 0, table).legend]
    assert (labels[0], labels[-1]) == ("FPL, unseen average", "FedAvg, unseen average")


def test_rows_with_and_without_a_left_out_domain_share_a_table(raw, make_runs, tmp_path):
    lines = {"All": "fedavg", "Less": {"method": "fedavg", "settings": {"leave_out": "photo"}}}
    study = parse(raw(rows=lines, baseline="All", seeds=1), "mine")
    make_runs(study, tmp_path, flat)
    (table,) = folders.make_tables(study, tmp_path)
    header, body = table.grid()
    assert header[1:7] == [*ORDER, "average", "seen average"]
    assert [c.text for c in body[0].cells][5:7] == ["25.0", "—"]
    assert [c.text for c in body[1].cells][5:8] == ["25.0", "23.3", "+0.0"]


# ---- each domain left out -----------------------------------------------------------------------


def study_of(methods, given):
    table = {name: (name, {}) for name in methods}
    settings = {**SMALL, "leave_out": "each", **given}
    title = "Methods on glyphs, unseen domains"
    return adhoc("compare", title, "glyphs", table, range(1), settings)


def test_compare_leaves_out_each_in_turn_and_does_nothing_twice(protofed, make_runs, monkeypatch):
    study = study_of(["fedavg", "fpl"], {})

    def score(cell):
        better = 5.0 * (cell.line.label == "fpl")
        return {d: 10.0 * (1 + i) + better + (d == cell.unseen) for i, d in enumerate(ORDER)}

    make_runs(study, Path("runs/compare-glyphs-unseen"), score)

    def never(*_, **__):
        raise AssertionError("a run that is there was done again")

    monkeypatch.setattr(subprocess, "Popen", never)
    code, out, err = protofed("compare", "--methods", "fedavg,fpl", "--leave-out", "each", *OPTIONS)
    assert (code, err) == (0, "")
    assert "8 of 8 runs are already complete" in out
    text = " ".join(out.split())
    assert "fedavg 11.0 21.0 31.0 41.0 26.0" in text
    assert "fpl 16.0 26.0 36.0 46.0 31.0 +5.0" in text
    assert out.count("unseen average") == 1  # one table
    assert "Methods on glyphs, unseen domains" in Path(
        "runs/compare-glyphs-unseen/study.toml"
    ).read_text("utf-8")


def test_clients_in_numbers_are_meant_for_every_run():
    study = study_of(["fedavg"], {"clients": {"scan": 3, "print": 2, "photo": 2, "inverse": 1}})
    found = {
        cell.unseen: dict(plan.configs([cell])[cell.key].clients) for cell in plan.cells(study)
    }
    assert found["scan"] == {"scan": 0, "print": 2, "photo": 2, "inverse": 1}
    assert found["inverse"] == {"scan": 3, "print": 2, "photo": 2, "inverse": 0}


def test_a_single_run_says_who_does_each(protofed):
    code, out, err = protofed("run", "--method", "fpl", "--leave-out", "each")
    assert (code, out) == (2, "")
    assert "protofed compare --methods fpl --leave-out each" in err
    assert not Path("runs").exists()
    with pytest.raises(ProtofedError, match="not each in turn"):
        run(tiny_task(), leave_out="each", **TINY)


def test_help_and_bad_domains(protofed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("run", "compare"):
        assert "DOMAIN | each" in protofed(command, "--help")[1]
    code, _, err = protofed("compare", "--methods", "fedavg", "--leave-out", "eachh", *OPTIONS)
    assert code == 2
    assert "unknown domain of glyphs 'eachh'" in err


@pytest.mark.slow
def test_each_for_real(protofed):
    command = ["compare", "--methods", "copa", "--leave-out", "each", *OPTIONS]
    code, out, err = protofed(*command)
    assert (code, err) == (0, "")
    assert "4 runs" in out
    assert "unseen average" in out
    again = protofed(*command)[1]
    assert "4 of 4 runs are already complete" in again
    summaries = [json.loads(p.read_text("utf-8")) for p in Path("runs").glob("*/*/summary.json")]
    assert {s["unseen"] for s in summaries} == set(ORDER)


def test_the_paper_s_table_runs_on_glyphs():
    for name in ("i2pfl-table3", "i2pfl-table3-marsfl"):
        study = load(name).overridden("glyphs", {"rounds": 2})
        (task,) = plan.study_tasks(study)
        asked = plan.cells(study, plan.Selection(rows=("copa",), seeds=(0,)))
        assert [c.unseen for c in asked] == list(ORDER)
        made = plan.configs(asked)
        assert all(sum(c.clients.values()) == 3 for c in made.values())
        assert plan.columns(study, task) == (*ORDER, "average")


def test_marsfl_s_settings_are_those_of_its_task():
    study = load("i2pfl-table3-marsfl")
    plain = load("i2pfl-table3")
    assert study.printed == plain.printed
    assert study.rows == plain.rows
    for name, share, lr in (("digits", 0.1, 0.01), ("office_caltech", 0.3, 0.001),
                            ("pacs", 0.3, 0.001)):  # fmt: skip
        own = {**study.settings, **study.tasks[name].settings}
        assert (own["samples"], own["lr"], own["rounds"], own["batch"]) == (share, lr, 50, 16)
        assert own["leave_out"] == "each"


# ---- what models are weighed by -----------------------------------------------------------------


def test_the_caption_says_which_methods_weigh_otherwise():
    config = {**TINY, "rounds": 1, "epochs": 1}
    names = ("fedavg", "fedproto", "fedopt", "fednova", "fedavg_ga", "fedbn", "local")
    text = caption([run(tiny_task(), name, **config) for name in names])
    assert (
        "weights of the average: sample counts (fedopt: uniform; fednova: samples over steps; "
        "fedavg_ga: generalization gaps; local: no model is averaged)." in text
    )
    assert "averaged like weights, running statistics included (fedbn, local: kept" in text
    uniform = caption([run(tiny_task(), "fedavg", average="uniform", **config)])
    assert "weights of the average: uniform." in uniform


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_with_weights_of_its_own_says_what_they_are(name):
    own = METHODS[name].weights is not Method.weights
    assert bool(create(name).weighting) == own
    assert create(name).weighting != "its own rule"


def test_a_variant_that_weighs_as_the_protocol_says_so():
    assert FedDyn().weighting == "uniform"
    assert FedDyn(variant="reference").weighting == ""


def test_a_run_of_an_earlier_version_claims_nothing():
    old = result("fedavg", 0, 1.0, 1.0, 1.0)
    del old.summary["weights"]
    assert "weights of the average: samples unless the method has its own" in caption([old])


def test_the_rows_of_a_table_are_named_as_the_table_does(raw, make_runs, tmp_path):
    lines = {"Plain": "fedavg", "As printed": {"method": "feddyn", "options": {"alpha": 0.1}},
             "As published": {"method": "feddyn", "options": {"variant": "reference"}}}  # fmt: skip
    study = parse(raw(rows=lines, seeds=1), "mine")
    make_runs(study, tmp_path, flat)
    for file in tmp_path.glob("*/summary.json"):
        summary = json.loads(file.read_text())
        correct = 'variant = "correct"' in (file.parent / "config.toml").read_text()
        file.write_text(json.dumps({**summary, "weights": "uniform" if correct else "samples"}))
    (table,) = folders.make_tables(study, tmp_path)
    assert "weights of the average: sample counts (As printed: uniform)." in table.caption
