"""A lie within all bounds shows in the next round; it can be taken back, by itself or by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Error, Message

from protofed import tree
from protofed.deploy.coordinator import Coordinator
from protofed.deploy.messages import RECORD, SITE_FAILED
from protofed.deploy.operator import roll_back
from protofed.deploy.spec import unpack
from protofed.deploy.wire import read_tree, to_array
from protofed.errors import Busy, ProtofedError
from protofed.runs.folder import RunFolder
from protofed.runs.records import read_records

BAD = "print-0"


def said(reply: Message) -> Any:
    return reply.content[RECORD]


def poison(w: Any, round: int, factor: float = 30.0, times: int = 1) -> list[int]:
    """Let a site send a model that is so much larger, in this round, so many times."""
    done: list[int] = []

    def change(name: str, reply: Message) -> Message:
        lies = name == BAD and said(reply)["trained"] and said(reply)["round"] == round
        if lies and len(done) < times:
            record = reply.content["tree.model"]
            for entry, t in read_tree(reply.content)["model"].items():
                if t.is_floating_point():
                    record[entry] = to_array(t.abs() * factor)
            done.append(round)
        return reply

    w.grid.spoil = change
    return done


def coordinator(w: Any, on_poison: str) -> Coordinator:
    spec = unpack(w.spec)
    return Coordinator(w.grid, w.members, spec, w.out, on_poison=on_poison, poll=0.005)


def without_in(w: Any, *rounds: int) -> None:
    """Let the site be away in these rounds."""

    def change(name: str, reply: Message) -> Message:
        now = said(reply)["round"]
        last = name == w.grid.online[-1]  # the round's last message
        away = (now + 1 if last else now) in rounds
        w.grid.online = ["scan-0", "photo-0"] if away else ["scan-0", BAD, "photo-0"]
        return reply

    w.grid.spoil = change
    if 0 in rounds:
        w.grid.online = ["scan-0", "photo-0"]


def model(w: Any) -> Any:
    return tree.load(w.out / "model.safetensors")[0]


@pytest.mark.parametrize(
    ("round", "method"),
    [
        (0, "fpl"),
        (2, "fedbn"),
        pytest.param(0, "fedbn", marks=pytest.mark.slow),
        pytest.param(2, "fpl", marks=pytest.mark.slow),
    ],
)
def test_a_poisoned_round_is_repeated_without_the_liar(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture, method: str, round: int
) -> None:
    """And the run is then the one in which the liar was not there in that round, bit for bit."""
    w = world(method, rounds=4)
    assert_done = poison(w, round)
    if round == 0:  # the losses of two rounds are needed to see a jump; a failure shows at once
        real = w.grid.spoil

        def fails(name: str, reply: Message) -> Message:
            reply = real(name, reply)
            if assert_done and name != BAD and said(reply)["round"] == 1 and len(assert_done) < 9:
                assert_done.append(1)
                if assert_done.count(1) <= 2:
                    reply.__dict__["_content"] = None
                    reply.__dict__["_error"] = Error(SITE_FAILED, "loss term 'ce' is nan")
            return reply

        w.grid.spoil = fails
    coordinator(w, "rollback").run()
    assert assert_done[0] == round
    assert f"replies of that round that stood out: {BAD}" in caplog.text
    records = read_records(w.out / "rounds.jsonl")
    assert [r["round"] for r in records] == [1, 2, 3, 4]
    assert [r["clients"] for r in records] == [2 if i == round else 3 for i in range(4)]
    assert records[round]["problems"] == {BAD: "left out"}
    other = world(method, rounds=4)
    without_in(other, round)
    other.coordinator().run()
    assert [r["clients"] for r in read_records(other.out / "rounds.jsonl")] == [
        2 if i == round else 3 for i in range(4)
    ]
    assert tree.equal(model(w), model(other))


def test_the_last_round_can_be_poisoned_too(world: Callable[..., Any]) -> None:
    w = world("fedavg", rounds=3)
    done = poison(w, 2)
    real = w.grid.spoil

    def fails(name: str, reply: Message) -> Message:
        reply = real(name, reply)
        if said(reply)["round"] == 3 and len(done) < 4:
            done.append(3)
            reply.__dict__["_content"] = None
            reply.__dict__["_error"] = Error(SITE_FAILED, "the model's scores are not finite")
        return reply

    w.grid.spoil = fails
    coordinator(w, "rollback").run()
    records = read_records(w.out / "rounds.jsonl")
    assert [r["clients"] for r in records] == [3, 3, 2]
    assert all(r["average"] == r["average"] for r in records)


def test_by_default_the_run_stops_and_the_operator_decides(world: Callable[..., Any]) -> None:
    w = world("fpl", rounds=4)
    poison(w, 2, times=9)
    with pytest.raises(ProtofedError, match=f"after round 3 .* stood out: {BAD}") as error:
        coordinator(w, "stop").run()
    assert f"deploy rollback --rounds 1 --without {BAD}" in error.value.hint
    assert tree.load(w.out / "checkpoint.safetensors")[1]["round"] == 3
    home = w.folder / "server"
    (home / "runs").mkdir(parents=True)
    (home / "federation.toml").write_text(
        (w.folder / "homes" / BAD / "federation.toml").read_text()
    )
    w.out.rename(home / "runs" / w.run.name)
    w.out = home / "runs" / w.run.name
    with pytest.raises(ProtofedError, match="unknown site 'prnt-0'"):
        roll_back(home, None, 1, ["prnt-0"])
    with pytest.raises(ProtofedError, match=r"no checkpoint of round -6 .* it has: 3, 2, 1"):
        roll_back(home, None, 9, [])
    with RunFolder(w.out).locked(), pytest.raises(Busy):
        roll_back(home, None, 1, [])
    run, now = roll_back(home, w.run.name, 1, [BAD])
    assert now == 2 and run.path == w.out
    before = run.checkpoint().extra["wire"][BAD]
    w.coordinator().run(resume=True)
    records = read_records(w.out / "rounds.jsonl")
    assert [r["clients"] for r in records] == [3, 3, 2, 2]  # for the rest of the run
    assert RunFolder(w.out).summary()["wire"][BAD] == before  # nor the last model to evaluate
    assert all(BAD not in r["by_client"] for r in records[2:])
    _, now = roll_back(home, None, 2, [])  # a finished run, too
    assert now == 2 and not (w.out / "summary.json").exists()
    w.grid.spoil = lambda name, reply: reply
    w.coordinator().run(resume=True)
    assert [r["clients"] for r in read_records(w.out / "rounds.jsonl")] == [3, 3, 3, 3]


def test_a_round_whose_sites_are_all_left_out_changes_nothing(world: Callable[..., Any]) -> None:
    private = {"update_epsilon": 50.0, "update_clip": 1.0, "norm": "group"}
    w = world("fpl", rounds=2, participation=0.1, **private)
    made = coordinator(w, "stop")
    (alone,) = made.server.sample()
    made.excluded = {alone: 1}
    before, states = made.server.state, []
    made.ledger.artifacts.write = lambda server: states.append(server.state)  # after each round
    made.run()
    empty, full = read_records(w.out / "rounds.jsonl")
    assert (empty["clients"], empty["loss"], empty["bytes_up"]) == (0, {}, 0)
    assert empty["problems"] == {alone: "left out"}
    ((_, none),), ((_, some),) = empty["privacy"].items(), full["privacy"].items()
    assert none["epsilon"] == 0 < some["epsilon"]
    assert tree.equal(states[0], before) and full["clients"] == 1


def test_two_sites_cannot_tell_who_lied(world: Callable[..., Any]) -> None:
    w = world("fedavg", rounds=4)
    w.grid.online = ["scan-0", BAD]
    poison(w, 2)
    with pytest.raises(ProtofedError, match="stood out: none") as error:
        coordinator(w, "rollback").run()
    assert "--without" not in error.value.hint


def test_a_site_that_lies_again_stays_left_out(world: Callable[..., Any]) -> None:
    w = world("fedavg", rounds=6)
    lies: list[int] = []

    def change(name: str, reply: Message) -> Message:
        if name == BAD and said(reply)["trained"] and said(reply)["round"] >= 2:
            lies.append(said(reply)["round"])
            record = reply.content["tree.model"]
            for entry, t in read_tree(reply.content)["model"].items():
                if t.is_floating_point():
                    record[entry] = to_array(t.abs() * 30)
        return reply

    w.grid.spoil = change
    coordinator(w, "rollback").run()
    records = read_records(w.out / "rounds.jsonl")
    assert [r["clients"] for r in records] == [3, 3, 2, 2, 2, 2]
    assert lies[0] == 2 and set(lies) <= {2, 3, 4}


def test_errors_that_have_nothing_to_do_with_a_round_are_no_poison(
    world: Callable[..., Any],
) -> None:
    """A lost connection is another code; and one site's failure is its own."""
    w = world("fedavg", rounds=3)

    def change(name: str, reply: Message) -> Message:
        code = {"scan-0": 5, BAD: SITE_FAILED}.get(name)
        if code is not None and said(reply)["round"] == 1 and len(w.grid.seen) <= 6:
            reply.__dict__["_content"] = None
            reply.__dict__["_error"] = Error(code, "gone")
        return reply

    w.grid.spoil = change
    coordinator(w, "rollback").run()
    assert [r["clients"] for r in read_records(w.out / "rounds.jsonl")] == [3, 3, 3]


