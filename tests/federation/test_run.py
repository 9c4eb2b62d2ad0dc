from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch

import protofed.federation.simulation as module
from protofed import tree
from protofed.config import Config, make_config
from protofed.data import load_task
from protofed.data.augment import normalized
from protofed.errors import Diverged, ProtofedError
from protofed.federation.client_round import Reply
from protofed.federation.client_state import ClientStore
from protofed.federation.evaluation import Scores
from protofed.federation.server import Server
from protofed.federation.simulation import Federation, Observer, batchnorm_policy, initial_network
from protofed.method import Batch, Client, Entry, Method, Sizes, Terms
from protofed.methods import FPL, FedAvg
from protofed.runs.folder import begins_anew
from protofed.runs.records import (
    Record,
    Records,
    last_mean,
    line,
    read_records,
    without_times,
)
from protofed.runs.result import Result, load_run
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task
from protofed.tree import Slot, Tree

pytestmark = pytest.mark.usefixtures("single_thread")

Digests = Callable[[Path], dict[str, str]]
QUICK: dict[str, Any] = {**TINY, "epochs": 1}
GLYPHS: dict[str, Any] = {
    "task": "glyphs",
    "rounds": 1,
    "epochs": 1,
    "clients": {"scan": 1, "photo": 1},
    "samples": 10,
    "device": "cpu",
}


@dataclass(frozen=True)
class Diary(Method):
    """Private state that matters: BatchNorm, a counter, and a point the head is drawn to."""

    name: ClassVar[str] = "diary"
    fails_in: int = -1

    @property
    def evaluates(self) -> str:
        return "clients"

    def shared(self, entry: Entry) -> Literal["both", "down", "no"]:
        return "no" if entry.kind == "bn" else "both"

    def init_client(self, model: Slot, sizes: Sizes) -> Tree:
        return {"diary": {"rounds": torch.tensor(0), "bias": torch.ones(sizes.classes)}}

    def loss(self, client: Client, batch: Batch) -> Terms:
        drift = client.parameters["head.bias"] - client.mine["diary"]["bias"]
        if int(client.round) == self.fails_in and client.name == "right-0":
            drift = drift * float("nan")
        return {**super().loss(client, batch), "drift": drift.square().sum()}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        diary = client.mine["diary"]
        bias = client.parameters["head.bias"] + client.uniform(client.classes)
        return {"note": {"n": diary["rounds"]}}, {
            "diary": {"rounds": diary["rounds"] + 1, "bias": bias}
        }


class At(Observer):
    """Does something when a client of a round has finished."""

    def __init__(self, round: int, client: int, act: Callable[[], object]) -> None:
        self.at, self.act = (round, client), act

    def client(self, round: int, done: int, total: int) -> None:
        if (round, done) == self.at:
            self.act()


def ctrl_c() -> None:
    raise KeyboardInterrupt


def same(a: Result, b: Result) -> bool:
    models = tree.equal({"model": a.model}, {"model": b.model})
    return models and without_times(a.rounds) == without_times(b.rounds)


def numbers(folder: Path) -> list[Record]:
    return without_times(read_records(folder / "rounds.jsonl"))


def states(config: Config, folder: Path | None) -> dict[str, Tree]:
    """The private state of every client as the folder's checkpoint has it."""
    assert folder is not None
    _, metadata = tree.load(folder / "checkpoint.safetensors")
    return {n: tree.load(folder / "clients" / f)[0] for n, f in metadata["clients"].items()}


# ---- what a run gives ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def glyphs_run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(
        **GLYPHS, method="fpl", options={"tau": 0.05}, out=tmp_path_factory.mktemp("g") / "r"
    )


