from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protofed.report.gather import gather
from protofed.report.page import write
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
    """A page over them, its figures beside it."""
    page = tmp_path_factory.mktemp("page") / "report.html"
    write(gather([runs]), page, page.with_name("figures"), images=12)
    return page
