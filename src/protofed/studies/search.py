"""Which points of a search are tried: all of a small grid, otherwise keyed random ones."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from protofed import keys
from protofed.errors import ProtofedError

Values = Sequence[Any] | str
"""A parameter's values: a list of them, or a range such as ``0.1..1`` or ``log:0.001..0.1``."""

DRAWS_PER_POINT = 100
"""If this many draws give no new point, there are none left."""


@dataclass(frozen=True)
class Range:
    """All numbers between two; ``log``: evenly on a logarithmic scale."""

    low: float
    high: float
    log: bool
    whole: bool

    def draw(self, rng: np.random.Generator) -> float:
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = rng.uniform(self.low, self.high)
        # three digits: easy for a person to repeat, and within the range
        return round(value) if self.whole else min(self.high, max(self.low, float(f"{value:.3g}")))


def search_points(
    over: Mapping[str, Values], budget: int, seed: int, whole: Collection[str] = ()
) -> list[dict[str, Any]]:
    """At most ``budget`` points, each parameter at one of its values.

    All points of a grid if there are no more than that. Otherwise they are drawn, each from its
    number and the seed: with a larger budget, the first ones stay the same. ``whole`` names
    parameters that are whole numbers.
    """
    if not over:
        raise ProtofedError("there is nothing to search over", "write --over tau=0.02,0.05")
    spaces = {name: _space(name, values, name in whole) for name, values in over.items()}
    grid = [space for space in spaces.values() if not isinstance(space, Range)]
    if len(grid) == len(spaces) and math.prod(map(len, grid)) <= budget:
        return [dict(zip(spaces, point, strict=True)) for point in product(*grid)]
    found: list[dict[str, Any]] = []
    for number in range(DRAWS_PER_POINT * budget):
        point = {
            name: _draw(space, keys.generator(seed, number, name, "search"))
            for name, space in spaces.items()
        }
        if point not in found:
            found.append(point)
        if len(found) == budget:
            break
    return found


def listed(name: str, values: object) -> list[Any]:
    """The values of a parameter; an error if a script gave it one value instead of several."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ProtofedError(f"the values of {name} must be a list", f"write [{values!r}]")
    return list(values)


def _space(name: str, values: Values, whole: bool) -> Range | list[Any]:
    """The values, each once; or a range of them, which stands alone."""
    given = [values] if isinstance(values, str) else listed(name, values)
    ranges = [v for v in given if isinstance(v, str) and ".." in v]
    if not ranges:
        return [v for i, v in enumerate(given) if v not in given[:i]]
    found = re.fullmatch(r"(log:)?(.+?)\.\.(.+)", ranges[0])
    hint = f"write {name}=0.1..1, {name}=log:0.001..0.1 or {name}=0.1,0.2"
    try:
        if found is None or len(given) > 1:
            raise ValueError
        low, high = float(found[2]), float(found[3])
    except ValueError:
        shown = ",".join(map(str, given))
        raise ProtofedError(f"cannot read the values of {name}: '{shown:.100}'", hint) from None
    log = found[1] is not None
    if not (math.isfinite(low) and math.isfinite(high) and low < high and (low > 0 or not log)):
        above = " above 0" if log else ""
        raise ProtofedError(
            f"the range of {name} must rise from one number{above} to another, got '{ranges[0]}'",
            hint,
        )
    if whole and not log and low.is_integer() and high.is_integer() and high - low < 10**4:
        return list(range(int(low), int(high) + 1))
    return Range(low, high, log, whole)


def _draw(space: Range | list[Any], rng: np.random.Generator) -> Any:
    return space.draw(rng) if isinstance(space, Range) else space[int(rng.integers(len(space)))]
