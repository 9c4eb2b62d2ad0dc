"""The real images, if they are at hand: exact counts, and what they look like."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
from PIL import Image

from protofed.data import Task, load_task
from protofed.data.inspect import class_counts, contact_sheet, verify

SHARED = Path(os.environ.get("PROTOFED_DATA") or Path(__file__).parents[4] / "shared" / "data")
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="no real images here")

SIZES = {
    "digits": {
        "mnist": (60000, 10000),
        "usps": (7291, 2007),
        "svhn": (5136, 2000),
        "syn": (3000, 2000),
    },
    "office_caltech": {
        "caltech": (899, 224),
        "amazon": (768, 190),
        "webcam": (237, 58),
        "dslr": (127, 30),
    },
    "pacs": {
        "photo": (1336, 334),
        "art_painting": (1640, 408),
        "cartoon": (1876, 468),
        "sketch": (3144, 785),
    },
}


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A cache that the tests of this file share: decoding takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def task(name: str) -> Task:
    return load_task(name, SHARED)


@pytest.mark.parametrize(
    "name",
    ["office_caltech", *(pytest.param(n, marks=pytest.mark.slow) for n in ("pacs", "digits"))],
)
def test_counts_and_sheet(name: str) -> None:
    loaded = task(name)
    assert {d: (len(i.train), len(i.test)) for d, i in loaded.domains.items()} == SIZES[name]
    for domain in class_counts(loaded).values():
        assert min(domain["train"]) > 0 and min(domain["test"]) > 0
    page = Image.open(io.BytesIO(contact_sheet(loaded)))
    assert page.format == "PNG" and page.width > 500 and page.height > 300
    if name == "digits":
        assert "SVHN is partial" in loaded.note and "re-creation" in loaded.note
        assert sum(class_counts(loaded)["mnist"]["train"][:2]) == 5923 + 6742


def test_office_has_copies_in_training_and_test() -> None:
    report = verify("office_caltech", SHARED)
    assert not report.bad and not report.conflicting
    assert (len(report.leaked), report.repeated) == (10, 18)
    assert all(have == official for have, official in report.counts.values())


@pytest.mark.slow
def test_cached_pacs_is_ready_in_half_a_second() -> None:
    task("pacs")
    times = []
    for _ in range(3):
        began = time.perf_counter()
        task("pacs")
        times.append(time.perf_counter() - began)
    assert min(times) < 0.5
