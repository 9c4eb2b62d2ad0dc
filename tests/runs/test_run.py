"""What a run records and returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from tests.runs.diary import QUICK, TASK, Diary, same

from protofed.config import make_config
from protofed.data import Task
from protofed.errors import Diverged, ProtofedError
from protofed.federation.client_round import Reply
from protofed.federation.server import Server
from protofed.federation.simulation import Federation, Observer
from protofed.method import Batch, Client, Entry, Method, Phase, Terms
from protofed.methods import FPL, FedAvg
from protofed.runs.records import BESIDE, SEEN, Record, Records
from protofed.runs.result import Result
from protofed.runs.run import run
from protofed.studies.tables import AVERAGE, SPREAD, WORST
from protofed.testing.checks import TINY
from protofed.tree import Tree

pytestmark = pytest.mark.usefixtures("single_thread")


def test_fields_of_the_records() -> None:
    result = run(TASK, FPL(), **{**TINY, "epochs": 1})
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
            "by_client",
            "steps",
            "norms",
            "seconds",
        ]
        assert record["round"] == i + 1
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
    record = run(TASK, FedAvg(), **settings).rounds[0]
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
    result = run(TASK, method, **QUICK, participation=share, observers=[counter])
    assert result.rounds["bytes_up"] == list(up.values())
    assert result.rounds["bytes_down"] == counter.down[:3]
    assert result.rounds["clients"] == [4 * share] * 3
    assert result.summary["bytes_up"] == sum(up.values())
    assert result.summary["bytes_down"] == sum(counter.down[:3])


def test_accuracy_is_the_mean_of_the_last_five_rounds() -> None:
    result = run(TASK, FedAvg(), **{**QUICK, "rounds": 7})
    for domain in ("left", "right"):
        expected = sum(result.rounds[f"accuracy.{domain}"][2:]) / 5
        assert result.accuracy[domain] == pytest.approx(expected)
    assert result.accuracy["average"] == pytest.approx(sum(result.rounds["average"][2:]) / 5)
    assert result.summary["accuracy"] == result.accuracy


def test_observers_see_everything_in_order() -> None:
    seen: list[object] = []

    class Watch(Observer):
        def start(self, federation: Federation, records: Records) -> None:
            seen.append(("start", len(federation.clients), len(records)))

        def client(self, round: int, done: int, total: int) -> None:
            seen.append((round, done, total))

        def round(self, record: Record) -> None:
            seen.append(("round", record["round"]))

        def end(self, result: Result) -> None:
            seen.append(("end", len(result.rounds)))

    settings = {**QUICK, "rounds": 2, "participation": 0.5}
    watched = run(TASK, FedAvg(), **settings, observers=[Watch()])
    rounds = [[(r, 1, 2), (r, 2, 2), ("round", r)] for r in (1, 2)]
    assert seen == [("start", 4, 0), *rounds[0], *rounds[1], ("end", 2)]
    assert same(watched, run(TASK, FedAvg(), **settings))


def test_a_run_is_repeatable_and_its_seed_counts() -> None:
    settings = {**QUICK, "rounds": 4, "participation": 0.5}
    result = run(TASK, FedAvg(), **settings)
    assert result.rounds["clients"] == [2] * 4
    assert same(result, run(TASK, FedAvg(), **settings))
    assert not same(result, run(TASK, FedAvg(), **{**settings, "seed": 1}))


def test_double_precision() -> None:
    settings = {**QUICK, "rounds": 1}
    result = run(TASK, FedAvg(), **settings, precision="fp64")
    assert result.model["head.weight"].dtype == torch.float64
    single = run(TASK, FedAvg(), **settings)
    torch.testing.assert_close(
        result.model["head.weight"].float(), single.model["head.weight"], rtol=1e-3, atol=1e-4
    )


def test_a_method_that_shares_nothing_can_be_run(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Alone(Method):
        name: ClassVar[str] = "alone"

        @property
        def evaluates(self) -> str:
            return "clients"

        def shared(self, entry: Entry) -> Literal["both", "down", "no"]:
            return "no"

    result = run(TASK, Alone(), **QUICK, out=tmp_path / "r")
    assert result.model == {}
    assert result.summary["bytes_up"] == 0


def test_a_run_without_a_folder_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(TASK, Diary(), **{**QUICK, "rounds": 1})
    assert list(tmp_path.iterdir()) == []


def test_out_of_gpu_memory_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 8 GiB "
            "of which 1 MiB is free. Including non-PyTorch memory, this process has 1 GiB"
        )

    monkeypatch.setattr(Federation, "run_round", short)
    with pytest.raises(ProtofedError, match=r"memory.*: .* 1 MiB is free \(use a small"):
        run(TASK, FedAvg(), **QUICK)


# ---- mistakes that would pass for results ------------------------------------------------------


def test_a_last_round_that_diverged_is_no_result() -> None:
    """Its losses are those from before the last step: with one step they are finite."""

    class Steep(FedAvg):
        def loss(self, client: Client, batch: Batch) -> Terms:
            return {"steep": 1e37 * super().loss(client, batch)["ce"]}

    steep = {**QUICK, "rounds": 1, "lr": 1e6, "batch": 64}
    with pytest.raises(Diverged, match="round 1: the averaged model is not finite"):
        run(TASK, Steep(), bounds="off", **steep)
    with pytest.raises(Diverged, match=r"refused; .* changed by inf: too large"):
        run(TASK, Steep(), **steep)


def test_an_average_that_is_not_finite_names_the_hook() -> None:
    class Nan(FedAvg):
        def weights(self, server: Any, updates: Any) -> Any:
            return [float("nan")] * len(updates)

    with pytest.raises(Diverged, match="weights or aggregate"):
        run(TASK, Nan(), **{**QUICK, "rounds": 1})


def test_a_class_is_not_a_method() -> None:
    with pytest.raises(ProtofedError, match=r"write FPL\(\)"):
        run(TASK, FPL, **QUICK)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [{"flip": False}, {"augment": "color"}, {"image_size": 16}, {"test_split": "mod10"}]
)
def test_a_loaded_task_takes_no_settings_of_its_loading(given: dict[str, Any]) -> None:
    """They would be recorded and change nothing."""
    task = replace(TASK, test_split="mod10")
    (name,) = given
    with pytest.raises(ProtofedError, match=f"{name} has no effect .*load_task.*task='tiny'"):
        run(task, "fedavg", **{**TINY, **given})


def test_a_loaded_task_takes_the_settings_that_it_has() -> None:
    """One dictionary of settings may serve load_task and run."""
    own = {"image_size": TASK.image_size, "flip": TASK.augment.flip}
    result = run(TASK, "fedavg", **{**QUICK, "rounds": 1, **own})
    assert result.config.hash == make_config(TASK, "fedavg", **{**QUICK, "rounds": 1}).hash


def test_a_ready_config_takes_no_task_by_name() -> None:
    with pytest.raises(ProtofedError, match="no further settings"):
        run("glyphs", config=make_config(TASK, "fedavg", **QUICK))


@pytest.mark.parametrize("name", [AVERAGE, WORST, SPREAD, SEEN, *BESIDE.values()])
def test_a_domain_cannot_have_the_name_of_a_column(name: str) -> None:
    domains = {name: TASK.domains["left"], "right": TASK.domains["right"]}
    with pytest.raises(ProtofedError, match="cannot be called"):
        Task(TASK.name, TASK.classes, domains, TASK.augment, TASK.clients, TASK.samples)


def with_value(**values: Any) -> FedAvg:
    return type("Mine", (FedAvg,), {"name": "mine", **values})()


@pytest.mark.parametrize(("method", "words"), [
    (with_value(evaluates="foo"), "unknown evaluates of method mine 'foo'"),
    (with_value(proto_pass="foo"), "unknown proto_pass"),
    (with_value(holdout=2.0), "holdout of method mine"),
    (with_value(shared=lambda self, entry: "maybe"), "unknown answer of mine's shared"),
    (with_value(phases=lambda self, r, e: (Phase(self.loss, optimizer="lion"),)), "optimizer"),
])  # fmt: skip
def test_misspelt_values_of_a_method(method: FedAvg, words: str) -> None:
    with pytest.raises(ProtofedError, match=words):
        run(TASK, method, **{**QUICK, "rounds": 1})


def test_numbers_of_numpy_are_numbers() -> None:
    tau = FPL(tau=np.float64(0.05)).tau  # type: ignore[arg-type]
    assert (tau, type(tau)) == (0.05, float)
