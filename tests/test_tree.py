from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from protofed import tree
from protofed.errors import ProtofedError
from protofed.files import Damaged
from protofed.tree import Tree
from tests.conftest import flipped

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "tree.safetensors"


def everything() -> Tree:
    values = torch.arange(12).reshape(3, 4) % 5
    return {
        "model": {str(d): values.to(d) for d in DTYPES} | {"a.b/c": torch.randn(2, 3)},
        "scalars": {
            "counter": torch.tensor(7),
            "mask": torch.tensor(True),
            "loss": torch.tensor(0.1, dtype=torch.float64),
        },
        "odd": {
            "empty": torch.zeros(0, 4),
            "special": torch.tensor([-0.0, math.inf, -math.inf, 1e-45]),
            "big": torch.tensor([2**62, -(2**62)]),
        },
    }


def test_round_trip_of_every_dtype(path: Path) -> None:
    before = everything()
    tree.save(before, path)
    after, metadata = tree.load(path)
    assert metadata == {}
    assert {s: set(e) for s, e in after.items()} == {s: set(e) for s, e in before.items()}
    for slot, entries in before.items():
        for name, t in entries.items():
            loaded = after[slot][name]
            assert (loaded.dtype, loaded.shape) == (t.dtype, t.shape), name
            assert bits(loaded) == bits(t), name
    assert tree.equal(before, after)


def bits(t: Tensor) -> list[int]:
    return t.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_nan_survives(path: Path) -> None:
    before = {"a": {"x": torch.tensor([math.nan, 1.0])}}
    tree.save(before, path)
    assert bits(tree.load(path)[0]["a"]["x"]) == bits(before["a"]["x"])
    assert tree.equal(tree.load(path)[0], before), "the same bits are equal"


def test_empty_slots_disappear(path: Path) -> None:
    tree.save({"model": {}, "x": {"y": torch.ones(1)}}, path)
    assert set(tree.load(path)[0]) == {"x"}
    for nothing in ({}, {"model": {}}):
        tree.save(nothing, path)
        assert tree.load(path)[0] == {}
        assert tree.copy(nothing) == {}
    assert tree.map_tensors({"a": {}, "b": {"c": torch.ones(1)}}, torch.neg).keys() == {"b"}
    assert tree.equal({"a": {}}, {})


def test_other_memory_layouts_come_back_plain(path: Path) -> None:
    plain = torch.randn(2, 3, 4, 5)
    layouts = {
        "channels_last": plain.to(memory_format=torch.channels_last),
        "transposed": plain.transpose(1, 3),
        "strided": plain[:, ::2, 1:],
        "expanded": torch.ones(3, 1).expand(3, 4),
    }
    assert not any(t.is_contiguous() for t in layouts.values())
    tree.save({"a": layouts}, path)
    for kept in (tree.load(path)[0]["a"], tree.copy({"a": layouts})["a"]):
        for name, t in layouts.items():
            assert torch.equal(kept[name], t)
            assert kept[name].is_contiguous()


def test_views_of_one_tensor_are_saved_whole(path: Path) -> None:
    base = torch.arange(6.0)
    tree.save({"a": {"front": base[:3], "back": base[3:]}}, path)
    loaded = tree.load(path)[0]["a"]
    assert loaded["front"].tolist() == [0, 1, 2]
    assert loaded["back"].tolist() == [3, 4, 5]


def test_copy_shares_no_memory_and_has_no_graph() -> None:
    weight = torch.ones(3, requires_grad=True)
    copied = tree.copy({"a": {"x": weight * 2, "y": weight}})
    assert not copied["a"]["x"].requires_grad
    copied["a"]["y"].add_(1)
    assert weight.tolist() == [1, 1, 1]


def test_loaded_tensors_lie_at_aligned_addresses(path: Path) -> None:
    tree.save({"a": {"odd": torch.ones(3, dtype=torch.uint8), "x": torch.randn(1000)}}, path)
    assert tree.load(path)[0]["a"]["x"].data_ptr() % 16 == 0


def test_nbytes_by_hand() -> None:
    content = {
        "model": {"w": torch.zeros(2, 3), "n": torch.tensor(1)},  # 24 + 8
        "p": {
            "half": torch.zeros(5, dtype=torch.float16),  # 10
            "mask": torch.zeros(7, dtype=torch.bool),  # 7
            "double": torch.zeros(2, 2, dtype=torch.float64),  # 32
            "none": torch.zeros(0, 9),  # 0
            "expanded": torch.zeros(1).expand(4),  # 16 travel
        },
        "empty": {},
    }
    assert tree.nbytes(content) == 24 + 8 + 10 + 7 + 32 + 16
    assert tree.nbytes({}) == 0


