"""A result, and the same result read back from its folder."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs.diary import QUICK, TASK, same

from protofed import tree
from protofed.config import make_config
from protofed.data import load_task
from protofed.data.augment import normalized
from protofed.errors import ProtofedError
from protofed.federation.facts import Facts
from protofed.runs.folder import RunFolder
from protofed.runs.records import Records
from protofed.runs.result import Result, load_run
from protofed.runs.run import run

pytestmark = pytest.mark.usefixtures("single_thread")

GLYPHS: dict[str, Any] = {
    "task": "glyphs",
    "rounds": 1,
    "epochs": 1,
    "clients": {"scan": 1, "photo": 1},
    "samples": 10,
    "model": "cnn2",
    "width": 4,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def glyphs_run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("g") / "r"
    return run(**GLYPHS, method="fpl", options={"tau": 0.05}, out=out)


def test_files_of_a_run(glyphs_run: Result) -> None:
    assert glyphs_run.folder is not None
    folder = RunFolder(glyphs_run.folder)
    assert {p.name for p in folder.path.iterdir()} == {
        "config.toml",
        "facts.json",
        "clients.json",
        "rounds.jsonl",
        "prototypes",
        "checkpoint.safetensors",
        "model.safetensors",
        "summary.json",
    }, "neither a lock nor a temporary file; FPL's clients keep no private state"
    model, metadata = tree.load(folder.path / "model.safetensors")
    assert tree.equal(model, {"model": glyphs_run.model})
    assert metadata["hash"] == glyphs_run.summary["hash"]
    assert metadata["holds"] == "the global model"
    assert metadata["accuracy"] == glyphs_run.accuracy
    assert metadata["domains"] == {"scan-0": "scan", "photo-0": "photo"}
    assert not metadata.keys() & {"host", "time", "engine", "device"}
    summary = folder.summary()
    assert summary == glyphs_run.summary
    assert summary["hyper_parameters"]["tau"] == 0.05
    clients = [(c["client"], c["domain"], c["samples"]) for c in summary["clients"]]
    assert clients == [("scan-0", "scan", 10), ("photo-0", "photo", 10)]
    assert len(folder.records()) == 1
    facts = Facts.from_dict(folder.facts())
    assert facts.to_dict() == glyphs_run.facts
    asked, other = glyphs_run.config, make_config(**GLYPHS, method="fedavg")
    hash = facts.run_hash(asked)
    assert folder.is_finished() and folder.is_finished(hash)
    assert not folder.is_finished(facts.run_hash(other))
    assert not RunFolder(folder.path / "nowhere").is_finished(hash)


def test_config_repeats_the_run(glyphs_run: Result, tmp_path: Path) -> None:
    assert glyphs_run.folder is not None
    path = glyphs_run.folder / "config.toml"
    again = run(config=path, out=tmp_path / "again")
    assert same(again, glyphs_run)
    assert again.config == glyphs_run.config
    assert (tmp_path / "again" / "config.toml").read_text() == path.read_text()
    other = run(config=str(path), seed=7)
    assert other.config.seed == 7
    assert not same(other, glyphs_run)


def test_load_run_equals_the_result(glyphs_run: Result) -> None:
    assert glyphs_run.folder is not None
    loaded = load_run(str(glyphs_run.folder))
    assert loaded.config == glyphs_run.config
    assert loaded.rounds == glyphs_run.rounds
    assert isinstance(loaded.rounds, Records)
    assert loaded.summary == glyphs_run.summary
    assert tree.equal({"m": loaded.model}, {"m": glyphs_run.model})
    assert loaded.accuracy == glyphs_run.accuracy


def test_load_run_needs_no_images(tmp_path: Path) -> None:
    """No task of this name can be loaded."""
    result = run(TASK, "fpl", **QUICK, out=tmp_path)
    loaded = load_run(tmp_path)
    assert loaded.config == result.config and not loaded.lean
    assert same(loaded, result)


def test_load_run_of_what_is_no_finished_run(tmp_path: Path) -> None:
    with pytest.raises(ProtofedError, match=r"no finished run.*--resume"):
        load_run(tmp_path)
    with pytest.raises(ProtofedError, match="there is no folder"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "study.toml").touch()
    with pytest.raises(ProtofedError, match=r"is a study's folder.*one of the runs"):
        load_run(tmp_path)


def test_network_reproduces_the_last_accuracy(glyphs_run: Result) -> None:
    network, task = glyphs_run.network(), load_task("glyphs")
    assert not network.training
    for domain, expected in glyphs_run.rounds[-1]["accuracy"].items():
        test = task.domains[domain].test
        with torch.no_grad():
            scores = network(normalized(test.x, task.augment, torch.float32)).logits
        accuracy = 100 * float((scores.argmax(1) == test.y).double().mean())
        assert accuracy == pytest.approx(expected, abs=1e-3)


def test_other_images_than_the_runs_are_refused(glyphs_run: Result) -> None:
    assert glyphs_run.task().name == "glyphs"
    facts = {**glyphs_run.facts, "digest": "0" * 64}
    with pytest.raises(ProtofedError, match="not those of the run"):
        dataclasses.replace(glyphs_run, facts=facts).task()


def test_a_run_without_its_model(glyphs_run: Result, tmp_path: Path) -> None:
    assert glyphs_run.folder is not None
    bare = tmp_path / "bare"
    shutil.copytree(
        glyphs_run.folder, bare, ignore=shutil.ignore_patterns("model*", "facts*", "clients*")
    )
    lean = load_run(bare)
    assert lean.lean and lean.facts == {} and lean.accuracy == glyphs_run.accuracy
    with pytest.raises(ProtofedError, match="without its model"):
        lean.network()


def test_html_of_a_result(glyphs_run: Result) -> None:
    html = glyphs_run._repr_html_()
    for part in ("<b>fpl</b>", "<b>glyphs</b>", "seed 0", "1 rounds", "data:image/png;base64,"):
        assert part in html
    for domain, value in glyphs_run.accuracy.items():
        assert f"<th>{domain}</th>" in html
        assert f"<td>{value:.2f}</td>" in html
    assert glyphs_run.plot().startswith(b"\x89PNG")
    assert repr(glyphs_run).startswith("<fpl on glyphs, seed 0: scan ")


def test_names_are_names_in_figures_and_pages() -> None:
    names = ("$\\frac$", "<b>a")
    task = dataclasses.replace(
        TASK,
        domains=dict(zip(names, TASK.domains.values(), strict=True)),
        clients=dict.fromkeys(names, 1),
        samples=dict.fromkeys(names, 22),
    )
    one = dict.fromkeys(names, 1)
    result = run(task, "fedavg", **{**QUICK, "rounds": 1, "clients": one})
    html = result._repr_html_()
    assert "&lt;b&gt;a" in html and "<b>a" not in html
    assert "<b>a" not in result.rounds._repr_html_()
