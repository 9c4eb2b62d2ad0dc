"""Figures: what is drawn, from data to axes and to files."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from protofed.config import make_config
from protofed.report import figures, notebook
from protofed.report.palette import looks_of, method_look
from protofed.report.plot import POINTS, Key, Panel, Plot, render, save, svg
from protofed.report.tuning import tuning
from protofed.runs.records import Records
from protofed.runs.result import Result
from protofed.studies.definition import Line, Row, Sweep
from protofed.studies.effects import Effects
from protofed.studies.history import RunHistory, join_left_out
from protofed.studies.tables import Spread, TableRow

THREE = ("scan", "print", "photo")


def history(label, seed=0, rounds=4, domains=("scan", "print"), level=50.0, unseen=None, **more):
    """A made-up run: accuracy rises by one in each round, and with the domain's place."""
    lines = []
    for t in range(rounds):
        accuracy = {d: level + t + i + seed for i, d in enumerate(domains)}
        mean = sum(accuracy.values()) / len(accuracy)
        lines.append({"round": t, "accuracy": accuracy, "average": mean, **more})
    return RunHistory(label, label, False, seed, unseen, Records(lines))


def axes(panel):
    """The axes of a panel, without laying it out."""
    axis = Figure().subplots()
    panel.draw(axis)
    return axis


def titles(plot):
    return [panel.title for panel in plot.panels]


def opened(content):
    with Image.open(io.BytesIO(content)) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("L"))
    assert pixels.min() < 100  # something is drawn
    assert (pixels > 250).mean() > 0.5  # on white
    return image.size


# ---- curves -------------------------------------------------------------------------------------


def test_one_run():
    plot = figures.curves([history("fedavg")], heading="glyphs, seed 0")
    assert titles(plot) == ["average over domains", "scan", "print"]
    axis = axes(plot.panels[1])
    (line,) = axis.lines
    assert line.get_ydata().tolist() == [50, 51, 52, 53]
    assert line.get_xdata().tolist() == [1, 2, 3, 4]
    assert not axis.collections  # no band for a single seed
    assert "fedavg ends at 53.0 %" in plot.panels[1].alt
    small, large = (opened(render(plot, ("png",), dpi)["png"]) for dpi in (40, 80))
    assert large[0] == 2 * small[0]


def test_validation_accuracy_has_the_last_panel():
    beside = {"validation": {"scan": 20.0, "print": 30.0}}
    runs = [history("fedavg", beside=beside), history("fpl", beside=beside)]
    plot = figures.curves(runs)
    assert titles(plot) == ["average over domains", "scan", "print", "validation average"]
    axis = axes(plot.panels[-1])
    assert axis.get_ylabel() == "validation accuracy, %"
    assert list(axis.lines[0].get_ydata()) == [25.0] * 4
    assert axes(plot.panels[0]).get_ylabel() == "test accuracy, %"
    assert "validation" not in titles(figures.curves([*runs, history("fedprox")]))


def test_several_methods_and_seeds():
    runs = [history(m, s, level=v) for m, v in (("a", 20), ("b", 40)) for s in (0, 1, 5)]
    plot = figures.curves(runs)
    axis = axes(plot.panels[1])
    assert axis.lines[0].get_ydata() == pytest.approx([22, 23, 24, 25])  # mean of seeds 0, 1, 5
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (20, 28)  # the range of the seeds
    looks = looks_of(runs)
    assert [line.get_color() for line in axis.lines[:2]] == [looks["a"].color, looks["b"].color]


def test_names_stand_at_the_ends_of_their_lines_apart_from_each_other():
    levels = {"a": 20.0, "b": 20.1, "c": 20.2, "d": 60.0}
    runs = [history(m, level=v) for m, v in levels.items()]
    plot = figures.curves(runs)
    assert plot.legend == ()
    axis = axes(plot.panels[1])
    assert [text.get_text() for text in axis.texts] == list("abcd")  # from below, as the lines end
    places = np.array([text.get_position()[1] for text in axis.texts])
    assert abs(places[3] - 63.0) < 0.1  # where nothing is in the way: its last value
    gaps = np.diff(places[:3])
    assert gaps == pytest.approx([gaps[0]] * 2) and gaps[0] > 1
    assert places[1] == pytest.approx(23.1)  # the middle one of those that were moved
    looks = looks_of(runs)
    assert [text.get_color() for text in axis.texts] == [looks[m].color for m in "abcd"]
    # too many lines, or too long a name, and there is a legend instead
    many = figures.curves([history(f"m{i}", level=i) for i in range(figures.LABELED_LINES + 1)])
    long = figures.curves([history("a"), history("a name of some length")])
    for plot in (many, long):
        assert plot.legend and not axes(plot.panels[0]).texts
    assert [key.label for key in figures.curves(runs[:1]).legend] == ["a"]


