"""The one type of state: named slots of named tensors.

A server's state, a client's state and both messages are Trees, e.g.
``{"model": {"head.weight": ...}, "prototypes": {"mean": [K, d], "count": [K]}}``. A Tree is at
once a safetensors file (keys ``slot/name``), a message on a wire, and a number of bytes. A slot
without tensors and an absent slot are the same thing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from protofed.errors import ProtofedError
from protofed.files import Damaged, sealed, unsealed, write_atomic

_PLAIN = torch.contiguous_format

Slot = dict[str, Tensor]
Tree = dict[str, Slot]


def map_tensors(tree: Mapping[str, Mapping[str, Tensor]], fn: Callable[[Tensor], Tensor]) -> Tree:
    """A new Tree with ``fn`` applied to every tensor; slots left empty disappear."""
    _check(tree)
    return {s: {n: fn(t) for n, t in entries.items()} for s, entries in tree.items() if entries}


def to(tree: Tree, device: torch.device | str) -> Tree:
    """The Tree on ``device``, detached from any graph."""
    return map_tensors(tree, lambda t: t.detach().to(device))


def copy(tree: Tree, device: torch.device | str = "cpu") -> Tree:
    """A Tree on ``device`` that shares no memory with the given one.

    Always in plain row-major order, as if it came from a file or a wire: a sum over another
    memory layout could round differently.
    """
    return map_tensors(tree, lambda t: t.detach().to(device).clone(memory_format=_PLAIN))


def nbytes(tree: Tree) -> int:
    """Bytes of tensor data: what travels when this Tree is a message."""
    _check(tree)
    return sum(t.numel() * t.element_size() for slot in tree.values() for t in slot.values())


def equal(a: Tree, b: Tree) -> bool:
    """Whether two Trees hold the same slots, names, dtypes, shapes and bits."""
    flat_a, flat_b = _flatten(a), _flatten(b)
    return flat_a.keys() == flat_b.keys() and all(
        t.dtype == flat_b[k].dtype and t.shape == flat_b[k].shape and _same_bits(t, flat_b[k])
        for k, t in flat_a.items()
    )


@contextmanager
def unchanged(given: Mapping[str, Tree], error: Callable[[str], Exception]) -> Iterator[None]:
    """Raise an error if these Trees, or a tensor of them, are changed in place meanwhile.

    The error is made from words for the first such tensor: ``slot/name of`` and the Tree's key.
    """
    before = {what: (t, t._version) for what, t in _named(given)}
    try:
        yield
    finally:
        now = dict(_named(given))
        for what, (t, version) in before.items():
            if now.pop(what, None) is not t or t._version != version:
                raise error(what)
        for what in now:
            raise error(what)


def _named(given: Mapping[str, Tree]) -> Iterator[tuple[str, Tensor]]:
    for what, tree in given.items():
        for slot, entries in tree.items():
            for name, t in entries.items():
                yield f"{slot}/{name} of {what}", t


def in_words(found: object) -> str:
    """What a hook returned in place of what it should."""
    if isinstance(found, Mapping):
        return f"{{{', '.join(f'{n!r}: {in_words(value)}' for n, value in found.items())}}}"
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)}"
    if isinstance(found, tuple | list) and found:
        return f"({', '.join(map(in_words, found))})"
    return f"{found!r:.100}"


def digest(tree: Tree, *about: str) -> str:
    """A hash that stands for a Tree, bit for bit, and for whatever else ``about`` says."""
    found = hashlib.blake2b(json.dumps(about).encode(), digest_size=16)
    for part in _parts(_flatten(tree)):
        found.update(part)
    return found.hexdigest()


def save(
    tree: Tree, path: Path, metadata: Mapping[str, Any] | None = None, private: bool = False
) -> None:
    """Write a Tree as a safetensors file, atomically: a reader sees the old file or the new.

    Its metadata has a checksum over names, dtypes, shapes, data and the rest of the metadata.
    """
    tensors = {k: t.detach().cpu().contiguous() for k, t in _flatten(tree).items()}
    about = json.dumps(sealed(metadata or {}, _parts(tensors)))
    write_atomic(path, serialize(tensors, {"protofed": about}), private)


def load(path: Path) -> tuple[Tree, dict[str, Any]]:
    """Read a Tree and its metadata; a file that is not as it was written is ``Damaged``."""
    tensors: Slot = {}
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["protofed"])
            for key in file.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                # clone: a file's tensors are not aligned in memory, and vectorized sums over
                # unaligned memory may round differently, which would break exact resume.
                tensors[key] = file.get_tensor(key).clone()
    except KeyError:
        raise Damaged(path, "it has no metadata of protofed") from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise Damaged(path, str(error)) from None
    if not isinstance(about, dict):
        raise Damaged(path, "its metadata is not an object")
    metadata = unsealed(path, about, _parts(tensors))
    tree: Tree = {}
    for key, t in tensors.items():
        slot, _, name = key.partition("/")
        tree.setdefault(slot, {})[name] = t
    return tree, metadata


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """All that a checksum covers, as buffers, in an order that a file does not change."""
    for name, t in sorted(tensors.items()):
        yield json.dumps([name, str(t.dtype), t.shape]).encode()
        yield _bytes(t).numpy()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # as bytes: 0.0 == -0.0 though they differ, and nan != nan though it does not
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(t: Tensor) -> Tensor:
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _check(tree: object) -> None:
    """Raise an error that names the slot or entry that no Tree can hold."""
    if not isinstance(tree, Mapping):
        raise ProtofedError(f"state and messages are slots of named tensors, not {type(tree)}")
    for slot, entries in tree.items():
        if not isinstance(entries, Mapping):
            raise ProtofedError(
                f"slot '{slot}' is {type(entries).__name__}, not a dict of named tensors"
            )
        for name, t in entries.items():
            if not isinstance(t, Tensor):
                raise ProtofedError(
                    f"entry '{name}' of slot '{slot}' is {type(t).__name__}, not a tensor"
                )


def _flatten(tree: Tree) -> dict[str, Tensor]:
    for slot in tree:
        if "/" in slot:
            raise ValueError(f"a slot's name cannot contain '/': {slot!r}")
    return {f"{s}/{n}": t for s, entries in tree.items() for n, t in entries.items()}
