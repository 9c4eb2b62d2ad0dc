"""How many cores there are to compute on."""

from __future__ import annotations

import os


def core_count() -> int:
    """The cores that this process may use: of a machine that a batch system divides, its part."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
