from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.commands import Done, call


@pytest.fixture
def protofed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """``protofed`` called in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return call
