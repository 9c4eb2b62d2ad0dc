"""Colors and line styles. A method looks the same on every page and in every figure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from hashlib import blake2b
from itertools import product
from typing import NamedTuple

from protofed.methods import METHODS
from protofed.studies.history import RunHistory
from protofed.studies.tables import BASELINE, TableRow


class Tone(NamedTuple):
    """A color in a figure file, on a light page and on a dark page."""

    paper: str
    light: str
    dark: str


TONES = (
    Tone("#0072B2", "#0072b2", "#4ba3e3"),  # blue
    Tone("#E69F00", "#d98c00", "#f0ad3c"),  # orange
    Tone("#009E73", "#009e73", "#2cc294"),  # green
    Tone("#CC79A7", "#c2649a", "#dd8fbd"),  # purple
    Tone("#D55E00", "#d55e00", "#f4814a"),  # vermilion
    Tone("#56B4E9", "#3ba3dc", "#7cc8f2"),  # sky blue
    Tone("#8C8C00", "#84840a", "#bcbc4a"),  # olive: the original's yellow is too pale on white
    Tone("#111111", "#24272b", "#e6e7e9"),  # black
    Tone("#777777", "#70757c", "#a0a7b0"),  # gray
)
"""Okabe and Ito's palette, which color-blind readers can distinguish, and a neutral gray."""
BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, OLIVE, _, GRAY = (tone.paper for tone in TONES)
COLORS = tuple(tone.paper for tone in TONES[:-1])
"""For anything but methods (domains, clusters, columns): all but gray."""
HUES = COLORS[:-1]
"""For methods: neither black nor gray, which is FedAvg's."""

CLASS_COLORS = (
    "#4e79a7", "#f28e2b", "#e15759", "#2f9e94", "#59a14f",
    "#d4a717", "#b07aa1", "#ff7f93", "#9c755f", "#8a8f98",
)  # fmt: skip
"""For classes: ten colors that are easy to distinguish on a light and on a dark page."""

STYLES: dict[str, tuple[float, ...]] = {
    "solid": (),
    "dashed": (4, 1.6),
    "dotted": (1, 1.4),
    "dashdot": (5, 1.6, 1, 1.6),
    "long": (9, 2),
    "dashdotdot": (5, 1.4, 1, 1.4, 1, 1.4),
}
"""Line styles: alternating lengths of dashes and gaps, in units of the line's width."""


class Look(NamedTuple):
    """The color and the line style of a method."""

    color: str
    style: str


_CHOSEN = {
    BASELINE: Look(GRAY, "dashed"),
    "fpl": Look(VERMILION, "solid"),
    "i2pfl": Look(BLUE, "long"),
    "fedseproto": Look(GREEN, "dashdot"),
    "fedproto": Look(ORANGE, "dotted"),
    "fedprox": Look(SKY, "dashdotdot"),
    "moon": Look(PURPLE, "solid"),
    "feddyn": Look(OLIVE, "dotted"),
    "fedproc": Look(BLUE, "dashed"),
    "fedopt": Look(GREEN, "long"),
    "fedplvm": Look(PURPLE, "dashed"),
}
"""Looks of methods that share the papers' tables: as different as possible, also in gray."""


@cache
def method_look(method: str) -> Look:
    """The look of a method: a chosen one, or one that follows from the hash of its name.

    Built-in methods come first, so that a user's own method never changes their looks. Once all
    looks are taken, methods share them.
    """
    free = [Look(*pair) for pair in product(HUES, STYLES) if pair not in _CHOSEN.values()]
    looks = dict(_CHOSEN)
    for name in (*sorted(METHODS), method):
        start = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") % len(free)
        unused = [look for look in (*free[start:], *free[:start]) if look not in looks.values()]
        looks.setdefault(name, next(iter(unused), free[start]))
    return looks[method]


def looks_of(items: Iterable[RunHistory | TableRow]) -> dict[str, Look]:
    """The look of each label, no two the same.

    A method has its own look. Its variants keep its color and differ in line style, as long as
    there are line styles left.
    """
    looks: dict[str, Look] = {}
    # methods before variants, and built-in ones first: they get the looks that are theirs
    for item in sorted(items, key=lambda item: (item.variant, item.method not in METHODS)):
        if item.label in looks:
            continue
        own = method_look(item.method)
        colors = (own.color, *(color for color in HUES if color != own.color))
        styles = (own.style, *(style for style in STYLES if style != own.style))
        unused = (pair for pair in product(colors, styles) if pair not in looks.values())
        looks[item.label] = Look(*next(unused, own))
    return looks
