"""Effects of switches: what a sweep over parameters with two values each says about each of them.

The effect of a parameter is the accuracy with its second value minus that with its first, averaged
over the settings of the others. It is computed for each seed, by least squares over the settings
that have all seeds, so that its interval is that of a difference paired by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import numpy as np

from protofed.studies.definition import Study, Sweep, show
from protofed.studies.tables import CONFIDENCE, Spread, TableCell, TableLine, TableRow, signed

ROMAN = {3: "III", 4: "IV", 5: "V", 6: "VI", 7: "VII"}


@dataclass(frozen=True)
class Effects:
    """The effects on a row's accuracy, or on its difference to another row's."""

    label: str
    method: str
    of: Mapping[str, Spread]
    """By parameter with its two values, unless the settings of one value are missing."""
    scope: str
    """How many settings they come from, and with what resolution."""
    baseline: str = ""
    """The row whose effects were subtracted, if so."""


def effects(study: Study, rows: Sequence[TableRow]) -> list[Effects]:
    """The effects for every row that is swept over three or more parameters with two values each.

    Effects on the difference to the baseline follow for the parameters that it shares.
    """
    complete = {row.label: row for row in rows if row.seeds == row.wanted}
    found = []
    for number, sweep in enumerate(study.sweeps):
        for label in sweep.rows if sweep.is_factorial else ():
            lines = [s for s in study.lines if (s.sweep, s.row.label) == (number, label)]
            there = [(s.point, complete[s.label]) for s in lines if s.label in complete]
            if made := _fitted(sweep, there):
                scope = _scope(sweep, [point for point, _ in there], len(lines))
                found.append(Effects(label, there[0][1].method, made, scope))
    base = next((e for e in found if e.label == study.baseline), None)
    others = [_difference(e, base) for e in found if base is not None and e is not base]
    return found + [e for e in others if e.of]


def resolution(sweep: Sweep) -> int | None:
    """The number of parameters in the shortest product that is constant; None for a whole grid.

    With four, no effect of one parameter is aliased with an interaction of two; with five, those
    interactions are not aliased with each other either.
    """
    points = sweep.points() if sweep.generators else []
    for size in range(1, len(sweep.over) + 1):
        for names in combinations(sweep.over, size):
            if len({prod(sweep.sign(point, n) for n in names) for point in points}) == 1:
                return size
    return None


def aliases(sweep: Sweep) -> list[list[str]]:
    """Effects and interactions of two parameters that the settings of a fraction cannot tell apart.

    ``average×flip`` and ``finch_level×upcr`` are one list if their signs agree in every setting,
    or differ in every one.
    """
    points = sweep.points() if sweep.generators else []
    found: dict[tuple[int, ...], list[str]] = {}
    for size in (1, 2):
        for names in combinations(sweep.over, size):
            signs = [prod(sweep.sign(point, n) for n in names) for point in points]
            key = tuple(s * signs[0] for s in signs) if signs else ()
            found.setdefault(key, []).append("×".join(names))
    return [same for same in found.values() if len(same) > 1] if points else []


def _scope(sweep: Sweep, points: Sequence[Mapping[str, Any]], planned: int) -> str:
    text = f"{len(points)} of {2 ** len(sweep.over)} settings"
    if len(points) == planned:
        r = resolution(sweep)
        if r is None:
            return text
        mixed = " and ".join(" = ".join(same) for same in aliases(sweep))
        return f"{text} (resolution {ROMAN.get(r, r)}{f'; aliased: {mixed}' if mixed else ''})"
    absent = [
        f"{name}={show(value)}"
        for name, values in sweep.over.items()
        for value in values
        if all(point[name] != value for point in points)
    ]
    none = f", none with {', '.join(absent)}" if absent else ""
    return f"{text} ({planned} planned{none}; interactions may show as effects)"


def _fitted(sweep: Sweep, there: Sequence[tuple[Mapping[str, Any], TableRow]]) -> dict[str, Spread]:
    varied = [n for n in sweep.over if len({sweep.sign(point, n) for point, _ in there}) == 2]
    signs = np.array([[1, *(sweep.sign(point, n) for n in varied)] for point, _ in there])
    if not varied or np.linalg.matrix_rank(signs) < signs.shape[1]:
        return {}
    accuracy = np.array([row.accuracy[row.main].values for _, row in there])
    # rounded: what the solver leaves of a zero differs between machines
    moved = np.linalg.lstsq(signs, -2 * accuracy, rcond=None)[0][1:].round(9)
    return {
        f"{name}: {' → '.join(map(show, sweep.over[name]))}": Spread.of(values)
        for name, values in zip(varied, moved.tolist(), strict=True)
    }


def _difference(one: Effects, base: Effects) -> Effects:
    pairs = {
        name: (s.values, base.of[name].values) for name, s in one.of.items() if name in base.of
    }
    shared = {
        name: Spread.of([round(a - b, 9) for a, b in zip(*both, strict=True)])
        for name, both in pairs.items()
    }
    return Effects(f"{one.label} − {base.label}", one.method, shared, "", base.label)


def parameters(found: Sequence[Effects]) -> list[str]:
    return list(dict.fromkeys(name for e in found for name in e.of))


def effect_grid(found: Sequence[Effects]) -> tuple[list[str], list[TableLine]]:
    """Header and lines of a table of the effects."""
    header = ["effect", *(e.label for e in found)]
    lines = [
        TableLine(tuple(map(TableCell, (name, *(signed(e.of.get(name)) for e in found)))))
        for name in parameters(found)
    ]
    return header, lines


def effect_caption(found: Sequence[Effects]) -> str:
    scopes = "; ".join(f"{e.label}: {e.scope}" for e in found if e.scope)
    return (
        "Effects, in points: accuracy with the second value minus that with the first, mean over "
        "the settings of the other parameters, paired by seed, ± standard error (± half the "
        f"{CONFIDENCE:.0%} interval; noise: the interval contains 0). {scopes}."
    )
