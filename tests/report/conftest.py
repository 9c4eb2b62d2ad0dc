from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protofed.report import plot
from protofed.report.collect import collect
from protofed.report.page import write_report
from protofed.runs.run import run

SMALL: dict[str, Any] = {
    "task": "glyphs", "rounds": 2, "epochs": 1, "model": "cnn2", "width": 4, "device": "cpu",
    "clients": {"scan": 2, "print": 2, "photo": 1}, "samples": 20, "engine": "loop",
}  # fmt: skip


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small runs, as compare leaves it: two methods, two seeds."""
    folder = tmp_path_factory.mktemp("compare")
    for method in ("fpl", "fedavg"):
        for seed in (0, 1):
            run(**SMALL, method=method, seed=seed, out=folder / f"{method}-{seed}")
    return folder


@pytest.fixture(scope="session")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about them, with its figures beside it."""
    page = tmp_path_factory.mktemp("page") / "report.html"
    given = collect([runs])
    write_report(given, page, page.with_name("figures"), images=12, kinds=("png",), dpi=60)
    return page


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the figures, which are not drawn: that would take most of the time."""
    names: list[str] = []

    def save(drawn: plot.Plot, folder: Path, prefix: str = "", *_: object) -> list[Path]:
        names.append(f"{prefix}{drawn.name}")
        return [folder / names[-1]]

    monkeypatch.setattr(plot, "save", save)
    monkeypatch.setattr(plot, "svg", lambda panel, prefix: f'<svg aria-label="{prefix}"></svg>')
    return names
