"""Robust aggregation: the replies of a round, changed so that a few of them cannot decide it.

It works on what the clients sent, before the method sees it: weights, prototypes and every other
slot alike. So it is a setting of any method.

    clip      a model's change, a prototype and any other slot is shortened to the median norm
    trimmed   coordinate by coordinate, the largest and smallest are left out of the mean
    median    coordinate by coordinate, the median
    krum      only the replies nearest to one another are kept (Multi-Krum, Blanchard et al. 2017)

``trimmed`` and ``median`` (Yin et al. 2018) give every client the same tensors, each client of a
class the same prototype, so the average that follows is theirs, whatever its weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from statistics import median_low

import torch
from torch import Tensor

from protofed.errors import ProtofedError
from protofed.federation.bounds import prototypes_of, shortened, size
from protofed.method import Update
from protofed.tree import Slot

BLOCK = 1 << 16
"""Coordinates that are compared at a time: those of all clients may not fit into memory at once."""


def robust_updates(
    kind: str,
    fraction: float,
    updates: Sequence[Update],
    slots: Iterable[str],
    start: Slot,
    rows: Container[str] = (),
) -> list[Update]:
    """The updates that a method gets to see; ``fraction`` of them may be wrong.

    ``slots`` are those that the messages have, ``rows`` those of them with a row for each of some
    images; ``start`` is the model that was sent.
    """
    if kind == "none" or len(updates) < 2:
        return list(updates)
    if kind == "krum":
        wrong = min(_rounded_up(fraction, len(updates)), len(updates) - 1)
        scores = outlyingness(updates, slots, wrong)
        kept = sorted(scores, key=lambda name: scores[name])[: len(updates) - wrong]
        return [u for u in updates if u.name in kept]
    if kind == "clip":
        joined = _Joined(updates, partial(_clipped, start=start, rows=rows))
    else:
        joined = _Joined(updates, partial(_middle, fraction=1.0 if kind == "median" else fraction))
    return [replace(u, messages=joined) for u in updates]


class _Joined:
    """Messages that depend on those of all clients, computed when a slot is first read."""

    def __init__(
        self, updates: Sequence[Update], join: Callable[[str, list[Slot]], list[Slot]]
    ) -> None:
        self._updates, self._join = updates, join
        self._done: dict[str, dict[str, Slot]] = {}

    def get(self, name: str, slot: str) -> Slot:
        if slot not in self._done:
            joined = self._join(slot, [u[slot] for u in self._updates])
            self._done[slot] = dict(zip((u.name for u in self._updates), joined, strict=True))
        return self._done[slot][name]


def _clipped(slot: str, sent: list[Slot], start: Slot, rows: Container[str]) -> list[Slot]:
    """Each client's slot, no larger than the median one."""
    found = [s for entries in sent if (s := size(slot, entries, start, rows)) is not None]
    if not found:
        return sent
    return [shortened(slot, entries, start, median_low(found), rows) for entries in sent]


def _middle(slot: str, sent: list[Slot], fraction: float) -> list[Slot]:
    """For each client the same: the mean of each coordinate without its extremes."""
    tables = [prototypes_of(entries) for entries in sent]
    if all(table is not None for table in tables):
        return _middle_prototypes(sent, fraction)
    names = _common_entries(sent)
    if names is None:
        raise ProtofedError(
            f"slot '{slot}' has other entries, or entries of another shape, at some clients, so it "
            "has no coordinates to compare",
            "use --robust clip or krum",
        )
    joined = {n: trimmed_mean(torch.stack([s[n] for s in sent]), fraction) for n in names}
    return [{**entries, **joined} for entries in sent]


def _common_entries(sent: list[Slot]) -> list[str] | None:
    """The floating-point entries, if all clients have the same ones in the same shapes."""
    shapes = [{n: t.shape for n, t in s.items() if t.is_floating_point()} for s in sent]
    return [*shapes[0]] if all(found == shapes[0] for found in shapes) else None


