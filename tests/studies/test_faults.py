"""Mistakes in studies, and files of theirs that are damaged: said in words, and nothing is lost."""

import gzip
import json

import pytest
from rich.console import Console

from protofed.errors import ProtofedError
from protofed.files import Damaged
from protofed.report import stored_analysis
from protofed.runs.run import is_finished
from protofed.studies import folder as folders
from protofed.studies import plan
from protofed.studies.compare import run_study
from protofed.studies.definition import builtin, dumps, load, parse
from protofed.studies.pack import pack
from protofed.studies.plan import Selection


def flat(cell):
    return dict.fromkeys(("scan", "print", "photo", "inverse", "average"), 50.0)


@pytest.mark.parametrize("sweeps", [
    [{"over": {"lr": [0.01, 0.02]}}, {"over": {"lr": [0.02, 0.03]}}],
    [{"over": {"lr": [0.0100000001, 0.01]}}],
])  # fmt: skip
def test_two_lines_of_one_name_are_refused(raw, sweeps):
    with pytest.raises(ProtofedError, match="2 lines are called 'FedAvg, lr="):
        parse(raw(rows={"FedAvg": "fedavg"}, sweep=sweeps), "mine")


def test_a_value_that_is_given_twice_counts_once(raw):
    study = parse(raw(rows={"FedAvg": "fedavg"}, sweep=[{"over": {"lr": [0.01, 0.01]}}]), "mine")
    assert [line.label for line in study.lines] == ["FedAvg, lr=0.01"]


@pytest.mark.parametrize(("change", "words"), [
    ({"baseline": []}, "baseline"),
    ({"override": {"on": 3}}, "on must be a text"),
    ({"tasks": {"glyphs": {"task": 3}}}, "task must be a text"),
    ({"printed": {"glyphs": {"columns": [], "FedAvg": {"values": 1.0, "std": "x"}}}}, "std"),
    ({"seeds": 10**11}, "seeds must be"),
    ({"notes": [1]}, "list of texts"),
    ({"tsne": {"domains": "scan"}}, "list of texts"),
    ({"tsne": {"rounds": [0]}}, "rounds in .tsne. must be"),
    ({"tsne": {"rounds": ["last"]}}, "rounds in .tsne. must be"),
])  # fmt: skip
def test_wrong_types(raw, change, words):
    with pytest.raises(ProtofedError, match=words):
        parse(raw(**{"rows": {"FedAvg": "fedavg"}, **change}), "mine")


@pytest.mark.parametrize(("change", "words"), [
    ({"printed": {"glyphs": {"FedAvg": [1.0, 2.0]}}}, r"\[printed.glyphs\] has no columns \(write"),
    ({"lick": "fpl-table2"}, r"unknown key 'lick' \(did you mean like"),
])  # fmt: skip
def test_what_is_missing_or_misspelt_is_named(raw, change, words):
    with pytest.raises(ProtofedError, match=words):
        parse(raw(**{"rows": {"FedAvg": "fedavg"}, **change}), "mine")


def test_a_name_that_is_like_no_other_is_answered_with_all(raw):
    with pytest.raises(ProtofedError, match=r"unknown kind 'banana' .valid: bars, curves, sweep"):
        parse(raw(kind="banana"), "mine")


COLUMNS = {"glyphs": {"columns": ["scam", "average"], "FedAvg": [1.0, 2.0]}}


@pytest.mark.parametrize(("change", "words"), [
    ({"printed": COLUMNS}, r"study 'mine': unknown column in \[printed.glyphs\] 'scam'"),
    ({"tsne": {"domains": ["scan", "pront"]}}, r"study 'mine': unknown domain in \[tsne\] 'pront'"),
])  # fmt: skip
def test_domains_that_the_task_has_not_are_said_before_any_run(raw, change, words, tmp_path):
    study = parse(raw(rows={"FedAvg": "fedavg"}, **change), "mine")
    with pytest.raises(ProtofedError, match=words):
        run_study(study, tmp_path / "out", 1, Console())
    assert not (tmp_path / "out").exists()
    moved = study.overridden(on="digits")  # its domains are others
    plan.check_domains(moved, plan.cells(moved))


@pytest.mark.parametrize("name", builtin())
def test_built_in_studies_name_domains_of_their_tasks(name):
    study = load(name)
    plan.check_domains(study, plan.cells(study))


@pytest.mark.parametrize("settings", [{"model": []}, {"leave_out": []}])
def test_wrong_types_of_settings(raw, settings):
    (cell,) = plan.cells(parse(raw(rows={"A": "fedavg"}, seeds=1, settings=settings), "mine"))
    with pytest.raises(ProtofedError, match="unknown"):
        cell.config()


