"""Bounds on what a client sends: a reply out of bounds is refused by name, or clipped on request.

A slot has a *size*: for the model the norm of its change, for prototypes the norm of the longest,
for a slot with a row for each of some images (``Slots.rows``) the root mean square of the rows'
norms, for anything else its norm. It may be ``Method.size_limit`` times the median over the clients
of the last ``ROUNDS`` rounds, or of this one: where most move, nobody stands out. There are no
rounds before the first, so its reference is what the server itself sends in a dry run on noise (of
its model, the whole norm).
With fewer than ``FEW`` clients, one of which could choose the median, it is the reference in every
round, with a wider factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from protofed.errors import ProtofedError
from protofed.federation.client_round import Reply
from protofed.tree import Slot, Tree

FACTOR, ROUNDS = 10.0, 5
FEW, WIDER = 4, 10.0


class OutOfBounds(ProtofedError):
    """A reply that does not count, because of a number in it."""


def prototypes_of(entries: Slot) -> tuple[Tensor, Tensor] | None:
    """The prototypes [..., d] in a slot, and which there are; None if it holds something else."""
    there = entries.get("mask", entries.get("count"))
    mean = entries.get("mean")
    if mean is None or there is None or mean.shape[:-1] != there.shape:
        return None
    return mean, there > 0


def size(slot: str, entries: Slot, start: Slot, rows: Container[str] = ()) -> float | None:
    """How large a slot of a message is; ``start`` is the model that was sent. None: no numbers.

    ``rows`` are the slots with a row for each of some images.
    """
    if (table := prototypes_of(entries)) is not None:
        mean, there = table
        # even those that are marked as absent: they are 0, unless somebody hides something
        longest = float(mean.double().norm(dim=-1).max()) if mean.numel() else 0.0
        return longest if longest != 0 or bool(there.any()) else None
    floats = {n: t for n, t in entries.items() if t.is_floating_point()}
    if not floats:
        return None
    moved = [n for n in floats if slot == "model" and n in start]
    parts = [t for n, t in floats.items() if n not in moved]
    if moved:
        parts += torch._foreach_sub([floats[n] for n in moved], [start[n] for n in moved])
    # a few kernels for all entries: a GPU waits for the host here, once for each client
    norm = float(torch.stack(torch._foreach_norm(parts, dtype=torch.float64)).norm())
    if slot in rows:
        norm /= math.sqrt(max(1, *(t.shape[:1].numel() for t in parts)))
    return norm


def sizes(message: Tree, start: Slot, rows: Container[str] = ()) -> dict[str, float]:
    found = {slot: size(slot, entries, start, rows) for slot, entries in message.items()}
    return {slot: value for slot, value in found.items() if value is not None}


def shortened(
    slot: str, entries: Slot, start: Slot, limit: float, rows: Container[str] = ()
) -> Slot:
    """A slot with its size brought down to ``limit``, if it is larger."""
    if (table := prototypes_of(entries)) is not None:
        mean, _ = table
        norm = mean.double().norm(dim=-1, keepdim=True)
        factor = torch.where(norm > limit, limit / norm, 1.0)
        return {**entries, "mean": (mean * factor).to(mean.dtype)}
    now = size(slot, entries, start, rows)
    if now is None or now <= limit:
        return entries
    origin = start if slot == "model" else {}
    return {
        n: torch.lerp(origin.get(n, torch.zeros_like(t)).to(t), t, limit / now)
        if t.is_floating_point()
        else t
        for n, t in entries.items()
    }


class Bounds:
    """The bounds of a run's replies; ``dry_run`` gives the sizes of a reply of the server's own."""

    def __init__(
        self,
        dry_run: Callable[[], Mapping[str, float]],
        clients: int,
        clip: bool = False,
        count_noise: float = 0.0,
        factor: float = FACTOR,
        rows: Container[str] = (),
    ) -> None:
        if not 1 <= factor < math.inf:
            raise ProtofedError(f"size_limit must be a finite number from 1, got {factor!r}")
        self._dry_run: Callable[[], Mapping[str, float]] | None = dry_run
        self._dry: Mapping[str, float] = {}
        self.few, self.clip, self.count_noise = clients < FEW, clip, count_noise
        self.factor, self.rows = factor, rows
        self.history: list[Mapping[str, float]] = []
        """The median size of each slot in the last rounds."""
        self._round: dict[str, dict[str, float]] = {}

    def admit(self, name: str, reply: Reply, start: Slot) -> None:
        """Take a reply into the round; ``OutOfBounds`` if it has numbers that nobody can have."""
        _check_numbers(reply, start, self.count_noise)
        found = sizes(reply.message, start, self.rows)
        for slot, value in found.items():
            # a norm may overflow while every entry is finite: that can be clipped
            if not math.isfinite(value) and not _are_finite(reply.message[slot]):
                raise OutOfBounds(f"out of bounds: {self._too_large(slot, value)}")
        self._round[name] = found

    def outside(self) -> dict[str, dict[str, tuple[float, str]]]:
        """For each client that sent too much: its slots, each with the limit and why, in words."""
        slots = {slot for own in self._round.values() for slot in own}
        limits = {slot: self._limit(slot) for slot in slots}
        found: dict[str, dict[str, tuple[float, str]]] = {}
        for name, own in self._round.items():
            for slot, value in own.items():
                limit, reference = limits[slot]
                if value > limit or value == math.inf:  # numbers so large that no norm holds them
                    why = f"{self._norm_of(slot)} {value:.4g}, more than {limit:.4g}: {reference}"
                    if value == math.inf:
                        why = self._too_large(slot, value)
                    found.setdefault(name, {})[slot] = limit, f"out of bounds: {why}"
        return found

    def _limit(self, slot: str) -> tuple[float, str]:
        past = [found[slot] for found in self.history if found.get(slot)]
        now = [own[slot] for own in self._round.values() if slot in own]
        known: dict[str, float] = {}
        if past and not self.few:
            known["the median of the last rounds"] = median_low(past)
        else:
            if self._dry_run is not None:  # dropped once done: it holds the first message
                self._dry, self._dry_run = self._dry_run(), None
            known["that of the server's own dry run"] = self._dry.get(slot, 0.0)
        if len(now) >= FEW:
            known["the median of this round"] = median_low(now)
        reference, size = max(known.items(), key=lambda item: item[1])
        factor = self.factor * WIDER if self.few else self.factor
        # a reference of 0 says nothing: honest clients may be the first to have something
        return factor * size or math.inf, f"{factor:g} times {reference}"

    def settle(self, name: str, slots: Mapping[str, float] | None) -> None:
        """Let a reply count with these slots clipped to these sizes, or (None) not at all."""
        own = self._round.pop(name)
        if slots is not None:
            self._round[name] = own | dict(slots)

    def close(self) -> dict[str, float]:
        """End a round; returns the median size of each slot, for the round's record."""
        each: dict[str, list[float]] = {}
        for found in self._round.values():
            for slot, value in found.items():
                each.setdefault(slot, []).append(value)
        # rounded as it is recorded: a resumed run, which reads the records, decides the same way
        medians = {slot: float(f"{median_low(each[slot]):.6g}") for slot in sorted(each)}
        self.restore([*self.history, medians])
        self.abandon()
        return medians

    def abandon(self) -> None:
        self._round = {}

    def restore(self, history: Iterable[Mapping[str, float]]) -> None:
        """Continue after rounds with these medians."""
        self.history = list(history)[-ROUNDS:]

    def _norm_of(self, slot: str) -> str:
        if slot == "model":
            return "its model changed by"
        return f"'{slot}' has {'rows of' if slot in self.rows else 'the'} norm"

    def _too_large(self, slot: str, value: float) -> str:
        why = "not finite" if math.isnan(value) else "too large for any bound"
        return f"{self._norm_of(slot)} {value}: {why}"


