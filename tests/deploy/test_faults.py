"""Bad, lost and late replies, and restarts: server and sites in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Error, Message, RecordDict
from tests.deploy.spoiled import SPOILED, set_values

from protofed import tree
from protofed.deploy.site import open_home
from protofed.deploy.wire import read_tree, to_array
from protofed.errors import ProtofedError
from protofed.runs.records import read_records
from protofed.runs.run import run

BAD = "print-0"


def test_bad_replies_are_refused_by_name_and_the_rounds_go_on(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """One kind after the other, a round for each; the first round is fine."""
    kinds = list(SPOILED)
    w = world(rounds=len(kinds) + 1)
    sent: dict[str, RecordDict] = {}

    def change(name: str, reply: Message) -> Message:
        round = (len(w.grid.seen) - 1) // 3  # three messages a round
        if name == BAD and 0 < round <= len(kinds):
            SPOILED[kinds[round - 1]][0](reply.content)
        if round == len(kinds):
            sent[name] = reply.content
        return reply

    w.grid.spoil = change
    with caplog.at_level(logging.WARNING, "protofed.deploy"):
        w.coordinator().run()
    first, *others = read_records(w.out / "rounds.jsonl")
    assert "problems" not in first and first["clients"] == 3
    for kind, record in zip(kinds, others, strict=True):
        words = SPOILED[kind][1]
        assert record["clients"] == 2, kind
        assert list(record["problems"]) == [BAD], kind
        assert words in record["problems"][BAD], kind
        assert any(BAD in m and words in m for m in caplog.messages), kind
    # the others' weights are renormalized: 30 and 20 samples
    a, b = (read_tree(sent[n])["model"] for n in ("scan-0", "photo-0"))
    model = tree.load(w.out / "model.safetensors")[0]["model"]
    for name, t in model.items():
        if t.is_floating_point():
            mean = (a[name].double() * (30 / 50) + b[name].double() * (20 / 50)).float()
            assert torch.equal(t, mean), name


def test_ragged_entries_have_to_fit_together(world: Callable[..., Any]) -> None:
    """FedPLVM's sites have as many prototypes a class as they found, in means and in masks."""
    w = world("fedplvm", rounds=2)

    def change(name: str, reply: Message) -> Message:
        if name == BAD and 3 < len(w.grid.seen) <= 6:
            content = reply.content
            mask = read_tree(content)["prototypes"]["mask"]
            content["tree.prototypes"]["mask"] = to_array(torch.cat([mask, mask], 1))
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    first, second = read_records(w.out / "rounds.jsonl")
    assert "problems" not in first
    assert "entry 'mask' of slot 'prototypes' has the shape" in second["problems"][BAD]
    assert second["clients"] == 2


def test_a_state_that_is_not_finite_ends_the_run_and_is_not_kept(
    world: Callable[..., Any],
) -> None:
    """Finite numbers, the squares of which FedAdam's server cannot hold."""
    w = world("fedadam", rounds=2)

    def change(name: str, reply: Message) -> Message:
        if name == BAD and len(w.grid.seen) > 3:
            record = reply.content["tree.model"]
            entry = next(n for n in record if n.endswith("weight"))
            record[entry] = to_array(read_tree(reply.content)["model"][entry] + 1e38)
        return reply

    w.grid.spoil = change
    with pytest.raises(ProtofedError, match="is no longer finite"):
        w.coordinator().run()
    state, about = tree.load(w.out / "checkpoint.safetensors")
    assert about["round"] == 1
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


