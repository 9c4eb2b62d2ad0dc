"""The server's rounds, with sites in one process: equal to the simulator, whatever happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Error, Message
from tests.deploy.spoiled import set_values
from tests.some_methods import REPEATS, options_of

from protofed import tree
from protofed.deploy import operator
from protofed.deploy.audit import AuditLog
from protofed.deploy.coordinator import POLLS_PER_SECOND, Coordinator
from protofed.deploy.spec import unpack
from protofed.deploy.wire import read_tree, to_array
from protofed.errors import ProtofedError
from protofed.inference import load_model
from protofed.methods import METHODS
from protofed.models import build
from protofed.models.weights import public_name
from protofed.runs.model_file import read_model
from protofed.runs.records import read_records
from protofed.runs.run import run

BAD = "print-0"
FEW = {"scan": 14, "print": 12, "photo": 11}
MIXED = ("fedgh", "fedmd", "fedproto", "fedseproto", "local")
"""Methods whose clients may have different models."""
SHARE_NO_MODEL = ("fedmd", "local")
CASES = [
    pytest.param(name, "cnn2", marks=marks)
    for name, marks in REPEATS.items()
    if name not in SHARE_NO_MODEL
]
CASES += [pytest.param(name, "cnn3,cnn2", marks=REPEATS[name]) for name in MIXED]


def _numbers(records: Any) -> list[dict[str, Any]]:
    """What depends on neither the clock nor the wire."""
    other = ("seconds", "wire", "bytes_down", "problems")
    return [{k: v for k, v in r.items() if k not in other} for r in records]


@pytest.mark.parametrize(("method", "models"), CASES)
def test_the_model_equals_the_simulators_bit_for_bit(
    world: Callable[..., Any], tmp_path: Path, method: str, models: str
) -> None:
    options = options_of(method) | ({"images": 24} if METHODS[method]().public_images else {})
    w = world(method, options, rounds=2, model=models, samples=FEW)
    w.coordinator().run()
    oracle = run(config=w.config, out=tmp_path / "oracle")
    found = read_model(w.out / "model.safetensors")
    assert tree.equal({"model": found.model}, tree.copy({"model": oracle.model}))
    assert oracle.stored is not None
    assert tree.equal(found.received, oracle.stored.received)
    assert found.card.hash == w.run.hash and found.card.classes == oracle.stored.card.classes
    for site in w.members.sites:  # each site has its own model, or the one for all
        path = w.folder / "homes" / site / "models" / f"{w.run.name}.safetensors"
        whole = oracle.client_models.get(site, {}) | oracle.model
        own = read_model(path)
        mine = dict(own.clients.get(site, {})) | own.model
        assert load_model(path).client == (site if own.clients else None)
        assert whole.keys() <= mine.keys()
        assert tree.equal({"model": {n: mine[n] for n in whole}}, {"model": whole})
    ours = _numbers(read_records(w.out / "rounds.jsonl"))
    theirs = _numbers(oracle.rounds)
    for record in theirs:
        beside = record.pop("beside", {})
        if w.config.method.evaluates == "everyone":  # sites have no images but their own
            record["accuracy"] = beside["own"]
        record["accuracy"].pop("inverse", None)  # the domain without a site
        record["average"] = round(sum(record["accuracy"].values()) / 3, 4)
        for site, own in record["by_client"].items():  # sites also say what they measured
            own["accuracy"] = record["accuracy"][w.members.sites[site].domain]
            own["tested"] = w.run.counts[site].tests
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["average"] == pytest.approx(other.pop("average"), abs=2e-4)
        mine.pop("average")
        assert mine == other


def test_options_of_training_are_the_sites_too(world: Callable[..., Any], tmp_path: Path) -> None:
    options = {"optimizer": "adamw", "schedule": "cosine", "warmup_rounds": 1, "clip_norm": 0.5,
               "label_smoothing": 0.1, "sampling": "balanced"}  # fmt: skip
    w = world("fpl", rounds=3, samples=FEW, **options)
    w.coordinator().run()
    oracle = run(config=w.config, out=tmp_path / "oracle")
    assert tree.equal(tree.load(w.out / "model.safetensors")[0], {"model": oracle.model})
    assert read_records(w.out / "rounds.jsonl")["lr"] == oracle.rounds["lr"] == [5e-4, 1e-3, 5e-4]


def test_weights_from_a_file_reach_the_sites_with_the_model(
    world: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the operator's machine has the file; ``deploy start`` puts a copy at the server."""
    path, server = tmp_path / "private" / "w.pth", tmp_path / "server"
    path.parent.mkdir()
    given = {"model": "resnet18_imagenet", "width": 4, "norm": None, "samples": FEW, "rounds": 1}
    network = build("resnet18_imagenet", 10, 32, width=4)
    state = network.encoder.state_dict()
    torch.save({public_name(n, (2, 2, 2, 2)): t for n, t in state.items()}, path)
    w = world("fedavg", **given, weights=str(path), train="head")
    assert "private" not in w.spec, "paths stay on the operator's machine"
    monkeypatch.setattr(operator, "runs", lambda folder: [])
    monkeypatch.setattr(operator, "flwr", lambda *_: {"run-id": 1})
    operator.start(server, w.run, resume=False, overwrite=False)
    oracle = run(config=w.config)
    path.unlink()
    spec = operator.with_weights(server, unpack(w.spec))
    Coordinator(w.grid, w.members, spec, w.out, poll=0.005).run()
    found = read_model(w.out / "model.safetensors").model
    assert tree.equal({"model": found}, tree.copy({"model": oracle.model}))
    assert torch.equal(found["encoder.0.weight"], state["0.weight"])
    (record,) = read_records(w.out / "rounds.jsonl")
    assert record["bytes_up"] == 4 * 3 * (10 * 32 + 10), "three sites send the head alone"
    Path(str(spec.config.weights)).write_bytes(b"other")
    with pytest.raises(ProtofedError, match="is not the file of weights that the run names"):
        operator.with_weights(server, unpack(w.spec))


