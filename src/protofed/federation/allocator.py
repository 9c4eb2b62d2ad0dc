"""Memory of activations and gradients that is freed and asked for again in every step."""

from __future__ import annotations

import ctypes
import functools

TRIM, TOP, MMAP = -1, -2, -3
"""The C library's numbers for what is set here (``malloc.h``)."""
SETTINGS = {
    MMAP: 32 << 20,  # up to here a block comes from the heap, which keeps it; more is not allowed
    TRIM: 1 << 30,  # so much may lie free before the system gets it back
    TOP: 64 << 20,  # a heap grows in such steps, and a thread's is not given up as a whole
}


@functools.cache
def keep_freed_memory() -> bool:
    """Let the process keep memory that it frees; False where the C library does not know how.

    Without it, glibc gives blocks of some megabytes back to the system in every step, and each of
    their pages costs a fault when it is touched again: a tenth to a sixth of a small CNN's step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library (macOS, Windows)
        return False
    return {mallopt(name, value) for name, value in SETTINGS.items()} == {1}
