"""Every method, with those that repeat another's kind left to `make slow`."""

import pytest

from protofed.methods import METHODS

ALWAYS = (
    "fedavg", "fedbn", "fedmd", "fedproto", "fpl", "i2pfl", "mixstyle", "scaffold", "stablefdg",
)  # fmt: skip
"""One of each kind. Methods have oracles, golden values and tests of their own beside."""

REPEATS = {n: [] if n in ALWAYS else [pytest.mark.slow] for n in METHODS}
SOME = [pytest.param(n, marks=marks) for n, marks in REPEATS.items()]
