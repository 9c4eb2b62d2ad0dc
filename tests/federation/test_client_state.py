"""Clients' states on disk: memory and time do not grow with the clients that sit out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from protofed import tree
from protofed.errors import ProtofedError
from protofed.federation.client_state import ClientStore, read_state
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
        found.accept()
        current |= staged
        if round % 7 == 6:
            found.clean(found.save(found.accept(), round + 1))
        if round == 20:
            found.restore(found.save(found.accept(), round + 1), {})
        assert found._used == in_memory(found)
        for name, expected in current.items():
            assert tree.equal(found.get(name), expected)


def test_names_that_are_too_long_for_a_file(tmp_path: Path) -> None:
    """A hospital's name in letters that take nine bytes each, as a domain's folder has it."""
    found, names = store(tmp_path, limit=0), [f"{'医' * 80}-{i}" for i in range(3)]
    for i, name in enumerate(names):
        found.stage(name, state(i), 10**6)
    files = found.save(found.accept(), 10**6)
    assert len(set(files.values())) == 3 and all(len(f) < 230 for f in files.values())
    for i, name in enumerate(names):
        assert tree.equal(found.get(name), state(i))


@pytest.mark.skipif(os.name == "nt", reason="needs modes of files")
def test_only_the_owner_can_read_a_state(tmp_path: Path) -> None:
    found = store(tmp_path, limit=0)
    found.stage("a", state(1), 0)
    (path,) = (tmp_path / "clients").iterdir()
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


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
    assert on_disk(tmp_path) == set(files.values()) and files["a"].startswith("a.2-")


def test_the_state_of_another_client_is_refused_and_a_name_of_earlier_versions_is_not(
    tmp_path: Path,
) -> None:
    made = store(tmp_path, limit=0)
    for name in ("a", "b"):
        made.stage(name, state(ord(name)), 0)
    files, folder = made.save(made.accept(), 1), tmp_path / "clients"
    (folder / files["a"]).write_bytes((folder / files["b"]).read_bytes())
    with pytest.raises(ProtofedError, match=rf"{files['a']}' is damaged: it holds another state"):
        made.get("a")
    for name in ("a.1", "a-0.1", "a.1-b.1", "1-b.1"):
        old = folder / f"{name}.safetensors"
        tree.save(state(3), old)
        assert tree.equal(read_state(old), state(3))


def test_a_clients_name_is_a_safe_file_name(tmp_path: Path) -> None:
    store = ClientStore(lambda name: {}, tmp_path / "clients", limit=0)
    state = {"a": {"x": torch.ones(2)}}
    for name in ("a/b", "../c", "ü 1", "a%2Fb"):
        store.stage(name, state, 0)
    store.accept()
    assert all(tree.equal(store.get(n), state) for n in ("a/b", "../c", "ü 1", "a%2Fb"))
    assert len(list((tmp_path / "clients").iterdir())) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["clients"]


def test_staged_states_count_once_accepted() -> None:
    store = ClientStore(lambda name: {"a": {"x": torch.zeros(1)}}, None)
    store.stage("c", {"a": {"x": torch.ones(1)}}, 0)
    assert store.get("c")["a"]["x"].item() == 0
    store.accept()
    assert store.get("c")["a"]["x"].item() == 1


def test_a_state_can_become_empty() -> None:
    store = ClientStore(lambda name: {"a": {"x": torch.zeros(1)}}, None)
    store.stage("c", {"a": {"x": torch.ones(1)}}, 0)
    store.accept()
    store.stage("c", {}, 1)
    store.accept()
    assert not any(store.get("c").values()), "what upload gives is the next private state"
