"""Clients with different models: who has which, what travels, who is tested, what is kept."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from protofed import analysis, tree
from protofed.config import make_config, read_config
from protofed.errors import ProtofedError
from protofed.federation.client_state import ClientStore
from protofed.federation.model_fit import require_fit
from protofed.federation.simulation import Federation, initial_network
from protofed.methods import METHODS, FedAvg, FedBN, FedGH, FedProto, FedSeProto, Local, Method
from protofed.models.mixed import checked_models, client_models
from protofed.observers.progress import accuracies, client_lines
from protofed.runs.records import without_times
from protofed.runs.result import Result, load_run
from protofed.runs.run import run
from protofed.studies.tables import caption, grid, rows
from protofed.testing.checks import TINY, _Interrupt, _same, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

ABLE = ("fedproto", "fedseproto", "fedtgp", "local", "fedmd", "fedgh")
BOTH = {**TINY, "model": "cnn3,cnn2"}
TABLE = {"left-0": "cnn2", "left-1": "cnn2", "right-0": "cnn3", "right-1": "cnn2"}


def federation(method: Method, **settings: Any) -> Federation:
    task = tiny_task(spare=12)
    return Federation(make_config(task, method, **{**BOTH, **settings}), task)


# ---- who has which ------------------------------------------------------------------------------


def test_names_alternate_over_the_clients() -> None:
    clients = ["a", "b", "c", "d", "e"]
    found = client_models("cnn3,cnn2", clients)  # even-numbered clients the first
    assert list(found.values()) == ["cnn3", "cnn2", "cnn3", "cnn2", "cnn3"]
    assert set(client_models("cnn3", clients).values()) == {"cnn3"}
    assert client_models(dict(reversed(TABLE.items())), list(TABLE)) == TABLE


def test_one_spelling_for_the_same_models() -> None:
    assert checked_models(" cnn3 , cnn2") == "cnn3,cnn2"
    assert checked_models("cnn3,cnn3") == "cnn3"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("cnn3,cnn4", ["unknown model 'cnn4'", "cnn3"]),
        ("cnn3,", ["unknown model ''"]),
        (3, ["unknown model '3'"]),
        ({}, ["table of models is empty"]),
        ({"left-0": "resnet"}, ["unknown model of a client 'resnet'"]),
        ({**TABLE, "up-0": "cnn2"}, ["unknown client in the table of models", "up-0", "left-0"]),
        ({"left-0": "cnn2", "left-1": "cnn3"}, ["no model for right-0, right-1", "[model]"]),
        (
            "cnn3,resnet10",
            ["features of the same size", "cnn3 has 512", "resnet10 has 32", "--width"],
        ),
    ],
)
def test_invalid_models_are_errors(model: Any, words: list[str]) -> None:
    with pytest.raises(ProtofedError) as error:
        federation(Local(), model=model)
    for word in words:
        assert word in str(error.value)


def test_the_table_is_in_the_file_the_hash_and_the_clients(tmp_path: Path) -> None:
    whole = run(tiny_task(), Local(), out=tmp_path / "run", **{**TINY, "model": TABLE, "rounds": 1})
    settings = read_config(tmp_path / "run" / "config.toml")
    assert settings["model"] == TABLE
    again = make_config(**{**settings, "task": tiny_task()})
    assert again == whole.config
    assert again.hash == whole.config.hash
    hashes = {
        make_config(tiny_task(), Local(), **{**TINY, "model": model}).hash
        for model in ("cnn2", "cnn3", "cnn3,cnn2", "cnn2,cnn3", TABLE)
    }
    assert len(hashes) == 5
    stored = json.loads((tmp_path / "run" / "clients.json").read_text("utf-8"))["clients"]
    assert {row["client"]: row["model"] for row in stored} == TABLE
    assert {row["client"]: row["model"] for row in whole.summary["clients"]} == TABLE


def test_clients_of_one_model_start_equal_and_models_have_keys_of_their_own() -> None:
    one = federation(Local())
    start = {name: one.store.get(name)["model"] for name in one.clients}
    assert tree.equal({"m": start["left-0"]}, {"m": start["right-0"]})
    assert tree.equal({"m": start["left-1"]}, {"m": start["right-1"]})
    for name, model in (("left-0", "cnn3"), ("left-1", "cnn2")):
        network = initial_network(one.config, tiny_task(), model)
        assert tree.equal({"m": start[name]}, {"m": dict(network.state_dict())})


def test_models_are_shown_where_they_differ() -> None:
    lines = client_lines(federation(Local()))
    assert lines[0].endswith(": left-0 cnn3, left-1 cnn2")
    assert "cnn" not in client_lines(federation(Local(), model="cnn2"))[0]


# ---- which methods can --------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_sends_models_says_so_before_anything_starts(
    name: str, tmp_path: Path
) -> None:
    if name in ABLE:
        assert make_config(tiny_task(spare=12), name, **BOTH).method.evaluates == "everyone"
        return
    with pytest.raises(ProtofedError) as error:
        run(tiny_task(), name, out=tmp_path / "run", **BOTH)
    text = str(error.value)
    assert text.startswith(f"{name} sends whole models, or parts that differ")
    assert "cnn3 and cnn2" in text
    assert f"methods that can: {', '.join(n for n in METHODS if n in ABLE)}" in text
    assert not (tmp_path / "run").exists()


def test_what_travels_decides_not_the_name() -> None:
    class HeadOnly(FedAvg):
        name = "headonly"

        def shared(self, entry: Any) -> Any:
            return "both" if entry.name.startswith("head.") else "no"

    models: tuple[Any, ...] = (("cnn3", "cnn2"), 4, 8, None, None)
    require_fit(HeadOnly(), *models)
    with pytest.raises(ProtofedError, match="fedbn sends"):
        require_fit(FedBN(), *models)


@pytest.mark.parametrize("cls", [FedProto, FedSeProto])
def test_share_follows_the_models_unless_it_is_given(cls: Any) -> None:
    assert make_config(tiny_task(), cls(), **TINY).method == cls()
    assert make_config(tiny_task(), cls(), **BOTH).method == cls(share="prototypes")
    assert make_config(tiny_task(), cls(share="prototypes"), **TINY).method.share == "prototypes"
    with pytest.raises(ProtofedError, match="methods that can"):
        federation(cls(share="model"))


# ---- what travels: bytes worked out by hand -----------------------------------------------------

K, D, CLIENTS, PUBLIC = 4, 512, 4, 24
MEANS = 4 * (K * D + K)  # a table of class means and its counts, or of prototypes and its mask
HEAD = 4 * (K * D + K)
LOGITS = 4 * PUBLIC * K
BYTES = {  # up and down, of a client in a later round
    "local": (0, 0),
    "fedmd": (LOGITS, LOGITS + 8),  # the consensus says for which round it is
    "fedproto": (MEANS, MEANS),
    "fedgh": (MEANS, HEAD),
    "fedseproto": (MEANS, MEANS),
    "fedtgp": (MEANS, MEANS),
}


@pytest.fixture(scope="module", params=ABLE)
def kept(request: Any, tmp_path_factory: Any) -> Result:
    """A run of each method with different models, in a folder."""
    out = tmp_path_factory.mktemp(request.param) / "run"
    return run(tiny_task(spare=12), request.param, out=out, **BOTH)


def test_nothing_but_prototypes_header_or_logits_travels(kept: Result) -> None:
    up, down = BYTES[kept.config.method.name]
    assert kept.rounds["bytes_up"][1:] == [CLIENTS * up] * 2
    assert kept.rounds["bytes_down"][1:] == [CLIENTS * down] * 2


# ---- who is tested ------------------------------------------------------------------------------


def accuracy(network: Any, task: Any, domain: str, nearest: torch.Tensor | None) -> float:
    """Of the head, or of the nearest of these prototypes."""
    images = task.domains[domain].test
    mean, std = (torch.tensor(v)[:, None, None] for v in (task.augment.mean, task.augment.std))
    with torch.no_grad():
        z, logits = network((images.x / 255 - mean) / std)
        scores = logits if nearest is None else -torch.cdist(z, nearest)
    said = scores.argmax(1)
    return 100 * float((said == images.y).double().mean())


def test_every_client_is_tested_on_every_domain(kept: Result) -> None:
    task = tiny_task(spare=12)
    clients = [row["client"] for row in kept.summary["clients"]]
    networks = {name: kept.network(name) for name in clients}
    record, own = kept.rounds[-1], {}
    assert kept.stored is not None
    trained = kept.config.method.name == "fedtgp"
    nearest = kept.stored.received["prototypes"]["mean"] if trained else None
    for domain in ("left", "right"):
        scores = {n: accuracy(network, task, domain, nearest) for n, network in networks.items()}
        assert record["accuracy"][domain] == pytest.approx(sum(scores.values()) / 4, abs=1e-3)
        own[domain] = sum(scores[f"{domain}-{i}"] for i in range(2)) / 2
        assert record["beside"]["own"][domain] == pytest.approx(own[domain], abs=1e-3)
    assert record["average"] == pytest.approx(sum(record["accuracy"].values()) / 2, abs=1e-3)
    assert kept.summary["evaluated"] == "everyone"
    assert ("nearest" in record["beside"]) == (kept.config.method.name == "fedproto")


def test_own_domain_accuracy_is_shown(kept: Result) -> None:
    last = kept.rounds[-1]["beside"]["own"]
    assert f"own domain {sum(last.values()) / 2:.1f}" in accuracies(kept.rounds[-1])
    own = kept.summary["beside"]["own"]
    for domain in ("left", "right"):
        column = kept.rounds[f"beside.own.{domain}"]
        assert own[domain] == pytest.approx(sum(column) / 3)
    header, (line,) = grid(rows([kept]))
    assert line.cells[header.index("own domain")].text == f"{own['average']:.1f}"
    text = caption([kept])
    assert "every client's own model on all domains, mean over the clients" in text
    assert "with different models (cnn3 and cnn2)" in text


def test_a_domain_without_clients_has_no_own_accuracy() -> None:
    record = federation(Local(), clients={"left": 2}).run_round()
    assert set(record["accuracy"]) == {"left", "right"}
    assert set(record["beside"]["own"]) == {"left"}


# ---- what is kept -------------------------------------------------------------------------------


def test_the_model_file_has_what_there_is_by_name(kept: Result) -> None:
    assert kept.folder is not None
    slots, about = tree.load(kept.folder / "model.safetensors")
    common = {"head.weight", "head.bias"} if kept.config.method.name == "fedgh" else set()
    assert set(slots.get("model", {})) == common
    assert about["holds"].startswith("each client's own entries (client/NAME/...)")
    task = tiny_task()
    for row in kept.summary["clients"]:
        network = initial_network(kept.found_config, task, row["model"])
        own = {n for n in slots["client"] if n.startswith(f"{row['client']}/")}
        entries = {n.removeprefix(f"{row['client']}/") for n in own}
        assert entries == set(network.state_dict()) - common
        assert all(torch.isfinite(slots["client"][n]).all() for n in own)


def test_a_run_is_read_back_with_its_clients_models(kept: Result) -> None:
    task = tiny_task(spare=12)
    assert kept.folder is not None
    again = load_run(kept.folder)
    assert again.client_models.keys() == kept.client_models.keys()
    for name, model in kept.client_models.items():
        assert tree.equal({"m": again.client_models[name]}, {"m": dict(model)})
    with pytest.raises(ProtofedError, match="has no global model") as error:
        again.network()
    assert "e.g. 'left-0'" in str(error.value)
    with pytest.raises(ProtofedError, match="unknown client 'left-9'"):
        again.network("left-9")
    z, _ = analysis.features(again, "left", task=task)
    assert z.shape == (20, 512)
    table = analysis.confusion(again, "right", task=task)
    assert table.sum() == 2 * 20  # of the domain's two clients, whose models differ
    with pytest.raises(ProtofedError, match="keep their own models"):
        analysis.features(again, "left", round=1, task=task)


def test_a_run_is_read_without_its_model(kept: Result) -> None:
    assert kept.folder is not None
    lean = load_run(kept.folder, model=False)
    assert lean.config.models == ("cnn3", "cnn2")
    assert lean.rounds == kept.rounds
    assert lean.client_models == {}


def test_fedbn_has_its_clients_batchnorm_in_the_file(tmp_path: Path) -> None:
    task = tiny_task()
    result = run(task, FedBN(), out=tmp_path / "run", **TINY)
    slots, _ = tree.load(tmp_path / "run" / "model.safetensors")
    assert len(slots["client"]) == 4 * 2 * 5  # four clients, two BatchNorms of five entries
    assert "beside" not in result.rounds[-1]  # a domain's figure is its own clients' already
    scores = [accuracy(result.network(f"left-{i}"), task, "left", None) for i in range(2)]
    assert result.rounds[-1]["accuracy"]["left"] == pytest.approx(sum(scores) / 2, abs=1e-3)
    with pytest.raises(ProtofedError, match="fedbn has no global model"):
        result.network()  # its BatchNorm would be untrained


def test_fedbn_without_batchnorm_has_a_global_model() -> None:
    result = run(tiny_task(), FedBN(), **{**TINY, "rounds": 1, "norm": "none"})
    assert torch.equal(result.network().head.weight, result.model["head.weight"])


def test_a_shared_model_has_no_client_of_its_own() -> None:
    result = run(tiny_task(), FedAvg(), **{**TINY, "rounds": 1})
    assert result.client_models == {}
    with pytest.raises(ProtofedError, match="no model of its own"):
        result.network("left-0")


def test_models_beyond_memory_stay_in_the_clients_folder(tmp_path: Path, monkeypatch: Any) -> None:
    small = functools.partial(ClientStore, limit=1000)
    monkeypatch.setattr("protofed.federation.simulation.ClientStore", small)
    result = run(tiny_task(), Local(), out=tmp_path / "run", **{**BOTH, "rounds": 1})
    assert result.client_models == {}
    _, about = tree.load(tmp_path / "run" / "model.safetensors")
    assert "clients/" in about["holds"]
    assert len(list((tmp_path / "run" / "clients").iterdir())) == 4


@pytest.mark.parametrize("method", [FedGH(), FedProto(), FedSeProto()], ids=lambda m: m.name)
def test_an_interrupted_run_resumes_to_the_same_bits(method: Method, tmp_path: Path) -> None:
    settings = {**BOTH, "epochs": 1, "samples": 10}
    whole, out = run(tiny_task(), method, **settings), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(tiny_task(), method, out=out, observers=[_Interrupt(after=1)], **settings)
    resumed = run(tiny_task(), method, out=out, resume=True, **settings)
    assert _same(whole, resumed)
    assert len(without_times(resumed.rounds)) == 3


# ---- FedProto's other rule ----------------------------------------------------------------------


def test_the_nearest_prototype_is_another_rule(monkeypatch: Any) -> None:
    task = tiny_task()
    one = Federation(make_config(task, FedProto(), **BOTH), task)
    for _ in range(2):
        record = one.run_round()
    C = one.server.state["prototypes"]["mean"]
    mean, std = (torch.tensor(v)[:, None, None] for v in (task.augment.mean, task.augment.std))
    images = one.tests["right"]
    right = []
    for name, site in one.clients.items():
        network = one.make_network(site.model)
        network.load_state_dict(one.store.get(name)["model"])
        network.eval()
        with torch.no_grad():
            z = network((images.x / 255 - mean) / std).feature
        said = torch.stack([(z - c).square().sum(1) for c in C]).argmin(0)
        right.append(100 * float((said == images.y).double().mean()))
    expected = sum(right) / len(right)
    assert record["beside"]["nearest"]["right"] == pytest.approx(expected, abs=1e-3)
