"""The examples of the documentation work as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from protofed import run
from protofed.methods import method_class
from protofed.studies.definition import load
from protofed.studies.plan import plan
from protofed.testing.checks import SHORT, check, tiny_task
from tests.deploy.loopback_world import free_port

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["cosine_proto.py:CosineProto"])
def test_an_example_method_passes_the_battery(name: str) -> None:
    verdicts = check(method_class(str(EXAMPLES / name)))
    other = {v.check: v.status for v in verdicts if v.status != "passed"}
    assert other == {"different models": "skipped"}, "it averages models"


def test_the_example_model_is_trained() -> None:
    own = {"model": f"{EXAMPLES / 'own_model.py'}:encoder", "width": None, "norm": None}
    assert run(tiny_task(), **{**SHORT, **own}).network().features == 64


def test_an_example_study_can_be_planned() -> None:
    study = load(str(EXAMPLES / "averaging.toml"))
    assert len(plan(study)) == 4 * len(study.seeds)


NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_at_small_size(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    assert all(cell["outputs"] or cell["execution_count"] for cell in cells), "it was not executed"
    assert not any(o["output_type"] == "error" for cell in cells for o in cell["outputs"])
    names: dict[str, object] = {"Image": bytes}  # in place of what only a notebook has
    for number, cell in enumerate(cells):
        code = "".join(cell["source"]).replace("from IPython.display import Image", "")
        code = re.sub(r"rounds=\d+", "rounds=1, epochs=1, batch=32", code)
        exec(compile(code.replace("300", "60"), f"{path.name}[{number}]", "exec"), names)


@pytest.mark.drill
def test_three_sites_on_one_machine(tmp_path: Path) -> None:
    found = {**os.environ, "ROUNDS": "1", "PORT": str(free_port())}
    found["PATH"] = f"{Path(sys.executable).parent}:{found['PATH']}"
    script = [EXAMPLES / "three_sites.sh", tmp_path / "demo"]
    subprocess.run(script, check=True, env=found, timeout=600)
    assert len(list(tmp_path.glob("demo/sites/*/models/*.safetensors"))) == 3
