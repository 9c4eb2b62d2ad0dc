"""A run that stops early, by its validation accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.runs.diary import same

from protofed.analysis import confusion
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.inference import load_model
from protofed.runs.folder import RunFolder
from protofed.runs.records import stops_early, without_times
from protofed.runs.result import load_run
from protofed.runs.run import run
from protofed.studies.execution import Job

pytestmark = pytest.mark.usefixtures("single_thread")

STILL: dict[str, Any] = {
    "task": "glyphs", "method": "fpl", "epochs": 1, "clients": {"scan": 1, "photo": 1},
    "samples": 20, "model": "cnn2", "width": 4, "norm": "group", "lr": 1e-9, "device": "cpu",
    "validate": "unused",
}  # fmt: skip
"""A run that learns nothing: its first round is its best."""


def validated(*averages: float) -> list[dict[str, Any]]:
    return [{"beside": {"validation": {"a": v, "b": v}}} for v in averages]


def test_when_a_run_stops() -> None:
    assert not stops_early(validated(1, 2, 3), 1)
    assert stops_early(validated(1, 3, 3), 1), "as good is not better"
    assert not stops_early(validated(1, 3, 2), 2) and stops_early(validated(1, 3, 2, 2), 2)
    assert not stops_early([], 1) and not stops_early(validated(3, 2, 1), None)


def test_it_is_a_whole_run_of_fewer_rounds(tmp_path: Path) -> None:
    result = run(**STILL, rounds=30, patience=2, keep_rounds=["last"], out=tmp_path / "r")
    assert len(result.rounds) == result.summary["rounds"] == 3
    shorter = run(**STILL, rounds=3)
    assert same(result, shorter)
    assert without_times(load_run(tmp_path / "r").rounds) == without_times(shorter.rounds)
    folder = RunFolder(tmp_path / "r")
    assert not folder.damage() and folder.artifact_rounds("snapshots") == [3]
    job = Job("r", result.config, folder, result.summary["hash"])
    assert job.is_complete(), "it has kept its last round"
    model = load_model(tmp_path / "r")
    assert model.kept is not None and model.kept.round == 3 and model.card.rounds == 3
    assert (confusion(tmp_path / "r", "scan") == shorter.confusion("scan")).all()
    again = run(**STILL, rounds=30, patience=2, keep_rounds=["last"], out=folder.path, resume=True)
    assert same(again, result) and folder.is_finished()


def test_by_default_the_last_prototypes_are_kept(tmp_path: Path) -> None:
    run(**STILL, rounds=30, patience=1, out=tmp_path)
    assert RunFolder(tmp_path).artifact_rounds("prototypes") == [1, 2]
    assert RunFolder(tmp_path).artifact_rounds("snapshots") == []


def test_it_needs_validation_images() -> None:
    with pytest.raises(ProtofedError, match=r"patience needs a validation.*--validate"):
        make_config("glyphs", "fedavg", patience=3)
    plain, patient = (make_config("glyphs", validate=0.1, patience=p) for p in (None, 3))
    assert plain.hash == make_config("glyphs", validate=0.1).hash != patient.hash
