"""Replies that are not what they must be are refused, and the rounds continue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Message, RecordDict
from tests.deploy.spoiled import SPOILED, Spoil, set_values

from protofed import tree
from protofed.deploy.checks import SLACK_BYTES, expected_reply
from protofed.deploy.spec import unpack
from protofed.deploy.wire import read_tree, to_array
from protofed.runs.records import read_records

BAD = "print-0"


def spoil_each_round(world: Any, spoils: Sequence[Spoil | None]) -> None:
    """Spoil the trained replies of one site, in each round in another way (None = not at all)."""

    def change(name: str, reply: Message) -> Message:
        round = (len(world.grid.seen) - 1) // 3  # three messages a round
        if name == BAD and round < len(spoils) and (spoil := spoils[round]) is not None:
            spoil(reply.content)
        return reply

    world.grid.spoil = change


def test_bad_replies_are_refused_by_name_and_the_rounds_continue(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """One kind after the other, a round for each; the first round is fine."""
    w = world(rounds=len(SPOILED) + 1)
    spoil_each_round(w, [None, *(spoil for spoil, _ in SPOILED.values())])
    with caplog.at_level(logging.WARNING, "protofed.deploy"):
        w.coordinator().run()
    first, *others = read_records(w.out / "rounds.jsonl")
    assert "problems" not in first and first["clients"] == 3
    for (kind, (_, words)), record in zip(SPOILED.items(), others, strict=True):
        assert record["clients"] == 2, kind
        assert list(record["problems"]) == [BAD], kind
        assert words in record["problems"][BAD], kind
        assert any(BAD in m and words in m for m in caplog.messages), kind


def test_the_weights_of_the_others_are_renormalized(world: Callable[..., Any]) -> None:
    w = world(rounds=1)
    sent: dict[str, RecordDict] = {}

    def change(name: str, reply: Message) -> Message:
        sent.setdefault(name, reply.content)
        if name == BAD:
            set_values(reply.content, round=9)
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    a, b = (read_tree(sent[n])["model"] for n in ("scan-0", "photo-0"))  # 30 and 20 samples
    for name, t in tree.load(w.out / "model.safetensors")[0]["model"].items():
        if t.is_floating_point():
            mean = (a[name].double() * (30 / 50) + b[name].double() * (20 / 50)).float()
            assert torch.equal(t, mean), name


HARMFUL: dict[str, Spoil] = {
    "no steps": lambda c: set_values(c, steps=0),
    "very many steps": lambda c: set_values(c, steps=2**62),
    "more steps of a loss": lambda c: set_values(
        c, loss_terms=["x"], loss_totals=[1.0], loss_steps=[10**6]
    ),
    "a long name of a loss": lambda c: set_values(
        c, loss_terms=["x" * 10**6], loss_totals=[1.0], loss_steps=[1]
    ),
    "many losses": lambda c: set_values(
        c, loss_terms=[f"t{i}" for i in range(900)], loss_totals=[1.0] * 900, loss_steps=[1] * 900
    ),
    "a long name of a site": lambda c: set_values(c, site="y" * 10**6),
    "a long key": lambda c: set_values(c, **{"z" * 10**6: 1}),
    "a second line": lambda c: set_values(c, site="s\n2025-01-01 INFO the run is complete\x1b[2J"),
}


def test_harmful_reports_are_refused_in_one_short_line(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Without steps, for one, FedNova's server would divide by zero and end the run for all."""
    w = world("fednova", rounds=len(HARMFUL))
    spoil_each_round(w, list(HARMFUL.values()))
    with caplog.at_level(logging.WARNING, "protofed.deploy"):
        w.coordinator().run()
    for kind, record in zip(HARMFUL, read_records(w.out / "rounds.jsonl"), strict=True):
        assert record["clients"] == 2, kind
        assert record["problems"][BAD].startswith("refused: "), kind
    assert all(len(n) < 5000 for n in (w.out / "rounds.jsonl").read_bytes().splitlines())
    assert all(m.isprintable() and len(m) < 1000 for m in caplog.messages), caplog.messages


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


def test_logits_of_other_shapes_are_refused(world: Callable[..., Any]) -> None:
    """The server learns the right shape with noise in place of images it does not have."""
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "has the shape (23, 10), not 24×10": lambda t: t[:-1],
        "has the shape (24, 9), not 24×10": lambda t: t[:, :-1],
        "has the shape (48, 10), not 24×10": lambda t: t.repeat(2, 1),
        "is torch.float64, not torch.float32": lambda t: t.double(),
        "is not finite": lambda t: t * float("nan"),
    }

    def spoil(content: RecordDict, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        logits = read_tree(content)["logits"]["public"]
        content["tree.logits"]["public"] = to_array(change(logits))

    w = world("fedmd", {"images": 24}, rounds=len(changes))
    spoil_each_round(w, [lambda c, f=f: spoil(c, f) for f in changes.values()])
    w.coordinator().run()
    for words, record in zip(changes, read_records(w.out / "rounds.jsonl"), strict=True):
        assert record["problems"] == {BAD: f"refused: entry 'public' of slot 'logits' {words}"}
        assert record["clients"] == 2


def test_very_many_logits_are_not_too_many(world: Callable[..., Any]) -> None:
    """The most bytes of a reply follow from how many images there are, not from the noise."""
    w = world("fedmd", {"images": 24}, rounds=1)
    spec, server = unpack(w.spec), w.coordinator().server
    assert spec.public == {"scan": 8, "print": 8, "photo": 8}
    many = replace(spec, public={"x": 10**7})
    assert expected_reply(many, server).limit == 4 * 10**7 * 10 * 4 + SLACK_BYTES
    assert expected_reply(spec, server).limit == 4 * 24 * 10 * 4 + SLACK_BYTES
