"""The report of a study: its rows, the paper's numbers, its sweeps, what is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.studies.made_runs import DOMAINS, TINY, make_study, study

from protofed.report import plot
from protofed.report.collect import collect
from protofed.report.page import write_report
from protofed.runs.run import run
from protofed.studies.definition import Study
from protofed.studies.folder import StudyFolder
from protofed.studies.launch import prepare
from protofed.studies.plan import PlannedRun

PAPER = {"columns": ["scan", "print", "photo", "inverse", "average"],
         "FedAvg": [40.0, 40.0, 40.0, 40.0, 40.0],
         "New": {"values": [50.0, 50.0, 50.0, 50.0, 50.0], "std": 0.5},
         "FPL": [49.0, 49.0, 49.0, 49.0, 49.0]}  # fmt: skip
ROWS = {"FedAvg": "fedavg", "New": "fednew", "FPL": "fpl"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time, and is tested elsewhere."""
    monkeypatch.setattr(plot, "svg", lambda panel, prefix: f'<svg aria-label="{panel.alt}"></svg>')


def page(folder: Path) -> str:
    out = folder.parent / "page" / "r.html"
    write_report(collect([folder]), out)
    return out.read_text("utf-8")


def page_of(made: Study, place: Path, *args: Any, **more: Any) -> str:
    """The page of a study with made-up runs (see ``make_runs``)."""
    return page(make_study(made, place / "s", *args, **more).path)


def test_the_paper_s_numbers_stand_below_ours(tmp_path: Path) -> None:
    made = study(printed={"glyphs": PAPER}, rows=ROWS, notes=["<so>"], paper="A & B")
    make_study(made, tmp_path / "s")
    given = collect([tmp_path / "s"])
    (group,) = given.groups
    assert (group.title, list(group.methods), group.baseline) == (
        "glyphs",
        ["FedAvg", "FPL"],
        "FedAvg",
    )
    assert given.skipped == ()
    text = page(tmp_path / "s")
    assert "<h1>Two methods</h1>" in text and "A &amp; B" in text and "<li>&lt;so&gt;</li>" in text
    # a row is one line with the paper's below it: it stays whole when the table is sorted
    own, new, fpl = re.findall(
        r"<tr>.*?</tr>", text.split('class="sortable result"')[1].split("</table>")[0], re.S
    )[1:4]
    assert 'data-value="40.5">40.5 ± 0.7<br><small>40.00 (+0.5)</small>' in own
    assert "45.5 ± 0.7<br><small>49.00 (-3.5)</small>" in fpl
    assert "+5.0 ± 0.0<br><small>±0.0 · paper +9.00</small>" in fpl
    assert "><br><small>50.00 ± 0.50</small>" in new and "which this version does not have" in new
    assert "is best" not in text
    assert "ours − paper" in text


def test_no_row_wins_before_all_have_been_run(tmp_path: Path) -> None:
    printed = {"glyphs": {k: v for k, v in PAPER.items() if k != "New"}}
    rows = {"FedAvg": "fedavg", "FPL": "fpl", "MOON": "moon"}
    made = study(printed=printed, rows=rows, seeds=1)
    text = page_of(made, tmp_path / "some", skip={("FPL", 0)})
    lead = text.split('class="lead">')[1].split("</p>")[0]
    assert lead.startswith("2 of 3 rows have been run, so none is called the best.")
    assert "<b>FedAvg</b> 40.0&nbsp;%, <b>MOON</b> 45.0&nbsp;% on average over 4 domains." in lead
    assert 'class="first"' not in text and 'class="best' not in text
    # the paper's numbers of a row without runs are a row of their own
    assert re.search(r"FPL<br><small>not run · paper</small>.*?<small>49.00</small>", text, re.S)
    text = page_of(made, tmp_path / "all")
    assert "<b>FPL</b> and MOON are level" in text and 'class="best' in text
    assert text.count('<li class="first"') == 2
    del rows["MOON"]
    text = page_of(study(printed=printed, rows=rows, seeds=1), tmp_path / "two")
    assert "<b>FPL</b> is best" in text and 'class="first"' in text and 'class="best' in text
    assert "The paper prints 49.0&nbsp;% for it." in text


def test_seeds_that_are_not_there_are_counted(tmp_path: Path) -> None:
    assert "1/2" in page_of(study(), tmp_path, skip={("FPL", 1)})


def test_every_section_says_which_rounds_count(tmp_path: Path) -> None:
    made = study(tasks={"glyphs": {"leave_out": "each"}}, seeds=1, last_rounds=1)
    text = page_of(made, tmp_path)
    assert "mean of the last" not in text
    assert text.count(", last round. ") == 5  # one caption for all, and one for each domain
    assert text.count("until a round reaches it") == 5 and "accuracy of fedavg" not in text


