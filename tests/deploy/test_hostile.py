"""A site with a good key that wants to end the run for all, or to be believed without bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import ArrayRecord, Error, Message, RecordDict
from tests.deploy.flower_world import FakeGrid
from tests.deploy.spoiled import Spoil, set_values

from protofed import tree
from protofed.deploy.coordinator import Coordinator
from protofed.deploy.messages import SITE_FAILED
from protofed.deploy.wire import read_tree, to_array
from protofed.errors import ProtofedError
from protofed.runs.records import read_records

BAD = "print-0"


def lie(w: Any, spoil: Spoil) -> None:
    """Let one site spoil whatever it trained, in every round."""

    def change(name: str, reply: Message) -> Message:
        if name == BAD and reply.has_content() and reply.content.array_records:
            spoil(reply.content)
        return reply

    w.grid.spoil = change


def replace_entry(slot: str, name: str, t: torch.Tensor) -> Spoil:
    def spoil(content: RecordDict) -> None:
        record = content[f"tree.{slot}"]
        assert isinstance(record, ArrayRecord)
        record[name] = to_array(t)

    return spoil


def longer(content: RecordDict) -> None:
    """Many prototypes that are not there: the server would compare each with each."""
    table = read_tree(content)["prototypes"]
    for name, t in table.items():
        padding = t.new_zeros(len(t), 100, *t.shape[2:])
        replace_entry("prototypes", name, torch.cat([t, padding], 1))(content)


def hidden(content: RecordDict) -> None:
    """A prototype that is huge, of a class that the site says it lacks."""
    table = read_tree(content)["prototypes"]
    table["count"][0], table["mean"][0] = 0, 3e38
    for name, t in table.items():
        replace_entry("prototypes", name, t)(content)


def overflowing(content: RecordDict) -> None:
    for name, sign in (("own", 1), ("received", -1)):
        score = torch.tensor(sign * 1.7e308, dtype=torch.float64)
        replace_entry("scores", name, score)(content)


def a_loss(content: RecordDict, name: str = "ce", total: float = 1.0) -> None:
    set_values(content, loss_terms=[name], loss_totals=[total], loss_steps=[1])


HOSTILE: dict[str, tuple[str, Spoil, str]] = {
    "columns": ("fedrdn", replace_entry("statistics", "style", torch.ones(2, 4)), "not 2×3"),
    "rows": ("fedrdn", replace_entry("statistics", "style", torch.ones(3, 3)), "not 2×3"),
    "colors": ("protostyle", replace_entry("styles", "pixels", torch.ones(2, 4)), "not 2×3"),
    "styles": ("fedccrl", replace_entry("styles", "pixels", torch.ones(1, 2, 4)), "not 1×2×3"),
    "many styles": (
        "fedccrl",
        replace_entry("styles", "pixels", torch.ones(25, 2, 3)),
        "the site has 24 samples",
    ),
    "many prototypes": ("fedplvm", longer, "the site has 24 samples"),
    "hidden": ("fpl", hidden, "'prototypes' has the norm"),
    "overflow": ("fedavg_ga", overflowing, "'scores' has the norm inf"),
    "slot": (
        "fpl", lambda c: c.update({"tree.../../x": ArrayRecord()}), "unexpected slot '../../x'"
    ),
    "loss": ("fpl", lambda c: a_loss(c, total=-1.7e308), "is larger than 1e+09"),
    "term": ("fpl", lambda c: a_loss(c, name="ce\n\x1b[2J"), "cannot be printed"),
    "version": ("fpl", lambda c: set_values(c, version="y" * 10**6), "names that are too long"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_one_site_cannot_end_a_run_or_escape_its_bounds(
    kind: str, world: Callable[..., Any]
) -> None:
    method, spoil, words = HOSTILE[kind]
    w = world(method, rounds=2)
    lie(w, spoil)
    w.coordinator().run()
    for record in read_records(w.out / "rounds.jsonl"):
        assert record["clients"] == 2
        assert record["problems"][BAD].startswith("refused: ")
        assert words in record["problems"][BAD]


def test_a_site_that_holds_back_part_of_its_reply_delays_no_other(
    world: Callable[..., Any],
) -> None:
    """Flower waits for the rest of a reply, for hours if it trickles in."""
    w = world(rounds=2, round_seconds=1.0, wait_seconds=60.0)
    pull, asked, complete = w.grid.pull_messages, dict[str, str](), threading.Event()

    def slow_pull(ids: list[str]) -> Any:
        name = asked[ids[0]]
        if name == BAD:
            complete.wait(20)
        return pull(ids)

    def push(messages: Any) -> Any:
        messages, names = list(messages), {i: n for n, i in w.grid.ids.items()}
        numbers = FakeGrid.push_messages(w.grid, messages)
        to = [names[m.metadata.dst_node_id] for m in messages]
        asked.update(zip(numbers, to, strict=True))
        return numbers

    w.grid.pull_messages, w.grid.push_messages = slow_pull, push
    try:
        w.coordinator().run()
    finally:
        complete.set()
    problems = [record["problems"] for record in read_records(w.out / "rounds.jsonl")]
    assert problems == [
        {BAD: "no reply within 1 s"}, {BAD: "is still sending an earlier reply"}
    ]  # fmt: skip
    assert list(asked.values()).count(BAD) == 1


def test_a_reply_that_is_complete_while_nobody_looks_is_taken(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower gives a reply only once."""
    w = world(rounds=1, round_seconds=1.0)
    pull, sleep = w.grid.pull_messages, time.sleep
    begun, complete = threading.Event(), threading.Event()

    def slow_pull(ids: list[str]) -> Any:
        begun.set()
        complete.wait(20)
        return pull(ids)

    def look_away(seconds: float) -> None:
        if begun.is_set():
            complete.set()
            seconds = 0.2
        sleep(seconds)

    w.grid.pull_messages = slow_pull
    monkeypatch.setattr(time, "sleep", look_away)
    w.coordinator().run()
    assert len(w.grid.seen) == 6  # nobody was asked twice


