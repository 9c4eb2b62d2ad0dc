"""Which clients train in a round."""

from __future__ import annotations

import math

from protofed import keys


def participants(seed: int, round: int, clients: int, participation: float) -> list[int]:
    """The positions of a round's clients among all, in order."""
    count = math.ceil(participation * clients - 1e-9)
    rng = keys.generator(seed, round, "participants")
    return sorted(rng.choice(clients, size=max(1, count), replace=False).tolist())
