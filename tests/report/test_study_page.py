"""The report of a study: its rows, the paper's numbers, its sweeps, what is missing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from protofed.report import plot
from protofed.report.collect import collect
from protofed.report.page import write_report
from protofed.runs.run import run
from protofed.studies import folder as folders
from protofed.studies import plan
from protofed.studies.definition import parse

PAPER = {"columns": ["scan", "print", "photo", "inverse", "average"],
         "FedAvg": [40.0, 40.0, 40.0, 40.0, 40.0],
         "New": {"values": [50.0, 50.0, 50.0, 50.0, 50.0], "std": 0.5},
         "FPL": [49.0, 49.0, 49.0, 49.0, 49.0]}  # fmt: skip
ROWS = {"FedAvg": "fedavg", "New": "fednew", "FPL": "fpl"}


def flat(cell):
    value = (40.0 if cell.line.row.method == "fedavg" else 45.0) + cell.seed
    return dict.fromkeys(("scan", "print", "photo", "inverse"), value)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time, and is tested elsewhere."""
    monkeypatch.setattr(plot, "svg", lambda panel, prefix: f'<svg aria-label="{panel.alt}"></svg>')


def page(folder: Path, out: Path) -> str:
    write_report(collect([folder]), out)
    return out.read_text("utf-8")


def test_the_paper_s_numbers_stand_below_ours(raw, make_runs, tmp_path):
    study = parse(raw(printed={"glyphs": PAPER}, rows=ROWS, notes=["<so>"], paper="A & B"), "mine")
    make_runs(study, tmp_path / "s", flat)
    given = collect([tmp_path / "s"])
    (group,) = given.groups
    assert (group.title, list(group.methods), group.baseline) == (
        "glyphs",
        ["FedAvg", "FPL"],
        "FedAvg",
    )
    assert given.skipped == ()
    text = page(tmp_path / "s", tmp_path / "r.html")
    assert "<h1>Two methods</h1>" in text and "A &amp; B" in text and "<li>&lt;so&gt;</li>" in text
    # a row is one line with the paper's below it: it stays whole when the table is sorted
    own, new, fpl = re.findall(
        r"<tr>.*?</tr>", text.split('class="sortable result"')[1].split("</table>")[0], re.S
    )[1:4]
    assert 'data-value="40.5">40.5 ± 0.7<br><small>40.00 (+0.5)</small>' in own
    assert "45.5 ± 0.7<br><small>49.00 (-3.5)</small>" in fpl
    assert "+5.0 ± 0.0<br><small>±0.0 · paper +9.00</small>" in fpl
    assert "—<br><small>50.00 ± 0.50</small>" in new and "which this version does not have" in new
    assert "The paper prints 49.0&nbsp;% for it." in text
    assert "ours − paper" in text


def test_what_is_unfinished_or_of_another_definition_is_said(raw, make_runs, tmp_path):
    study = parse(raw(), "mine")
    make_runs(study, tmp_path, flat)
    runs = sorted(p.parent for p in tmp_path.glob("*/config.toml"))
    (runs[0] / "summary.json").unlink()
    shutil.copytree(runs[1], tmp_path / "copy")
    given = collect([tmp_path])
    assert dict(given.skipped) == {
        runs[0]: "not finished",
        tmp_path / "copy": "not part of the study as it is now",
    }
    (group,) = given.groups
    assert len(group.results) == 3
    assert "1/2" in page(tmp_path, tmp_path / "r.html")


def test_a_domain_left_out_in_turn_is_a_section_each_under_one_table(raw, make_runs, tmp_path):
    study = parse(raw(tasks={"glyphs": {"leave_out": "each"}}, seeds=1), "mine")
    make_runs(study, tmp_path, flat)
    groups = collect([tmp_path]).groups
    assert [g.unseen for g in groups] == ["scan", "print", "photo", "inverse"]
    assert groups[1].title == "glyphs, print left out"
    text = page(tmp_path, tmp_path / "r.html")
    assert text.count("<h2>glyphs: each domain left out in turn") == 1
    assert text.index("<h2>glyphs: each domain") < text.index("<h2>glyphs, scan left out")
    assert (
        "on average over 4 domains, each by models trained without it: <b>45.0&nbsp;%</b>" in text
    )
    assert set(re.findall(r'href="#([tg]\d)"', text)) == {"t0", "g0", "g1", "g2", "g3"}
    assert all(f'<section id="{part}">' in text for part in ("t0", "g0", "g3"))
    assert "is best on print, which no client has: <b>45.0&nbsp;%</b>" in text
    # nothing averages what was trained on with what was not
    assert "average over domains" not in text and "average, %" not in text
    for domain in ("scan", "print", "photo", "inverse"):
        assert f"Accuracy on {domain} (unseen) over rounds: FedAvg ends at 40.0 %" in text
        assert f">{domain} (unseen), %" in text
    assert text.count("Accuracy on seen average over rounds") == 4
    assert text.count("Accuracy on unseen average over rounds: FedAvg ends at 40.0 %") == 1
    assert text.count("Accuracy on unseen average: FedAvg 40.0 %") == 1


def test_as_long_as_no_row_has_all_domains_the_page_says_so(raw, make_runs, tmp_path):
    study = parse(raw(tasks={"glyphs": {"leave_out": "each"}}, seeds=1), "mine")
    make_runs(study, tmp_path, flat)
    for file in tmp_path.glob("*/summary.json"):
        if '"seed": 0' in file.read_text() and 'leave_out = "scan"' in (
            file.with_name("config.toml").read_text()
        ):
            file.unlink()
    text = page(tmp_path, tmp_path / "r.html")
    assert "No row is complete yet." in text
    assert "Accuracy on unseen average" not in text
    assert "Accuracy on print (unseen) over rounds" in text