@pytest.mark.parametrize("method", ["fedrdn", "protostyle", "fedccrl", "stablefdg", "fedplvm"])
def test_sizes_that_data_decide_are_free_and_no_others(
    method: str, world: Callable[..., Any]
) -> None:
    w = world(method, rounds=1)
    entries = w.coordinator().expected.entries
    free = {name for key, (_, shape) in entries.items() for name in key if str in map(type, shape)}
    expected = {"fedccrl": {"styles", "pixels"}, "fedplvm": {"prototypes", "mean", "mask"}}
    assert free == expected.get(method, set())


def failing(w: Any, monkeypatch: pytest.MonkeyPatch, *names: str) -> Coordinator:
    """A run whose server cannot aggregate the replies of these sites."""
    made = w.coordinator()
    real = made.server.method.aggregate

    def aggregate(server: Any, mean: Any, updates: Any) -> Any:
        if any(u.name in names for u in updates):
            raise RuntimeError("sizes do not match")
        return real(server, mean, updates)

    monkeypatch.setattr(type(made.server.method), "aggregate", staticmethod(aggregate))
    return made


def test_a_reply_that_cannot_be_aggregated_is_refused_by_name(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a site would end every run whose method's server it can make fail."""
    w = world("fedavg", rounds=2)
    failing(w, monkeypatch, BAD).run()
    for record in read_records(w.out / "rounds.jsonl"):
        assert record["clients"] == 2
        assert "could not be aggregated: sizes do not match" in record["problems"][BAD]


def test_the_only_reply_without_which_the_others_work_is_refused(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world("fedavg", rounds=1)
    made = w.coordinator()
    real = made.server.method.aggregate

    def aggregate(server: Any, mean: Any, updates: Any) -> Any:
        names = [u.name for u in updates]
        if BAD in names and len(names) > 1:
            raise RuntimeError("sizes do not match")
        return real(server, mean, updates)

    monkeypatch.setattr(type(made.server.method), "aggregate", staticmethod(aggregate))
    made.run()
    [record] = read_records(w.out / "rounds.jsonl")
    assert record["clients"] == 2 and list(record["problems"]) == [BAD]


def test_where_most_replies_fail_nobody_is_blamed(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most sites are right: something else is wrong, such as a state that one has poisoned."""
    w = world("fedavg", rounds=1)
    with pytest.raises(ProtofedError, match=r"failed 3 times.*could not be aggregated"):
        failing(w, monkeypatch, BAD, "scan-0").run()


def test_a_site_does_not_stop_a_run_by_claiming_a_loss_or_a_failure(
    world: Callable[..., Any],
) -> None:
    """Of those that train in a round it may be the only one whose losses are known."""
    w = world("fedavg", rounds=4, minimum=1)
    w.grid.online = [BAD]

    def change(name: str, reply: Message) -> Message:
        round = len(w.grid.seen) - 1
        if round >= 1:
            w.grid.online = list(w.members.sites)
        if name == BAD and reply.has_content() and reply.content.array_records and round >= 2:
            a_loss(reply.content, total=1e6)
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    assert len(read_records(w.out / "rounds.jsonl")) == 4

    w = world("fedavg", rounds=3, minimum=1)
    w.grid.online = [BAD]

    def fail(name: str, reply: Message) -> Message:
        if len(w.grid.seen) > 1:
            w.grid.online = list(w.members.sites)
            if name == BAD:
                reply.__dict__["_content"] = None
                reply.__dict__["_error"] = Error(SITE_FAILED, "nan")
        return reply

    w.grid.spoil = fail
    w.coordinator().run()
    assert len(read_records(w.out / "rounds.jsonl")) == 3


def test_losses_below_zero_are_no_jump(world: Callable[..., Any]) -> None:
    """A linear term in the loss, such as FedDyn's, can make it negative."""
    w = world("fedavg", rounds=4)

    def change(name: str, reply: Message) -> Message:
        if reply.content.array_records:
            a_loss(reply.content, total=-1.0)
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    assert [r["clients"] for r in read_records(w.out / "rounds.jsonl")] == [3, 3, 3, 3]


def test_a_large_method_bound_is_the_methods_and_not_a_sites(world: Callable[..., Any]) -> None:
    """A run's options cannot set it, and no reply has a say in it."""
    w = world("fedfa", rounds=1)
    made = w.coordinator()
    assert made.server.bounds is not None and made.server.bounds.factor == 50.0
    assert "size_limit" not in made.server.method.options()
    with pytest.raises(ProtofedError, match="size_limit"):
        world("fedfa", {"size_limit": 1e9}, rounds=1)
    lie(w, lambda c: set_values(c, size_limit=1e9))
    made.run()
    [record] = read_records(w.out / "rounds.jsonl")
    assert "unexpected fields: size_limit" in record["problems"][BAD]


def test_a_reply_that_was_dropped_leaves_no_trace(world: Callable[..., Any]) -> None:
    """The round is the one in which the site was not there, bit for bit."""
    w, other = world("fedrdn", rounds=1), world("fedrdn", rounds=1)
    lie(w, HOSTILE["rows"][1])
    w.coordinator().run()
    other.grid.online = ["scan-0", "photo-0"]
    other.coordinator().run()
    models = [tree.load(x.out / "model.safetensors")[0] for x in (w, other)]
    assert tree.equal(*models)