def test_the_first_rounds_do_not_squeeze_the_others():
    run = history("a", rounds=40)
    for record in run.rounds[:4]:
        record["accuracy"]["scan"] = 10.0
    scan, other = (axes(panel).get_ylim() for panel in figures.curves([run]).panels[1:])
    assert scan == (50, 90)  # from round 5 on: 54 to 89
    assert other == (50, 95)  # 55 to 90: its own range
    short = history("a", rounds=4)
    assert axes(figures.curves([short]).panels[1]).get_ylim() == (45, 55)


def test_a_file_has_the_size_of_a_paper(tmp_path):
    runs = [history(m, domains=THREE) for m in ("a", "b")]
    (path,) = save(figures.curves(runs), tmp_path, kinds=("png",), dpi=100)
    with Image.open(path) as image:
        assert image.size[0] == 716  # two columns of a paper


def test_a_method_looks_the_same_in_every_figure():
    sent = {"bytes_up": 1_000_000, "bytes_down": 2_000_000}
    runs = [history(m, **sent) for m in ("moon", "fpl", "fedopt")]
    rows = [TableRow(m, {"average": Spread(50.0, None, 1)}, method=m) for m in ("fedopt", "moon")]
    curves, traffic = axes(figures.curves(runs).panels[0]), figures.traffic(runs[1:])
    colors = [line.get_color() for line in curves.lines[:3]]
    assert colors[1:] == [key.color for key in traffic.legend]
    assert [line.get_linestyle() for line in curves.lines[:3]] == ["-", "-", "--"]  # fedopt's
    bars = axes(figures.bars(rows).panels[0]).patches
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [
        method_look(m).color.lower() for m in ("fedopt", "moon")
    ]


def test_more_methods_than_colors_are_distinct():
    runs = [history(f"method {i}", level=float(3 * i)) for i in range(2 * figures.MOST_LINES)]
    legend = figures.curves(runs).legend
    assert [key.label for key in legend] == [run.label for run in runs]
    assert len({(key.color, key.shape) for key in legend}) == len(runs)


def test_a_single_round_and_runs_of_different_length():
    one = axes(figures.curves([history("a", rounds=1)]).panels[0])
    assert one.lines[0].get_marker() == "o"
    two = figures.curves([history("a", 0, rounds=3), history("a", 1, rounds=5)])
    assert len(axes(two.panels[0]).lines[0].get_xdata()) == 3


def test_values_that_are_not_finite_leave_a_gap():
    run = history("a")
    run.rounds[1]["accuracy"]["scan"] = float("nan")  # no site measured it in this round
    low, high = axes(figures.curves([run]).panels[1]).get_ylim()
    assert low < 50 < 53 < high


def test_two_dozen_names_do_not_squeeze_the_panels(monkeypatch):
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k)
    )
    for n in (2, 24):
        plot = figures.curves([history(f"m{i}") for i in range(n)])
        render(replace(plot, panels=plot.panels[:1] * 3), ("png",), 20)
    heights = [f.axes[0].get_position().height * f.get_figheight() for f in drawn]
    assert heights[1] > 0.9 * heights[0]
    assert len(drawn[1].legends[0].get_texts()) == 24


def test_a_result_draws_itself():
    config = make_config(clients=1, samples=10, device="cpu")
    result = Result(config, history("fedavg").rounds, {"method": "fed<avg"})
    opened(result.plot())
    text = notebook.html(result)
    assert "<b>fed&lt;avg</b> on <b>glyphs</b>, seed 0, 4 rounds" in text
    assert "<th>scan</th><th>print</th><th>average</th>" in text
    assert "<td>51.50</td>" in text and "data:image/png;base64,iVBOR" in text
    assert result._repr_html_() == text


# ---- a domain that no client trained on ---------------------------------------------------------