def test_fields_of_the_records() -> None:
    result = run(tiny_task(), FPL(), **QUICK)
    assert len(result.rounds) == 3
    for i, record in enumerate(result.rounds):
        assert list(record) == [
            "round",
            "accuracy",
            "average",
            "loss",
            "bytes_up",
            "bytes_down",
            "clients",
            "steps",
            "seconds",
        ]
        assert record["round"] == i
        assert record["accuracy"].keys() == {"left", "right"}
        assert record["average"] == pytest.approx(sum(record["accuracy"].values()) / 2, abs=1e-4)
        assert all(0 <= a <= 100 for a in record["accuracy"].values())
        assert record["loss"].keys() == {"ce", "cpcl", "upcr"}
        assert record["clients"] == 4
        assert record["steps"] == 4 * 3  # 22 samples in batches of 8
        assert record["seconds"].keys() == {"train", "evaluate"}
    assert result.rounds[0]["loss"]["cpcl"] == 0
    assert result.rounds[1]["loss"]["cpcl"] > 0


def test_the_loss_of_a_round_is_the_mean_over_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[Reply] = []
    accept = Server.accept

    def spy(self: Server, name: str, reply: Reply) -> None:
        replies.append(reply)
        accept(self, name, reply)

    monkeypatch.setattr(Server, "accept", spy)
    settings = {**QUICK, "rounds": 1, "samples": {"left": 22, "right": 5}}
    record = run(tiny_task(), FedAvg(), **settings).rounds[0]
    assert {r.steps for r in replies} == {3, 1}
    total = sum(r.losses["ce"][0] for r in replies)
    assert record["loss"]["ce"] == pytest.approx(total / record["steps"], rel=1e-12)
    assert record["steps"] == sum(r.steps for r in replies) == 8


class Bytes(Observer):
    """Counts what goes down by hand."""

    def __init__(self) -> None:
        self.down: list[int] = []

    def start(self, federation: Federation, records: Records) -> None:
        self.federation = federation
        self._count()

    def round(self, record: Record) -> None:
        self._count()

    def _count(self) -> None:
        server = self.federation.server
        self.down.append(hand_bytes(server.broadcast()) * len(server.sample()))


def hand_bytes(message: Tree) -> int:
    sizes = {torch.float32: 4, torch.int64: 8, torch.bool: 1}
    return sum(t.numel() * sizes[t.dtype] for slot in message.values() for t in slot.values())


@pytest.mark.parametrize(("method", "share"), [(FedAvg(), 1.0), (FPL(), 0.5), (Diary(), 0.75)])
def test_bytes_are_what_was_sent(
    monkeypatch: pytest.MonkeyPatch, method: Method, share: float
) -> None:
    up: dict[int, int] = {}
    accept = Server.accept

    def spy(self: Server, name: str, reply: Reply) -> None:
        up[self.round] = up.get(self.round, 0) + hand_bytes(reply.message)
        accept(self, name, reply)

    monkeypatch.setattr(Server, "accept", spy)
    counter = Bytes()
    result = run(tiny_task(), method, **QUICK, participation=share, observers=[counter])
    assert result.rounds["bytes_up"] == list(up.values())
    assert result.rounds["bytes_down"] == counter.down[:3]
    assert result.rounds["clients"] == [4 * share] * 3
    assert result.summary["bytes_up"] == sum(up.values())
    assert result.summary["bytes_down"] == sum(counter.down[:3])


def test_columns_rows_and_html_of_records() -> None:
    result = run(tiny_task(), FPL(), **QUICK)
    records = result.rounds
    assert records["average"] == [r["average"] for r in records]
    assert records["accuracy.left"] == [r["accuracy"]["left"] for r in records]
    assert records["round"] == [0, 1, 2]
    assert records[0]["round"] == 0
    assert records.columns[:4] == ["round", "accuracy.left", "accuracy.right", "average"]
    rows = records.rows()
    assert [list(row) for row in rows] == [records.columns] * 3
    assert rows[2]["loss.cpcl"] == records[2]["loss"]["cpcl"]
    assert not any(isinstance(v, dict) for row in rows for v in row.values())
    html = records._repr_html_()
    assert html.count("<tr>") == 4
    for column in records.columns:
        assert f"<th>{column}</th>" in html
    assert f"<td>{records[1]['average']:.4g}</td>" in html
    with pytest.raises(KeyError):
        records["nothing"]
    assert Records().columns == []
    assert Records()._repr_html_().count("<tr>") == 1