def test_with_participation_the_same_sites_train_as_in_the_simulator(
    world: Callable[..., Any], tmp_path: Path
) -> None:
    w = world("fpl", rounds=3, participation=0.5, samples=FEW)
    w.coordinator().run()
    oracle = run(config=w.config, out=tmp_path / "oracle")
    assert tree.equal(tree.load(w.out / "model.safetensors")[0], {"model": oracle.model})
    records = read_records(w.out / "rounds.jsonl")
    for mine, other in zip(records, oracle.rounds, strict=True):
        assert mine["accuracy"]["photo"] == other["accuracy"]["photo"]


def test_the_bill_is_what_passed_the_wire(world: Callable[..., Any]) -> None:
    """By site and round, and in total, with a refused reply and the last evaluation included."""
    w = world("fpl", rounds=2)

    def change(name: str, reply: Any) -> Any:
        if name == "print-0" and len(w.grid.seen) == 5:
            set_values(reply.content, round=9)
        return reply

    w.grid.spoil = change
    summary = w.coordinator().run()
    rounds = [w.grid.passed[i : i + 3] for i in (0, 3)]
    records = read_records(w.out / "rounds.jsonl")
    for record, messages in zip(records, rounds, strict=True):
        assert record["wire"] == {n: {"down": down, "up": up} for n, down, up in messages}
        # the tensors' own bytes are nearly all of it; a refused reply's are not the run's
        assert sum(down for _, down, _ in messages) < 1.02 * record["bytes_down"] + 30_000
        counted = [up for n, _, up in messages if n not in record.get("problems", {})]
        assert record["bytes_up"] < sum(counted) < 1.02 * record["bytes_up"] + 30_000
    assert len(w.grid.passed) == 9
    for site, bill in summary["wire"].items():
        mine = [(down, up) for name, down, up in w.grid.passed if name == site]
        assert bill == {"down": sum(d for d, _ in mine), "up": sum(u for _, u in mine)}
    assert list(summary["wire"]) == list(w.members.sites)


@pytest.mark.parametrize("liars", [[BAD], ["scan-0", BAD, "photo-0"]])
def test_a_state_that_is_not_finite_is_not_kept(
    world: Callable[..., Any], liars: list[str]
) -> None:
    """Finite numbers, the squares of which FedAdam's server cannot hold: of one site, or of all."""
    w = world("fedadam", rounds=2, bounds="off")

    def change(name: str, reply: Message) -> Message:
        if name in liars and len(w.grid.seen) > 3 and reply.content.array_records:
            record = reply.content["tree.model"]
            entry = next(n for n in record if n.endswith("weight"))
            record[entry] = to_array(read_tree(reply.content)["model"][entry] + 1e38)
        return reply

    w.grid.spoil = change
    if len(liars) > 1:
        with pytest.raises(ProtofedError, match="is no longer finite"):
            w.coordinator().run()
    else:
        w.coordinator().run()
        last = read_records(w.out / "rounds.jsonl")[-1]
        assert last["clients"] == 2 and "is no longer finite" in last["problems"][BAD]
    state, about = tree.load(w.out / "checkpoint.safetensors")
    assert about["round"] == (1 if len(liars) > 1 else 2)
    assert all(t.isfinite().all() for t in state["model"].values())


