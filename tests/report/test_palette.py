"""Looks: one for each method, everywhere, and never the same twice in a figure."""

from __future__ import annotations

from dataclasses import dataclass

from protofed.methods import METHODS
from protofed.report.palette import GRAY, HUES, STYLES, TONES, Look, looks_of, method_look
from protofed.studies.definition import builtin, load


@dataclass(frozen=True)
class Item:
    label: str
    method: str
    variant: bool = False


def test_every_method_has_a_look_of_its_own() -> None:
    looks = {name: method_look(name) for name in METHODS}
    assert len(set(looks.values())) == len(METHODS)
    assert looks["fedavg"] == Look(GRAY, "dashed")
    assert GRAY not in {look.color for name, look in looks.items() if name != "fedavg"}
    assert all(look.style in STYLES for look in looks.values())


def test_a_look_does_not_depend_on_the_figure() -> None:
    alone = looks_of([Item("FPL", "fpl")])["FPL"]
    among = looks_of([Item(name.upper(), name) for name in METHODS])["FPL"]
    assert alone == among == method_look("fpl")
    # nor on the order, nor on a method of one's own that comes first
    own = looks_of([Item("mine", "mine"), Item("FPL", "fpl"), Item("A", "fedavg")])
    assert (own["FPL"], own["A"]) == (method_look("fpl"), method_look("fedavg"))
    assert method_look("mine") == method_look("mine")


def test_the_methods_of_the_papers_differ_without_their_colors() -> None:
    papers = [method_look(name).style for name in ("fedavg", "fpl", "i2pfl", "fedseproto")]
    assert len(set(papers)) == 4


def test_variants_keep_the_color_and_differ_in_style() -> None:
    items = [Item("w/o UPCR", "fpl", True), Item("w/o CPCL", "fpl", True), Item("full", "fpl")]
    looks = looks_of([*items, *items])  # a label may come again
    assert sorted(looks) == ["full", "w/o CPCL", "w/o UPCR"]
    assert looks["full"] == method_look("fpl")  # the defaults have the method's look, though last
    assert {look.color for look in looks.values()} == {method_look("fpl").color}
    assert len({look.style for look in looks.values()}) == 3


def test_many_variants_are_still_distinct() -> None:
    items = [Item(f"tau={i}", "fpl", True) for i in range(len(HUES) * len(STYLES))]
    assert len(set(looks_of(items).values())) == len(items)


def test_the_rows_of_the_papers_tables_differ() -> None:
    for name in builtin():
        rows = load(name).rows.values()
        looks = looks_of([Item(row.label, row.method, bool(row.options)) for row in rows])
        assert len(set(looks.values())) == len(rows), name


def test_every_color_has_a_tone_for_light_and_dark_pages() -> None:
    assert len({tone.paper for tone in TONES}) == len({tone.dark for tone in TONES}) == 9