def test_an_unseen_domain_comes_first_and_is_in_no_average():
    sent = {"bytes_up": 1, "bytes_down": 1}
    run = history("fedavg", domains=THREE, level=30.0, unseen="photo", **sent)
    plot = figures.curves([run])
    assert titles(plot) == ["photo (unseen)", "scan", "print", "seen average"]
    first = [axes(panel).lines[0].get_ydata()[0] for panel in plot.panels]
    assert first == [32.0, 30.0, 31.0, 30.5]
    assert plot.panels[0].alt.endswith("fedavg ends at 35.0 %.")
    assert titles(figures.traffic([run])) == ["photo (unseen)"]


def test_runs_that_left_out_each_domain_are_joined():
    left_out = [
        history("a", s, domains=THREE, level=10.0 * i + s, unseen=d)
        for i, d in enumerate(THREE)
        for s in (0, 1)
    ]
    runs = join_left_out([*left_out, history("b", domains=THREE, unseen="scan")])
    assert [(r.label, r.seed, r.unseen) for r in runs] == [("a", 0, "each"), ("a", 1, "each")]
    # each from the run without it: 0, 10 + 1, 20 + 2
    assert runs[0].rounds[0]["accuracy"] == {"scan": 0.0, "print": 11.0, "photo": 22.0}
    assert runs[0].rounds["average"] == [11.0, 12.0, 13.0, 14.0]
    assert titles(figures.curves(runs)) == [
        "unseen average", "scan (unseen)", "print (unseen)", "photo (unseen)",
    ]  # fmt: skip


# ---- bars, bytes, heat maps ---------------------------------------------------------------------


def test_bars_have_a_panel_for_each_column():
    spreads = {"scan": Spread.of([38.0, 41.0, 41.0]), "average": Spread(50.0, 1.0, 3)}
    rows = [TableRow("FPL", spreads, method="fpl"), TableRow("none", {})]
    plot = figures.bars(rows)
    assert titles(plot) == ["average over domains", "scan"]
    axis = axes(plot.panels[1])
    assert [bar.get_width() for bar in axis.patches] == [40.0]
    assert axis.lines[0].get_xdata().tolist() == [38.0, 41.0, 41.0]  # a dot for each seed
    assert [text.get_text() for text in axis.get_yticklabels()] == ["FPL"]
    assert plot.panels[1].alt == "Accuracy on scan: FPL 40.0 %."


def test_a_long_name_of_a_row_leaves_room_for_its_bar():
    long = "a name of a row that would be wider than the bars of its panel are, and then some more"
    rows = [TableRow(label, {"average": Spread.of([50.0])}) for label in (long, "FPL, tau=0.02")]
    (panel,) = figures.bars(rows).panels
    first, second = (text.get_text() for text in axes(panel).get_yticklabels())
    assert len(first.splitlines()) == 2 and first.endswith("…")
    assert max(map(len, first.splitlines())) <= 28
    assert second == "FPL, tau=0.02" and long in panel.alt


def gaps(panel, side):
    """The pixels between the labels of neighboring ticks on a side of a panel, as on a page."""
    with rc_context({"font.size": POINTS}):
        figure = Figure(figsize=(panel.width, panel.height), layout="constrained")
        axis = figure.subplots()
        panel.draw(axis)
        figure.draw_without_rendering()
    ticks = axis.get_xticklabels() if side == "x" else axis.get_yticklabels()
    boxes = [text.get_window_extent() for text in ticks]
    spans = sorted((box.x0, box.x1) if side == "x" else (box.y0, box.y1) for box in boxes)
    return [after[0] - before[1] for before, after in pairwise(spans)]


def test_long_names_of_rows_do_not_run_into_each_other():
    names = [f"proto_pass{i}: last_epoch → after the round" for i in range(4)]
    found = Effects("FPL", "fpl", {name: Spread.of([1.0, 1.2]) for name in names}, "")
    assert min(gaps(figures.effects([found]).panels[0], "y")) > 0
    rows = [TableRow(name, {"average": Spread.of([50.0])}) for name in names]
    assert min(gaps(figures.bars(rows).panels[0], "y")) > 0


def test_values_of_a_search_do_not_run_into_each_other():
    values = (0.00146, 0.00293, 0.00446)
    row = Row("FPL", "fpl")
    lines = [Line(f"FPL, lr={lr}", row, {"lr": lr}, 0) for lr in values]
    study = SimpleNamespace(sweeps=[Sweep({"lr": values}, ("FPL",))], lines=lines)
    rows = [TableRow(line.label, {"average": Spread.of([50.0])}) for line in lines]
    assert min(gaps(tuning(study, rows, lines[:1], "").panels[0], "x")) > 10


