"""Server and sites in one process, through Flower's own records: equal to the simulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from protofed.federation import tree
from protofed.federation.records import read_records
from protofed.federation.run import run
from protofed.methods import METHODS


def _numbers(records: Any) -> list[dict[str, Any]]:
    """What does not depend on clock and wire."""
    odd = ("seconds", "wire", "bytes_down", "problems")
    return [{k: v for k, v in r.items() if k not in odd} for r in records]


@pytest.mark.parametrize("method", list(METHODS))
def test_the_model_is_the_simulators_to_the_bit(
    world: Callable[..., Any], tmp_path: Path, method: str
) -> None:
    w = world(method, rounds=2)
    w.coordinator().run()
    oracle = run(config=w.config, out=tmp_path / "oracle")
    model, about = tree.load(w.out / "model.safetensors")
    assert tree.equal(model, {"model": oracle.model})
    assert about["hash"] == w.config.hash
    ours = _numbers(read_records(w.out / "rounds.jsonl"))
    theirs = _numbers(oracle.rounds)
    for record in theirs:  # the domain without a site has no images here
        del record["accuracy"]["inverse"]
        record["average"] = round(sum(record["accuracy"].values()) / 3, 4)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["average"] == pytest.approx(other.pop("average"), abs=2e-4)
        mine.pop("average")
        assert mine == other
