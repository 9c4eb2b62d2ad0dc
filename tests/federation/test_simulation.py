"""A federation in memory: initial weights, who sits out, who is tested."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs.diary import QUICK, TASK, Diary

from protofed import tree
from protofed.config import make_config
from protofed.federation.simulation import (
    TESTED_PER_DOMAIN,
    Federation,
    batchnorm_policy,
    initial_network,
)
from protofed.methods import FedAvg, FedBN
from protofed.runs.records import without_times
from protofed.testing.checks import TINY

pytestmark = pytest.mark.usefixtures("single_thread")


def federation(**more: Any) -> Federation:
    settings = {**TINY, "norm": "batch", "epochs": 1, "samples": 1, "rounds": 2, **more}
    return Federation(make_config(TASK, FedBN(), **settings), TASK)


def test_initial_weights_are_keyed_and_leave_torchs_generator_alone() -> None:
    config = make_config(TASK, FedAvg(), **TINY, precision="fp32")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = initial_network(config, TASK).state_dict()
    assert torch.equal(torch.rand(4), expected)
    again = initial_network(config, TASK).state_dict()
    other = initial_network(replace(config, seed=1), TASK).state_dict()
    assert tree.equal({"m": dict(first)}, {"m": dict(again)})
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert "kept by each client" in batchnorm_policy(initial_network(config, TASK), Diary())


def test_clients_that_sit_out_keep_their_state() -> None:
    config = make_config(TASK, Diary(), **{**QUICK, "participation": 0.5, "rounds": 4})
    found = Federation(config, TASK)
    turns = dict.fromkeys(found.clients, 0)
    for _ in range(4):
        chosen = found.server.sample()
        before = {n: tree.copy(found.store.get(n)) for n in found.clients}
        found.run_round()
        for name in found.clients:
            turns[name] += name in chosen
            after = found.store.get(name)
            assert tree.equal(after, before[name]) == (name not in chosen)
            assert int(after["diary"]["rounds"]) == turns[name]
    assert len(set(turns.values())) > 1


def test_states_spill_to_disk(tmp_path: Path) -> None:
    config = make_config(TASK, Diary(), **QUICK)
    found = Federation(config, TASK, tmp_path)
    found.store.limit = tree.nbytes(found.store.get("left-0")) * 3 // 2
    found.run_round()
    assert len(list(tmp_path.iterdir())) == 3, "one of four fits in memory"
    plain = Federation(config, TASK)
    plain.run_round()
    for name in plain.clients:
        assert tree.equal(found.store.get(name), plain.store.get(name))
    a, b = found.run_round(), plain.run_round()
    assert without_times([a]) == without_times([b])


def test_of_many_clients_some_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.federation.simulation.TESTED_PER_DOMAIN", 3)
    many = federation(clients={"left": 8, "right": 2}, participation=0.2)
    assert "3 clients" in many.examined

    def draw() -> list[list[str | None]]:
        return [[e.client for e in many._eval_jobs(round, many.tests)] for round in range(6)]

    drawn = draw()
    for names in drawn:
        assert len(names) == len(set(names)) == 5
        assert [n for n in names if n.startswith("right")] == ["right-0", "right-1"]
        assert names == sorted(names, key=list(many.clients).index)
    assert len({n for names in drawn for n in names}) > 7, "others in other rounds"
    assert drawn == [
        [e.client for e in many._eval_jobs(round, many.tests)] for round in range(6)
    ], "keyed"
    record = many.run_round()
    assert set(record["accuracy"]) == {"left", "right"}


def test_all_of_few_clients_are_examined() -> None:
    few = federation(clients={"left": 8, "right": 2})
    assert TESTED_PER_DOMAIN >= 8
    assert few.examined == ""
    assert [e.client for e in few._eval_jobs(0, few.tests)] == list(few.clients)


def test_images_of_clients_that_sit_out_are_not_kept_twice() -> None:
    found = federation(clients={"left": 8, "right": 2}).clients
    assert list(found) == [f"left-{i}" for i in range(8)] + ["right-0", "right-1"]
    assert len(found) == 10 and "left-9" not in found
    site = found["right-1"]
    assert (site.name, site.domain, len(site.images)) == ("right-1", "right", 1)
    assert site is not found["right-1"], "made when asked for, and not held"
    assert torch.equal(site.images.x, found["right-1"].images.x)
    assert found.domain("left-3") == "left"
