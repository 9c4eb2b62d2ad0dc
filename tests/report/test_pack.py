"""A study packed to be kept: few small files, no models, and the same tables and report."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.report.conftest import SMALL
from tests.studies.made_runs import PAPER, TINY, image_folder, make_runs, make_study, study

from protofed import analysis, compare, load_model
from protofed.errors import ProtofedError
from protofed.federation.facts import NUMERICS
from protofed.files import sealed
from protofed.methods import method_class
from protofed.report import plot, stored_analysis
from protofed.report.collect import collect
from protofed.report.group_analysis import analyze, analyzed_run
from protofed.report.pack import pack
from protofed.report.page import write_report
from protofed.runs.pool import PACKED, Pool, unpack
from protofed.runs.result import load_run
from protofed.runs.run import run
from protofed.studies.definition import FolderImages, parse
from protofed.studies.folder import StudyFolder, to_text
from protofed.studies.launch import prepare


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with the figures' names: drawing takes most of the time."""

    def save(drawn: plot.Plot, folder: Path, kinds: tuple[str, ...], **_: object) -> list[Path]:
        paths = [folder / f"{drawn.name}.{kind}" for kind in kinds]
        for path in paths:
            path.write_text("")
        return paths

    monkeypatch.setattr(plot, "save", save)


def test_the_copy_is_four_files_and_makes_the_same_tables(tmp_path: Path) -> None:
    made = study(printed={"glyphs": PAPER}, notes=["it did otherwise"])
    made = made.overridden(settings={"data": "/somewhere/images"})
    folder = make_study(made, tmp_path / "runs" / "s", skip={("FPL", 1)})
    packed = pack(folder.path, tmp_path / "b", images=0)
    assert packed.runs == 3
    assert set(contents(tmp_path / "b")) == {"study.toml", PACKED, "table.md", "curves.png"}
    assert packed.size == sum(map(len, contents(tmp_path / "b").values())) < 100_000
    # where images and runs lay is nobody's business, and cannot change a number
    for text in ((tmp_path / "b" / "study.toml").read_text(), _packed_text(tmp_path / "b")):
        assert "somewhere" not in text and "pool" not in text
    shutil.rmtree(tmp_path / "runs" / "s")  # nothing comes from elsewhere
    copy = StudyFolder.open(tmp_path / "b")
    for form in ("markdown", "csv", "latex"):
        ours, theirs = (to_text(f.study, f.tables(), form) for f in (copy, folder))
        assert ours == theirs
    assert (tmp_path / "b" / "table.md").read_text() == to_text(made, folder.tables(), "markdown")
    assert "1/2" in (tmp_path / "b" / "table.md").read_text()


def _packed_text(folder: Path) -> str:
    return gzip.decompress((folder / PACKED).read_bytes()).decode()


@pytest.mark.usefixtures("no_drawing")
def test_packed_again_it_is_the_same_bytes_and_nothing_of_before(tmp_path: Path) -> None:
    folder = make_study(study(seeds=1), tmp_path / "runs" / "s")
    pack(folder.path, tmp_path / "b", images=0)
    before = contents(tmp_path / "b")
    (tmp_path / "b" / "old.png").write_text("")
    pack(folder.path, tmp_path / "b", images=0)
    assert contents(tmp_path / "b") == before
    # from the copy itself, too
    pack(tmp_path / "b", tmp_path / "c", images=0)
    assert contents(tmp_path / "c") == before


@pytest.mark.usefixtures("no_drawing")
def test_that_runs_diverged_is_remembered(tmp_path: Path) -> None:
    folder = make_study(study(seeds=1), tmp_path / "runs" / "s", skip={("FPL", 0)})
    gone = make_runs(study(seeds=1), tmp_path / "runs", skip={("FedAvg", 0)})["FPL", 0]
    (gone / "summary.json").unlink()
    (gone / "diverged.txt").write_text("'ce' is nan")
    pack(folder.path, tmp_path / "b", images=0)
    (table,) = StudyFolder.open(tmp_path / "b").tables()
    assert [row.state for row in table.rows] == ["", "diverged"]
    assert table.notes == () and StudyFolder.open(tmp_path / "b").study.hash == study().hash


