"""A privacy budget across machines: noise of the operating system, spending on the site's disk."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("dp_accounting")

from flwr.app import Message
from tests.deploy.spoiled import set_values

from protofed import tree
from protofed.deploy.messages import Request
from protofed.deploy.spending import SPENT_FILE, Spending, Trained
from protofed.deploy.wire import Refused, read_tree
from protofed.errors import ProtofedError
from protofed.federation.privacy import Budget, Privacy
from protofed.files import read_json
from protofed.runs.records import read_records

FEW = {"scan": 14, "print": 12, "photo": 11}
BUDGET = {"proto_epsilon": 200.0, "samples": FEW}


def spent(w: Any, site: str) -> Path:
    return Path(w.folder / "homes" / site / "privacy" / w.run.hash / SPENT_FILE)


def sent(replies: list[Message]) -> list[Any]:
    return [read_tree(r.content, 1 << 30) for r in replies if not r.has_error()]


def test_the_spending_of_a_run_is_in_its_records_and_at_the_sites(
    world: Callable[..., Any],
) -> None:
    w = world("fpl", rounds=2, **BUDGET)
    summary = w.coordinator().run()
    records = read_records(w.out / "rounds.jsonl")
    assert [r["privacy"]["prototypes"]["level"] for r in records] == ["sample"] * 2
    assert records[1]["privacy"]["prototypes"]["epsilon"] == pytest.approx(200.0)
    assert records[0]["privacy"]["prototypes"]["epsilon"] < 200
    assert "(200, 1e-05)-DP" in summary["privacy"]["prototypes"]
    assert summary["privacy"]["model"] == "no guarantee"
    for site in w.members.sites:
        found = read_json(spent(w, site))
        assert found["releases"] == 2
        assert found["spent"]["prototypes"]["epsilon"] == pytest.approx(200.0)
        assert spent(w, site).stat().st_mode & 0o777 == 0o600
        assert not list(spent(w, site).parent.glob("*.safetensors"))  # the run is over


def test_a_message_is_paid_for_before_it_is_made(tmp_path: Path) -> None:
    """Or a site that is killed in between would have a reply that no budget knows of."""
    spending = Spending(tmp_path, Privacy(Budget("prototypes", 3.0, 1e-5, 1.0, releases=1)), keep=1)

    def train() -> Trained:
        assert spending.releases == 1
        return {}, {"state": ""}

    request = Request("north", "0" * 10, 0, train=True, evaluate=False, accepted="")
    assert spending.once(request, {}, train, lambda _: True)[1]["releases"] == 1


RELEASES = 3


def _ask(folder: Path, round: int, barrier: Any, paid: Any) -> None:
    budget = Budget("prototypes", 3.0, 1e-5, 1.0, releases=RELEASES)
    spending = Spending(folder, Privacy(budget), keep=9)

    def train() -> Trained:
        return {}, {"state": ""}

    request = Request("north", "0" * 10, round, train=True, evaluate=False, accepted="")
    barrier.wait()
    try:
        paid.put(spending.once(request, {}, train, lambda _: True)[1]["releases"])
    except Refused:
        paid.put(0)


def test_messages_at_the_same_time_are_paid_for_one_by_one(
    tmp_path: Path,
) -> None:
    """A process answers each message: two that read the same number would both send."""
    fork = multiprocessing.get_context("fork")
    count, paid = 8, fork.Queue()
    barrier = fork.Barrier(count)
    each = [fork.Process(target=_ask, args=(tmp_path, n, barrier, paid)) for n in range(count)]
    for process in each:
        process.start()
    found = sorted(paid.get(timeout=60) for _ in each)
    for process in each:
        process.join()
    assert found == [0] * (count - RELEASES) + [1, 2, 3]


def test_noise_differs_between_two_runs_of_the_same_seed(world: Callable[..., Any]) -> None:
    models = []
    for _ in range(2):
        w = world("fedavg", rounds=1, update_epsilon=200.0, norm="group", samples=FEW)
        w.coordinator().run()
        models.append(w.grid.seen[-1][1])
    assert not tree.equal(*(read_tree(m, 1 << 30) for m in models))


def test_a_repeated_request_gets_the_same_reply_and_costs_nothing(
    world: Callable[..., Any],
) -> None:
    w = world("fpl", rounds=2, minimum=3, update_epsilon=300.0, norm="group", **BUDGET)
    replies: list[Message] = []

    def lose_one(name: str, reply: Message) -> Message:
        if name == "print-0":
            replies.append(reply)
            if len(replies) == 1:  # as if it had been changed on its way: the round is repeated
                set_values(reply.content, round=7)
        return reply

    w.grid.spoil = lose_one
    w.coordinator().run()
    first, again, *_ = sent(replies)
    assert tree.equal(first, again)
    assert all(read_json(spent(w, site))["releases"] == 2 for site in w.members.sites)


def test_a_server_that_returns_to_its_checkpoint_gets_the_same_replies(
    world: Callable[..., Any],
) -> None:
    w = world("fpl", rounds=4, checkpoint_every=2, **BUDGET)

    class Crash(BaseException):
        pass

    def crash(name: str, reply: Message) -> Message:
        if len(w.grid.seen) == 12:  # at the end of the fourth round, two after the checkpoint
            raise Crash
        return reply

    w.grid.spoil = crash
    coordinator = w.coordinator()
    coordinator.ledger.checkpoint = keep_first(coordinator.ledger.checkpoint)
    with pytest.raises(Crash):
        coordinator.run()
    w.grid.spoil = lambda name, reply: reply
    w.coordinator().run(resume=True)
    assert all(read_json(spent(w, site))["releases"] == 4 for site in w.members.sites)


def keep_first(save: Callable[..., None]) -> Callable[..., None]:
    """A server that is killed writes no checkpoint when it ends."""
    done: list[int] = []

    def only_once(checkpoint: Any) -> None:
        if not done:
            save(checkpoint)
        done.append(1)

    return only_once


def test_a_site_refuses_to_exceed_its_budget_and_the_run_stops(
    world: Callable[..., Any],
) -> None:
    w = world("fpl", rounds=2, **BUDGET)
    w.coordinator().run()
    before = read_json(spent(w, "scan-0"))
    with pytest.raises(ProtofedError, match="budget of the prototypes is spent: ε 200 allows 2"):
        w.coordinator().run(overwrite=True)  # the same run once more, with other noise
    assert read_json(spent(w, "scan-0")) == before


def test_a_reply_that_claims_a_wrong_number_of_releases_is_refused(
    world: Callable[..., Any],
) -> None:
    w = world("fpl", rounds=2, **BUDGET)
    claims = iter((0, 3))

    def claim(name: str, reply: Message) -> Message:
        if name == "print-0" and "loss_terms" in reply.content["protofed"]:
            set_values(reply.content, releases=next(claims))
        return reply

    w.grid.spoil = claim
    w.coordinator().run()
    problems = [r["problems"]["print-0"] for r in read_records(w.out / "rounds.jsonl")]
    assert problems == [
        f"refused: the reply is number {n} of 2 under a privacy budget" for n in (0, 3)
    ]


def test_a_budget_that_the_method_cannot_keep_is_refused_before_anything_is_sent(
    world: Callable[..., Any],
) -> None:
    with pytest.raises(ProtofedError, match="scaffold also sends"):
        world("scaffold", update_epsilon=1.0, norm="group")
