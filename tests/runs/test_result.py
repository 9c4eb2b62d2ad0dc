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
from protofed.inference import load_model
from protofed.method import Method
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


def test_the_result_of_a_class_in_this_process_predicts() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(Method):
        name = "own"

    result = run(**GLYPHS, method=Own())
    x = load_task("glyphs").domains["scan"].test.x[:3]
    fedavg = run(**GLYPHS, method="fedavg")
    assert result.predict(x) == fedavg.predict(x)


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
    with pytest.raises(ProtofedError, match=r"is not a run's folder$"):  # perhaps a pool
        load_run(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(ProtofedError, match=r"no finished run.*--resume"):
        load_run(tmp_path)
    with pytest.raises(ProtofedError, match=r"there is no folder.*runs are in runs/"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "study.toml").touch()
    with pytest.raises(ProtofedError, match=r"is a study's folder.*one of the runs in its pool"):
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
    with pytest.raises(ProtofedError, match="has no model here"):
        lean.network()
    with pytest.raises(ProtofedError, match="without its model"):
        load_run(glyphs_run.folder, model=False).network()


def test_what_is_known_of_clients(glyphs_run: Result) -> None:
    (record,) = glyphs_run.rounds
    for name, client in glyphs_run.clients.items():
        assert (name, client.samples) == (f"{client.domain}-0", 10)
        assert client.accuracy == {1: record["accuracy"][client.domain]}
        assert client.loss[1].keys() == record["loss"].keys()
    each = [client.loss[1]["ce"] for client in glyphs_run.clients.values()]
    assert sum(each) / 2 == pytest.approx(record["loss"]["ce"]), "one step each"
    assert not any(column.startswith("by_client") for column in glyphs_run.rounds.columns)


def test_clients_with_models_of_their_own() -> None:
    result = run(TASK, "fedbn", **{**QUICK, "rounds": 2, "participation": 0.5})
    for record in result.rounds:
        trained = [n for n, own in record["by_client"].items() if "loss" in own]
        assert len(trained) == record["clients"] == 2 and len(record["by_client"]) == 4
        for domain, expected in record["accuracy"].items():
            own = [
                c.accuracy[record["round"]] for c in result.clients.values() if c.domain == domain
            ]
            assert sum(own) / len(own) == pytest.approx(expected, abs=1e-3)
    rounds = {n: set(c.loss) for n, c in result.clients.items()}
    assert sum(map(len, rounds.values())) == 4


def test_predictions_confusions_and_prototypes(glyphs_run: Result) -> None:
    images = load_task("glyphs").domains["scan"].test
    predicted = glyphs_run.predict(images.x)
    assert predicted == load_model(glyphs_run.folder or "").predict(images.x)
    confusion = glyphs_run.confusion("scan")
    accuracy = 100 * confusion.trace() / confusion.sum()
    assert accuracy == pytest.approx(glyphs_run.rounds[-1]["accuracy"]["scan"], abs=1e-3)
    assert glyphs_run.prototypes().sent.keys() == {"scan-0", "photo-0"}
    assert glyphs_run.prototypes(1).round == 1


@pytest.mark.parametrize("method", ["fpl", "fedproto", "fedbn"])
def test_a_result_without_a_folder(method: str) -> None:
    """What it can do it does; what it cannot, it says."""
    result = run(TASK, method, **{**QUICK, "rounds": 2})
    table = result.confusion("left", TASK)
    accuracy = result.rounds[-1]["accuracy"]["left"]
    assert 100 * table.trace() / table.sum() == pytest.approx(accuracy, abs=1e-3)
    client = "left-0" if result.client_models else None
    assert len(result.predict(TASK.domains["left"].test.x, client)) == len(
        TASK.domains["left"].test
    )
    with pytest.raises(ProtofedError, match=r"no folder, and so no prototypes.*out=FOLDER"):
        result.prototypes()
    with pytest.raises(ProtofedError, match=r"made by a program.*task="):
        result.confusion("left")


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
