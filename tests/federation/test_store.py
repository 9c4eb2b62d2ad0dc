"""Clients' states on disk: memory and time do not grow with the clients that sit out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protofed import tree
from protofed.config import make_config
from protofed.federation.client_state import ClientStore
from protofed.federation.simulation import EXAMINED, Federation
from protofed.methods import FedBN
from protofed.testing.checks import TINY, tiny_task
from protofed.tree import Tree


def state(value: float, floats: int = 25) -> Tree:
    return {"a": {"x": torch.full((floats,), float(value))}}


def store(tmp_path: Path, limit: int, share: float = 1.0) -> ClientStore:
    return ClientStore(lambda name: {}, tmp_path / "clients", limit, share)


def on_disk(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "clients").glob("*")}


def in_memory(found: ClientStore) -> int:
    """Counted anew, not as the store keeps count."""
    kept = [s for i in (found._current, found._staged) for s in i.values()]
    return sum(tree.nbytes(s) for s in kept if not isinstance(s, str))


def test_it_keeps_count(tmp_path: Path) -> None:
    found = store(tmp_path, limit=450)  # four states of 100 bytes, or what fits
    rng = torch.Generator().manual_seed(0)
    current: dict[str, Tree] = {}
    for round in range(30):
        staged = {}
        for name in torch.randperm(9, generator=rng)[:3].tolist():
            new = state(round + name / 10, int(torch.randint(1, 50, (1,), generator=rng)))
            found.stage(str(name), new, round)
            staged[str(name)] = new
            if round % 4 == 0:  # a reply that comes twice
                found.stage(str(name), new, round)
            assert found._used == in_memory(found) <= 450
        if round % 5 == 3:
            found.abandon()
        else:
            found.accept()
            current |= staged
        if round % 7 == 6:
            found.clean(found.save(found.accept(), round + 1))
        if round == 20:
            found.restore(found.save(found.accept(), round + 1))
        assert found._used == in_memory(found)
        for name, expected in current.items():
            assert tree.equal(found.get(name), expected)


def test_fewer_participants_keep_less_in_memory(tmp_path: Path) -> None:
    found = store(tmp_path, limit=1000, share=0.2)
    for i in range(10):
        found.stage(str(i), state(i), 0)
    found.accept()
    assert in_memory(found) == 200
    assert len(on_disk(tmp_path)) == 8
    assert all(tree.equal(found.get(str(i)), state(i)) for i in range(10))


def test_an_old_state_is_let_go(tmp_path: Path) -> None:
    found = store(tmp_path, limit=1000)
    found.stage("a", state(1), 0)
    found.save(found.accept(), 1)
    assert len(found._saved) == 1
    found.stage("a", state(2), 1)
    found.accept()
    assert not found._saved, "the state before is in a file and nowhere else"
    files = found.save(found.accept(), 2)
    found.clean(files)
    assert on_disk(tmp_path) == set(files.values()) == {"a.2.safetensors"}


def federation(**more: Any) -> Federation:
    settings = {**TINY, "norm": "batch", "epochs": 1, "samples": 1, "rounds": 2, **more}
    task = tiny_task()
    return Federation(make_config(task, FedBN(), **settings), task)


def test_of_many_clients_some_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.federation.simulation.EXAMINED", 3)
    many = federation(clients={"left": 8, "right": 2}, participation=0.2)
    assert "3 clients" in many.examined
    drawn = [[e.client for e in many._exams(round)] for round in range(6)]
    for names in drawn:
        assert len(names) == len(set(names)) == 5
        assert [n for n in names if n.startswith("right")] == ["right-0", "right-1"]
        assert names == sorted(names, key=list(many.sites).index)
    assert len({n for names in drawn for n in names}) > 7, "others in other rounds"
    assert drawn == [[e.client for e in many._exams(round)] for round in range(6)], "keyed"
    record = many.run_round()
    assert set(record["accuracy"]) == {"left", "right"}


def test_all_of_few_clients_are_examined() -> None:
    few = federation(clients={"left": 8, "right": 2})
    assert EXAMINED >= 8
    assert few.examined == ""
    assert [e.client for e in few._exams(0)] == list(few.sites)


def test_images_of_clients_that_sit_out_are_not_kept_twice() -> None:
    found = federation(clients={"left": 8, "right": 2}).sites
    assert list(found) == [f"left-{i}" for i in range(8)] + ["right-0", "right-1"]
    assert len(found) == 10 and "left-9" not in found
    site = found["right-1"]
    assert (site.name, site.domain, len(site.images)) == ("right-1", "right", 1)
    assert site is not found["right-1"], "made when asked for, and not held"
    assert torch.equal(site.images.x, found["right-1"].images.x)
    assert found.domain("left-3") == "left"
