"""A process that trains on a CPU keeps the memory it frees, and the threads it asked for."""

from __future__ import annotations

import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from protofed.config import make_config
from protofed.federation import cpu
from protofed.federation.cpu import keep_freed_memory, one_thread, use_one_thread
from protofed.federation.simulation import Federation
from protofed.testing.checks import TINY, tiny_task

GLIBC = platform.libc_ver()[0] == "glibc"
# 20 MB in five blocks, all freed before the next step, as activations are
CHILD = """
import resource, torch
from protofed.federation.cpu import keep_freed_memory

def step():
    blocks = [torch.ones(1 << 20) for _ in range(5)]

assert keep_freed_memory()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not GLIBC, reason="glibc's allocator")
def test_a_step_reuses_the_memory_of_the_step_before() -> None:
    """Of 51,200 pages hardly any is new; without the setting, about four fifths are."""
    command = [sys.executable, "-c", CHILD]
    assert int(subprocess.run(command, capture_output=True, check=True).stdout) < 5000


def test_an_engine_on_a_cpu_sets_it() -> None:
    keep_freed_memory.cache_clear()
    task = tiny_task()
    Federation(make_config(task, "fedavg", **TINY), task)
    assert keep_freed_memory.cache_info().misses == 1
    assert keep_freed_memory() == GLIBC


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str | None) -> object:
        return object()

    monkeypatch.setattr(cpu.ctypes, "CDLL", without)
    keep_freed_memory.cache_clear()
    assert keep_freed_memory() is False
    keep_freed_memory.cache_clear()


def test_a_thread_keeps_its_one_thread_while_others_set_theirs() -> None:
    """As a run in another thread does when it ends."""
    with one_thread(), ThreadPoolExecutor(1, initializer=use_one_thread) as pool:
        pool.submit(int).result()
        torch.set_num_threads(3)
        assert pool.submit(torch.get_num_threads).result() == 1
