"""The page: complete, self-contained, escaped, and honest about what is missing."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.studies.made_runs import TINY, make_runs, make_study, study
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.errors import ProtofedError
from protofed.report.collect import Group, ReportInput, collect
from protofed.report.group_analysis import analyze
from protofed.report.page import environment, headline, write_report
from protofed.report.page_table import PageCell, PageTable, result_table
from protofed.report.palette import TONES
from protofed.report.run_details import facts
from protofed.report.stored_analysis import GroupAnalysis
from protofed.runs.result import Result, load_run
from protofed.studies.tables import rows

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A page's tags, all of which must be closed; its ids, and the targets of its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        href = found.get("href") or ""
        if href.startswith("#"):
            self.targets.append(href[1:])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_has_every_part(report: Path) -> None:
    text = report.read_text("utf-8")
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert set(page.targets) <= set(page.ids)
    for part in (
        "Accuracy", "Over rounds", "By domain", "Accuracy for its bytes", "by class", "by domain",
        "What is mistaken for what", "clusters in round 2", "print-1", "checkpoint_every",
        "lr = 0.01", "Seeds", "BatchNorm", "averaged like weights", "mean of the last 5 rounds",
        "fp32 on cpu", "never the best round", "fewer than 5 seeds", "The gap between domains",
        "made by the server",
    ):  # fmt: skip
        assert part.lower() in text.lower(), part
    described = [a for tag, a in page.tags if tag == "svg" and a.get("role") == "img"]
    # 5 curves, 5 bars, 2 of bytes, 4 t-SNE, 8 confusions, 3 of clusters
    assert len(described) == 27
    assert all(len(a["aria-label"] or "") > 20 for a in described)


def test_nothing_comes_from_elsewhere(report: Path) -> None:
    text = report.read_text("utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=\"?(https?:)?//", text)
    assert "@import" not in text and "url(http" not in text
    # the colors of text and lines are the page's: no plain black, no placeholder
    assert not re.search(r"(fill|stroke): #(000000|010101|020202)", text)
    assert "DejaVu" not in text
    assert text.count("<style") == 1  # none inside a figure: it would apply to the page


def test_the_same_runs_give_the_same_page(runs: Path, tmp_path: Path, saved: list[str]) -> None:
    for name in "ab":
        write_report(collect([runs / "fpl-0"]), tmp_path / name, images=0)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    (group,) = collect([runs / "fpl-0"]).groups
    one, two = (analyze(group, 2, lambda text: None).embeddings["fpl"][0] for _ in range(2))
    assert np.array_equal(one.places, two.places)


def test_a_method_has_one_look_on_the_whole_page(report: Path) -> None:
    text = report.read_text("utf-8")
    fpl, fedavg = "var(--c4)", "var(--c8)"
    ranks = dict(re.findall(r'style="--c: ([^"]+)"><span class="name">(\w+)<', text))
    assert ranks == {fpl: "fpl", fedavg: "fedavg"}
    # in both tables, and in the legend of bytes
    swatch = r'style="stroke: ([^"]+)"[^<>]*/></svg>(?:&nbsp;)?(\w+)<'
    found = re.findall(swatch, text)
    assert found.count((fpl, "fpl")) == found.count((fedavg, "fedavg")) == 3
    assert len(found) == 6
    assert f"--c8: {TONES[8].light}" in text and f"--c8: {TONES[8].dark}" in text


def test_every_figure_is_there_for_a_paper(report: Path) -> None:
    names = {p.name for p in report.with_name("figures").iterdir()}
    stems = {
        "curves", "domains", "bytes", "confusion-fedavg", "confusion-fpl", "tsne-fedavg",
        "tsne-fpl", "clusters-fpl",
    }  # fmt: skip
    assert names == {f"{stem}.png" for stem in stems}
    for path in report.with_name("figures").iterdir():
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L"))
        assert pixels.min() < 100 and (pixels > 250).mean() > 0.3


def test_what_cannot_be_made_is_said(runs: Path, tmp_path: Path, saved: list[str]) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "fpl-0" / "prototypes")
    (tmp_path / "runs" / "fpl-1" / "summary.json").unlink()
    given = collect([tmp_path / "runs"])
    write_report(given, tmp_path / "r.html", images=0)
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "Not asked for (--images 0)" in text
    assert "All methods: clients sent no prototypes, or none were kept." in text
    assert "Not in this report: fpl-1: not finished" in text
    assert "clusters in round" not in text


def test_without_the_images_the_rest_is_there(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[str]
) -> None:
    def missing(result: Result) -> None:
        raise ProtofedError("task 'glyphs' is nowhere", "fetch it")

    monkeypatch.setattr(Result, "task", missing)
    write_report(collect([runs]), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "not available: task &#39;glyphs&#39; is nowhere (fetch it)" in text
    assert "clusters in round" in text and "by class" not in text


NASTY = '<script>alert("1")</script> & $x^$'


def test_every_text_is_escaped(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = load_run(runs / "fpl-0")
    records = [
        {**r, "accuracy": {NASTY: r["accuracy"]["scan"], "print": r["accuracy"]["print"]}}
        for r in result.rounds
    ]
    clients = [{**row, "client": NASTY, "note": NASTY} for row in result.summary["clients"]]
    summary = {**result.summary, "method": NASTY, "data": NASTY, "clients": clients}
    nasty = replace(result, rounds=type(result.rounds)(records), summary=summary)
    found = GroupAnalysis(missing={"features": {NASTY: [NASTY]}}, classes=(NASTY, "b"))
    found.confusions = {NASTY: {NASTY: np.array([[3, 1], [0, 2]])}}
    monkeypatch.setattr("protofed.report.page.analyze", lambda *_: found)
    group = Group(NASTY, (nasty,))
    given = ReportInput((group, replace(group)), ((Path(NASTY), NASTY),))
    write_report(given, tmp_path / "r.html", title=NASTY)
    text = (tmp_path / "r.html").read_text("utf-8")
    assert Page(text).open == []
    assert len(re.findall(r"<script", text)) == 1
    assert "alert(" in text and "<script>alert" not in text


def test_two_groups_have_names_of_their_own(tmp_path: Path, saved: list[str]) -> None:
    for rounds in (1, 2):
        settings = {**TINY, "rounds": rounds}
        make_runs(study(seeds=1, settings=settings), tmp_path / "runs", rounds=rounds)
    write_report(collect([tmp_path / "runs"]), tmp_path / "two.html", tmp_path / "f", images=0)
    page = Page((tmp_path / "two.html").read_text("utf-8"))
    assert len(page.ids) == len(set(page.ids)) and set(page.targets) <= set(page.ids)
    assert len(saved) == len(set(saved)) and "glyphs-rounds-1-curves" in saved


def test_the_headline(runs: Path) -> None:
    (group,) = collect([runs]).groups
    table = rows(group.results)
    show = environment().get_template("parts.html.j2").module.headline
    text = show(headline(table, 2))
    best = max(table, key=lambda r: r.accuracy["average"].mean)
    assert text.startswith(f"<b>{best.label}</b> is best on average over 4 domains")
    assert f"{best.accuracy['average'].mean:.1f}&nbsp;%" in text
    assert "Fewer than 5 seeds" in text
    alone = show(headline([r for r in table if r.label == "fpl"], 1))
    assert "reaches" in alone and "One seed" in alone
    assert show(headline([], 1)) == "No row is complete yet."
    same = [replace(r, accuracy=best.accuracy) for r in table]
    level = show(headline(same, 2))
    assert level.startswith(f"<b>{same[0].label}</b> and {same[1].label} are level on average")
    assert "is best" not in level


def test_a_row_that_lacks_seeds_is_not_called_the_best(tmp_path: Path, saved: list[str]) -> None:
    folder = make_study(study(), tmp_path / "s", skip={("FPL", 1)})
    write_report(collect([folder.path]), tmp_path / "page.html", images=0)
    text = (tmp_path / "page.html").read_text("utf-8")
    # FPL is better with its only seed
    assert "<b>FedAvg</b> reaches <b>40.5&nbsp;%</b> on average over 4 domains." in text
    assert "Not ranked, for lack of seeds: FPL." in text
    (ranks,) = re.findall(r'<ol class="ranks".*?</ol>', text, flags=re.S)
    assert "FedAvg" in ranks and "FPL" not in ranks


def test_labels_that_are_alike_in_the_name_of_a_file(
    runs: Path, tmp_path: Path, saved: list[str]
) -> None:
    (group,) = collect([runs]).groups
    labels = {"fpl": "方法", "fedavg": "图"}
    named = tuple(
        replace(r, summary={**r.summary, "method": labels[r.summary["method"]]})
        for r in group.results
    )
    given = ReportInput((Group(group.title, named),), ())
    write_report(given, tmp_path / "page.html", tmp_path / "figures", images=12)
    assert {"confusion-x", "confusion-x-2"} <= set(saved) and len(saved) == len(set(saved))
    page = Page((tmp_path / "page.html").read_text("utf-8"))
    assert len(page.ids) == len(set(page.ids))


def test_tables_carry_values_to_sort_by() -> None:
    cells = [[PageCell("a<b"), PageCell("1,234.5 ± 2", "best")], [PageCell("c"), PageCell("")]]
    text = environment().get_template("parts.html.j2").module.table(PageTable(["m", "v"], cells))
    assert '<td class="best" data-value="1234.5">1,234.5 ± 2</td>' in text
    assert "a&lt;b" in text and text.count("data-value") == 1
    assert text.count('<button type="button">') == 2


def test_best_and_second_are_marked(runs: Path) -> None:
    (group,) = collect([runs]).groups
    table = result_table(rows(group.results), group.looks)
    assert {cell.mark for cell in table.rows[0][1:6]} <= {"best", "second"}
    assert [row[0].look for row in table.rows] == [group.looks[m] for m in ("fedavg", "fpl")]


def test_the_command(runs: Path, tmp_path: Path, saved: list[str]) -> None:
    out = tmp_path / "deep" / "page.html"
    given = ["report", str(runs / "fpl-0"), "-o", str(out), "--images", "5", "--title", "My <own>"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert "1 run: " in done.output and "fpl: t-SNE" in done.output
    assert "<h1>My &lt;own&gt;</h1>" in out.read_text("utf-8")
    assert "6 figure files" in done.output and "page-figures" in done.output
    assert {"curves", "tsne-fpl"} <= set(saved)
    failed = CliRunner().invoke(app, ["report", str(tmp_path / "none")])
    assert isinstance(failed.exception, ProtofedError)
    failed = CliRunner().invoke(app, ["report", str(runs), "-o", str(tmp_path)])
    assert "is a folder" in str(failed.exception)


def test_most_methods_need_not_be_named(runs: Path) -> None:
    fedavg = load_run(runs / "fedavg-0", model=False)
    results = []
    for method in ("a", "b", "c"):
        weights = "uniform" if method == "c" else "samples"
        named = {**fedavg.summary, "method": method, "weights": weights}
        results.append(replace(fedavg, summary=named))
    name = "Weights of the average"
    assert facts(Group("", tuple(results)))[name] == "sample counts (c: uniform)"
    assert facts(Group("", tuple(results[1:])))[name] == "b: sample counts; c: uniform"
