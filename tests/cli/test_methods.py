"""``protofed methods`` and ``tasks``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.commands import MINE, Done

from protofed.testing.checks import CheckResult

Protofed = Callable[..., Done]


def test_methods_lists_them_all(protofed: Protofed) -> None:
    code, out, _ = protofed("methods")
    assert code == 0
    for name in ("fedavg", "fedproto", "fpl"):
        assert re.search(rf"^\s*{name}\b", out, re.M)
    assert "CVPR 2023" in out


def test_methods_shows_one(protofed: Protofed) -> None:
    code, out, _ = protofed("methods", "fpl")
    assert code == 0
    for part in ("CVPR 2023", "tau", "τ", "0.02", "finch_level", "first | last", "Deviations"):
        assert part in out
    assert re.search(r"finch_level +last +first", out)  # published, printed
    assert "--set reading=printed" in out
    out = protofed("methods", "fedprox").out
    assert "default" in out and "printed" not in out
    assert "no hyper-parameters" in protofed("methods", "fedavg").out
    assert "on digits" in protofed("methods", "fpl", "--task", "digits").out
    for given, words in (
        (["fpll"], "fpl"),
        (["fpl", "fedavg"], "protofed methods check fedavg"),
        (["fpl", "--task", "digit"], "digits"),
    ):
        code, _, err = protofed("methods", *given)
        assert (code, err.count("\n")) == (2, 1)
        assert words in err


def test_methods_check(protofed: Protofed, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.py").write_text(MINE)
    code, out, _ = protofed("methods", "check", "mine.py:Mine")
    assert code == 0
    assert re.search(r"all \d+ checks passed", out)
    assert "✓ gradients" in out
    found = [
        CheckResult("gradients", "passed"),
        CheckResult("missing class", "failed", "not finite"),
    ]

    def checked(method: object, tell: Callable[[CheckResult], None]) -> list[CheckResult]:
        for verdict in found:
            tell(verdict)
        return found

    monkeypatch.setattr("protofed.testing.run_checks", checked)
    code, out, err = protofed("methods", "check", "mine.py:Mine")
    assert code == 2
    assert "✗ missing class: not finite" in out
    assert "1 of 2 checks failed for mine.py:Mine" in err
    code, _, err = protofed("methods", "check")
    assert code == 2
    assert "file.py:Class" in err


def test_methods_check_says_a_fault_once_and_where(protofed: Protofed) -> None:
    Path("mine.py").write_text(MINE.replace("self.scale *", "self.scale * self.scales *"))
    code, out, err = protofed("methods", "check", "mine.py:Mine")
    assert code == 2
    (line,) = (line for line in out.splitlines() if line.startswith("✗"))
    at = 1 + MINE.partition("self.scale *")[0].count("\n")
    assert line.startswith(f"✗ gradients: mine.py:{at}: AttributeError: ")
    assert re.search(r"\d+ of \d+ checks failed for mine.py:Mine \(1 fault, each shown once\)", err)


def test_tasks(protofed: Protofed) -> None:
    code, out, _ = protofed("tasks")
    assert code == 0
    for task in ("glyphs", "digits", "office_caltech", "pacs", "vlcs", "folder:PATH"):
        assert task in out
    for domain in ("scan", "print", "photo", "inverse"):
        assert re.search(rf"^\s*{domain}\s+\d+\s+200\s", out, re.M)