def test_a_domain_left_out_in_turn_is_a_section_each_under_one_table(tmp_path: Path) -> None:
    text = page_of(study(tasks={"glyphs": {"leave_out": "each"}}, seeds=1), tmp_path)
    groups = collect([tmp_path / "s"]).groups
    assert [g.unseen for g in groups] == ["scan", "print", "photo", "inverse"]
    assert groups[1].title == "glyphs, print left out"
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


def test_as_long_as_no_row_has_all_domains_the_page_says_so(tmp_path: Path) -> None:
    made = study(tasks={"glyphs": {"leave_out": "each"}}, seeds=1)
    folder = make_study(made, tmp_path / "s")
    for file in tmp_path.glob("*/config.toml"):
        if 'leave_out = "scan"' in file.read_text():
            file.with_name("summary.json").unlink()
    text = page(folder.path)
    assert "No row is complete yet." in text
    assert "Accuracy on unseen average" not in text
    assert "Accuracy on print (unseen) over rounds" in text


def test_rows_with_and_without_a_left_out_domain_have_no_common_section(tmp_path: Path) -> None:
    lines = {"Less": {"method": "fedavg", "settings": {"leave_out": "photo"}}, "All": "fedavg"}
    text = page_of(study(rows=lines, baseline="All", seeds=1), tmp_path)
    assert "left out in turn" not in text
    assert "<h2>glyphs, photo left out</h2>" in text and "<h2>glyphs</h2>" in text


def test_of_one_domain_left_out_that_one_counts(tmp_path: Path) -> None:
    values = {"scan": 80.0, "print": 60.0, "photo": 20.0, "inverse": 40.0}
    made = study(tasks={"glyphs": {"leave_out": "photo"}}, seeds=1)
    text = page_of(made, tmp_path, lambda run: values)
    first, *others = re.findall(r'aria-label="Accuracy on (.*?) over rounds: (.*?), FPL', text)
    assert first == ("photo (unseen)", "FedAvg ends at 20.0 %")
    assert others[-1] == ("seen average", "FedAvg ends at 60.0 %")
    bars = re.findall(r'aria-label="Accuracy on ([a-z ()]*?): FedAvg ([0-9.]*) %', text)
    assert (bars[0], bars[4]) == (("photo (unseen)", "20.0"), ("seen average", "60.0"))
    assert bars[5] == ("photo (unseen) against megabytes", "20.0")
    assert "average over domains" not in text


def test_a_sweep_comes_first_and_its_points_have_no_t_sne(tmp_path: Path) -> None:
    over = {"tau": [round(0.02 * i, 2) for i in range(1, 18)]}
    made = study(kind="sweep", seeds=1, sweep=[{"rows": ["FPL"], "over": over}])
    text = page_of(made, tmp_path)
    assert text.index("Over parameters") < text.index('id="g0-table"')
    assert "Accuracy over tau: FPL is best with 45.0 % at tau = 0.02." in text
    assert "Not shown for the points of a sweep" in text
    assert "18 lines are too many for one figure" in text


def test_a_sweep_over_unseen_domains_is_drawn_once(tmp_path: Path) -> None:
    tasks = {"glyphs": {"leave_out": "each"}}
    over = [{"rows": ["FPL"], "over": {"tau": [0.02, 0.5]}}]
    text = page_of(study(kind="sweep", seeds=1, sweep=over, tasks=tasks), tmp_path)
    assert text.count("Accuracy over tau: FPL is best with 45.0 %") == 1
    assert text.index('id="t0-sweep"') < text.index('id="t0-over-rounds"') < text.index('id="g0"')


def test_the_main_result_says_how_few_seeds_its_own_row_has(tmp_path: Path) -> None:
    """And not that of a row with fewer, which is not ranked."""
    for seeds, said in ((5, False), (4, True)):
        rows = {"FedAvg": "fedavg", "FPL": "fpl", "MOON": "moon"}
        made = study(seeds=seeds, rows=rows)
        text = page_of(made, tmp_path / str(seeds), skip={("MOON", 0)})
        lead = text.split('class="lead">')[1].split("</p>")[0]
        assert "<b>FPL</b> is best" in lead and "Not ranked, for lack of seeds: MOON" in lead
        assert ("Fewer than 5 seeds" in lead) == said


def lead_of(made: Study, place: Path, *args: Any, **more: Any) -> tuple[str, str, list[str]]:
    """The main result of a study's page, its note on the table, and its ranking."""
    text = page_of(made, place, *args, **more)
    lead = text.split('class="lead">')[1].split("</p>")[0]
    (note,) = re.findall(r"Test accuracy in %; [^<]*", text)
    return lead, note, re.findall(r'<span class="name">([^<]*)<', text)


