from __future__ import annotations

import os
from pathlib import Path

import pytest

from protofed.cores import core_count
from protofed.federation.facts import choose_engine


def test_cores_of_others_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A batch system gives a job 2 of 64, and forked workers are to be 2."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 9}, raising=False)
    assert core_count(tmp_path) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert core_count(tmp_path) == 64
    monkeypatch.setattr("protofed.federation.facts.core_count", lambda: 2)
    assert choose_engine("auto", "cpu") == ("workers", "the device is a CPU with 2 workers")


def quota(group: Path, version: int, text: str) -> None:
    """Give a control group a quota and a period, in microseconds."""
    group.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (group / "cpu.max").write_text(f"{text}\n")
    else:
        for name, number in zip(("quota", "period"), text.split(), strict=True):
            (group / f"cpu.cfs_{name}_us").write_text(f"{number}\n")


@pytest.mark.parametrize(
    ("version", "line", "base", "none"),
    [
        (2, "0::/a/job\n", "", "max 100000"),
        (1, "3:memory:/x\n4:cpu,cpuacct:/a/job\n0::/\n", "cpu", "-1 100000"),
    ],
)
def test_a_container_has_the_cores_of_its_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int, line: str, base: str, none: str
) -> None:
    """A container of `docker run --cpus 2` sees all cores of the machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(line)
    group = tmp_path / "sys/fs/cgroup" / base / "a/job"
    assert core_count(tmp_path) == 64
    for text, cores in [("200000 100000", 2), ("250000 100000", 3), ("5000 100000", 1), (none, 64)]:
        quota(group, version, text)
        assert core_count(tmp_path) == cores
    quota(group, version, "9900000 100000")  # more than there are
    assert core_count(tmp_path) == 64
    quota(group.parent, version, "400000 100000")  # the group that it is in has less
    assert core_count(tmp_path) == 4
