"""A study packed to be kept: small, without models, and the same tables and report from it."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from protofed.studies.pack import pack

from protofed import analysis
from protofed.errors import ProtofedError
from protofed.report import plot, stored_analysis
from protofed.report.collect import collect
from protofed.report.group_analysis import analyzed_run
from protofed.report.page import write_report
from protofed.runs.result import load_run
from protofed.runs.run import run
from protofed.studies import folder as folders
from protofed.studies import plan
from protofed.studies.definition import parse

PAPER = {"columns": ["scan", "print", "photo", "inverse", "average"],
         "FedAvg": [40.0, 40.0, 40.0, 40.0, 40.0],
         "FPL": {"values": [50.0, 50.0, 50.0, 50.0, 50.0], "std": 0.5}}  # fmt: skip


def flat(cell: Any) -> dict[str, float]:
    value = (40.0 if cell.line.row.method == "fedavg" else 45.0) + cell.seed
    return dict.fromkeys(("scan", "print", "photo", "inverse"), value)


def names(folder: Path) -> set[str]:
    """The files in the folders of the runs."""
    runs = [p.parent for p in folder.glob("*/config.toml")]
    return {p.name for run in runs for p in run.iterdir()}


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_copy_makes_the_same_tables_and_a_report(raw, make_runs, tmp_path, monkeypatch):
    study = parse(raw(printed={"glyphs": PAPER}, notes=["it did otherwise"]), "mine")
    study = study.overridden(settings={"data": "/somewhere/images"})
    make_runs(study, tmp_path / "a", flat, skip={("FPL", 1)})
    folders.write_outputs(study, tmp_path / "a")
    packed = pack(tmp_path / "a", tmp_path / "b")
    assert packed.runs == 3
    for name in ("table.md", "table.csv", "table.tex"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()
    assert names(tmp_path / "b") == {"config.toml", "summary.json", "rounds.jsonl.gz"}
    kinds = {p.suffix for p in (tmp_path / "b").rglob("*") if p.is_file()}
    assert kinds == {".toml", ".json", ".gz", ".md", ".csv", ".tex", ".png", ".html"}
    # where the images lay is nobody's business, and cannot change a number
    for file in (tmp_path / "b").rglob("*.toml"):
        assert "somewhere" not in file.read_text()
    page = (tmp_path / "b" / "report.html").read_text("utf-8")
    assert "40.00 (+0.5)" in page
    assert "50.00 ± 0.50 (-5.0)" in page
    assert "it did otherwise" in page
    assert "All methods: the run&#39;s folder has no model." in page
    # again over what is there: the same bytes, and nothing of what was there before
    before = contents(tmp_path / "b")
    (tmp_path / "b" / "figures" / "old.png").write_text("")
    monkeypatch.setattr(plot, "save", lambda *_: [])
    pack(tmp_path / "a", tmp_path / "b")
    assert contents(tmp_path / "b") == {p: c for p, c in before.items() if p.suffix != ".png"}


def test_nothing_is_packed_over_what_is_no_packed_study(study, make_runs, tmp_path):
    make_runs(study, tmp_path / "a", flat)
    with pytest.raises(ProtofedError, match="into itself"):
        pack(tmp_path / "a", tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("")
    with pytest.raises(ProtofedError, match="not empty"):
        pack(tmp_path / "a", tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    next((tmp_path / "c").glob("*/config.toml")).with_name("model.safetensors").write_text("")
    with pytest.raises(ProtofedError, match="with its models"):
        pack(tmp_path / "a", tmp_path / "c")
    make_runs(study, tmp_path / "d", flat, skip={(r, s) for r in ("FedAvg", "FPL") for s in (0, 1)})
    with pytest.raises(ProtofedError, match="no finished run"):
        pack(tmp_path / "d", tmp_path / "e")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A real study, and what it packs to."""
    from .conftest import raw

    folder = tmp_path_factory.mktemp("packed")
    settings = {**raw()["settings"], "clients": {"scan": 2, "photo": 1}, "engine": "loop"}
    study = parse(raw(seeds=1, settings=settings, printed={"glyphs": PAPER}), "mine")
    cells = plan.cells(study)
    index = {cell.key: folder / "a" / cell.config().label for cell in cells}
    for cell in cells:
        run(config=cell.config(), out=index[cell.key])
    folders.write_study(study, folder / "a", index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "save", lambda *_: [])  # most of the time it takes
        pack(folder / "a", folder / "b", images=12)
    return folder / "a", folder / "b"


def test_the_report_of_the_copy_is_the_report(
    packed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With t-SNE, confusions and clusters, though no model is there any more."""
    source, copy = packed
    assert names(copy) >= {"analysis.json.gz"} and "model.safetensors" not in names(copy)
    write_report(collect([source]), tmp_path / "r.html", images=12)
    ours, theirs = ((p).read_text("utf-8") for p in (tmp_path / "r.html", copy / "report.html"))
    # places of a t-SNE are kept to two digits
    for part in ("by class", "clusters in round 1", "The gap between domains", "% right"):
        assert part in ours and part in theirs, part
    assert ours.count("<svg") == theirs.count("<svg")
    assert len(theirs) < 1.5e6
    # and packing the copy changes nothing
    monkeypatch.setattr(plot, "save", lambda *_: [])
    pack(copy, tmp_path / "again")
    assert (tmp_path / "again" / "report.html").read_text("utf-8") == theirs


def test_what_was_kept_reads_back(packed: tuple[Path, Path]) -> None:
    source, copy = packed
    of_fpl = next(p.parent for p in source.glob("glyphs-fpl-*/config.toml"))
    found = stored_analysis.GroupAnalysis()
    assert stored_analysis.load(found, "FPL", copy / of_fpl.name)
    full = load_run(of_fpl)
    confusion = analysis.confusion(full, "photo", limit=12)
    assert np.array_equal(found.confusions["FPL"]["photo"], confusion)
    assert found.clusters["FPL"] == analysis.clusters(full)
    cosine = analysis.prototype_distances(full).cosine
    assert np.allclose(found.distances["FPL"].cosine, cosine, atol=1e-4, equal_nan=True)
    assert not stored_analysis.load(found, "FPL", source)
    file = copy / of_fpl.name / stored_analysis.FILE
    parts = json.loads(gzip.decompress(file.read_bytes()))
    assert set(parts) >= {"confusion", "tsne", "gap", "clusters", "distances", "tested"}


def test_the_first_seed_with_a_model_is_analyzed_run(
    packed: tuple[Path, Path], tmp_path: Path
) -> None:
    """Whose model, or what was kept of it, is there; without any it is the first."""
    source, copy = packed
    run = next(p.parent for p in source.glob("glyphs-fpl-*/config.toml"))
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("model.safetensors"))
    without, whole, kept_of = (load_run(p, model=False) for p in (bare, run, copy / run.name))
    assert analyzed_run([without, whole]) is whole
    assert analyzed_run([without, kept_of, whole]) is kept_of
    assert analyzed_run([without, without]) is without


def test_a_run_without_its_model_says_so(packed: tuple[Path, Path]) -> None:
    _, copy = packed
    lean = load_run(next(copy.glob("*/config.toml")).parent)
    assert lean.lean and len(lean.rounds) == 1
    with pytest.raises(ProtofedError, match="without its model"):
        analysis.features(lean, "photo")
    with pytest.raises(ProtofedError, match="without its model"):
        lean.network()