def test_a_site_keeps_the_states_of_all_checkpoints(world: Callable[..., Any]) -> None:
    w = world("fedbn", rounds=6)
    kept: list[int] = []

    def change(name: str, reply: Message) -> Message:
        folder = w.folder / "homes" / name / "states" / w.run.hash
        kept.append(len(list(folder.iterdir())))
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    assert max(kept) == w.members.checkpoints + 1
    files = sorted(path.name for path in w.out.glob("checkpoint*"))
    assert len(files) == w.members.checkpoints == 3
    rounds = [c.round for c in RunFolder(w.out, 3).kept_checkpoints().values()]
    assert rounds == [6, 5, 4]


def test_a_run_holds_a_site_to_the_images_it_began_with(world: Callable[..., Any]) -> None:
    w = world("fedavg", rounds=2)
    w.coordinator().run()
    extra = RunFolder(w.out).checkpoint().extra  # type: ignore[union-attr]
    assert extra["counts"] == {n: list(w.run.counts[n]) for n in w.members.sites}
    again = w.coordinator()
    assert again.fixed == {}
    checkpoint = RunFolder(Path(w.out)).checkpoint()
    assert checkpoint is not None
    again._continue(checkpoint)
    assert again.fixed == {n: w.run.counts[n] for n in w.members.sites}