def _middle_prototypes(sent: list[Slot], fraction: float) -> list[Slot]:
    """The same for each class's prototypes; a client without any of a class still has none.

    A client's own mean counts, not each of its prototypes: of these, it may send as many as it has
    images, and with them choose the middle alone.
    """
    means = [entries["mean"].clone() for entries in sent]
    there = [table[1] for entries in sent if (table := prototypes_of(entries)) is not None]
    for k in range(len(means[0])):
        of_class = [(mean[k], own[k]) for mean, own in zip(means, there, strict=True)]
        owners = [mean[own].double() for mean, own in of_class if bool(own.any())]
        if owners:
            rows = torch.stack([rows.reshape(-1, rows.shape[-1]).mean(0) for rows in owners])
            middle = trimmed_mean(rows, fraction)
            for mean, own in of_class:
                mean[own] = middle.to(mean.dtype)
    return [{**entries, "mean": mean} for entries, mean in zip(sent, means, strict=True)]


def trimmed_mean(stack_M: Tensor, fraction: float) -> Tensor:
    """The mean over the first dimension without its ``fraction`` largest and smallest values.

    At least one value, or two of an even number, remains: that is the median.
    """
    count = len(stack_M)
    cut = min(_rounded_up(fraction, count), (count - 1) // 2)
    kept = stack_M.double().sort(0).values[cut : count - cut]
    return kept.mean(0).to(stack_M.dtype)


def _rounded_up(fraction: float, count: int) -> int:
    """That part of a count, rounded up; 0.14 of 50 is 7, though as floats it is a bit more."""
    return math.ceil(Fraction(str(fraction)) * count)


def outlyingness(updates: Sequence[Update], slots: Iterable[str], wrong: int) -> dict[str, float]:
    """Krum's score of each update, relative to the median one, in the slot where it is largest.

    An update's score is the sum of the squared distances to its ``M - wrong - 2`` nearest others.
    """
    near = max(1, len(updates) - wrong - 2)
    worst = torch.zeros(len(updates), dtype=torch.float64)
    for slot in sorted(slots):
        distance = _distances([u[slot] for u in updates])
        if distance is None:
            continue
        distance.fill_diagonal_(math.inf)
        score = distance.nan_to_num(math.inf, math.inf).sort(1).values[:, :near].sum(1)
        middle = float(score.sort().values[(len(updates) - 1) // 2])
        # inf / inf: as far away as most
        worst = torch.maximum(worst, (score / (middle or 1.0)).nan_to_num(1.0, math.inf))
    return {u.name: float(w) for u, w in zip(updates, worst, strict=True)}


def _distances(sent: list[Slot]) -> Tensor | None:
    """Squared distances [M, M] between the clients' slots; for prototypes, the mean over classes.

    Clients that have no class in common are as far from each other as clients usually are.
    """
    tables = [table for entries in sent if (table := prototypes_of(entries)) is not None]
    if len(tables) < len(sent):
        floats = _common_entries(sent)
        if not floats:
            return None
        total = torch.zeros(len(sent), len(sent), dtype=torch.float64)
        for n in floats:
            for block in zip(*(s[n].flatten().split(BLOCK) for s in sent), strict=True):
                total += _squared(torch.stack(block).double().cpu())
        return total
    means = torch.stack([_class_means(*table) for table in tables], 1).cpu()  # [K, M, d]
    owner = torch.stack(
        [there.reshape(len(there), -1).any(1) for _, there in tables], 1
    ).cpu()  # [K, M]
    both = (owner[:, :, None] & owner[:, None]).double()
    common = both.sum(0)
    total = (torch.stack([_squared(m) for m in means]) * both).sum(0)
    mean = total / common.clamp(min=1)
    known = mean[(common > 0) & ~torch.eye(len(mean), dtype=torch.bool)]
    return torch.where(common > 0, mean, known.nanmedian() if len(known) else 0.0)


def _class_means(mean: Tensor, there: Tensor) -> Tensor:
    """One prototype [K, d] for each class, of one or of several."""
    weight = there.reshape(len(mean), -1, 1).double()
    rows = mean.reshape(len(mean), -1, mean.shape[-1]).double()
    return (rows.where(weight > 0, 0.0)).sum(1) / weight.sum(1).clamp(min=1)


def _squared(points_Md: Tensor) -> Tensor:
    return torch.cdist(points_Md, points_Md, compute_mode="donot_use_mm_for_euclid_dist").square()
