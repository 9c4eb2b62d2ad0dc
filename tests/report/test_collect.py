"""Which runs a report is about, and which of them may be compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.report.conftest import SMALL
from tests.studies.made_runs import TINY, make_runs, make_study, study

from protofed.errors import ProtofedError
from protofed.federation.facts import NUMERICS
from protofed.report.collect import collect
from protofed.report.pack import pack
from protofed.runs.run import run


def test_loose_runs_are_grouped_by_what_they_share(tmp_path: Path) -> None:
    rows = {
        "a": "fpl",
        "b": {"method": "fpl", "options": {"tau": 0.05}},
        "c": {"method": "fpl", "options": {"tau": 0.1}},
        "d": "fedavg",
    }
    make_runs(study(rows=rows), tmp_path / "one", skip={("b", 1), ("c", 1)})
    make_runs(study(seeds=1, settings={**TINY, "rounds": 2}), tmp_path / "other")
    (group,) = collect([tmp_path / "one", next((tmp_path / "one").iterdir())]).groups
    assert group.title == "glyphs"
    assert list(group.methods) == ["fedavg", "fpl tau=0.02", "fpl tau=0.05", "fpl tau=0.1"]
    assert [len(runs) for runs in group.methods.values()] == [2, 2, 1, 1]
    assert group.seeds == [0, 1]
    both = collect([tmp_path / "one", tmp_path / "other"]).groups
    assert [group.title for group in both] == ["glyphs · rounds 1", "glyphs · rounds 2"]


def test_runs_in_other_precision_or_of_other_images_are_not_compared(tmp_path: Path) -> None:
    one = study(seeds=1, rows={"FedAvg": "fedavg"})
    make_runs(one, tmp_path)
    make_runs(study(seeds=1, rows={"FPL": "fpl"}), tmp_path, digest="others")
    make_runs(study(seeds=1, rows={"MOON": "moon"}), tmp_path, numerics=0)
    titles = [group.title for group in collect([tmp_path]).groups]
    here = f"glyphs · numerics {NUMERICS}"
    assert sorted(titles) == ["glyphs · numerics 0", here, f"{here} · images others"]


def test_a_study_says_what_is_compared(tmp_path: Path) -> None:
    make_study(study(rows={"Base": "fedavg", "Ours": "fpl"}, seeds=1), tmp_path / "s")
    (group,) = collect([tmp_path / "s"]).groups
    assert (group.title, group.baseline) == ("glyphs", "Base")
    assert list(group.methods) == ["Base", "Ours"]
    assert group.table is not None and [row.label for row in group.rows] == ["Base", "Ours"]


def test_studies_and_loose_runs_of_one_pool(tmp_path: Path) -> None:
    for name, tau in (("one", 0.02), ("two", 0.5)):
        rows = {"FedAvg": "fedavg", "FPL": {"method": "fpl", "options": {"tau": tau}}}
        make_study(study(rows=rows, title=name, seeds=1), tmp_path / name)
    loose = make_runs(study(seeds=[7], rows={"FedAvg": "fedavg"}), tmp_path)
    unfinished = make_runs(study(seeds=[8], rows={"FedAvg": "fedavg"}), tmp_path)
    (unfinished["FedAvg", 8] / "summary.json").unlink()
    found = collect([tmp_path])
    assert [group.title for group in found.groups] == ["one: glyphs", "two: glyphs", "glyphs"]
    assert [result.folder for result in found.groups[2].results] == [loose["FedAvg", 7]]
    assert found.skipped == ((unfinished["FedAvg", 8], "not finished"),)


def test_a_packed_study_is_read_like_a_study(tmp_path: Path) -> None:
    folder = make_study(study(seeds=1), tmp_path / "runs" / "s")
    pack(folder.path, tmp_path / "packed", images=0)
    ours, theirs = (collect([path]).groups[0] for path in (folder.path, tmp_path / "packed"))
    assert ours.rows == theirs.rows and ours.title == theirs.title
    assert [r.rounds for r in ours.results] == [r.rounds for r in theirs.results]
    assert all(r.folder is None for r in theirs.results)


def test_damaged_runs_are_skipped_and_no_run_is_an_error(tmp_path: Path) -> None:
    runs = make_runs(study(seeds=1), tmp_path / "runs")
    shutil.copytree(runs["FPL", 0], tmp_path / "other" / "broken")
    (tmp_path / "other" / "broken" / "rounds.jsonl").write_bytes(b"cut\n")
    given = collect([tmp_path / "runs", tmp_path / "other"])
    assert [path.name for path, _ in given.skipped] == ["broken"]
    with pytest.raises(ProtofedError, match="no finished run in"):
        collect([tmp_path / "other"])
    with pytest.raises(ProtofedError, match="is not a folder"):
        collect([tmp_path / "nowhere"])


def test_runs_of_a_gpu_can_be_read_without_one(tmp_path: Path) -> None:
    settings = {**TINY, "device": "cuda", "engine": "lanes"}
    make_runs(study(seeds=1, settings=settings), tmp_path, device="cuda", precision="bf16")
    (group,) = collect([tmp_path]).groups
    assert group.results[0].config.engine == "lanes"
    assert group.results[0].summary["precision"] == "bf16"


def test_a_real_run_is_read_as_it_was(tmp_path: Path) -> None:
    done = run(**{**SMALL, "rounds": 1}, method="fpl", out=tmp_path / "run")
    (group,) = collect([tmp_path / "run"]).groups
    (read,) = group.results
    assert read.accuracy == done.accuracy and read.config == done.config and read.lean


def test_runs_with_other_clients_are_not_seeds_of_each_other(tmp_path: Path) -> None:
    rows = {"FedAvg": "fedavg"}
    for clients, seed in ((1, 0), (2, 1)):
        settings = {**TINY, "clients": clients}
        make_runs(study(settings=settings, seeds=[seed], rows=rows), tmp_path / "fixed")
    found = collect([tmp_path / "fixed"]).groups
    every = [f"scan {n}, print {n}, photo {n}, inverse {n}" for n in (1, 2)]
    assert [group.title for group in found] == [f"glyphs · clients {words}" for words in every]
    assert [group.seeds for group in found] == [[0], [1]]
    settings = {**TINY, "clients": "random", "leave_out": "print"}
    make_runs(study(settings=settings, seeds=[0, 1], rows=rows), tmp_path / "drawn")
    (group,) = collect([tmp_path / "drawn"]).groups
    first, second = (result.config.clients for result in group.results)
    assert group.seeds == [0, 1] and first != second