def test_rows_with_and_without_a_left_out_domain_have_no_common_section(raw, make_runs, tmp_path):
    lines = {"Less": {"method": "fedavg", "settings": {"leave_out": "photo"}}, "All": "fedavg"}
    make_runs(parse(raw(rows=lines, baseline="All", seeds=1), "mine"), tmp_path, flat)
    text = page(tmp_path, tmp_path / "r.html")
    assert "left out in turn" not in text
    assert "<h2>glyphs, photo left out</h2>" in text and "<h2>glyphs</h2>" in text


def test_of_one_domain_left_out_that_one_counts(raw, make_runs, tmp_path):
    study = parse(raw(tasks={"glyphs": {"leave_out": "photo"}}, seeds=1), "mine")
    values = {"scan": 80.0, "print": 60.0, "photo": 20.0, "inverse": 40.0}
    make_runs(study, tmp_path, lambda cell: values)
    text = page(tmp_path, tmp_path / "r.html")
    first, *others = re.findall(r'aria-label="Accuracy on (.*?) over rounds: (.*?), FPL', text)
    assert first == ("photo (unseen)", "FedAvg ends at 20.0 %")
    assert others[-1] == ("seen average", "FedAvg ends at 60.0 %")
    bars = re.findall(r'aria-label="Accuracy on ([a-z ()]*?): FedAvg ([0-9.]*) %', text)
    assert (bars[0], bars[4]) == (("photo (unseen)", "20.0"), ("seen average", "60.0"))
    assert bars[5] == ("photo (unseen) against megabytes", "20.0")
    assert "average over domains" not in text


def test_a_sweep_comes_first_and_its_points_have_no_t_sne(raw, make_runs, tmp_path):
    over = {"tau": [round(0.02 * i, 2) for i in range(1, 18)]}
    study = parse(raw(kind="sweep", seeds=1, sweep=[{"rows": ["FPL"], "over": over}]), "mine")
    make_runs(study, tmp_path, flat)
    text = page(tmp_path, tmp_path / "r.html")
    assert text.index("Over parameters") < text.index('id="g0-table"')
    assert "Accuracy over tau: FPL is best with 45.0 % at tau = 0.02." in text
    assert "Not shown for the points of a sweep" in text
    assert "18 lines are too many for one figure" in text


def test_a_sweep_over_unseen_domains_is_drawn_once(raw, make_runs, tmp_path):
    tasks = {"glyphs": {"leave_out": "each"}}
    over = [{"rows": ["FPL"], "over": {"tau": [0.02, 0.5]}}]
    make_runs(parse(raw(kind="sweep", seeds=1, sweep=over, tasks=tasks), "mine"), tmp_path, flat)
    text = page(tmp_path, tmp_path / "r.html")
    assert text.count("Accuracy over tau: FPL is best with 45.0 %") == 1
    assert text.index('id="t0-sweep"') < text.index('id="t0-over-rounds"') < text.index('id="g0"')


def test_studies_and_loose_runs_together(raw, make_runs, tmp_path):
    for name, tau in (("one", 0.02), ("two", 0.5)):
        rows = {"FedAvg": "fedavg", "FPL": {"method": "fpl", "options": {"tau": tau}}}
        make_runs(parse(raw(rows=rows, title=name, seeds=1), name), tmp_path / name, flat)
    run = next((tmp_path / "two").glob("glyphs-fpl-*"))
    shutil.copytree(run, tmp_path / "loose")
    groups = collect([tmp_path]).groups
    assert [g.title for g in groups] == ["one: glyphs", "two: glyphs", "glyphs"]
    text = page(tmp_path, tmp_path / "r.html")
    assert text.count("<h2>") == 3


def test_the_main_result_says_how_few_seeds_its_own_row_has(raw, make_runs, tmp_path):
    study = parse(raw(seeds=5), "mine")
    make_runs(study, tmp_path / "all", flat)
    make_runs(study, tmp_path / "less", flat, skip={("FPL", 4)})
    for name, said in (("all", False), ("less", True)):
        lead = page(tmp_path / name, tmp_path / "r.html").split('class="lead">')[1].split("</p>")[0]
        assert "<b>FPL</b> is best" in lead
        assert ("Fewer than 5 seeds" in lead) == said


def test_features_over_rounds_say_so_and_which_rounds_are_not_there(raw, tmp_path):
    small = {"rounds": 2, "epochs": 1, "clients": 1, "samples": 10, "model": "cnn2", "width": 4}
    given = {"rows": {"FedAvg": "fedavg"}, "seeds": 1, "kind": "tsne", "tsne": {"rounds": [1, 7]}}
    settings = {**small, "device": "cpu", "engine": "loop"}
    study = parse(raw(**given, settings=settings), "mine")
    (cell,) = plan.cells(study)
    config = cell.config()
    run(config=config, out=tmp_path / "s" / config.label)
    folders.write_study(study, tmp_path / "s", {cell.key: tmp_path / "s" / config.label})
    write_report(collect([tmp_path / "s"]), tmp_path / "r.html", images=10)
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "FedAvg · round 1<" in text and "FedAvg · round 2<" in text
    assert "at the end of the run and after the rounds named below. t-SNE" in text
    assert "that round's model" in text and "the final model" not in text
    assert "round 7: the run has 2." in text
