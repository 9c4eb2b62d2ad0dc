"""The measured studies in the repository: their tables are what their runs give."""

from __future__ import annotations

from pathlib import Path

import pytest

from protofed.runs.pool import PACKED
from protofed.studies.folder import StudyFolder, to_text

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize(
    "folder", sorted(p.parent for p in RESULTS.glob(f"*/{PACKED}")), ids=lambda p: p.name
)
def test_the_table_is_made_of_the_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_DATA", "nowhere")  # reading needs no images
    found = StudyFolder.open(folder)
    assert {stored.name for stored in found.runs.values() if stored} == {
        stored.name for stored in found.pool.runs
    }, "a run that no table shows"
    text = to_text(found.study, found.tables(), "markdown")
    assert text == (folder / "table.md").read_text("utf-8")
