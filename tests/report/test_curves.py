"""Curves: the figure is drawn for one run and for many, to a file and to memory."""

import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from protofed.config import make_config
from protofed.report import figures as report_figures
from protofed.report.curves import COLORS, curves, together
from protofed.runs.records import Records
from protofed.runs.result import Result


def result(method, seed=0, rounds=4, domains=("scan", "print"), level=50.0, leave_out=None):
    lines = []
    for t in range(rounds):
        accuracy = {d: level + t + i + seed for i, d in enumerate(domains)}
        mean = sum(accuracy.values()) / len(accuracy)
        lines.append({"round": t, "accuracy": accuracy, "average": mean})
    clients = 1 if leave_out is None else "one"
    given = {"samples": 10, "device": "cpu", "seed": seed, "leave_out": leave_out}
    config = make_config(clients=clients, **given)
    return Result(config, Records(lines), {}, {"method": method})


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn."""
    drawn = []
    save = Figure.savefig

    def keep(self, *args, **kwargs):
        drawn.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn


def opened(file):
    with Image.open(file) as image:
        assert image.format == "PNG"
        image.load()
        assert min(image.size) > 300
        pixels = np.asarray(image.convert("L"))
    assert pixels.min() < 100  # something is drawn
    assert (pixels > 250).mean() > 0.5  # on white
    return image.size


def test_one_run_to_a_path_and_to_a_buffer(tmp_path, figures):
    for path in (tmp_path / "curves.png", str(tmp_path / "again.png")):
        curves([result("fedavg")], path)
        size = opened(path)
    buffer = io.BytesIO()
    curves([result("fedavg")], buffer)
    buffer.seek(0)
    assert opened(buffer) == size
    axes = figures[0].axes[:3]
    assert [a.get_title() for a in axes] == ["average of the domains", "scan", "print"]
    (line,) = axes[1].lines
    assert line.get_ydata().tolist() == [50, 51, 52, 53]
    assert line.get_xdata().tolist() == [1, 2, 3, 4]
    assert not axes[0].collections  # no band for a single seed
    assert axes[0].get_ylim() == (0, 100)
    assert "seed 0" in figures[0].get_suptitle()


def test_several_methods_and_seeds(tmp_path, figures):
    runs = [result(m, s, level=v) for m, v in (("a", 20), ("b", 40)) for s in (0, 1, 5)]
    curves(runs, tmp_path / "c.png")
    opened(tmp_path / "c.png")
    (figure,) = figures
    panel = figure.axes[1]
    assert [line.get_label() for line in panel.lines] == ["a", "b"]
    assert panel.lines[0].get_ydata() == pytest.approx([22, 23, 24, 25])  # mean of seeds 0, 1, 5
    assert len(panel.collections) == 2
    band = panel.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (20, 28)  # the range between the seeds
    assert "3 seeds" in figure.get_suptitle()


def test_more_methods_than_colors_are_told_apart(tmp_path, figures):
    names = [f"method{i}" for i in range(2 * len(COLORS) + 1)]
    curves([result(n, level=float(3 * i)) for i, n in enumerate(names)], tmp_path / "c.png")
    opened(tmp_path / "c.png")
    lines = figures[0].axes[0].lines
    assert [line.get_label() for line in lines] == names
    looks = {(line.get_color(), line.get_linestyle()) for line in lines}
    assert len(looks) == len(names)


@pytest.mark.parametrize("domains", [("one",), tuple("ab"), tuple("abc"), tuple("abcdef")])
def test_any_number_of_domains_gets_its_panels_and_a_legend(tmp_path, figures, domains):
    curves([result("x", domains=domains), result("y", domains=domains)], tmp_path / "c.png")
    titles = [a.get_title() for a in figures[0].axes]
    assert titles[: len(domains) + 1] == ["average of the domains", *domains]
    legends = [a.get_legend() for a in figures[0].axes if a.get_legend()]
    assert len(legends) == 1
    assert [t.get_text() for t in legends[0].get_texts()] == ["x", "y"]


def test_a_single_round_and_runs_of_different_length(tmp_path, figures):
    curves([result("a", rounds=1)], tmp_path / "one.png")
    opened(tmp_path / "one.png")
    curves([result("a", 0, rounds=3), result("a", 1, rounds=5)], tmp_path / "two.png")
    assert len(figures[1].axes[0].lines[0].get_xdata()) == 3


def test_a_result_draws_itself():
    opened(io.BytesIO(result("fedavg").plot()))


@pytest.mark.parametrize("domains", [("a", "b"), ("a", "b", "c")])  # without and with a spare panel
def test_two_dozen_names_do_not_squeeze_the_panels(figures, domains):
    few, many = ([result(f"m{i}", domains=domains) for i in range(n)] for n in (2, 24))
    for results in (few, many):
        curves(results, io.BytesIO())
    heights = [figure.axes[0].get_position().height for figure in figures]
    assert heights[1] > 0.7 * heights[0]


# ---- a domain that nobody trained on ------------------------------------------------------------

THREE = ("scan", "print", "photo")


def test_with_a_domain_left_out_it_comes_first_and_is_in_no_average(figures):
    run = result("fedavg", domains=THREE, level=30.0, leave_out="photo")
    curves([run], io.BytesIO())
    axes = figures[0].axes[:4]
    assert [a.get_title() for a in axes] == ["photo (unseen)", "scan", "print", "seen average"]
    first = [a.lines[0].get_ydata()[0] for a in axes]
    assert first == [32.0, 30.0, 31.0, 30.5]
    plot = report_figures.curves({"fedavg": [run]})
    assert [p.title for p in plot.panels] == [a.get_title() for a in axes]
    assert plot.panels[0].alt.endswith("fedavg ends at 35.0 %.")
    for record in run.rounds:
        record |= {"bytes_up": 1, "bytes_down": 1}
    assert report_figures.traffic({"fedavg": [run]}).panels[0].title == "photo (unseen)"


def test_runs_that_left_out_each_domain_are_joined(figures):
    left_out = [
        result("a", s, domains=THREE, level=10.0 * i + s, leave_out=d)
        for i, d in enumerate(THREE)
        for s in (0, 1)
    ]
    runs = together([*left_out, result("b", domains=THREE, leave_out="scan")])
    assert [(r.summary["method"], r.config.seed) for r in runs] == [("a", 0), ("a", 1)]
    # each from the run without it: 0, 10 + 1, 20 + 2
    assert runs[0].rounds[0]["accuracy"] == {"scan": 0.0, "print": 11.0, "photo": 22.0}
    assert runs[0].rounds["average"] == [11.0, 12.0, 13.0, 14.0]
    curves(runs, io.BytesIO())
    titles = [a.get_title() for a in figures[0].axes[:4]]
    assert titles == ["unseen average", "scan (unseen)", "print (unseen)", "photo (unseen)"]
    assert "each domain left out in turn" in figures[0].get_suptitle()
    assert left_out[0].config.leave_out == "scan"