def test_an_exact_name_wins(raw):
    rows = {"FPL": "fpl", "FPL, GroupNorm": {"method": "fpl", "settings": {"norm": "group"}}}
    tasks = {"glyphs": {}, "more": {"task": "glyphs", "lr": 0.02}}
    study = parse(raw(rows=rows, tasks=tasks, seeds=1), "mine")

    def chosen(**names):
        return [(c.task, c.line.label) for c in plan.cells(study, Selection(**names))]

    assert chosen(rows=("FPL",), tasks=("glyphs",)) == [("glyphs", "FPL")]
    assert chosen(rows=("FPL, GroupNorm",), tasks=("more",)) == [("more", "FPL, GroupNorm")]
    assert len(chosen(rows=("fpl",), tasks=("glyphs",))) == 2  # the method
    assert len(chosen(rows=("Fpl, groupnorm",))) == 2  # both tasks


def test_names_with_commas_can_be_typed():
    from protofed.cli.study import _names

    known = ["FPL", "FPL, GroupNorm", "FedAvg"]
    assert _names("FedAvg, FPL, GroupNorm", known) == ("FedAvg", "FPL, GroupNorm")
    assert _names("FPL,fedavg", known) == ("FPL", "fedavg")
    assert _names(None) == ()


def test_a_task_name_with_a_slash_gives_files(raw, make_runs, tmp_path):
    study = parse(raw(tasks={"a/b": {"task": "glyphs"}, "glyphs": {"lr": 0.02}}), "mine")
    make_runs(study, tmp_path / "out", flat)
    assert "curves-a-b.png" in folders.write_outputs(study, tmp_path / "out")


DAMAGE = {
    "summary.json": ["", "x", "[]", "{}"],
    "config.toml": ["", "seed = 1"],
    "rounds.jsonl": ["", "{}\n", "[1]\n"],
}


@pytest.mark.parametrize(
    ("file", "content"), [(f, c) for f, contents in DAMAGE.items() for c in contents]
)
def test_damaged_files_are_named_and_a_packed_copy_survives(
    raw, make_runs, tmp_path, monkeypatch, file, content
):
    monkeypatch.setattr("protofed.report.page.write_report", lambda *_, **__: None)
    study = parse(raw(seeds=1), "mine")
    make_runs(study, tmp_path / "out", flat)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "study.toml").write_text("a packed study")
    (copy / "report.html").write_text("its report")
    run = folders.finished(folders.read_index(tmp_path / "out")[plan.cells(study)[0].key])
    (run / file).write_text(content)
    with pytest.raises(ProtofedError, match=file.replace(".", r"\.")):
        folders.write_outputs(study, tmp_path / "out")
    with pytest.raises(ProtofedError, match=file.replace(".", r"\.")):
        pack(tmp_path / "out", copy, images=0)
    if file == "summary.json":  # it is done again
        assert not is_finished(run, plan.cells(study)[0].config())
    assert (copy / "study.toml").read_text() == "a packed study"
    assert (copy / "report.html").is_file()


def test_a_damaged_index_is_named(raw, make_runs, tmp_path):
    study = parse(raw(seeds=1), "mine")
    make_runs(study, tmp_path / "out", flat)
    for content in ("x", "[]", json.dumps(3)):
        next((tmp_path / "out").glob("index-*.json")).write_text(content)
        with pytest.raises(Damaged, match="index-"):
            folders.open_study(tmp_path / "out")


def test_runs_that_a_table_leaves_out_are_told(raw, make_runs, protofed, tmp_path):
    study = parse(raw(seeds=1), "mine")
    make_runs(study, tmp_path / "out", flat)
    folders.write_study(
        parse(raw(rows={"FedAvg": "fedavg"}, seeds=1), "mine"), tmp_path / "out", {}
    )
    code, out, err = protofed("study", "table", tmp_path / "out", "--format", "csv")
    assert code == 0 and "FPL" not in out
    assert "1 finished runs" in err and "left out" in err


@pytest.mark.parametrize("content", [{"confusion": {}}, {"tsne": [1]}, {"clusters": {}}, []])
def test_kept_analyses_that_are_incomplete_are_damaged(tmp_path, content):
    file = tmp_path / stored_analysis.FILE
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    if content:
        with pytest.raises(ProtofedError, match="damaged"):
            stored_analysis.load(stored_analysis.GroupAnalysis(), "FPL", tmp_path)
    else:
        assert stored_analysis.load(stored_analysis.GroupAnalysis(), "FPL", tmp_path)


def test_a_file_that_begins_with_a_mark_is_read(raw, tmp_path):
    (tmp_path / "mine.toml").write_text(dumps(raw(seeds=1)), "utf-8-sig")
    assert load(str(tmp_path / "mine.toml")).title == "Two methods"


def test_values_of_one_name_given_in_two_options_are_one_list(protofed, monkeypatch):
    found = []
    monkeypatch.setattr(
        "protofed.studies.compare.run_study", lambda s, *_, **__: (found.append(s), [])
    )
    monkeypatch.setattr("protofed.cli.study.print_outcome", lambda *_: None)
    protofed("sweep", "--over", "lr=0.01,0.02", "--over", "lr=0.03")
    assert [line.point["lr"] for line in found[0].lines] == [0.01, 0.02, 0.03]
