"""Keyed randomness: numbers are a function of a key, never consumed from a stream.

A key is made of whatever names the draw (seed, round, client's name, phase, step, purpose), so
neither the order of clients nor the engine nor a crash and resume can change a result, and a
checkpoint needs no generator state. Two kinds of draws:

- on the host, ``generator(...)``: a numpy generator for permutations, crops, Beta variables and
  initial weights, a new one for each key;
- inside a training step, ``uniform``, ``normal`` and ``beta``: a stateless integer hash written in
  tensor operations, the same on every device, whose key is an input tensor of the step.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from protofed.fused import replaceable


def key(*parts: int | str) -> int:
    """A 63-bit hash of these parts: 1 differs from "1", and ("ab", "c") from ("a", "bc")."""
    # a separator inside a part is doubled: no text of one part can look like two parts
    words = (f"{type(p).__name__}:{p}".replace("\x1f", "\x1f\x1f") for p in parts)
    text = "\x1f".join(words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*parts: int | str) -> np.random.Generator:
    """A fresh host generator for this key."""
    return np.random.Generator(np.random.Philox(key(*parts)))


_torch_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # fork only while it is free: a copy is never released
    os.register_at_fork(
        before=_torch_lock.acquire,
        after_in_parent=_torch_lock.release,
        after_in_child=_torch_lock.release,
    )


@contextmanager
def torch_draws(*parts: int | str) -> Iterator[None]:
    """PyTorch's own generator, for initial weights: seeded with this key, then restored.

    All threads share it, so only one at a time may use it: of two runs in two threads, neither
    draws the other's numbers.
    """
    with _torch_lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(*parts))
        yield


# The finalizer of SplitMix64 (Steele, Lea, Flood 2014). Torch has no unsigned 64-bit arithmetic
# on every device, so the constants are written as the signed numbers with the same bits, and a
# logical shift right is an arithmetic one with the copied sign bits masked away.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _hash(key: Tensor, draw: int, n: int) -> Tensor:
    """n hashed int64 numbers for the ``draw``-th draw of a step with this key (0-d int64)."""
    x = key + (torch.arange(n, device=key.device, dtype=torch.int64) + (draw << 40) + 1) * _GAMMA
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


@replaceable
def uniform(key: Tensor, draw: int, shape: tuple[int, ...]) -> Tensor:
    """Float32 numbers in the open interval (0, 1): the upper 23 bits of the hash, centered."""
    bits = _shift_right(_hash(key, draw, math.prod(shape)), 41)
    return ((bits.to(torch.float32) + 0.5) * 2.0**-23).reshape(shape)


# The others are computed in float64, then rounded: the last bits of a logarithm or cosine differ
# between devices.


@replaceable
def normal(key: Tensor, draw: int, shape: tuple[int, ...]) -> Tensor:
    """Float32 standard normal numbers (Box and Muller)."""
    u = uniform(key, draw, (2, *shape)).double()
    return (torch.sqrt(-2 * torch.log(u[0])) * torch.cos(2 * math.pi * u[1])).float()


@replaceable
def beta(key: Tensor, draw: int, shape: tuple[int, ...], a: float) -> Tensor:
    """Float32 numbers of the Beta(a, a) distribution, for any a > 0 (Devroye, 1996)."""
    u = uniform(key, draw, (2, *shape)).double()
    cos = torch.cos(2 * math.pi * u[1])
    w = (torch.exp(-torch.log(u[0]) / a) - 1) * cos * cos
    return (0.5 + 0.5 * torch.sign(cos) / torch.sqrt(1 + 1 / w)).float()
