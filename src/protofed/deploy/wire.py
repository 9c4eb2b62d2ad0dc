"""A Tree as Flower's records and back, bit for bit.

Each slot is an ``ArrayRecord`` named ``tree.<slot>``, each tensor an ``Array`` with its raw bytes
in row-major, little-endian order. There is no ``.npy`` header and no pickle: what arrives is
checked (a known dtype, the length that the shape requires) before any of its bytes are read. Every
dtype below travels unchanged, BatchNorm's int64 counters and bfloat16 included.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from torch import Tensor

from protofed.errors import ProtofedError
from protofed.tree import Tree

PREFIX = "tree."
RAW = "protofed.raw"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class Refused(ProtofedError):
    """A message that is not accepted. Its text may travel: it names no file of a site."""


def to_array(t: Tensor) -> Array:
    """The Array that carries a tensor, wherever and however the tensor is stored."""
    name = str(t.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ProtofedError(f"a tensor of {t.dtype} cannot travel", f"use {', '.join(DTYPES)}")
    if sys.byteorder != "little":
        raise ProtofedError("big-endian machines are not supported")
    flat = t.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return Array(dtype=name, shape=tuple(t.shape), stype=RAW, data=data)


def from_array(array: Array, where: str) -> Tensor:
    """The tensor of an Array; refused if its bytes do not match what it claims to be."""
    if array.stype != RAW or array.dtype not in DTYPES:
        raise Refused(f"{where} has an unknown format: {array.dtype!r} in {array.stype!r}")
    dtype, shape = DTYPES[array.dtype], tuple(array.shape)
    if len(shape) > 8 or not all(type(n) is int and n >= 0 for n in shape):
        raise Refused(f"{where} has an invalid shape {shape}")
    if len(array.data) != math.prod(shape) * dtype.itemsize:
        raise Refused(f"{where} has {len(array.data)} bytes, which do not match its shape {shape}")
    if not array.data:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool and array.data.strip(b"\0\1"):
        raise Refused(f"{where} is bool but has bytes other than 0 and 1")
    # the clone is aligned like any other tensor: sums must not round differently
    return torch.frombuffer(bytearray(array.data), dtype=dtype).clone().reshape(shape)


def add_tree(content: RecordDict, tree: Tree) -> RecordDict:
    for slot, entries in tree.items():
        if entries:
            content[PREFIX + slot] = ArrayRecord({n: to_array(t) for n, t in entries.items()})
    return content


def read_tree(content: RecordDict, limit: int | None = None) -> Tree:
    """The Tree in a message's content; more than ``limit`` bytes are refused unread."""
    size = sum(len(a.data) for r in content.array_records.values() for a in r.values())
    if limit is not None and size > limit:
        raise Refused(f"the message has {size} bytes, more than the {limit} allowed")
    tree: Tree = {}
    for key, record in content.array_records.items():
        if not key.startswith(PREFIX):
            raise Refused(f"the message has an unknown record {key!r}")
        slot = key.removeprefix(PREFIX)
        tree[slot] = {
            name: from_array(array, f"entry {name!r} of slot {slot!r}")
            for name, array in record.items()
        }
    return tree


def message_bytes(messages: Iterable[Message]) -> list[int]:
    """Sizes of messages as Flower serializes them, without what TLS and HTTP add.

    What several of them share is serialized once.
    """
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        no_object_id_recompute,
    )

    sizes: dict[str, int] = {}
    found = []
    with no_object_id_recompute():
        for message in messages:
            parts = get_all_nested_objects(message)
            sizes |= {i: len(part.deflate()) for i, part in parts.items() if i not in sizes}
            found.append(sum(sizes[i] for i in parts))
    return found
