"""What lanes would do on a GPU that stand-ins on a CPU do not show; see ``pretended_gpu``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.some_methods import ALWAYS

from protofed.methods import METHODS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ALWAYS, id="one of each kind"),
        pytest.param([n for n in METHODS if n not in ALWAYS], id="rest", marks=pytest.mark.slow),
    ],
)
def test_graphs_hold_all_of_a_step_and_devices_are_never_mixed(names: list[str]) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.engines.lanes.pretended_gpu", *names]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
