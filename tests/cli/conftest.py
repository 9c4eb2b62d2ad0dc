from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.commands import Done, call

from protofed.report import plot


@pytest.fixture
def protofed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """``protofed`` called in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return call


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of figures, and no figures: drawing takes most of the time."""

    def save(drawn: plot.Plot, folder: Path, *_: object, **__: object) -> list[Path]:
        return [folder / f"{drawn.name}.png"]

    monkeypatch.setattr(plot, "save", save)
    monkeypatch.setattr(plot, "svg", lambda panel, prefix: "<svg></svg>")
