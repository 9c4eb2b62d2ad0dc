"""How many images each site has: declared once, confirmed by the operator, fixed for a run.

A site's weight in the average, its steps and the weight of its accuracy follow from these
numbers, so a reply that claims other numbers is refused. The server knows those of sites that are
clients of a built-in task. Other sites declare theirs when they first take part; ``protofed deploy
confirm`` shows and confirms them, in ``counts.json`` in the server's folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from protofed.deploy.locking import locked
from protofed.errors import unknown
from protofed.federation.setup import Setup
from protofed.files import read_json, write_json
from protofed.shape import require_shape

COUNTS_FILE = "counts.json"
_SHAPE = {"sites": {str: {"samples": int, "tests": int, "confirmed": bool}}}


class Count(NamedTuple):
    """A site's training and test images."""

    samples: int
    tests: int

    def __str__(self) -> str:
        return f"{self.samples} training and {self.tests} test images"


class Counts:
    """The counts of a federation's sites: those ``known`` beforehand, and those in a file."""

    def __init__(self, folder: Path | None, known: Mapping[str, Count], most: int) -> None:
        """Without a ``folder`` there is no operator: what a site declares first is confirmed."""
        self.path = folder / COUNTS_FILE if folder is not None else None
        self.known, self.most = known, most
        self._said: dict[str, tuple[Count, bool]] = {}

    def confirmed(self, site: str) -> Count | None:
        """The count that a site's replies must have; None if it has none yet."""
        if site in self.known:
            return self.known[site]
        count, confirmed = self._read().get(site, (None, False))
        return count if confirmed else None

    def declare(self, site: str, count: Count) -> bool:
        """Record what a site declares; returns whether it is confirmed."""
        with self._locked():
            said = self._read()
            if site not in said or said[site][0] != count:
                self._write(said | {site: (count, self.path is None)})
        return self.confirmed(site) == count

    def confirm(self, sites: Iterable[str]) -> dict[str, Count]:
        """Confirm what these sites, or all if none is named, declared; returns the new counts."""
        sites = list(sites)
        with self._locked():
            said = self._said_by(sites)
            new = {s: c for s, (c, done) in said.items() if not done and (s in sites or not sites)}
            self._write(said | {site: (count, True) for site, count in new.items()})
        return new

    def forget(self, sites: Iterable[str]) -> None:
        """Let these sites declare their images again, in the next run that reaches them."""
        sites = list(sites)
        with self._locked():
            said = self._said_by(sites)
            self._write({site: about for site, about in said.items() if site not in sites})

    def _said_by(self, sites: Iterable[str]) -> dict[str, tuple[Count, bool]]:
        """What all sites have declared; an error if one of these has not."""
        said = self._read()
        for site in sites:
            if site not in said:
                raise unknown("site that has declared its images:", site, said)
        return said

    def check(self, count: Count) -> str:
        """What is wrong with a declaration, in words; empty if nothing is."""
        if all(0 < n <= self.most for n in count):
            return ""
        return f"it declares {count}, and max_samples is {self.most}"

    def _locked(self) -> AbstractContextManager[None]:
        """A site may declare its images while the operator confirms others'."""
        return nullcontext() if self.path is None else locked(self.path.parent)

    def _read(self) -> dict[str, tuple[Count, bool]]:
        if self.path is not None and self.path.is_file():
            found = require_shape(self.path, read_json(self.path), _SHAPE)["sites"]
            return {
                site: (Count(about["samples"], about["tests"]), about["confirmed"])
                for site, about in found.items()
            }
        return dict(self._said)

    def _write(self, said: Mapping[str, tuple[Count, bool]]) -> None:
        self._said = dict(said)
        if self.path is not None:
            about = {s: {**c._asdict(), "confirmed": done} for s, (c, done) in said.items()}
            write_json(self.path, {"sites": about})


def expected_work(setup: Setup, images: int, public: int, round: int) -> tuple[int, int, float]:
    """Samples, steps and last learning rate of a client with that many training images."""
    samples = images - int(images * setup.method.holdout)
    steps, lr = 0, 0.0
    for phase in setup.method.phases(round, setup.training.epochs):
        training = setup.training.for_phase(phase)
        trained = samples if phase.data == "own" else public
        steps += training.epochs * -(-trained // training.batch)
        lr = training.lr_in(round)
    return samples, steps, lr