def test_what_a_method_adds_is_only_shown_where_something_is_added():
    cheap, dear = (
        history(m, bytes_up=1_000_000 + extra, bytes_down=0) for m, extra in (("a", 0), ("b", 9000))
    )
    both = figures.traffic([cheap, dear])
    assert titles(both) == ["average over domains", "what a method adds"]
    assert [round(bar.get_width()) for bar in axes(both.panels[1]).patches] == [0, 9]
    assert len(figures.traffic([dear]).panels) == 1
    assert len(figures.traffic([history("a")]).panels) == 1  # bytes that were not recorded
    assert len(figures.traffic([cheap, replace(cheap, label="b")]).panels) == 1


def test_confusions_write_shares_and_leave_out_zeros():
    counts = np.array([[3, 1], [0, 4]])
    axis = axes(figures.confusions("x", {"d": counts}, ["cat", "dog"]).panels[0])
    assert [text.get_text() for text in axis.texts] == ["75", "25", "100"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["cat", "dog"]


def test_more_classes_than_names():
    classes = [f"class number {i}" for i in range(40)]
    plot = figures.confusions("x", {"d": np.eye(40, dtype=np.int64)}, classes)
    assert plot.name == "confusion-x"
    text = svg(plot.panels[0], "p")
    assert "class number" not in text.split(">", 1)[1]
    assert len(text) < 100_000


# ---- pages and files ----------------------------------------------------------------------------


def test_files_and_pages_are_the_same_every_time(tmp_path):
    plot = figures.confusions("x", {"d": np.array([[3, 1], [0, 4]])}, ["cat", "dog"])
    paths = save(plot, tmp_path, "a-", dpi=30)
    assert [path.name for path in paths] == ["a-confusion-x.png", "a-confusion-x.pdf"]
    first = [path.read_bytes() for path in paths]
    assert first[1].startswith(b"%PDF")
    assert [path.read_bytes() for path in save(plot, tmp_path, "a-", dpi=30)] == first
    panel = figures.curves([history("a"), history("b")]).panels[0]
    assert svg(panel, "p") == svg(panel, "p")


def test_a_panel_takes_its_colors_from_the_page():
    text = svg(figures.curves([history("i2pfl"), history("fedavg")]).panels[0], "p1")
    assert "currentColor" in text and "var(--line)" in text
    assert "var(--c0)" in text and "var(--c8)" in text  # blue and gray
    ids = set()
    for part in text.split(' id="')[1:]:
        ids.add(part.split('"')[0])
    assert ids and all(i.startswith("p1-") for i in ids)
    assert {part.split(")")[0] for part in text.split("url(#")[1:]} <= ids


def test_a_panel_s_legend_is_below_it(monkeypatch):
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k)
    )
    keys = [(Key(name, "#0072B2", "o"),) for name in ("class", "domain", "mark")]
    panels = tuple(
        Panel(t, t, lambda axis: None, legend=k) for t, k in zip("ab", keys[:2], strict=True)
    )
    render(Plot("x", "", panels, keys[2], heading="A $heading$"), ("png",), 20)
    (figure,) = drawn
    below = [axis.get_legend().get_texts()[0].get_text() for axis in figure.axes]
    assert below == ["class", "domain"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["mark"]
    assert figure.get_suptitle() == "A $heading$"


def test_looks_can_be_given():
    runs = [history("a"), history("b")]
    looks = looks_of([*runs, history("c")])
    drawn = axes(figures.curves(runs, looks).panels[0]).lines[:2]
    assert [line.get_color() for line in drawn] == [looks["a"].color, looks["b"].color]


# ---- t-SNE --------------------------------------------------------------------------------------


def test_prototypes_of_a_client_and_of_the_server_at_one_place_are_both_seen():
    found = figures.Embedding(np.zeros((2, 2)), np.zeros(2, int), ("scan", ""), ("sent", "made"))
    for panel in figures.embedding("fpl", found, ["0"]).panels:
        below, above = (float(drawn.get_sizes()[0]) for drawn in axes(panel).collections)
        assert below > 4 * above
