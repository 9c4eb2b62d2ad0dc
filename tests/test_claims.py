"""What the README and the pages claim is what the files in results/ say.

Each sentence is made from the files and must be on its page, word for word. If a study was run
again, change the page to what the failing test shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from protofed.studies.folder import StudyFolder
from protofed.studies.tables import AVERAGE, Spread, TableRow

ROOT = Path(__file__).parents[1]
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MEASURED = re.compile(r"\d+\.\d ± \d+\.\d")


@cache
def rows(study: str, task: str) -> dict[str, TableRow]:
    (table,) = StudyFolder.open(ROOT / "results" / study).tables([task])
    return {row.label: row for row in table.rows}


def spread(value: Spread) -> str:
    assert value.error is not None
    return f"{value.mean:.1f} ± {value.error:.1f}"


def above_fedavg(study: str, label: str) -> str:
    """``4.9 ± 0.9 above FedAvg (five seeds; its paper prints 7.3)``, without the words between."""
    found = rows(study, "office_caltech")
    ours = found[label].differences[AVERAGE]
    paper = found[label].paper[AVERAGE] - found["FedAvg"].paper[AVERAGE]
    return f"{spread(ours)} {{}}({COUNTS[ours.seeds]} seeds; its paper prints {paper:.1f})"


def office_caltech() -> str:
    fpl, i2pfl = above_fedavg("fpl-table2", "FPL"), above_fedavg("i2pfl-table2", "I2PFL")
    return (
        "On Office-Caltech, under the papers' own protocols, FPL ends "
        f"{fpl.format('above FedAvg ')} and I²PFL {i2pfl.format('')}"
    )


def digits() -> str:
    seconds = rows("fpl-table2", "digits")["FPL"].seconds
    return f"a hundred rounds of FPL on Digits take {seconds:.0f} s on one GPU"


def styles() -> str:
    found = rows("styles", "office_caltech")
    ours, jitter = (found[label].differences[AVERAGE] for label in ("ProtoStyle", "color jitter"))
    return (
        f"there, ProtoStyle, a method of this package, ends {spread(ours)} above I²PFL "
        f"({COUNTS[ours.seeds]} seeds), and FedAvg with color jitter {spread(jitter)}"
    )


def glyphs() -> str:
    found = rows("glyphs", "glyphs")
    fpl, fedproto = (found[label].differences[AVERAGE] for label in ("fpl", "fedproto"))
    return (
        f"Over {COUNTS[fpl.seeds]} seeds, FPL ends {spread(fpl)} points above FedAvg, and FedProto "
        f"{spread(fedproto)} above it"
    )


def batches() -> str:
    large, small = (
        dict(zip(row.seed_list, row.accuracy[AVERAGE].values, strict=True))
        for study in ("fpl-table2", "i2pfl-table2")
        for row in (rows(study, "office_caltech")["FedAvg"],)
    )
    seeds = large.keys() & small.keys()
    before, after = (fmean(own[seed] for seed in seeds) for own in (large, small))
    return (
        f"batches of 32 in place of 64 lift FedAvg alone from {before:.1f} to {after:.1f} "
        f"([{COUNTS[len(seeds)]} seeds each](results.md))"
    )


README = (office_caltech, digits, styles, glyphs)
CLAIMS = {**dict.fromkeys(README, "README.md"), batches: "docs/choosing-a-method.md"}


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text("utf-8").split())


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_the_files_say_so(claim: Callable[[], str]) -> None:
    assert claim() in text_of(CLAIMS[claim])


def test_the_readme_claims_nothing_else() -> None:
    claimed = [number for claim in README for number in MEASURED.findall(claim())]
    assert sorted(MEASURED.findall(text_of("README.md"))) == sorted(claimed)
