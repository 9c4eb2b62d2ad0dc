"""How a process that trains on a CPU uses its threads and its memory, and how it ends."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from signal import SIGTERM, Signals

import torch

TRIM, TOP, MMAP = -1, -2, -3
"""The parameters of ``mallopt`` that are set here, as numbered in ``malloc.h``."""
SETTINGS = {
    MMAP: 32 << 20,  # blocks up to this size come from the heap, which keeps them; the maximum
    TRIM: 1 << 30,  # free memory at the top of the heap before it goes back to the system
    TOP: 64 << 20,  # heaps grow in steps of this size, and a thread's heap is kept as a whole
}


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one intra-op thread. Sums are split over threads, so their number changes the bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_one_thread() -> None:
    """Have the calling thread compute with one intra-op thread from now on."""
    # When a thread first asks, it takes over the number that any thread set last. If it asked only
    # later, a run that ends in another thread and restores its own number would change this one.
    torch.get_num_threads()
    torch.set_num_threads(1)


@functools.cache
def keep_freed_memory() -> bool:
    """Let the process keep memory that it frees; False if the C library has no such setting.

    Otherwise glibc returns blocks of a few megabytes to the system in every step, and touching
    their pages again costs faults: 10 to 17 % of a small CNN's step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library (macOS, Windows)
        return False
    return {mallopt(name, value) for name, value in SETTINGS.items()} == {1}


def die_with_parent(number: Signals = SIGTERM) -> None:
    """Called in a child: get this signal when the thread that started it ends (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number)  # 1: PR_SET_PDEATHSIG
