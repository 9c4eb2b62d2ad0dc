"""Server and sites in one process, through Flower's own records: equal to the simulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from tests.deploy.spoiled import set_values

from protofed import tree
from protofed.methods import METHODS
from protofed.runs.records import read_records
from protofed.runs.run import run


def _numbers(records: Any) -> list[dict[str, Any]]:
    """What does not depend on clock and wire."""
    odd = ("seconds", "wire", "bytes_down", "problems")
    return [{k: v for k, v in r.items() if k not in odd} for r in records]


def test_the_bill_is_what_passed_the_wire(world: Callable[..., Any]) -> None:
    """Of each site and round, and in all: with a reply that is refused and the last evaluation."""
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


CASES = [(name, "cnn3") for name in METHODS]
CASES += [(name, "cnn3,cnn2") for name in ("local", "fedmd", "fedproto", "fedgh", "fedseproto")]


@pytest.mark.parametrize(("method", "models"), CASES)
def test_the_model_is_the_simulators_to_the_bit(
    world: Callable[..., Any], tmp_path: Path, method: str, models: str
) -> None:
    w = world(method, rounds=2, model=models)
    w.coordinator().run()
    oracle = run(config=w.config, out=tmp_path / "oracle")
    model, about = tree.load(w.out / "model.safetensors")
    assert tree.equal(model, tree.copy({"model": oracle.model}))
    assert about["hash"] == w.config.hash
    for site in w.members.sites:  # and each site has its own, or the one for all
        path = w.folder / "homes" / site / "models" / f"{w.config.label}.safetensors"
        whole = oracle.clients.get(site, {}) | oracle.model
        mine = tree.load(path)[0].get("model", {})
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
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["average"] == pytest.approx(other.pop("average"), abs=2e-4)
        mine.pop("average")
        assert mine == other
