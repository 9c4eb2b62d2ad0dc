from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from tests.deploy.flower_world import through_wire

from protofed import tree
from protofed.deploy import wire
from protofed.deploy.wire import Refused, add_tree, from_array, read_tree, to_array
from protofed.errors import ProtofedError
from protofed.tree import Tree

VARIED: Tree = {
    "model": {
        "weight": torch.randn(3, 4).t(),  # not contiguous
        "bn.num_batches_tracked": torch.tensor(2**62 + 1),
        "double": torch.tensor([1.0 + 2**-52, float("inf"), -0.0], dtype=torch.float64),
        "half": torch.tensor([1.5], dtype=torch.float16),
        "bfloat": torch.randn(5).to(torch.bfloat16),
    },
    "prototypes": {
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 7),
        "scalar": torch.tensor(0.1),
        "count": torch.arange(3, dtype=torch.int32),
        "bytes": torch.tensor([0, 255], dtype=torch.uint8),
        "nan": torch.tensor([float("nan")]),
    },
}


def test_every_dtype_arrives_to_the_bit() -> None:
    content = add_tree(RecordDict(), VARIED)
    message, _ = through_wire(Message(content, 7, MessageType.TRAIN))
    again = read_tree(message.content)
    assert tree.equal(again, VARIED)
    assert again["model"]["bn.num_batches_tracked"].shape == ()
    assert again["prototypes"]["none"].shape == (0, 7)


def test_an_empty_slot_is_no_record_and_a_tensor_is_ones_own() -> None:
    content = add_tree(RecordDict(), {"model": {}, "a": {"x": torch.ones(2)}})
    assert list(content) == ["tree.a"]
    first, second = read_tree(content)["a"]["x"], read_tree(content)["a"]["x"]
    first += 1
    assert torch.equal(second, torch.ones(2))


def test_a_dtype_without_a_name_is_said() -> None:
    with pytest.raises(ProtofedError, match="cannot travel"):
        to_array(torch.zeros(1, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (Array("float32", (3,), wire.RAW, b"1234"), "do not match its shape"),
        (Array("float32", (10**15, 10**15), wire.RAW, b"1234"), "do not match its shape"),
        (Array("float32", (-1,), wire.RAW, b""), "has an invalid shape"),
        (Array("object", (1,), wire.RAW, b"1234"), "unknown format"),
        (Array("float32", (1,), "numpy.ndarray", b"1234"), "unknown format"),
        (Array("float32", (1,) * 9, wire.RAW, b"1234"), "has an invalid shape"),
        (Array("bool", (2,), wire.RAW, b"\x00\x02"), "bytes other than"),
    ],
)
def test_an_array_that_is_not_what_it_says_is_refused(array: Array, words: str) -> None:
    with pytest.raises(Refused, match=words):
        from_array(array, "entry 'x'")


def test_more_than_the_limit_is_refused_unread() -> None:
    content, size = add_tree(RecordDict(), VARIED), tree.nbytes(VARIED)
    assert read_tree(content, size)
    with pytest.raises(Refused, match=f"more than the {size - 1} allowed"):
        read_tree(content, size - 1)


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(Refused, match="unknown record"):
        read_tree(RecordDict({"arrays": ArrayRecord({"w": to_array(torch.zeros(1))})}))


def test_what_messages_share_is_serialized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    records = dict(add_tree(RecordDict(), VARIED))
    messages = [
        Message(RecordDict({**records, "own": ConfigRecord({"site": name})}), 7, MessageType.TRAIN)
        for name in ("a", "bb", "ccc")
    ]
    sizes = [through_wire(message)[1] for message in messages]
    assert len(set(sizes)) > 1
    serialized = 0

    def deflate(array: Array, real: Any = Array.deflate) -> bytes:
        nonlocal serialized
        serialized += 1
        return real(array)

    monkeypatch.setattr(Array, "deflate", deflate)
    assert wire.message_bytes(messages[:1]) == sizes[:1]
    alone, serialized = serialized, 0
    assert wire.message_bytes(messages) == sizes
    assert serialized == alone
