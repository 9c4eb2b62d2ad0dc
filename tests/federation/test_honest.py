"""No honest run of any method meets the bounds."""

from __future__ import annotations

from typing import Any

import pytest
from tests.some_methods import SOME, options_of

from protofed.methods import METHODS
from protofed.runs.run import run

pytestmark = pytest.mark.usefixtures("single_thread")
SMALL: dict[str, Any] = {
    "rounds": 3, "epochs": 2, "samples": 20, "width": 4, "batch": 10, "device": "cpu",
    "clients": {"scan": 2, "print": 1, "photo": 1, "inverse": 1},
}  # fmt: skip


def refused(method: str, **settings: Any) -> list[Any]:
    public = settings and METHODS[method]().public_images
    options = options_of(method) | ({"images": 24} if public else {})
    found = run("glyphs", method, options=options, **settings)
    return [record["problems"] for record in found.rounds if "problems" in record]


@pytest.mark.parametrize("method", SOME)
def test_an_honest_run_in_small(method: str) -> None:
    assert refused(method, **SMALL) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_an_honest_run_on_glyphs(method: str) -> None:
    assert refused(method) == []