def test_equal_sees_every_kind_of_difference() -> None:
    base: Tree = {
        "a": {"x": torch.tensor([1.0, 2.0]), "n": torch.tensor(3), "zero": torch.zeros(2)}
    }
    assert tree.equal(base, {"a": dict(reversed(tree.copy(base)["a"].items()))})
    one_bit = torch.tensor([1.0, 2.0]).view(torch.int32) ^ torch.tensor([0, 1], dtype=torch.int32)
    others = {
        "value": {"a": {**base["a"], "x": torch.tensor([1.0, 2.5])}},
        "bit": {"a": {**base["a"], "x": one_bit.view(torch.float32)}},
        "dtype": {"a": {**base["a"], "x": base["a"]["x"].double()}},
        "integer's dtype": {"a": {**base["a"], "n": torch.tensor(3, dtype=torch.int32)}},
        "shape": {"a": {**base["a"], "x": torch.tensor([[1.0, 2.0]])}},
        "dtype, same bits": {"a": {**base["a"], "zero": torch.zeros(2, dtype=torch.int32)}},
        "missing": {"a": {"x": base["a"]["x"], "zero": base["a"]["zero"]}},
        "more": {"a": {**base["a"], "y": torch.ones(1)}},
        "name": {"a": {{"x": "x2"}.get(n, n): t for n, t in base["a"].items()}},
        "slot": {"b": base["a"]},
        "nothing": {},
    }
    for what, other in others.items():
        assert not tree.equal(base, other), what
        assert not tree.equal(other, base), what


def test_equal_compares_bits_not_values() -> None:
    assert not tree.equal({"a": {"x": torch.tensor([0.0])}}, {"a": {"x": torch.tensor([-0.0])}})
    nan = {"a": {"x": torch.tensor([math.nan])}}
    assert tree.equal(nan, tree.copy(nan))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, -1])
def test_truncated_file(path: Path, size: int) -> None:
    tree.save(everything(), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ProtofedError) as error:
        tree.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "content", [b"garbage", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0notjson!", b'{"a": 1}\n']
)
def test_garbage(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ProtofedError, match=str(path)):
        tree.load(path)


def test_metadata_that_is_no_json(path: Path) -> None:
    path.parent.mkdir()
    save_file({"a/x": torch.ones(1)}, path, {"protofed": "{cut"})
    with pytest.raises(ProtofedError, match=str(path)):
        tree.load(path)


def test_missing_file_and_folder(path: Path) -> None:
    with pytest.raises(ProtofedError, match=str(path)):
        tree.load(path)
    path.mkdir(parents=True)
    with pytest.raises(ProtofedError, match=str(path)):
        tree.load(path)


def test_a_file_of_somebody_else(path: Path) -> None:
    path.parent.mkdir()
    save_file({"model/w": torch.ones(2)}, path)
    with pytest.raises(Damaged, match="no metadata of protofed"):
        tree.load(path)


def test_no_bit_of_a_file_can_be_lost(path: Path) -> None:
    before = {"model": {"w": torch.ones(2, 3), "n": torch.tensor(3)}, "mask": {"é": torch.ones(0)}}
    tree.save(before, path, {"round": 3, "hash": "äß", "clients": {"a/b": "x.1"}})
    whole = path.read_bytes()
    _, about = tree.load(path)
    for bit in range(8 * len(whole)):
        path.write_bytes(flipped(whole, bit))
        try:
            loaded, metadata = tree.load(path)
        except ProtofedError as error:
            assert str(path) in str(error)
        else:  # the name of a letter in capitals, perhaps
            assert tree.equal(loaded, before) and metadata == about, bit


def test_files_of_the_format_without_checksums_are_read(path: Path) -> None:
    path.parent.mkdir()
    save_file({"a/x": torch.ones(1)}, path, {"protofed": '{"format": 1, "round": 3}'})
    assert tree.load(path)[1] == {"round": 3}
    save_file({"a/x": torch.ones(1)}, path, {"protofed": '{"format": 2, "round": 3}'})
    with pytest.raises(Damaged, match="its checksum is missing"):
        tree.load(path)


def test_slot_with_a_slash_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="'a/b'"):
        tree.save({"a/b": {"c": torch.ones(1)}}, path)
    assert not path.exists()


def test_metadata_round_trip(path: Path) -> None:
    metadata = {"round": 3, "hash": "äß", "clients": {"a/b": "x.1", "c": "y"}, "none": None}
    tree.save({"a": {"x": torch.ones(1)}}, path, metadata)
    assert tree.load(path)[1] == metadata


def test_old_file_survives_a_failed_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.save({"a": {"x": torch.ones(1)}}, path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        tree.save({"a": {"x": torch.zeros(1)}}, path)
    assert tree.load(path)[0]["a"]["x"].tolist() == [1]
    assert list(path.parent.iterdir()) == [path]


def test_files_of_a_newer_version_are_refused(path: Path) -> None:
    tree.save({"a": {"x": torch.ones(1)}}, path, {"round": 3})
    assert tree.load(path)[1] == {"round": 3}
    save_file({"a/x": torch.ones(1)}, path, {"protofed": '{"format": 3}'})
    with pytest.raises(ProtofedError, match="newer version of protofed"):
        tree.load(path)
    save_file({"a/x": torch.ones(1)}, path, {"protofed": "[]"})
    with pytest.raises(ProtofedError, match="metadata"):
        tree.load(path)
