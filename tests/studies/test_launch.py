"""Which runs a study needs: what the pool has is taken, and nothing is written before that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.studies.made_runs import TINY, image_folder, make_runs, raw, study

from protofed.data import DataMissing
from protofed.errors import ProtofedError
from protofed.runs.pool import PACKED
from protofed.runs.run import run
from protofed.studies.adhoc import adhoc, protocol_note
from protofed.studies.definition import FolderImages, load, parse
from protofed.studies.execution import Execution, Job
from protofed.studies.folder import StudyFolder
from protofed.studies.launch import Asked, prepare, prepare_all, shard_of
from protofed.studies.plan import Selection, plan


def states(jobs: list[Job]) -> dict[str, bool]:
    return {job.name: job.is_complete() for job in jobs}


def test_what_the_pool_has_is_not_done_again(tmp_path: Path) -> None:
    make_runs(study(), tmp_path, skip={("FPL", 1)})
    same, jobs = prepare(study(), tmp_path)
    assert same == study()
    assert states(jobs) == {
        "FedAvg seed 0": True, "FPL seed 0": True, "FedAvg seed 1": True, "FPL seed 1": False,
    }  # fmt: skip
    _, jobs = prepare(study(), tmp_path, selection=Selection(rows=("fedavg",), seeds=(7,)))
    assert states(jobs) == {"FedAvg seed 7": False}
    two = study(seeds=1, tasks={"glyphs": {}, "more": {"task": "glyphs", "lr": 0.02}})
    assert next(iter(states(prepare(two, tmp_path)[1]))) == "glyphs  FedAvg  seed 0"


def test_one_run_may_answer_several_lines(tmp_path: Path) -> None:
    rows = {"FedAvg": "fedavg", "The same": "fedavg", "FPL": "fpl"}
    assert len(prepare(study(rows=rows, seeds=1), tmp_path)[1]) == 2


def test_a_run_of_several_studies_keeps_what_all_of_them_need(tmp_path: Path) -> None:
    plain = Asked(study(seeds=1, rows={"FPL": "fpl"}), "plain")
    drawn = [
        Asked(study(seeds=1, rows={"FPL": "fpl"}, settings={**TINY, "keep_rounds": kept}), "drawn")
        for kept in ([1], ["last"], [])
    ]
    execution = Execution(tmp_path)
    make_runs(plain.study, tmp_path)  # no models are in the folders that it makes
    for asked, kept in (([plain, *drawn], (1, "last")), ([drawn[1], plain], ("last",))):
        found = [own for _, own in prepare_all(asked, execution)]
        assert all(own == found[0] and own[0] is found[0][0] for own in found)
        (job,) = found[0]
        assert job.config.keep_rounds == kept
        assert job.memory is not None and not job.is_complete()
    ((_, (job,)),) = prepare_all([plain], execution)
    assert job.config.keep_rounds is None and job.is_complete()


def test_a_run_to_choose_from_never_shows_its_test_accuracy(tmp_path: Path) -> None:
    settings = {**TINY, "validate": "unused", "samples": 0.1}
    shown = study(seeds=1, rows={"FPL": "fpl"}, settings=settings)
    swept = [{"points": [{"tau": 0.02}, {"tau": 0.1}], "rows": ["FPL"]}]
    tuned = study(seeds=1, rows={"FPL": "fpl"}, settings=settings, sweep=swept, kind="tune")
    both = [Asked(shown, "shown"), Asked(tuned, "tuned")]
    (_, (first,)), (_, points) = prepare_all(both, Execution(tmp_path))
    assert points[0] is first and first.validated


def test_a_run_of_another_device_serves_unless_one_is_asked_for(tmp_path: Path) -> None:
    free = study(settings={k: v for k, v in TINY.items() if k != "device"}, seeds=1)
    make_runs(free, tmp_path, device="cuda", precision="bf16")
    assert all(states(prepare(free, tmp_path)[1]).values())
    assert not any(states(prepare(study(seeds=1), tmp_path)[1]).values())


def test_runs_on_the_gpus_of_a_cluster_do_not_share_this_machine_s(tmp_path: Path) -> None:
    asked = {**TINY, "device": "cuda", "engine": "ray", "precision": "fp32"}
    _, (job,) = prepare(study(settings=asked, seeds=1, rows={"FedAvg": "fedavg"}), tmp_path)
    assert not job.gpu


def test_runs_of_other_images_or_another_code_do_not_serve(tmp_path: Path) -> None:
    runs = make_runs(study(seeds=1), tmp_path)
    stale = runs["FPL", 0]
    summary = json.loads((stale / "summary.json").read_text())
    (stale / "summary.json").write_text(json.dumps({**summary, "hash": "0123456789"}))
    make_runs(study(seeds=[1], rows={"FedAvg": "fedavg"}), tmp_path, digest="others")
    _, jobs = prepare(study(), tmp_path)
    assert states(jobs) == {
        "FedAvg seed 0": True, "FPL seed 0": False, "FedAvg seed 1": False, "FPL seed 1": False,
    }  # fmt: skip


def test_a_t_sne_over_rounds_takes_no_run_that_kept_no_models(tmp_path: Path) -> None:
    runs = make_runs(study(seeds=1), tmp_path)
    drawn = study(seeds=1, kind="tsne", tsne={"rounds": [1]})
    assert not any(states(prepare(drawn, tmp_path)[1]).values())
    for folder in runs.values():
        (folder / "snapshots").mkdir()
        (folder / "snapshots" / "1.safetensors").write_text("")
    assert all(states(prepare(drawn, tmp_path)[1]).values())
    assert all(states(prepare(study(seeds=1), tmp_path)[1]).values())


def test_parts_are_disjoint_and_together_the_whole(tmp_path: Path) -> None:
    planned = plan(study(seeds=4))
    parts = [[r.config.hash for r in shard_of(planned, i, 3)] for i in (1, 2, 3)]
    assert sorted(len(part) for part in parts) == [2, 3, 3]
    assert sorted(h for part in parts for h in part) == sorted(r.config.hash for r in planned)
    # whatever the order of rows
    other = plan(study(seeds=4, rows={"FPL": "fpl", "FedAvg": "fedavg"}))
    assert {r.config.hash for r in shard_of(other, 2, 3)} == set(parts[1])
    found = [prepare(study(), tmp_path, shard=(i, 2))[1] for i in (1, 2)]
    assert [len(jobs) for jobs in found] == [2, 2]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"rows": {"Base": "fedavgg"}}, r"row Base: 'fedavgg' \(did you mean fedavg.*--methods runs"),
    ({"settings": {**TINY, "model": "cnn3,cnn2"}}, "FedAvg  seed 0: .*fedavg sends whole models"),
    ({"settings": {**TINY, "clients": 3, "lr": 0}}, "lr must be a number above 0"),
    (
        {"printed": {"glyphs": {"columns": ["scam", "average"], "FPL": [1.0, 2.0]}}},
        r"unknown column in \[printed.glyphs\] 'scam'",
    ),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_mistakes_are_said_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProtofedError, match=words):
        prepare(study(**change), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_packed_study_is_not_a_pool(tmp_path: Path) -> None:
    (tmp_path / PACKED).write_bytes(b"")
    with pytest.raises(ProtofedError, match="a packed study, not a pool"):
        prepare(study(), tmp_path)


def test_a_study_written_on_the_spot() -> None:
    rows = {"fpl": ("fpl", {"tau": 0.5}), "mine": ("fedavg", {})}
    made = adhoc("compare", "Two", "folder:a/pets", rows, range(3, 5), {"rounds": 2})
    assert (made.seeds, list(made.tasks), made.kind) == ((3, 4), ["folder-pets"], "table")
    assert made.rows["fpl"].options == {"tau": 0.5}
    swept = adhoc("sweep", "One", "glyphs", {"fpl": ("fpl", {})}, [0], {}, [{"over": {"lr": [1]}}])
    assert swept.kind == "sweep" and swept.lines[0].label == "fpl, lr=1"


# ---- images -------------------------------------------------------------------------------------

FOLDER = {**{k: v for k, v in TINY.items() if k != "clients"}, "samples": 0.5, "engine": "loop"}


def test_two_folders_of_one_name_never_share_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    pool = tmp_path / "runs"
    found = {}
    for number, where in enumerate("ab"):
        image_folder(Path(where) / "pets", start=100 * number)
        tasks = {"pets": {"task": f"folder:{where}/pets"}}
        asked = parse(raw(seeds=1, rows={"FedAvg": "fedavg"}, settings=FOLDER, tasks=tasks), where)
        made, (job,) = prepare(asked, pool)
        assert not job.is_complete(), "the other folder's run does not serve"
        run(config=job.config, out=job.folder.path)
        assert job.is_complete()
        found[where] = StudyFolder.create(pool / where, made, pool)
        assert found[where].study.images[f"folder:{where}/pets"].domains == ("day", "night")
    accuracies = {where: folder.tables()[0].rows[0].accuracy for where, folder in found.items()}
    assert list(accuracies["a"]) == ["day", "night", "average"]
    for where, folder in found.items():  # each has its own run, and no note of mixed images
        (stored,) = StudyFolder.open(folder.path).runs.values()
        assert stored is not None
        assert (stored.facts["digest"],) == folder.study.digests(f"folder:{where}/pets")
        assert folder.tables()[0].notes == ()


def test_where_the_images_are_not_what_is_complete_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
    chosen = Selection(tasks=("digits",), rows=("FedAvg",), seeds=(0,))
    made = load("fpl-table2")
    with pytest.raises(DataMissing):
        prepare(made, tmp_path, selection=chosen)
    small = parse({**made.raw, "seeds": 1, "rows": {"FedAvg": "fedavg"}, "printed": {}}, "small")
    make_runs(small, tmp_path / "runs", lambda _: {"mnist": 50.0}, digest="theirs")
    _, (job,) = prepare(made, tmp_path / "runs", selection=chosen)
    assert job.is_complete()
    # a folder is its images: of others nothing is taken
    pets = study(seeds=1, rows={"FedAvg": "fedavg"}, tasks={"pets": {"task": "folder:gone/pets"}})
    other = pets.with_images({"folder:gone/pets": FolderImages(("a",), ("digest",))})
    with pytest.raises(DataMissing):
        prepare(other, tmp_path / "runs")


# ---- validation and protocols -------------------------------------------------------------------


def test_validation_images_are_looked_for_before_anything_runs(tmp_path: Path) -> None:
    made = study(settings={**TINY, "validate": 0.1})
    with pytest.raises(ProtofedError, match=r"FedAvg  seed 0: .*1 of domain 'scan'"):
        prepare(made, tmp_path / "runs")
    fedmd = study(settings={**TINY, "validate": "unused"}, rows={"FedMD": "fedmd"})
    with pytest.raises(ProtofedError, match="FedMD  seed 0: fedmd trains on public images"):
        prepare(fedmd, tmp_path / "runs")


def test_papers_that_train_otherwise_are_named() -> None:
    rows = {"fpl": ("fpl", {}), "i2pfl": ("i2pfl", {}), "fedseproto": ("fedseproto", {})}

    def note(task: str, **settings: Any) -> str:
        return protocol_note(adhoc("compare", "Three", task, rows, [0, 1], settings))

    assert "differently: i2pfl: batch 32 (here 64); fedseproto: model cnn3 (here" in note("digits")
    assert "comes from the method" in note("digits")
    assert "differently: fpl: batch 64 (here 32); fedseproto" in note("digits", protocol="i2pfl")
    assert note("glyphs") == ""