def test_columns_of_rounds_with_other_terms() -> None:
    base = {"round": 0, "accuracy": {"a": 1.0}, "average": 1.0, "loss": {"ce": 1.0}}
    records = Records([base, {**base, "round": 1, "loss": {"ce": 0.5, "later": 0.1}}])
    html = records._repr_html_()
    heads, *rows = html.split("<tr>")[1:]
    assert "loss.later" in heads
    assert [row.count("<td>") for row in rows] == [heads.count("<th>")] * 2


def test_html_of_a_result() -> None:
    result = run(tiny_task(), FPL(), **QUICK)
    html = result._repr_html_()
    for part in ("<b>fpl</b>", "<b>tiny</b>", "seed 0", "3 rounds", "data:image/png;base64,"):
        assert part in html
    for domain, value in result.accuracy.items():
        assert f"<th>{domain}</th>" in html
        assert f"<td>{value:.2f}</td>" in html
    assert result.plot().startswith(b"\x89PNG")
    assert repr(result).startswith("<fpl on tiny, seed 0: left ")


def test_last_mean_by_hand() -> None:
    records = [
        {"accuracy": {"a": float(i), "b": 10.0 * i}, "average": 5.5 * i} for i in range(1, 8)
    ]
    assert last_mean(records) == {"a": 5.0, "b": 50.0, "average": 27.5}  # rounds 3 to 7
    assert last_mean(records[:5]) == {"a": 3.0, "b": 30.0, "average": 16.5}
    assert last_mean(records[:2]) == {"a": 1.5, "b": 15.0, "average": 8.25}
    assert last_mean(records[:1]) == {"a": 1.0, "b": 10.0, "average": 5.5}


def test_accuracy_is_the_mean_of_the_last_five_rounds() -> None:
    result = run(tiny_task(), FedAvg(), **{**QUICK, "rounds": 7})
    for domain in ("left", "right"):
        expected = sum(result.rounds[f"accuracy.{domain}"][2:]) / 5
        assert result.accuracy[domain] == pytest.approx(expected)
    assert result.accuracy["average"] == pytest.approx(sum(result.rounds["average"][2:]) / 5)
    assert result.summary["accuracy"] == result.accuracy


def test_network_reproduces_the_last_accuracy(glyphs_run: Result) -> None:
    network, task = glyphs_run.network(), load_task("glyphs")
    assert not network.training
    for domain, expected in glyphs_run.rounds[-1]["accuracy"].items():
        test = task.domains[domain].test
        with torch.no_grad():
            scores = network(normalized(test.x, task.augment, torch.float32)).logits
        accuracy = 100 * float((scores.argmax(1) == test.y).double().mean())
        assert accuracy == pytest.approx(expected, abs=1e-3)


def test_observers_see_everything_in_order() -> None:
    seen: list[object] = []

    class Watch(Observer):
        def start(self, federation: Federation, records: Records) -> None:
            seen.append(("start", len(federation.sites), len(records)))

        def client(self, round: int, done: int, total: int) -> None:
            seen.append((round, done, total))

        def round(self, record: Record) -> None:
            seen.append(("round", record["round"]))

        def end(self, result: Result) -> None:
            seen.append(("end", len(result.rounds)))

    settings = {**QUICK, "rounds": 2, "participation": 0.5}
    watched = run(tiny_task(), FedAvg(), **settings, observers=[Watch()])
    rounds = [[(r, 1, 2), (r, 2, 2), ("round", r)] for r in range(2)]
    assert seen == [("start", 4, 0), *rounds[0], *rounds[1], ("end", 2)]
    assert same(watched, run(tiny_task(), FedAvg(), **settings))


