"""When to print a line about work that takes long, where lines cannot be redrawn."""

from __future__ import annotations

from time import monotonic

FIRST, FACTOR = 10.0, 4
"""Seconds until the first line, and how much longer each further one takes."""


class Silence:
    """Time without a line: too long after 10 seconds, then after 40, 160, 640 and so on.

    So work of hours has a few lines, and short work has none.
    """

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """Something else was printed."""
        self._began, self._longest = monotonic(), FIRST

    @property
    def seconds(self) -> float:
        return monotonic() - self._began

    def too_long(self) -> bool:
        """Whether to print a line now; the next is due much later."""
        seconds = self.seconds
        if seconds < self._longest:
            return False
        while self._longest <= seconds:
            self._longest *= FACTOR
        return True
