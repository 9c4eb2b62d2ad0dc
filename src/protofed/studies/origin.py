"""What the runs of a study were made with, and what they took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protofed.runs.pool import StoredRun


@dataclass(frozen=True)
class Origin:
    """How many runs have which number or name; ``seconds`` are those of all runs together."""

    runs: int
    hardware: Counter[str]
    precision: Counter[str]
    numerics: Counter[str]
    commits: Counter[str]
    seconds: float
    wall: float | None
    """Seconds in which at least one run was under way; None if a run did not record its end."""

    @classmethod
    def of(cls, stored: Sequence[StoredRun]) -> Origin:
        found = {s.hash: s for s in stored}.values()  # rows may share a run

        def fact(name: str) -> Counter[str]:
            return Counter(str(s.facts.get(name, "unknown")) for s in found)

        commits = Counter(s.facts.get("versions", {}).get("commit", "unknown") for s in found)
        spans = [(s.summary.get("finished"), s.summary["seconds"]) for s in found]
        ends = [(end - took, end) for end, took in spans if end is not None]
        return cls(
            len(found),
            fact("hardware"),
            fact("precision"),
            fact("numerics"),
            commits,
            sum(took for _, took in spans),
            _covered(ends) if len(ends) == len(spans) else None,
        )

    def __str__(self) -> str:
        wall = "not recorded" if self.wall is None else f"{self.wall:,.0f} s"
        return (
            f"Runs: {self.runs}, on {shares(self.hardware)}, numerics {shares(self.numerics)}, "
            f"commit {shares(self.commits)}, {self.seconds:,.0f} s in all, wall-clock {wall}."
        )


def shares(counts: Counter[str]) -> str:
    """``2``, or ``2 (40 runs) and 0 (2)``."""
    if len(counts) == 1:
        return next(iter(counts))
    (first, most), *others = counts.most_common()
    return " and ".join([f"{first} ({most} runs)", *(f"{name} ({n})" for name, n in others)])


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of what the spans cover together."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
