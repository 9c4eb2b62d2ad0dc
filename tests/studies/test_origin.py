"""What a table says of the runs it is made of."""

from __future__ import annotations

import json
from pathlib import Path

from tests.studies.made_runs import make_runs, study

from protofed.federation.facts import NUMERICS
from protofed.studies.folder import StudyFolder


def test_runs_at_the_same_time_count_once_in_wall_clock(tmp_path: Path) -> None:
    made = study()
    runs = make_runs(made, tmp_path)
    finished = {("FedAvg", 0): 100, ("FPL", 0): 102, ("FedAvg", 1): 200, ("FPL", 1): 199}
    for key, folder in runs.items():
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**summary, "finished": finished[key]}))
    facts = json.loads((runs["FPL", 1] / "facts.json").read_text())
    facts |= {"versions": {"commit": "abc1234"}, "hardware": "a GPU"}
    (runs["FPL", 1] / "facts.json").write_text(json.dumps(facts))
    folder = StudyFolder.create(tmp_path / "s", made, tmp_path)
    # 4.5 s each: 95.5 to 102, and 194.5 to 200
    assert folder.tables()[0].details.endswith(
        f"Runs: 4, on made up (3 runs) and a GPU (1), numerics {NUMERICS}, commit unknown "
        "(3 runs) and abc1234 (1), 18 s in all, wall-clock 12 s."
    )


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    make_runs(study(), tmp_path)
    folder = StudyFolder.create(tmp_path / "s", study(), tmp_path)
    assert str(folder.origin()).endswith("18 s in all, wall-clock not recorded.")
