"""From a folder of (made-up) runs to tables and figures."""

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from protofed.errors import ProtofedError
from protofed.runs.records import read_records
from protofed.studies import folder as folders
from protofed.studies import plan
from protofed.studies.definition import parse
from protofed.studies.render import latex_escape, to_latex, to_markdown
from protofed.studies.tables import TableCell, TableLine

PAPER = {"columns": ["scan", "print", "photo", "inverse", "average"],
         "FedAvg": [40.0, 40.0, 40.0, 40.0, 40.0],
         "FPL": {"values": [50.0, 50.0, 50.0, 50.0, 50.0], "std": 0.5}}  # fmt: skip


def flat(cell):
    """40 for FedAvg, 45 for all others, one more with each seed."""
    value = (40.0 if cell.line.row.method == "fedavg" else 45.0) + cell.seed
    return dict.fromkeys(("scan", "print", "photo", "inverse"), value)


@pytest.fixture
def printed(raw):
    return parse(raw(printed={"glyphs": PAPER}, notes=["the paper did otherwise"]), "mine")


def test_a_table_beside_the_paper(printed, make_runs, tmp_path):
    make_runs(printed, tmp_path, flat)
    (table,) = folders.make_tables(folders.open_study(tmp_path), tmp_path)
    header, body = table.grid()
    assert header == [
        "method", "scan", "print", "photo", "inverse", "average", "Δ FedAvg", "MB", "s",
    ]  # fmt: skip
    texts = [[c.text for c in line.cells] for line in body]
    assert texts[0][5] == "40.5 ± 0.7"
    assert texts[1][5] == "40.00 (+0.5)"
    assert texts[2][5:7] == ["45.5 ± 0.7", "+5.0 ± 0.0 (±0.0)"]
    assert texts[3][5:7] == ["50.00 ± 0.50 (-4.5)", "+10.00"]
    assert "fewer than 5 seeds" in table.caption
    assert table.notes == ("the paper did otherwise",)


def test_what_is_missing_is_shown_not_dropped(raw, make_runs, tmp_path):
    rows = {"FedAvg": "fedavg", "FPL": "fpl", "New": "fednew"}
    study = parse(raw(rows=rows), "mine")
    make_runs(study, tmp_path, flat, skip={("FPL", 1)})
    (table,) = folders.make_tables(study, tmp_path)
    texts = [[c.text for c in line.cells] for line in table.grid()[1]]
    assert texts[1][-1] == "1/2"
    assert texts[2][0] == "New (needs method fednew, which this version does not have)"
    assert texts[2][1:6] == ["—"] * 5
    # a run that diverged is said to have
    cell = next(c for c in plan.cells(study) if c.line.label == "FPL" and c.seed == 1)
    path = folders.read_index(tmp_path)[cell.key][0]
    path.with_name(f"{path.name}.diverged").write_text("nan")
    (table,) = folders.make_tables(study, tmp_path)
    assert table.rows[1].state == "diverged"


def test_a_row_defined_otherwise_does_not_mix_with_the_old_one(raw, study, make_runs, tmp_path):
    make_runs(study, tmp_path, flat)
    changed = parse(raw(rows={"FedAvg": "fedavg", "FPL": {"method": "fpl", "options": {"tau": 1}}}),
                    "mine")  # fmt: skip
    (table,) = folders.make_tables(changed, tmp_path)
    assert [r.seeds for r in table.rows] == [2, 0]


def test_unseen_domains_are_a_column_each(raw, make_runs, tmp_path):
    study = parse(raw(tasks={"glyphs": {"leave_out": "each"}}, seeds=1), "mine")
    order = ("scan", "print", "photo", "inverse")

    def unseen(cell):
        return {d: 10.0 * (1 + i) + (d == cell.unseen) for i, d in enumerate(order)}

    make_runs(study, tmp_path, unseen)
    (table,) = folders.make_tables(study, tmp_path)
    means = {c: s.mean for c, s in table.rows[0].accuracy.items()}
    assert means == {"scan": 11, "print": 21, "photo": 31, "inverse": 41, "average": 26}
    assert table.rows[0].megabytes == 36  # of four runs
    assert "on the column's domain by a model trained without it" in table.caption
    assert "scan 1 × 10, print 1 × 10, photo 1 × 10, inverse 1 × 10" in table.caption
    assert "test images: scan 200, print 200, photo 200, inverse 200" in table.caption
    header, body = table.grid()
    assert header[1:7] == ["scan", "print", "photo", "inverse", "unseen average",
                           "Δ FedAvg, unseen"]  # fmt: skip
    assert body[1].cells[6].text == "+0.0"


