from __future__ import annotations

import os

import pytest

from protofed.cores import core_count
from protofed.federation.facts import choose_engine


def test_cores_of_others_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system gives a job 2 of 64, and forked workers are to be 2."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 9}, raising=False)
    assert core_count() == 2
    assert choose_engine("auto", "cpu") == ("workers", "the device is a CPU with 2 workers")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert core_count() == 64