def test_validation_alone_says_what_is_best(tmp_path: Path) -> None:
    """By test accuracy, τ = 0.5 is better."""
    over = [{"rows": ["FPL"], "over": {"tau": [0.02, 0.5]}}]
    made = study(kind="sweep", sweep=over, settings={**TINY, "validate": "unused"})

    def accuracy(run: PlannedRun) -> dict[str, float]:
        return dict.fromkeys(DOMAINS, 40.0 + 10 * run.line.point.get("tau", 0))

    def validation(run: PlannedRun) -> float:
        return 50.0 + (run.line.point.get("tau") == 0.02)

    lead, note, ranks = lead_of(made, tmp_path, accuracy, validation=validation)
    assert lead.startswith(
        "<b>FPL, tau=0.02</b> is best by validation accuracy. Its test accuracy on average over 4 "
        "domains is <b>40.2&nbsp;%</b>, +0.2 points from FedAvg"
    )
    assert "partly chance" not in lead and "by validation accuracy alone" in note
    assert ranks == ["FPL, tau=0.02", "FedAvg", "FPL, tau=0.5"]


def test_a_lead_that_test_images_chose_is_partly_chance(tmp_path: Path) -> None:
    over = [{"rows": ["FPL"], "over": {"tau": [0.02, 0.5]}}]

    def accuracy(run: PlannedRun) -> dict[str, float]:
        return dict.fromkeys(DOMAINS, 40.0 + 10 * run.line.point.get("tau", 0))

    lead, note, ranks = lead_of(study(kind="sweep", sweep=over), tmp_path / "a", accuracy)
    assert lead.startswith("<b>FPL, tau=0.5</b> is best on average over 4 domains: <b>45.0")
    assert "Test images say which setting is best, so its lead is partly chance." in lead
    assert "validation" not in note and ranks[0] == "FPL, tau=0.5"
    lead, *_ = lead_of(study(), tmp_path / "b")  # two methods are no settings to choose from
    assert "partly chance" not in lead


def test_features_over_rounds_say_so_and_which_rounds_are_not_there(tmp_path: Path) -> None:
    given = {"rows": {"FedAvg": "fedavg"}, "seeds": 1, "kind": "tsne", "tsne": {"rounds": [1, 7]}}
    settings = {**TINY, "rounds": 2, "engine": "loop"}
    made, (job,) = prepare(study(**given, settings=settings), tmp_path)
    run(config=job.config, out=job.folder.path)
    StudyFolder.create(tmp_path / "s", made, tmp_path)
    write_report(collect([tmp_path / "s"]), tmp_path / "r.html", images=10)
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "FedAvg · round 1<" in text and "FedAvg · round 2<" in text
    assert "at the end of the run and after the rounds named below. t-SNE" in text
    assert "that round's model" in text and "the final model" not in text
    assert "round 7: the run has 2." in text


def test_effects_of_switches_are_a_table(tmp_path: Path) -> None:
    over = {"tau": [0.02, 0.5], "flip": [True, False], "lr": [0.1, 0.2]}
    made = study(kind="sweep", sweep=[{"rows": ["FPL"], "over": over}])
    text = page_of(made, tmp_path)
    assert "flip: True → False" in text and "FPL: 8 of 8 settings." in text


def test_of_many_settings_the_effects_are_the_result_not_the_best(tmp_path: Path) -> None:
    over = {"average": ["samples", "uniform"], "flip": [True, False], "lr": [0.01, 0.02],
            "batch": [8, 4], "tau": [0.02, 0.05]}  # fmt: skip
    made = study(kind="sweep", sweep=[{"rows": ["FPL"], "over": over}], seeds=2)

    def accuracy(run: PlannedRun) -> dict[str, float]:
        return dict.fromkeys(DOMAINS, 50.0 + 6 * (run.line.point.get("batch") == 4))

    text = page_of(made, tmp_path, accuracy)
    assert "FPL, batch: 8 → 4: +6.0 ± 0.0." in text
    assert "is best" not in text
    # 32 bars with long names cannot be read
    assert "Not drawn: 33 bars are too many for one figure; see the table." in text
    assert "domains.png" not in text


def test_differences_to_the_baseline_are_a_figure_of_the_task(tmp_path: Path) -> None:
    text = page_of(study(kind="differences", seeds=2), tmp_path)
    assert "Differences to FedAvg" in text and "Above FedAvg on glyphs: FPL +5.0." in text
    assert 'href="#g0-sweep">Differences</a>' in text