@pytest.mark.parametrize(
    ("file", "content"),
    [("summary.json", "x"), ("config.toml", "seed = 1"), ("rounds.jsonl", "[1]\n")],
)
@pytest.mark.usefixtures("no_drawing")
def test_what_cannot_be_read_leaves_an_earlier_copy(
    tmp_path: Path, file: str, content: str
) -> None:
    folder = make_study(study(seeds=1), tmp_path / "runs" / "s")
    pack(folder.path, tmp_path / "b", images=0)
    before = contents(tmp_path / "b")
    (make_runs(study(seeds=1), tmp_path / "runs")["FPL", 0] / file).write_text(content)
    with pytest.raises(ProtofedError, match=file.replace(".", r"\.")):
        pack(folder.path, tmp_path / "b", images=0)
    assert contents(tmp_path / "b") == before


def test_nothing_is_packed_over_what_is_not_a_packed_study(tmp_path: Path) -> None:
    folder = make_study(study(), tmp_path / "runs" / "s")
    with pytest.raises(ProtofedError, match="into itself"):
        pack(folder.path, folder.path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("")
    for place in (tmp_path / "b", tmp_path / "runs"):
        with pytest.raises(ProtofedError, match="not empty"):
            pack(folder.path, place)
    every = {(label, seed) for label in ("FedAvg", "FPL") for seed in (0, 1)}
    none = make_study(study(), tmp_path / "none" / "s", skip=every)
    with pytest.raises(ProtofedError, match="no finished run"):
        pack(none.path, tmp_path / "e")
    with pytest.raises(ProtofedError, match="holds no study"):
        pack(tmp_path, tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_a_packed_study_is_not_run_in(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / PACKED).write_bytes(b"")
    with pytest.raises(ProtofedError, match="holds a packed study"):
        StudyFolder.create(tmp_path / "b", study(), tmp_path)


# ---- what a report shows of models --------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A real study's folder, and what it packs to."""
    place = tmp_path_factory.mktemp("packed")
    settings = {k: v for k, v in SMALL.items() if k != "task"} | {"rounds": 1}
    made, jobs = prepare(study(seeds=1, settings=settings), place / "runs")
    for job in jobs:
        run(config=job.config, out=job.folder.path)
    folder = StudyFolder.create(place / "runs" / "s", made, place / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "save", lambda *_, **__: [])  # most of the time it takes
        pack(folder.path, place / "copy", images=12)
    return folder.path, place / "copy"


def test_the_report_of_the_copy_is_the_report(
    packed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With t-SNE, confusions and clusters, though no model is there any more."""
    monkeypatch.setattr(plot, "svg", lambda panel, prefix: f'<svg aria-label="{panel.alt}"></svg>')
    texts = []
    for folder in packed:
        write_report(collect([folder]), tmp_path / "r.html", images=12)
        texts.append((tmp_path / "r.html").read_text("utf-8"))
    ours, theirs = texts
    for part in ("by class", "clusters in round 1", "The gap between domains", "% right"):
        assert part in ours and part in theirs, part
    assert ours.count("<svg") == theirs.count("<svg")
    assert "has no model" not in theirs


def test_what_was_kept_reads_back(packed: tuple[Path, Path]) -> None:
    source, copy = packed
    stored = {run.config["method"]: run for run in Pool(copy).runs}
    parts = stored["fpl"].analysis
    assert parts is not None
    assert set(parts) >= {"confusion", "tsne", "gap", "clusters", "distances", "tested"}
    found = stored_analysis.GroupAnalysis()
    stored_analysis.add_stored(found, "FPL", parts)
    full = load_run(next(source.parent.glob("glyphs-fpl-*")))
    confusion = analysis.confusion(full, "photo", limit=12)
    assert np.array_equal(found.confusions["FPL"]["photo"], confusion)
    assert found.clusters["FPL"] == analysis.clusters(full)
    cosine = analysis.prototype_distances(full).cosine
    assert np.allclose(found.distances["FPL"].cosine, cosine, atol=1e-4, equal_nan=True)
    # as JSON it is the same
    again = stored_analysis.GroupAnalysis()
    stored_analysis.add_stored(again, "FPL", json.loads(json.dumps(parts)))
    assert again.clusters == found.clusters


def test_the_first_seed_with_a_model_is_analyzed(packed: tuple[Path, Path], tmp_path: Path) -> None:
    """Whose model, or what was kept of it, is there; without any it is the first."""
    source, copy = packed
    folder = next(source.parent.glob("glyphs-fpl-*"))
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("model.safetensors"))
    without, whole = (load_run(path, model=False) for path in (bare, folder))
    kept = next(run for run in Pool(copy).runs if run.config["method"] == "fpl").result()
    assert analyzed_run([without, whole]) is whole
    assert analyzed_run([without, kept, whole]) is kept
    assert analyzed_run([without, without]) is without


def test_a_packed_run_has_no_model(packed: tuple[Path, Path]) -> None:
    kept = Pool(packed[1]).runs[0].result()
    assert kept.lean and len(kept.rounds) == 1
    assert kept.plot().startswith(b"\x89PNG")
    with pytest.raises(ProtofedError, match="has no model here"):
        analysis.features(kept, "photo")
    with pytest.raises(ProtofedError, match="has no model here"):
        kept.network()


@pytest.mark.parametrize("parts", [{"confusion": {}}, {"tsne": [1]}, {"clusters": {}}])
def test_a_stored_analysis_that_is_damaged_is_named(
    packed: tuple[Path, Path], parts: dict[str, object]
) -> None:
    with pytest.raises(ProtofedError, match="stored analysis of FPL is damaged"):
        stored_analysis.add_stored(stored_analysis.GroupAnalysis(), "FPL", parts)
    # and the page says so in its place
    (group,) = collect([packed[1]]).groups
    for result in group.results:
        result.analysis = parts
    found = analyze(group, 12, lambda text: None)
    assert "damaged" in found.reasons("features", group.methods)[0]


@pytest.mark.usefixtures("no_drawing")
def test_what_two_machines_packed_becomes_one_study(tmp_path: Path) -> None:
    made = study(seeds=4)
    whole = make_study(made, tmp_path / "whole" / "s")
    pack(whole.path, tmp_path / "all", images=0)
    for name, seeds in (("a", [0, 1]), ("b", [2, 3])):
        make_study(made.with_seeds(seeds), tmp_path / name / "s")
        pack(tmp_path / name / "s", tmp_path / "packed" / name, images=0)
        done = unpack(tmp_path / "packed" / name, tmp_path / "pool")
        assert (done.taken, done.known, done.other) == (4, 0, 0)
    assert unpack(tmp_path / "packed" / "a", tmp_path / "pool").known == 4
    joined = StudyFolder.create(tmp_path / "pool" / "s", made, tmp_path / "pool")
    assert all(joined.runs.values())
    pack(joined.path, tmp_path / "both", images=0)
    assert contents(tmp_path / "both") == contents(tmp_path / "all")
    # what the pool has from elsewhere is not done again
    _, jobs = prepare(made, tmp_path / "pool")
    assert len(jobs) == 8 and all(job.is_complete() for job in jobs)


@pytest.mark.usefixtures("no_drawing")
def test_runs_of_another_numerics_are_not_unpacked(tmp_path: Path) -> None:
    folder = make_study(study(seeds=1), tmp_path / "runs" / "s", numerics=NUMERICS - 1)
    pack(folder.path, tmp_path / "b", images=0)
    assert unpack(tmp_path / "b", tmp_path / "pool").other == 2
    assert not (tmp_path / "pool").exists()


@pytest.mark.usefixtures("no_drawing")
def test_a_packed_run_stays_in_the_pool(tmp_path: Path) -> None:
    folder = make_study(study(seeds=1), tmp_path / "runs" / "s")
    pack(folder.path, tmp_path / "b", images=0)
    (line, *_) = (json.loads(text) for text in _packed_text(tmp_path / "b").splitlines())
    content = {k: v for k, v in line.items() if k not in ("format", "checksum")}
    outside = json.dumps(sealed({**content, "name": "../elsewhere"})).encode()
    (tmp_path / "b" / PACKED).write_bytes(gzip.compress(outside))
    with pytest.raises(ProtofedError, match="not the name of a run's folder"):
        unpack(tmp_path / "b", tmp_path / "pool")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.usefixtures("no_drawing")
def test_a_study_whose_figure_is_a_tsne_is_packed_with_it(
    packed: tuple[Path, Path], tmp_path: Path
) -> None:
    source, _ = packed
    made = StudyFolder.open(source).study
    raw = {k: v for k, v in made.raw.items() if k != "pool"}
    drawn = parse({**raw, "kind": "tsne", "tsne": {"domains": ["photo"]}}, "drawn")
    folder = StudyFolder.create(source.parent / "drawn", drawn, source.parent)
    pack(folder.path, tmp_path / "b", images=10)
    names = {p.name for p in (tmp_path / "b").glob("*.png")}
    assert names == {"curves.png", "tsne-fedavg.png", "tsne-fpl.png", "clusters-fpl.png"}
    # what was looked at goes with the runs: without their models it is packed again
    unpack(tmp_path / "b", tmp_path / "pool")
    again = StudyFolder.create(tmp_path / "pool" / "drawn", drawn, tmp_path / "pool")
    pack(again.path, tmp_path / "c", images=10)
    assert {p.name for p in (tmp_path / "c").glob("*.png")} == names


def test_what_is_handed_on_does_not_say_where_images_were(tmp_path: Path) -> None:
    home = tmp_path / "patients"
    images = image_folder(home / "scans")
    (images / "day" / "cat" / "broken.png").write_bytes(b"no image")
    settings = {"rounds": 1, "epochs": 1, "batch": 8, "model": "cnn2", "skip_bad": True}
    compare(
        f"folder:{images}", ["fedavg"], runs=home / "runs", out=home / "study", jobs=1,
        progress=False, **settings,
    )  # fmt: skip
    (own,) = [p for p in (home / "runs").iterdir() if p.is_dir()]
    packed, page = tmp_path / "packed", tmp_path / "page.html"
    pack(home / "study", packed, images=2)
    write_report(collect([home / "study"]), page, images=2, kinds=("png",))
    lines = gzip.decompress((packed / "runs.jsonl.gz").read_bytes())
    for content in (
        (own / "model.safetensors").read_bytes(), lines, page.read_bytes(),
        (packed / "study.toml").read_bytes(), (packed / "table.md").read_bytes(),
    ):  # fmt: skip
        assert b"folder:scans" in content and b"patients" not in content
    assert load_model(own).card.task == "folder:scans"
    assert StudyFolder.open(packed).tables()[0].rows[0].state == ""


OWN = """
from dataclasses import dataclass
from protofed.method import hyper
from protofed.methods import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    name = "mine"
    mu: float = hyper(0.5, "μ", "")
"""


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize("on", [None, "second"])
def test_folders_of_one_name_keep_their_rows(tmp_path: Path, on: str | None) -> None:
    """Packed without their paths, one would have the runs of the other."""
    (tmp_path / "mine.py").write_text(OWN)
    method_class(mine := f"{tmp_path / 'mine.py'}:Mine")
    folders = {name: f"folder:{tmp_path}/patients/{name}/scans" for name in ("first", "second")}
    held = {"clients": {"day": 1, "night": 1}, "samples": {"day": 10, "night": 10}}
    asked = study(
        tasks={name: {"task": folder, **held} for name, folder in folders.items()},
        rows={"FedAvg": "fedavg", "Mine": mine}, settings={**TINY, "image_size": 8}, seeds=1,
    )  # fmt: skip
    found = {folder: FolderImages(("day", "night"), (name,)) for name, folder in folders.items()}
    for value, (name, folder) in enumerate(folders.items()):
        same = dict.fromkeys(("day", "night"), 40.0 + value)
        alone = parse({**asked.raw, "tasks": {name: asked.raw["tasks"][name]}}, "alone")
        images = {folder: found[folder]}
        make_runs(alone.with_images(images), tmp_path, lambda _, a=same: a, digest=name)  # type: ignore[misc]
    if on is not None:
        elsewhere = parse({**asked.raw, "tasks": {"glyphs": {}}}, "elsewhere")
        asked = elsewhere.overridden(on=folders[on], settings={**asked.settings, **held})
        found = {folders[on]: found[folders[on]]}
    ours = StudyFolder.create(tmp_path / "s", asked.with_images(found), tmp_path)
    packed = tmp_path / "packed"
    pack(ours.path, packed, images=0)
    tables = StudyFolder.open(packed).tables()
    scores = [[row.accuracy["average"].mean for row in table.rows] for table in tables]
    assert scores == ([[40.0, 40.0], [41.0, 41.0]] if on is None else [[41.0, 41.0]])
    written = (packed / "study.toml").read_text() + (packed / "table.md").read_text()
    assert "patients" not in written
