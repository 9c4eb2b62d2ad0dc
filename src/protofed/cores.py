"""How many cores there are to compute on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from protofed.control_groups import control_groups


def core_count(root: Path = Path("/")) -> int:
    """The cores that this process may use: its part of a machine that is shared with others.

    A batch system names the cores of a job; a container has a quota of the time of all cores.
    """
    if hasattr(os, "sched_getaffinity"):  # Linux
        named = len(os.sched_getaffinity(0))
    else:
        named = os.cpu_count() or 1
    return min([named, *(math.ceil(quota) for quota in _quotas(root))])


def _quotas(root: Path) -> Iterator[float]:
    """How many cores' time each control group of this process allows it."""
    for group in control_groups("cpu", root):
        with suppress(OSError, ValueError):  # version 2; "max": no quota
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield quota / period
        with suppress(OSError, ValueError):  # version 1; -1: no quota
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = (int((group / name).read_text()) for name in names)
            if quota > 0:
                yield quota / period
