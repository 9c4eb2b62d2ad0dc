"""Stored numbers of tiny runs: a change of form must not move any of them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from protofed.federation.facts import NUMERICS
from tests.golden.cases import CASES, HASHES, NUMBERS, VALUES, machine, numbers_of

STORED = json.loads(VALUES.read_text())
BITS = json.loads(HASHES.read_text())


def _flat(value: Any, name: str = "") -> dict[str, float]:
    if isinstance(value, dict):
        return {k: v for n, part in value.items() for k, v in _flat(part, f"{name}/{n}").items()}
    if isinstance(value, list):
        return {k: v for n, part in enumerate(value) for k, v in _flat(part, f"{name}/{n}").items()}
    return {name: value}


def test_other_numbers_have_another_numerics_number() -> None:
    """``Facts.numerics`` tells runs apart whose arithmetic differs: raise it with these values."""
    known = json.loads(NUMBERS.read_text())
    assert known[str(NUMERICS)] == hashlib.sha256(VALUES.read_bytes()).hexdigest()
    assert list(known) == [str(n) for n in range(1, NUMERICS + 1)]


def test_every_case_is_stored() -> None:
    assert set(STORED) == set(CASES)
    for hashes in BITS.values():
        assert set(hashes) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_the_stored_ones(case: str, subtests: pytest.Subtests) -> None:
    if case.endswith("on Flower"):
        pytest.importorskip("flwr")
    found = numbers_of(case)
    bits = found.pop("sha256")
    got, want = _flat(found), _flat(STORED[case])
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    with subtests.test("to the bit"):
        if machine() not in BITS:
            pytest.skip(f"no hashes are stored for {machine()}")
        assert bits == BITS[machine()][case]


@pytest.mark.slow
def test_a_newer_cpu_gives_the_stored_bits_with_the_instructions_of_an_older_one() -> None:
    """A CPU with AVX512 can compute as one with AVX2, whose hashes are stored."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("needs a CPU with AVX512")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", Path(__file__)],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert f"{len(CASES)} subtests passed" in done.stdout and "skipped" not in done.stdout
