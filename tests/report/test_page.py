"""The page: whole, self-contained, escaped, and honest about what is missing."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.errors import ProtofedError
from protofed.report import figures, plots
from protofed.report.gather import Gathered, Group, gather
from protofed.report.html import html_table
from protofed.report.kept import Findings
from protofed.report.page import headline, result_table, write
from protofed.report.setting import facts
from protofed.runs.result import load_run
from protofed.runs.run import run
from protofed.studies.tables import rows

from .conftest import SMALL


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The figures that would be drawn for a paper, without the time it takes."""
    names: list[str] = []

    def save(plot: plots.Plot, folder: Path, prefix: str = "", *_: object) -> list[Path]:
        names.append(f"{prefix}{plot.name}")
        return [folder / names[-1]]

    monkeypatch.setattr(plots, "save", save)
    return names


VOID = {"meta", "link", "br", "hr", "img", "input"}


class Checked(HTMLParser):
    """Tags that close, ids that are unique, links that lead somewhere."""

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
    page = Checked(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert set(page.targets) <= set(page.ids)
    for part in (
        "Accuracy", "Over rounds", "By domain", "Accuracy for its bytes", "by class", "by domain",
        "What is mistaken for what", "who is together, round 2", "print-1", "checkpoint_every",
        "lr = 0.01", "Seeds", "BatchNorm", "averaged like weights", "mean of the last 5 rounds",
        "fp32 on cpu", "never the best round", "fewer than 5 seeds", "The gap between domains",
        "what the server made",
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
    # colors of text and lines are the page's: nothing drawn in plain black or a stand-in
    assert not re.search(r"(fill|stroke): #(000000|010101|020202)", text)
    assert "DejaVu" not in text
    assert text.count("<style") == 1  # none inside a picture: it would hold for the page


def test_the_same_runs_give_the_same_page(runs: Path, tmp_path: Path) -> None:
    for name in "ab":
        write(gather([runs / "fpl-0"]), tmp_path / name, images=2)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_figure_is_there_for_a_paper(report: Path) -> None:
    names = {p.name for p in report.with_name("figures").iterdir()}
    stems = {
        "curves", "domains", "bytes", "confusion-fedavg", "confusion-fpl", "tsne-fedavg",
        "tsne-fpl", "clusters-fpl",
    }  # fmt: skip
    assert names == {f"{s}.{kind}" for s in stems for kind in ("pdf", "png")}
    for path in report.with_name("figures").iterdir():
        if path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF")
        else:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("L"))
            assert pixels.min() < 100 and (pixels > 250).mean() > 0.3


def test_what_cannot_be_made_is_said(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "fpl-0" / "prototypes")
    (tmp_path / "runs" / "fpl-1" / "summary.json").unlink()
    gathered = gather([tmp_path / "runs"])
    write(gathered, tmp_path / "r.html", images=0)
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "Not asked for (--images 0)" in text
    assert "All methods: clients sent no prototypes, or none were kept." in text
    assert "Not in this report: fpl-1: not finished" in text
    assert "who is together" not in text


def test_without_the_images_the_rest_is_there(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(config: object) -> None:
        raise ProtofedError("task 'glyphs' is nowhere", "fetch it")

    monkeypatch.setattr("protofed.report.findings.config_task", missing)
    write(gather([runs]), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "task &#x27;glyphs&#x27; is nowhere (fetch it)" in text
    assert "who is together" in text and "by class" not in text


NASTY = '<script>alert("1")</script> & $x^$'


def test_every_text_is_escaped(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = load_run(runs / "fpl-0")
    records = [
        {**r, "accuracy": {NASTY if d == "scan" else d: a for d, a in r["accuracy"].items()}}
        for r in result.rounds
    ]
    clients = [{**row, "client": NASTY, "note": NASTY} for row in result.summary["clients"]]
    summary = {**result.summary, "method": NASTY, "data": NASTY, "clients": clients}
    odd = replace(result, rounds=type(result.rounds)(records), summary=summary)
    found = Findings(absent={"features": {NASTY: [NASTY]}}, classes=(NASTY, "b"))
    found.confusions = {NASTY: {NASTY: np.array([[3, 1], [0, 2]])}}
    monkeypatch.setattr("protofed.report.page.find", lambda *_: found)
    group = Group(NASTY, (odd,))
    gathered = Gathered((group, replace(group)), ((Path(NASTY), NASTY),))
    write(gathered, tmp_path / "r.html", title=NASTY)
    text = (tmp_path / "r.html").read_text("utf-8")
    assert Checked(text).open == []
    assert len(re.findall(r"<script", text)) == 1
    assert "alert(" in text and "<script>alert" not in text


def test_groups_are_runs_that_may_be_compared(runs: Path, tmp_path: Path, saved: list[str]) -> None:
    run(**{**SMALL, "rounds": 1}, method="fpl", out=tmp_path / "short")
    for tau in (0.05, 0.1):
        run(**SMALL, method="fpl", options={"tau": tau}, out=tmp_path / str(tau))
    gathered = gather([runs, tmp_path / "0.05", tmp_path / "0.1", runs / "fpl-0"])
    (group,) = gathered.groups
    assert group.title == "glyphs"
    assert list(group.methods) == ["fedavg", "fpl tau=0.02", "fpl tau=0.05", "fpl tau=0.1"]
    assert [len(r) for r in group.methods.values()] == [2, 2, 1, 1]
    assert group.seeds == [0, 1]
    both = gather([runs, tmp_path / "short"])
    assert [g.title for g in both.groups] == ["glyphs · rounds 2", "glyphs · rounds 1"]
    write(both, tmp_path / "two.html", tmp_path / "f", images=0)
    text = (tmp_path / "two.html").read_text("utf-8")
    page = Checked(text)
    assert len(page.ids) == len(set(page.ids)) and set(page.targets) <= set(page.ids)
    assert len(saved) == len(set(saved)) and "glyphs-rounds-1-curves" in saved


def test_damaged_runs_are_left_out_and_none_at_all_is_an_error(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fpl-0", tmp_path / "broken")
    (tmp_path / "broken" / "rounds.jsonl").write_bytes(b"cut\n")
    gathered = gather([runs / "fedavg-0", tmp_path])
    assert [p.name for p, _ in gathered.left_out] == ["broken"]
    with pytest.raises(ProtofedError, match="no finished run in"):
        gather([tmp_path])
    with pytest.raises(ProtofedError, match="is no folder"):
        gather([tmp_path / "nowhere"])


def test_runs_of_a_gpu_can_be_read_without_one(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedavg-0", tmp_path / "gpu")
    config = tmp_path / "gpu" / "config.toml"
    text = config.read_text("utf-8").replace('device = "cpu"', 'device = "cuda"')
    config.write_text(text.replace('engine = "loop"', 'engine = "lanes"'), "utf-8")
    (group,) = gather([tmp_path]).groups
    assert group.results[0].config.device == "cuda"
    assert group.results[0].config.engine == "lanes"


def test_the_headline(runs: Path) -> None:
    (group,) = gather([runs]).groups
    table = rows(group.results)
    text = headline(table, 2)
    best = max(table, key=lambda r: r.accuracy["average"].mean)
    assert text.startswith(f"<b>{best.method}</b> is best on average of 4 domains")
    assert f"{best.accuracy['average'].mean:.1f}&nbsp;%" in text
    assert "Fewer than 5 seeds" in text
    alone = headline([r for r in table if r.method == "fpl"], 1)
    assert "reaches" in alone and "One seed" in alone


def test_tables_carry_values_to_sort_by() -> None:
    text = html_table(["m", "v"], [[("a<b", ""), ("1,234.5 ± 2", "best")], [("c", ""), ("", "")]])
    assert '<td class="best" data-value="1234.5">1,234.5 ± 2</td>' in text
    assert "a&lt;b" in text and text.count("data-value") == 1
    assert text.count('<button type="button">') == 2


def test_best_and_second_are_marked(runs: Path) -> None:
    (group,) = gather([runs]).groups
    text = result_table(rows(group.results))
    assert 'class="best"' in text


def test_more_methods_than_colors_and_more_classes_than_names(runs: Path, tmp_path: Path) -> None:
    (group,) = gather([runs / "fpl-0"]).groups
    (result,) = group.results
    many = {
        f"method {i}": [replace(result, summary={**result.summary, "method": f"method {i}"})]
        for i in range(19)
    }
    legend = figures.curves(many).legend
    assert len({(k.color, k.shape) for k in legend[:16]}) == 16
    classes = [f"class number {i}" for i in range(40)]
    plot = figures.confusions("x", {"d": np.eye(40, dtype=np.int64)}, classes)
    text = plots.svg(plot.panels[0], "p")
    assert "class number" not in text.split(">", 1)[1]
    assert len(text) < 100_000
    plots.save(plot, tmp_path)
    assert (tmp_path / "confusion-x.pdf").is_file()


def test_a_panel_takes_its_colors_from_the_page(runs: Path) -> None:
    (group,) = gather([runs]).groups
    text = plots.svg(figures.curves(group.methods).panels[0], "p1")
    assert "currentColor" in text and "var(--c0)" in text and "var(--line)" in text
    assert all(i.startswith("p1-") for i in re.findall(r'id="([^"]+)"', text))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(re.findall(r'id="([^"]+)"', text))


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


def test_keep_rounds_by_command(tmp_path: Path) -> None:
    given = [
        "run", "--quiet", "--clients", "1", "--samples", "10", "--epochs", "1", "--rounds", "2",
        "--method", "fedproto", "--device", "cpu", "--model", "cnn2", "--width", "4",
        "--out", str(tmp_path / "run"), "--keep-rounds", "1,last",
    ]  # fmt: skip
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert {p.name for p in (tmp_path / "run" / "snapshots").iterdir()} == {
        "1.safetensors", "2.safetensors",
    }  # fmt: skip
    assert json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))["rounds"] == 2


def test_what_a_method_adds_is_only_shown_where_something_is_added(runs: Path) -> None:
    fedavg, fpl = (load_run(runs / f"{m}-0", model=False) for m in ("fedavg", "fpl"))
    both = figures.traffic({"fedavg": [fedavg], "fpl": [fpl]})
    assert [p.title for p in both.panels] == ["average of the domains", "what a method adds"]
    assert len(figures.traffic({"fpl": [fpl]}).panels) == 1
    assert len(figures.traffic({"a": [fedavg], "b": [fedavg]}).panels) == 1


def test_most_methods_need_not_be_named(runs: Path) -> None:
    fedavg = load_run(runs / "fedavg-0", model=False)
    results = []
    for method in ("a", "b", "c"):
        weights = "uniform" if method == "c" else "samples"
        named = {**fedavg.summary, "method": method, "weights": weights}
        results.append(replace(fedavg, summary=named))
    assert "<dd>sample counts (c: uniform)</dd>" in facts(Group("", tuple(results)))
    assert "<dd>b: sample counts; c: uniform</dd>" in facts(Group("", tuple(results[1:])))


def test_a_legend_stands_below_the_panel_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k)
    )
    keys = [(plots.Key(name, "#0072B2", "dot"),) for name in ("class", "domain", "mark")]
    panels = tuple(
        plots.Panel(t, t, lambda axis: None, legend=k) for t, k in zip("ab", keys[:2], strict=True)
    )
    plots.save(plots.Plot("x", "", "", panels, keys[2]), tmp_path, kinds=("png",))
    (figure,) = drawn
    below = [axis.get_legend().get_texts()[0].get_text() for axis in figure.axes]
    assert below == ["class", "domain"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["mark"]