def test_participation_in_a_run() -> None:
    settings = {**QUICK, "rounds": 6, "participation": 0.5}
    result = run(tiny_task(), FedAvg(), **settings)
    assert result.rounds["clients"] == [2] * 6
    assert same(result, run(tiny_task(), FedAvg(), **settings))
    assert not same(result, run(tiny_task(), FedAvg(), **{**settings, "seed": 1}))


def test_clients_that_sit_out_keep_their_state(tmp_path: Path) -> None:
    config = make_config(tiny_task(), Diary(), **{**QUICK, "participation": 0.5, "rounds": 4})
    federation = Federation(config, tiny_task())
    turns = dict.fromkeys(federation.sites, 0)
    for _ in range(4):
        chosen = federation.server.sample()
        before = {n: tree.copy(federation.store.get(n)) for n in federation.sites}
        federation.run_round()
        for name in federation.sites:
            turns[name] += name in chosen
            after = federation.store.get(name)
            assert tree.equal(after, before[name]) == (name not in chosen)
            assert int(after["diary"]["rounds"]) == turns[name]
    assert len(set(turns.values())) > 1


def test_initial_weights_are_keyed_and_leave_torchs_generator_alone() -> None:
    task = tiny_task()
    config = make_config(task, FedAvg(), **TINY)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = initial_network(config, task).state_dict()
    assert torch.equal(torch.rand(4), expected)
    again = initial_network(config, task).state_dict()
    other = initial_network(make_config(task, FedAvg(), **TINY, seed=1), task).state_dict()
    assert tree.equal({"m": dict(first)}, {"m": dict(again)})
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert "kept by each client" in batchnorm_policy(initial_network(config, task), Diary())


def test_double_precision() -> None:
    settings = {**QUICK, "rounds": 1}
    result = run(tiny_task(), FedAvg(), **settings, precision="fp64")
    assert result.model["head.weight"].dtype == torch.float64
    single = run(tiny_task(), FedAvg(), **settings)
    torch.testing.assert_close(
        result.model["head.weight"].float(), single.model["head.weight"], rtol=1e-3, atol=1e-4
    )


# ---- the folder ----------------------------------------------------------------------------------


