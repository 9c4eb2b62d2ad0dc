"""The examples of the documentation work as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from protofed import run
from protofed.methods import method_class
from protofed.testing.checks import SHORT, check, tiny_task

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["cosine_proto.py:CosineProto"])
def test_an_example_method_passes_the_battery(name: str) -> None:
    verdicts = check(method_class(str(EXAMPLES / name)))
    other = {v.check: v.status for v in verdicts if v.status != "passed"}
    assert other == {"different models": "skipped"}, "it averages models"


def test_the_example_model_is_trained() -> None:
    own = {"model": f"{EXAMPLES / 'own_model.py'}:encoder", "width": None, "norm": None}
    assert run(tiny_task(), **{**SHORT, **own}).network().features == 64