def recorded(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, float]]:
    """The medians in the records of earlier rounds, for ``Bounds.restore``; some have none."""
    return [record.get("norms", {}) for record in records]


def _are_finite(entries: Slot) -> bool:
    return all(bool(t.isfinite().all()) for t in entries.values())


def _check_numbers(reply: Reply, start: Slot, count_noise: float) -> None:
    """Refuse numbers that no honest client can send, whatever the others send.

    ``count_noise``: the standard deviation of what privacy adds to counts. If there is any, ten
    times as much is allowed, and so are fractions.
    """
    for slot, entries in reply.message.items():
        if prototypes_of(entries) is not None:
            kind = "mask" if "mask" in entries else "count"
            count = entries[kind].double()
            slack = FACTOR * count_noise
            most = 1 if kind == "mask" else reply.samples + slack
            most_sum = reply.samples + slack * count.numel() ** 0.5
            fits = (count >= 0) & (count <= most)
            if not count_noise:
                fits &= count == count.round()
            if not bool(fits.all()) or float(count.sum()) > most_sum:
                words = "numbers" if count_noise else "whole numbers"
                raise OutOfBounds(
                    f"out of bounds: '{kind}' of slot '{slot}' must be {words} from 0 to "
                    f"{most:g} that sum to at most {most_sum:g} samples"
                )
    model = reply.message.get("model", {})
    variances = {n: t for n, t in model.items() if n.endswith("running_var")}
    if negative := _where(variances, lambda t: t < 0):
        raise OutOfBounds(f"out of bounds: '{negative}' is a variance and has negative entries")
    counters = {
        n: t - start[n]
        for n, t in model.items()
        if not t.is_floating_point() and t.dtype != torch.bool and n in start
    }
    most = FACTOR * reply.steps
    if name := _where(counters, lambda t: (t < 0) | (t > most)):
        raise OutOfBounds(
            f"out of bounds: counter '{name}' moved by {int(counters[name].max())} in "
            f"{reply.steps} steps"
        )


def _where(entries: Slot, wrong: Callable[[Tensor], Tensor]) -> str | None:
    """The first entry in which something is wrong. All are looked at together: a GPU waits once."""
    if not entries or not bool(wrong(torch.cat([t.flatten() for t in entries.values()])).any()):
        return None
    return next(name for name, t in entries.items() if bool(wrong(t).any()))