def test_less_than_the_minimum_waits_with_words_and_ends(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    w = world(minimum=2, wait_seconds=0.3)
    w.grid.online = ["scan-0"]
    with (
        caplog.at_level(logging.WARNING, "protofed.deploy"),
        pytest.raises(ProtofedError, match="1 sites are there, and a round needs 2"),
    ):
        w.coordinator().run()
    assert "1 of 2 are there; not yet: print-0, photo-0" in caplog.text


def test_too_few_replies_average_nothing_and_end_after_three_attempts(
    world: Callable[..., Any],
) -> None:
    w = world(minimum=3)
    before = w.coordinator().server.state
    w.grid.spoil = lambda name, reply: (
        set_values(reply.content, round=9) or reply if name == BAD else reply
    )
    with pytest.raises(ProtofedError, match="round 1 failed 3 times: 2 of the 3"):
        w.coordinator().run()
    state, about = tree.load(w.out / "checkpoint.safetensors")
    assert about["round"] == 0 and tree.equal(state, before)


def test_a_late_site_takes_part_from_the_next_round(world: Callable[..., Any]) -> None:
    w = world(rounds=3)
    w.grid.online = ["scan-0", "photo-0"]

    def change(name: str, reply: Message) -> Message:
        w.grid.online = ["scan-0", "print-0", "photo-0"]
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    records = read_records(w.out / "rounds.jsonl")
    assert [r["clients"] for r in records] == [2, 3, 3]
    assert records[0]["problems"] == {BAD: "not connected"}
    assert records[0]["accuracy"]["print"] == records[0]["accuracy"]["print"]  # measured later


@pytest.mark.parametrize("method", ["fedseproto", "feddyn", "fpl"])
def test_a_killed_server_goes_on_with_the_same_bits(
    world: Callable[..., Any], tmp_path: Path, method: str
) -> None:
    w = world(method, rounds=4, checkpoint_every=2)

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
    """A site that trained in vain goes on as if it had not been there."""
    models = []
    for way in ("lost", "absent"):
        w = world("fedseproto", rounds=3)

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
        states = list((w.folder / "homes" / BAD / "states" / w.config.hash).iterdir())
        assert len(states) <= 3
    assert tree.equal(*models)


def test_a_site_that_lost_its_state_says_so(world: Callable[..., Any]) -> None:
    w = world("fedseproto", rounds=2)

    def change(name: str, reply: Message) -> Message:
        if len(w.grid.seen) == 3:
            for path in (w.folder / "homes" / BAD / "states").rglob("*.safetensors"):
                path.unlink()
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    second = read_records(w.out / "rounds.jsonl")[1]
    assert "no longer has its private state" in second["problems"][BAD]


def test_what_a_site_tells_of_its_troubles_names_no_file(world: Callable[..., Any]) -> None:
    w = world(rounds=1)
    (w.folder / "homes" / BAD / "site.toml").write_text("= broken")
    w.coordinator().run()
    problem = read_records(w.out / "rounds.jsonl")[0]["problems"][BAD]
    assert "ProtofedError" in problem and "site.toml" not in problem and "/" not in problem


def test_a_node_with_an_unknown_key_is_no_site(world: Callable[..., Any]) -> None:
    w = world(rounds=1)
    w.grid.keys[BAD] = b"no key at all"
    w.coordinator().run()
    assert read_records(w.out / "rounds.jsonl")[0]["clients"] == 2


def test_with_participation_the_same_sites_train_as_in_the_simulator(
    world: Callable[..., Any], tmp_path: Path
) -> None:
    w = world("fpl", rounds=4, participation=0.5)
    w.coordinator().run()
    oracle = run(config=w.config, out=tmp_path / "oracle")
    assert tree.equal(tree.load(w.out / "model.safetensors")[0], {"model": oracle.model})
    records = read_records(w.out / "rounds.jsonl")
    for mine, other in zip(records, oracle.rounds, strict=True):
        assert mine["accuracy"]["photo"] == other["accuracy"]["photo"]


def test_a_run_of_another_installation_is_refused(world: Callable[..., Any]) -> None:
    from protofed.deploy.spec import unpack

    w = world()
    with pytest.raises(ProtofedError, match="need the same version"):
        unpack(w.spec.replace(w.config.hash, "0000000000"))
    with pytest.raises(ProtofedError, match="cannot be read"):
        unpack("{}")


def test_the_names_of_states_are_no_paths(world: Callable[..., Any]) -> None:
    from protofed.deploy.site import States

    w = world()
    home = open_home(w.folder / "homes" / BAD)
    with pytest.raises(ProtofedError, match="is no name of a private state"):
        States(home.folder / "states").load("../../secret")