def test_an_error_and_a_silent_site_are_named(world: Callable[..., Any]) -> None:
    w = world(rounds=1, round_seconds=1.0)

    def change(name: str, reply: Message) -> Message | None:
        if len(w.grid.seen) > 3:
            return reply
        if name == BAD:
            reply.__dict__["_content"] = None
            reply.__dict__["_error"] = Error(5, "Node Unavailable")
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    (record,) = read_records(w.out / "rounds.jsonl")
    assert record["problems"] == {BAD: "error 5: Node Unavailable"}
    w = world(rounds=1, round_seconds=1.0)
    w.grid.spoil = lambda name, reply: None if name == BAD and len(w.grid.seen) < 4 else reply
    w.coordinator().run()
    (record,) = read_records(w.out / "rounds.jsonl")
    assert record["problems"] == {BAD: "no reply within 1 s"}
    assert record["clients"] == 2


def test_the_more_sites_are_silent_the_less_often_they_are_asked_for(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(rounds=1)
    pauses, pull = list[float](), w.grid.pull_messages
    monkeypatch.setattr(time, "sleep", pauses.append)
    w.grid.pull_messages = lambda ids: pull(ids) if pauses else []
    w.coordinator().run()
    assert max(pauses) == 3 / POLLS_PER_SECOND


def test_a_sites_error_is_one_line(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    w = world(rounds=1)

    def change(name: str, reply: Message) -> Message:
        if name == BAD and len(w.grid.seen) <= 3:
            reply.__dict__["_content"] = None
            reply.__dict__["_error"] = Error(7, "oh\n2025-01-01 INFO fine " + "x" * 10**5)
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    problem = read_records(w.out / "rounds.jsonl")[0]["problems"][BAD]
    assert problem.startswith("error 7: oh 2025") and len(problem) == 500


def test_a_sites_error_names_no_file(world: Callable[..., Any]) -> None:
    w = world(rounds=1)
    (w.folder / "homes" / BAD / "site.toml").write_text("= broken")
    w.coordinator().run()
    problem = read_records(w.out / "rounds.jsonl")[0]["problems"][BAD]
    assert "ProtofedError" in problem and "site.toml" not in problem and "/" not in problem
    entry, *_ = AuditLog(w.folder / "homes" / BAD).entries()
    assert entry["event"] == "failed" and "site.toml" in entry["why"]


def test_a_node_with_an_unknown_key_is_no_site(world: Callable[..., Any]) -> None:
    w = world(rounds=1)
    w.grid.keys[BAD] = b"no key at all"
    w.coordinator().run()
    assert read_records(w.out / "rounds.jsonl")[0]["clients"] == 2


def test_with_too_few_sites_the_run_waits_and_ends(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    w = world(minimum=2, wait_seconds=0.3)
    w.grid.online = ["scan-0"]
    with (
        caplog.at_level(logging.WARNING, "protofed.deploy"),
        pytest.raises(ProtofedError, match=r"1 sites are connected .* and a round needs 2"),
    ):
        w.coordinator().run()
    assert "1 of 2 are ready; missing: print-0, photo-0" in caplog.text


def test_too_few_replies_average_nothing_and_end_after_three_attempts(
    world: Callable[..., Any],
) -> None:
    w = world(minimum=3)
    before = w.coordinator().server.state
    w.grid.spoil = lambda name, reply: (
        set_values(reply.content, round=9) or reply if name == BAD else reply
    )
    with pytest.raises(ProtofedError, match="round 1 failed 3 times: only 2 of 3"):
        w.coordinator().run()
    state, about = tree.load(w.out / "checkpoint.safetensors")
    assert about["round"] == 0 and tree.equal(state, before)


def test_a_late_site_takes_part_from_the_next_round(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    w = world(rounds=3)
    w.grid.online = ["scan-0", "photo-0"]

    def change(name: str, reply: Message) -> Message:
        w.grid.online = ["scan-0", "print-0", "photo-0"]
        return reply

    w.grid.spoil = change
    with caplog.at_level(logging.INFO, "protofed.deploy"):
        w.coordinator().run()
    records = read_records(w.out / "rounds.jsonl")
    assert [r["clients"] for r in records] == [2, 3, 3]
    assert records[0]["problems"] == {BAD: "not connected"}
    why, sent = f"round 1: site {BAD}: not connected", "round 1: sent to scan-0, photo-0"
    assert caplog.messages.index(why) < caplog.messages.index(sent)
    assert records[0]["accuracy"]["print"] == records[0]["accuracy"]["print"]  # measured later


def test_the_log_says_once_why_a_site_takes_no_part(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    w = world(rounds=3)
    w.grid.online = ["scan-0", "photo-0"]
    with caplog.at_level(logging.WARNING, "protofed.deploy"):
        w.coordinator().run()
    records = read_records(w.out / "rounds.jsonl")
    assert [r["problems"] for r in records] == [{BAD: "not connected"}] * 3
    assert [m for m in caplog.messages if BAD in m and "missing" not in m] == [
        f"round 1: site {BAD}: not connected"
    ]


def test_prototypes_of_an_attempt_that_failed_are_not_kept(world: Callable[..., Any]) -> None:
    """Who replied only then did not take part in the round."""
    w = world(rounds=1, minimum=2, keep_rounds="all")
    gone = {"photo-0", BAD}

    def change(name: str, reply: Message) -> Message:
        first = len(w.grid.seen) <= 3
        if name in gone if first else name == "scan-0" and len(w.grid.seen) <= 6:
            set_values(reply.content, round=9)
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    assert read_records(w.out / "rounds.jsonl")[0]["clients"] == 2
    about = tree.load(w.out / "prototypes" / "1.safetensors")[1]
    assert [c["client"] for c in about["clients"]] == [BAD, "photo-0"]


def test_two_servers_do_not_write_one_run(world: Callable[..., Any]) -> None:
    w = world(rounds=2)
    told: list[str] = []

    def change(name: str, reply: Message) -> Message:
        if not told:
            with pytest.raises(ProtofedError) as error:
                w.coordinator().run(resume=True)
            told.append(str(error.value))
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    assert "another process has a run under way" in told[0]
    assert len(read_records(w.out / "rounds.jsonl")) == 2


@pytest.mark.parametrize("method", ["fedbn", "feddyn", "fpl"])
def test_a_killed_server_resumes_with_the_same_bits(
    world: Callable[..., Any], tmp_path: Path, method: str
) -> None:
    w = world(method, rounds=4, checkpoint_every=2, samples=FEW)

    class Killed(BaseException):
        pass

    def change(name: str, reply: Message) -> Message:
        if len(w.grid.seen) == 11:  # in the fourth round, which has no checkpoint before it
            raise Killed
        return reply

    w.grid.spoil = change
    coordinator = w.coordinator()
    # SIGKILL leaves no time for a last checkpoint
    real, coordinator.ledger.checkpoint = (
        coordinator.ledger.checkpoint,
        lambda kept: real(kept) if kept.round == 2 else None,
    )
    with pytest.raises(Killed):
        coordinator.run()
    assert tree.load(w.out / "checkpoint.safetensors")[1]["round"] == 2
    w.grid.spoil = lambda name, reply: reply
    w.coordinator().run(resume=True)
    oracle = run(config=w.config, out=tmp_path / "oracle")
    assert tree.equal(tree.load(w.out / "model.safetensors")[0], {"model": oracle.model})
    assert len(read_records(w.out / "rounds.jsonl")) == 4


def test_a_lost_reply_does_not_count_at_the_site_either(world: Callable[..., Any]) -> None:
    """A site whose reply was lost continues as if it had not been there."""
    models = []
    for way in ("lost", "absent"):
        w = world("fedbn", rounds=3)

        def change(name: str, reply: Message, w: Any = w, way: str = way) -> Message:
            done = len(w.grid.seen)
            if way == "lost" and name == BAD and done in (4, 5, 6):
                set_values(reply.content, round=7)
            if way == "absent":
                gone = 3 <= done < 5
                w.grid.online = ["scan-0", "photo-0"] if gone else ["scan-0", BAD, "photo-0"]
            return reply

        w.grid.spoil = change
        w.coordinator().run()
        records = read_records(w.out / "rounds.jsonl")
        assert [r["clients"] for r in records] == [3, 2, 3]
        models.append(tree.load(w.out / "model.safetensors")[0])
        states = list((w.folder / "homes" / BAD / "states" / w.run.hash).iterdir())
        assert len(states) <= 3
    assert tree.equal(*models)


def test_a_site_that_lost_its_state_says_so(world: Callable[..., Any]) -> None:
    w = world("fedbn", rounds=2)

    def change(name: str, reply: Message) -> Message:
        if len(w.grid.seen) == 3:
            for path in (w.folder / "homes" / BAD / "states").rglob("*.safetensors"):
                path.unlink()
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    second = read_records(w.out / "rounds.jsonl")[1]
    assert "no longer has its private state" in second["problems"][BAD]