def test_files_of_a_run(glyphs_run: Result) -> None:
    folder = glyphs_run.folder
    assert folder is not None
    files = {p.name for p in folder.iterdir()}
    assert files >= {
        "config.toml",
        "rounds.jsonl",
        "checkpoint.safetensors",
        "model.safetensors",
        "summary.json",
    }
    assert "clients" not in files, "FPL keeps no private state"
    assert not [f for f in files if f.endswith(".tmp")]
    model, metadata = tree.load(folder / "model.safetensors")
    assert tree.equal(model, {"model": glyphs_run.model})
    assert metadata == {"hash": glyphs_run.config.hash, "holds": "the global model"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == glyphs_run.summary
    assert summary["hyper_parameters"]["tau"] == 0.05
    clients = [(c["client"], c["domain"], c["samples"]) for c in summary["clients"]]
    assert clients == [("scan-0", "scan", 10), ("photo-0", "photo", 10)]
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 1
    assert is_finished(folder, glyphs_run.config)
    assert not is_finished(folder, make_config(**GLYPHS, method="fedavg"))
    assert not is_finished(folder / "nowhere", glyphs_run.config)


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


def test_load_run_of_what_is_no_finished_run(tmp_path: Path) -> None:
    with pytest.raises(ProtofedError, match=r"no finished run.*--resume"):
        load_run(tmp_path)
    with pytest.raises(ProtofedError, match="there is no folder"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "study.toml").touch()
    with pytest.raises(ProtofedError, match=r"is a study's folder.*one of the runs"):
        load_run(tmp_path)


def test_a_method_that_shares_nothing_can_be_run(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Alone(Method):
        name: ClassVar[str] = "alone"

        @property
        def evaluates(self) -> str:
            return "clients"

        def shared(self, entry: Entry) -> Literal["both", "down", "no"]:
            return "no"

    result = run(tiny_task(), Alone(), **QUICK, out=tmp_path / "r")
    assert result.model == {}
    assert result.summary["bytes_up"] == 0


# ---- resume --------------------------------------------------------------------------------------


def one_and_a_half_states() -> int:
    federation = Federation(make_config(tiny_task(), Diary(), **QUICK), tiny_task())
    return tree.nbytes(federation.store.get("left-0")) * 3 // 2


@pytest.mark.parametrize("method", [FedAvg(), FPL(), Diary()], ids=lambda m: m.name)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_run_resumes_to_the_same_bits(
    tmp_path: Path, method: Method, at: int
) -> None:
    config = make_config(
        tiny_task(), method, **{**QUICK, "rounds": 4, "participation": 0.75}, checkpoint_every=2
    )
    whole = run(tiny_task(), config=config, out=tmp_path / "whole")
    out = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(tiny_task(), config=config, out=out, observers=[At(at, 2, ctrl_c)])
    assert tree.load(out / "checkpoint.safetensors")[1]["round"] == at, "what is complete is kept"
    assert len(read_records(out / "rounds.jsonl")) == at
    assert not (out / "summary.json").exists()
    resumed = run(tiny_task(), config=config, out=out, resume=True)
    assert same(whole, resumed)
    assert numbers(out) == numbers(tmp_path / "whole")
    assert (out / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    a, b = states(config, whole.folder), states(config, out)
    assert a.keys() == b.keys()
    assert all(tree.equal(a[n], b[n]) for n in a)
    assert bool(a) == (method.name == "diary")


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("limit", ["none", "one", "all"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_states_on_disk_survive(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    limit: str,
    every: int,
    how: str,
) -> None:
    """Killed: the folder as it is in the middle of a round; interrupted: Ctrl-C tidies up."""
    settings = {**QUICK, "rounds": 3, "participation": share, "checkpoint_every": every}
    config = make_config(tiny_task(), Diary(), **settings)
    whole = run(tiny_task(), config=config)
    size = {"none": 0, "one": one_and_a_half_states(), "all": 1 << 30}[limit]
    monkeypatch.setattr(module, "ClientStore", functools.partial(ClientStore, limit=size))
    clients = 4 if share == 1 else 2
    for at in (1, 2):
        out, copy = tmp_path / f"cut{at}", tmp_path / f"copy{at}"
        act = ctrl_c if how == "interrupted" else functools.partial(shutil.copytree, out, copy)
        observers = [At(at, clients, act)]
        if how == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                run(tiny_task(), config=config, out=out, observers=observers)
        else:
            assert same(whole, run(tiny_task(), config=config, out=out, observers=observers))
            out = copy
        resumed = run(tiny_task(), config=config, out=out, resume=True)
        assert same(whole, resumed), f"round {at}"
        names = set(tree.load(out / "checkpoint.safetensors")[1]["clients"].values())
        assert {p.name for p in (out / "clients").iterdir()} == names, "no litter is left"


def test_states_spill_to_disk(tmp_path: Path) -> None:
    config = make_config(tiny_task(), Diary(), **QUICK)
    federation = Federation(config, tiny_task(), tmp_path)
    federation.store.limit = one_and_a_half_states()
    federation.run_round()
    assert len(list((tmp_path / "clients").iterdir())) == 3, "one of four fits in memory"
    plain = Federation(config, tiny_task())
    plain.run_round()
    for name in plain.sites:
        assert tree.equal(federation.store.get(name), plain.store.get(name))
    a, b = federation.run_round(), plain.run_round()
    assert without_times([a]) == without_times([b])


def test_a_clients_name_is_a_safe_file_name(tmp_path: Path) -> None:
    store = ClientStore(lambda name: {}, tmp_path / "clients", limit=0)
    state = {"a": {"x": torch.ones(2)}}
    for name in ("a/b", "../c", "ü 1", "a%2Fb"):
        store.stage(name, state, 0)
    store.accept()
    assert all(tree.equal(store.get(n), state) for n in ("a/b", "../c", "ü 1", "a%2Fb"))
    assert len(list((tmp_path / "clients").iterdir())) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["clients"]


def test_staged_states_count_once_accepted() -> None:
    store = ClientStore(lambda name: {"a": {"x": torch.zeros(1)}}, None)
    store.stage("c", {"a": {"x": torch.ones(1)}}, 0)
    assert store.get("c")["a"]["x"].item() == 0
    store.abandon()
    store.accept()
    assert store.get("c")["a"]["x"].item() == 0
    store.stage("c", {"a": {"x": torch.ones(1)}}, 0)
    store.accept()
    assert store.get("c")["a"]["x"].item() == 1


def test_a_state_can_become_empty() -> None:
    store = ClientStore(lambda name: {"a": {"x": torch.zeros(1)}}, None)
    store.stage("c", {"a": {"x": torch.ones(1)}}, 0)
    store.accept()
    store.stage("c", {}, 1)
    store.accept()
    assert not any(store.get("c").values()), "what upload gives is the next private state"


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_interrupted_while_evaluating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The round's states are accepted but its record is not there: the round does not count."""
    config = make_config(tiny_task(), Diary(), **QUICK)
    whole, out = run(tiny_task(), config=config), tmp_path / "run"
    monkeypatch.setattr(module, "ClientStore", functools.partial(ClientStore, limit=limit))
    evaluate = Federation.evaluate

    def interrupted(self: Federation, observers: Sequence[Observer] = ()) -> Scores:
        return ctrl_c() if self.server.round == 2 else evaluate(self)  # type: ignore[return-value]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Federation, "evaluate", interrupted)
        run(tiny_task(), config=config, out=out)
    assert tree.load(out / "checkpoint.safetensors")[1]["round"] == 1
    assert len(read_records(out / "rounds.jsonl")) == 1
    assert same(whole, run(tiny_task(), config=config, out=out, resume=True))


def test_a_diverging_run_keeps_what_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Diverged, match=r"right-0, round 3, phase 0"):
        run(tiny_task(), Diary(fails_in=2), **QUICK, out=out)
    assert tree.load(out / "checkpoint.safetensors")[1]["round"] == 2
    assert len(read_records(out / "rounds.jsonl")) == 2
    assert not is_finished(out, make_config(tiny_task(), Diary(fails_in=2), **QUICK))


def test_resume_of_a_run_killed_before_its_first_checkpoint(tmp_path: Path) -> None:
    config = make_config(tiny_task(), Diary(), **QUICK)
    out, copy = tmp_path / "run", tmp_path / "copy"
    act = functools.partial(shutil.copytree, out, copy)
    whole = run(tiny_task(), config=config, out=out, observers=[At(1, 1, act)])
    assert not (copy / "checkpoint.safetensors").exists()
    assert len(read_records(copy / "rounds.jsonl")) == 1
    assert same(whole, run(tiny_task(), config=config, out=copy, resume=True))
    assert numbers(copy) == numbers(out)


def test_what_cannot_change_a_number_is_not_another_configuration(tmp_path: Path) -> None:
    """A study asks for other workers with other --jobs, and a copied folder for other paths."""
    given = make_config(tiny_task(), Diary(), **QUICK, workers=1)
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.toml").write_text(given.toml())
    for name in ("rounds.jsonl", "prototypes/7.safetensors", "clients/x", "notes.txt"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text('{"round": 0}\n')
    config = make_config(tiny_task(), Diary(), **QUICK, workers=2, checkpoint_every=1)
    assert begins_anew(out, config)
    whole = run(tiny_task(), config=config)
    assert same(whole, run(tiny_task(), config=config, out=out, resume=True))
    assert not begins_anew(out, config)
    assert not (out / "prototypes" / "7.safetensors").exists(), "of the run that was killed"
    assert not (out / "clients" / "x").exists()
    assert (out / "notes.txt").exists(), "not a run's"


@pytest.mark.parametrize("change", [{"seed": 1}, {"lr": 0.5}, {"rounds": 9}, None])
def test_another_configuration_without_a_checkpoint_is_refused(
    tmp_path: Path, digests: Digests, change: dict[str, Any] | None
) -> None:
    config = make_config(tiny_task(), Diary(), **QUICK)
    text = "rounds = " if change is None else replace(config, **change).toml()
    (tmp_path / "config.toml").write_text(text)
    before = digests(tmp_path)
    assert not begins_anew(tmp_path, config)
    with pytest.raises(ProtofedError, match=r"another configuration.*--overwrite"):
        run(tiny_task(), config=config, out=tmp_path, resume=True)
    assert digests(tmp_path) == before


def test_a_finished_run_without_its_checkpoint_is_kept(tmp_path: Path, digests: Digests) -> None:
    config = make_config(tiny_task(), FedAvg(), **QUICK)
    run(tiny_task(), config=config, out=tmp_path)
    (tmp_path / "checkpoint.safetensors").unlink()
    before = digests(tmp_path)
    assert not begins_anew(tmp_path, config)
    with pytest.raises(ProtofedError, match="finished run without its checkpoint"):
        run(tiny_task(), config=config, out=tmp_path, resume=True)
    assert digests(tmp_path) == before


def test_what_a_kill_left_of_the_first_file_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / ".config.toml.x1y2.tmp").write_text("rou")
    config = make_config(tiny_task(), FedAvg(), **QUICK)
    run(tiny_task(), config=config, out=tmp_path, resume=True)
    assert is_finished(tmp_path, config)


def test_resume_of_nothing_and_of_a_finished_run(tmp_path: Path) -> None:
    config = make_config(tiny_task(), FedAvg(), **QUICK)
    first = run(tiny_task(), config=config, out=tmp_path / "run", resume=True)
    again = run(tiny_task(), config=config, out=tmp_path / "run", resume=True)
    assert first.rounds == again.rounds, "seconds too: nothing was run again"
    assert same(first, again)


@pytest.mark.parametrize("cut", ['{"round": 1, "acc', "{", '{"round": 1}'])
def test_a_cut_last_line_is_left_out(tmp_path: Path, cut: str) -> None:
    config = make_config(tiny_task(), FedAvg(), **QUICK)
    out = tmp_path / "run"
    whole = run(tiny_task(), config=config)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_task(), config=config, out=out, observers=[At(1, 2, ctrl_c)])
    with (out / "rounds.jsonl").open("a") as file:
        file.write(cut)
    assert len(read_records(out / "rounds.jsonl")) == 1
    assert same(whole, run(tiny_task(), config=config, out=out, resume=True))
    assert len(read_records(out / "rounds.jsonl")) == 3


def test_a_line_cut_inside_a_character_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    record = {"round": 0, "accuracy": {"grün": 1.0}, "average": 1.0}
    content = (line(record) * 2).encode()
    path.write_bytes(content[: content.rindex("ü".encode()) + 1])
    assert read_records(path) == [record]


def test_damaged_records(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    with pytest.raises(ProtofedError, match=r"rounds\.jsonl"):
        read_records(path)
    path.write_text("garbage\n{}\n")
    with pytest.raises(ProtofedError, match=r"rounds\.jsonl.*damaged"):
        read_records(path)
    path.write_text("")
    assert read_records(path) == []


# ---- folders that cannot be used: an error, and nothing is touched -------------------------------


@pytest.fixture
def cut_run(tmp_path: Path) -> tuple[Config, Path]:
    config = make_config(tiny_task(), Diary(), **QUICK)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(tiny_task(), config=config, out=out, observers=[At(2, 1, ctrl_c)])
    return config, out


@pytest.mark.parametrize("change", [{"seed": 1}, {"lr": 0.5}, {"rounds": 9}])
def test_checkpoint_of_another_configuration(
    cut_run: tuple[Config, Path], digests: Digests, change: dict[str, Any]
) -> None:
    config, out = cut_run
    before = digests(out)
    with pytest.raises(ProtofedError, match=rf"another configuration.*{config.hash}"):
        run(tiny_task(), Diary(), **{**QUICK, **change}, out=out, resume=True)
    assert digests(out) == before


def test_checkpoint_every_is_not_another_configuration(cut_run: tuple[Config, Path]) -> None:
    _, out = cut_run
    run(tiny_task(), Diary(), **QUICK, checkpoint_every=1, out=out, resume=True)


@pytest.mark.parametrize("size", [0, 5, 500, -1])
def test_truncated_checkpoint(cut_run: tuple[Config, Path], digests: Digests, size: int) -> None:
    config, out = cut_run
    path = out / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    before = digests(out)
    with pytest.raises(ProtofedError, match=r"checkpoint\.safetensors"):
        run(tiny_task(), config=config, out=out, resume=True)
    assert digests(out) == before


def test_fewer_records_than_the_checkpoint(cut_run: tuple[Config, Path], digests: Digests) -> None:
    config, out = cut_run
    path = out / "rounds.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    (out / "clients" / "litter").write_text("x")
    before = digests(out)
    with pytest.raises(ProtofedError, match=r"checkpoint of round 2.*1 rounds"):
        run(tiny_task(), config=config, out=out, resume=True)
    assert digests(out) == before


def test_missing_client_state_is_named(cut_run: tuple[Config, Path]) -> None:
    config, out = cut_run
    victim = sorted((out / "clients").iterdir())[0]
    victim.unlink()
    with pytest.raises(ProtofedError, match=victim.name):
        run(tiny_task(), config=config, out=out, resume=True)


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_that_is_not_a_runs(
    tmp_path: Path, digests: Digests, flags: dict[str, bool]
) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    before = digests(tmp_path)
    with pytest.raises(ProtofedError, match="is not a run's folder"):
        run(tiny_task(), FedAvg(), **QUICK, out=tmp_path, **flags)
    assert digests(tmp_path) == before


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_file_instead_of_a_folder(tmp_path: Path, flags: dict[str, bool]) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(ProtofedError, match="is a file"):
        run(tiny_task(), FedAvg(), **QUICK, out=path, **flags)
    assert path.read_text() == "precious"


def test_an_existing_run_is_not_overwritten_by_accident(
    cut_run: tuple[Config, Path], digests: Digests
) -> None:
    config, out = cut_run
    before = digests(out)
    with pytest.raises(ProtofedError, match=r"already holds a run.*--resume.*--overwrite"):
        run(tiny_task(), config=config, out=out)
    assert digests(out) == before


def test_overwrite_starts_anew(cut_run: tuple[Config, Path]) -> None:
    _, out = cut_run
    result = run(tiny_task(), FedAvg(), **{**QUICK, "rounds": 1}, out=out, overwrite=True)
    assert same(result, run(tiny_task(), FedAvg(), **{**QUICK, "rounds": 1}))
    assert len(read_records(out / "rounds.jsonl")) == 1
    assert not (out / "clients").exists(), "nothing of the old run is left"
    assert json.loads((out / "summary.json").read_text())["method"] == "fedavg"


def test_overwrite_with_a_setting_that_cannot_run_leaves_the_old_run(
    cut_run: tuple[Config, Path], digests: Digests
) -> None:
    _, out = cut_run
    before = digests(out)
    with pytest.raises(ProtofedError, match="training images"):
        run(tiny_task(), FedAvg(), **QUICK, samples=10_000, out=out, overwrite=True)
    assert digests(out) == before


def test_an_empty_folder_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run(tiny_task(), FedAvg(), **{**QUICK, "rounds": 1}, out=tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_run_without_a_folder_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(tiny_task(), Diary(), **{**QUICK, "rounds": 1})
    assert list(tmp_path.iterdir()) == []


def test_memory_that_ends_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 8 GiB "
            "of which 1 MiB is free. Including non-PyTorch memory, this process has 1 GiB"
        )

    monkeypatch.setattr(Federation, "run_round", short)
    with pytest.raises(ProtofedError, match=r"memory is too short: .* 1 MiB is free \(use a small"):
        run(tiny_task(), FedAvg(), **TINY)