def test_every_format(printed, make_runs, tmp_path):
    make_runs(printed, tmp_path, flat)
    names = folders.write_outputs(printed, tmp_path)
    assert names == ["table.md", "table.csv", "table.tex", "curves.png", "curves.pdf"]
    text = (tmp_path / "table.md").read_text()
    assert "| FPL | **45.5 ± 0.7** |" in text
    assert "<u>40.5 ± 0.7</u>" in text
    assert "- the paper did otherwise" in text
    latex = (tmp_path / "table.tex").read_text()
    for part in (r"\toprule", r"\textbf{45.5 $\pm$ 0.7}", r"\underline{40.5", r"$\Delta$ FedAvg",
                 r"accuracy in \%", r"\quad paper"):  # fmt: skip
        assert part in latex
    assert latex.count("{") == latex.count("}")
    lines = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert len(lines) == 10
    last = lines[-1]
    assert (last["method"], last["column"], last["seeds"]) == ("FPL", "average", "2")
    assert float(last["mean"]) == 45.5
    assert float(last["difference"]) == float(last["low"]) == float(last["high"]) == 5
    assert (float(last["paper"]), float(last["ours_minus_paper"])) == (50, -4.5)
    with Image.open(tmp_path / "curves.png") as image:
        image.load()
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_escaping():
    assert latex_escape("-8.7 (-0.3) a-1 2-3") == "$-$8.7 ($-$0.3) a-1 2-3"
    assert latex_escape("a_b & 5 % ± τ {x}") == r"a\_b \& 5 \% $\pm$ $\tau$ \{x\}"
    assert "\\|" in to_markdown(["a|b"], [TableLine((TableCell("c|d"),))])
    assert r"x\_1" in to_latex(["m"], [TableLine((TableCell("x_1", "best"),))], "50 % of_it")


@pytest.mark.parametrize("over", [{"tau": [0.02, 0.5]}, {"tau": [0.02, 0.5], "upcr": [0, 1]}])
def test_a_sweep_is_a_line_or_a_heat_map(raw, make_runs, tmp_path, over):
    study = parse(raw(kind="sweep", sweep=[{"rows": ["FPL"], "over": over}]), "mine")
    make_runs(study, tmp_path, flat, skip={("FPL, tau=0.5, upcr=1", 0)})
    names = folders.write_outputs(study, tmp_path)
    assert names[3:] == ["sweep.png", "sweep.pdf"]
    with Image.open(tmp_path / "sweep.png") as image:
        image.load()
        assert min(image.size) > 200
    assert "| FPL, tau=0.02" in (tmp_path / "table.md").read_text()


def test_bars_and_several_sweeps_have_names_of_their_own(raw, make_runs, tmp_path):
    make_runs(parse(raw(kind="bars"), "mine"), tmp_path / "a", flat)
    names = folders.write_outputs(folders.open_study(tmp_path / "a"), tmp_path / "a")
    assert "bars.png" in names
    sweeps = [{"rows": ["FPL"], "over": {"tau": [0.1]}}, {"rows": ["FPL"], "over": {"upcr": [0]}}]
    study = parse(raw(kind="sweep", sweep=sweeps), "mine")
    make_runs(study, tmp_path / "b", flat)
    names = folders.write_outputs(study, tmp_path / "b")
    assert {"sweep-tau.png", "sweep-upcr.pdf"} <= set(names)


def test_compressed_rounds_are_read(study, make_runs, tmp_path):
    make_runs(study, tmp_path, flat)
    for file in tmp_path.glob("*/rounds.jsonl"):
        Path(f"{file}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert "curves.png" in folders.write_outputs(study, tmp_path)
    packed = next(tmp_path.glob("*/rounds.jsonl.gz"))
    assert len(read_records(packed.with_suffix(""))) == 3
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ProtofedError, match="gz' is damaged"):
        read_records(packed.with_suffix(""))


def test_the_runs_of_a_folder_by_row(study, make_runs, tmp_path):
    make_runs(study, tmp_path, flat, skip={("FPL", 0)})
    found = folders.run_folders(tmp_path)
    assert {k: len(v) for k, v in found["glyphs"].items()} == {"FedAvg": 2, "FPL": 1}
    assert all(json.loads((p / "summary.json").read_text()) for p in found["glyphs"]["FedAvg"])
    with pytest.raises(ProtofedError, match="no study"):
        folders.open_study(tmp_path / "none")


def test_nothing_is_written_without_a_run(study, make_runs, tmp_path):
    make_runs(study, tmp_path, flat, skip={(r, s) for r in ("FedAvg", "FPL") for s in (0, 1)})
    assert folders.write_outputs(study, tmp_path) == []
    (table,) = folders.make_tables(study, tmp_path)
    assert table.caption == "No run is there yet."
    assert len(table.grid()[1]) == 2
