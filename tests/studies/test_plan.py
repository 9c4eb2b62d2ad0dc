"""From a study to its runs: which configs, on which task, with which domain left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.studies.made_runs import DOMAINS, TINY, image_folder, raw, study

from protofed.data import DataMissing
from protofed.errors import ProtofedError
from protofed.studies.definition import FolderImages, Study, builtin, load, parse
from protofed.studies.plan import Selection, check_domains, columns, plan, study_tasks


def chosen(made: Study, **names: Any) -> list[tuple[str, str]]:
    return [(run.task, run.line.label) for run in plan(made, Selection(**names))]


def test_tasks_rows_and_seeds_can_be_chosen() -> None:
    made = load("i2pfl-table2")
    found = plan(made, Selection(tasks=("pacs",), rows=("fedavg", "I2PFL"), seeds=(4,)))
    assert {(run.task, run.line.label, run.seed) for run in found} == {
        ("pacs", "FedAvg", 4), ("pacs", "I2PFL", 4),
    }  # fmt: skip
    assert [run.name for run in found] == ["pacs  FedAvg  seed 4", "pacs  I2PFL  seed 4"]
    with pytest.raises(ProtofedError, match="pacs"):
        plan(made, Selection(tasks=("pcas",)))
    with pytest.raises(ProtofedError, match="FedProto"):
        plan(made, Selection(rows=("FedPrto",)))


def test_an_exact_name_wins() -> None:
    rows = {"FPL": "fpl", "FPL, GroupNorm": {"method": "fpl", "settings": {"norm": "group"}}}
    tasks = {"glyphs": {}, "more": {"task": "glyphs", "lr": 0.02}}
    made = study(rows=rows, tasks=tasks, seeds=1)
    assert chosen(made, rows=("FPL",), tasks=("glyphs",)) == [("glyphs", "FPL")]
    assert chosen(made, rows=("FPL, GroupNorm",), tasks=("more",)) == [("more", "FPL, GroupNorm")]
    assert len(chosen(made, rows=("fpl",), tasks=("glyphs",))) == 2  # the method
    assert len(chosen(made, rows=("Fpl, groupnorm",))) == 2  # both tasks


def test_seeds_come_first_so_that_early_results_cover_all_rows() -> None:
    assert [(run.seed, run.line.label) for run in plan(study())] == [
        (0, "FedAvg"), (0, "FPL"), (1, "FedAvg"), (1, "FPL"),
    ]  # fmt: skip


def test_no_images_and_no_gpu_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("images were read")

    monkeypatch.setattr("protofed.studies.plan.load_task", never)
    monkeypatch.setattr("torch.cuda.is_available", never)
    for name in builtin():
        assert plan(load(name), Selection(seeds=(0,)))


@pytest.mark.parametrize("settings", [{"model": []}, {"leave_out": []}, {"lr": -1.0}])
def test_a_bad_setting_names_the_study(settings: dict[str, Any]) -> None:
    with pytest.raises(ProtofedError, match=f"study 'mine': {next(iter(settings))} must be"):
        study(settings=settings)


@pytest.mark.parametrize("settings", [{"clients": {"scam": 1}}, {"leave_out": "scam"}])
def test_a_setting_that_does_not_fit_names_the_run(settings: dict[str, Any]) -> None:
    with pytest.raises(ProtofedError, match="glyphs  FedAvg  seed 0: "):
        plan(study(seeds=1, settings=settings))


COLUMNS = {"glyphs": {"columns": ["scam", "average"], "FedAvg": [1.0, 2.0]}}


@pytest.mark.parametrize(("change", "words"), [
    ({"printed": COLUMNS}, "study 'mine': unknown column in [printed.glyphs] 'scam'"),
    ({"tsne": {"domains": ["scan", "pront"]}}, "study 'mine': unknown domain in [tsne] 'pront'"),
])  # fmt: skip
def test_domains_that_the_task_has_not_are_an_error(change: dict[str, Any], words: str) -> None:
    made = study(rows={"FedAvg": "fedavg"}, **change)
    with pytest.raises(ProtofedError, match=re.escape(words)):
        check_domains(made, Selection())
    check_domains(made.overridden(on="digits"), Selection())  # its domains are others


# ---- another task in place of the study's -------------------------------------------------------


def test_different_models_stay_on_another_task() -> None:
    """They are what the study is about; one model for all belongs to the task."""
    made = load("fedseproto-table3").overridden("glyphs", {"rounds": 2, "device": "cpu"})
    for config in (run.config for run in plan(made)):
        assert config.models == ("cnn3", "cnn2")
        assert config.method.evaluates == "everyone"
        assert config.width == 16  # of the task's own protocol
    one = parse({**load("fedseproto-table3").raw, "settings": {"model": "cnn2"}}, "one")
    (task,) = study_tasks(one.overridden("glyphs"))
    assert "model" not in task.settings


def test_another_task_in_place_of_the_study_s() -> None:
    made = load("i2pfl-table7").overridden("glyphs", {"rounds": 2})
    (task,) = study_tasks(made)
    assert (task.name, dict(task.settings)) == ("glyphs", {"clients": "equal"})
    config = plan(made)[0].config
    assert (config.task, config.protocol, config.rounds) == ("glyphs", "glyphs", 2)
    assert set(config.domain_clients.values()) == {3}  # ten clients, as many for each domain
    # a distribution that only the papers' tasks have is the task's own there
    other = load("fedseproto-table1").overridden("glyphs")
    assert plan(other)[0].config.domain_clients["scan"] == 4
    # domains stand for domains in their order
    alone = load("fpl-fig1").overridden("glyphs")
    clients = [run.config.domain_clients for run in plan(alone) if run.seed == 0]
    assert clients[0] == {"scan": 1}
    assert clients[3] == {"inverse": 1}
    assert len(clients[4]) == 4


# ---- domains that no client has -----------------------------------------------------------------


def test_a_domain_left_out_is_a_run_for_each_domain() -> None:
    made = study(tasks={"glyphs": {"leave_out": "each"}}, seeds=1)
    found = [run for run in plan(made) if run.line.label == "FPL"]
    assert [run.unseen for run in found] == list(DOMAINS)
    assert found[1].name == "glyphs  FPL without print  seed 0"
    assert [run.config.leave_out for run in found] == list(DOMAINS)


def test_clients_in_numbers_are_meant_for_every_run() -> None:
    clients = {"scan": 3, "print": 2, "photo": 2, "inverse": 1}
    settings = {**TINY, "leave_out": "each", "clients": clients}
    found = {run.unseen: dict(run.config.domain_clients) for run in plan(study(settings=settings))}
    assert found["scan"] == {"scan": 0, "print": 2, "photo": 2, "inverse": 1}
    assert found["inverse"] == {"scan": 3, "print": 2, "photo": 2, "inverse": 0}


def test_the_paper_s_table_runs_on_glyphs() -> None:
    for name in ("i2pfl-table3", "i2pfl-table3-marsfl"):
        made = load(name).overridden("glyphs", {"rounds": 2})
        (task,) = study_tasks(made)
        asked = plan(made, Selection(rows=("copa",), seeds=(0,)))
        assert [run.unseen for run in asked] == list(DOMAINS)
        assert all(sum(run.config.domain_clients.values()) == 3 for run in asked)
        assert columns(made, task) == (*DOMAINS, "average")


def test_what_is_swept_is_swept_on_another_task_too() -> None:
    swept = [{"rows": ["FPL"], "over": {"batch": [8, 4]}}]
    rows = {"FPL": {"method": "fpl", "settings": {"lr": 0.5}}}
    made = study(rows=rows, sweep=swept, seeds=1).overridden("digits")
    found = [(run.config.batch, run.config.lr) for run in plan(made)]
    assert found == [(8, 0.01), (4, 0.01)]  # the learning rate belonged to the old task


# ---- folders of images --------------------------------------------------------------------------


def pets(task: str, **settings: Any) -> Study:
    made = {k: v for k, v in TINY.items() if k != "clients"}
    return parse(raw(tasks={"pets": {"task": task}}, settings={**made, **settings}), "mine")


def test_a_folder_that_is_not_there_can_be_planned() -> None:
    made = pets("folder:nowhere/pets")
    assert [run.config.task for run in plan(made)] == ["folder:nowhere/pets"] * 4
    (task,) = study_tasks(made)
    assert columns(made, task) == ("average",)
    moved = load("fpl-table2").overridden("folder:nowhere/pets")
    assert plan(moved)[0].config.task == "folder:nowhere/pets"


def test_its_domains_are_looked_up_once_where_each_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
    made = pets("folder:nowhere/pets", leave_out="each")
    with pytest.raises(DataMissing):
        plan(made)
    known = made.with_images({"folder:nowhere/pets": FolderImages(("a", "b"), ("d",))})
    assert [run.unseen for run in plan(known) if run.seed == 0] == ["a", "b"] * 2
    assert columns(known, study_tasks(known)[0]) == ("a", "b", "average")
    image_folder(tmp_path / "pets", ("x", "y", "z"))
    here = pets(f"folder:{tmp_path / 'pets'}", leave_out="each")
    assert {run.unseen for run in plan(here)} == {"x", "y", "z"}


def test_a_row_on_another_task_is_still_that_row() -> None:
    made = load("styles").overridden(on="glyphs", settings={"rounds": 2})
    first = {run.line.label: run.config for run in plan(made) if run.task == "glyphs"}
    assert first["GroupNorm"].norm == "group" and first["FedAvg"].norm == "batch"
