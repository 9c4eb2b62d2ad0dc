"""Engines: where and how the clients of a round are trained.

``loop`` is the oracle: one client after another. ``workers`` runs clients on all cores of a CPU
and agrees with it bit for bit; ``lanes`` runs them on a GPU and agrees to a tolerance; ``ray`` runs
them on a cluster, with a loop on each core or lanes on each GPU. Importing this package makes them
known to the federation.
"""

from __future__ import annotations

from typing import Any

import torch

from protofed.engines.loop import Loop
from protofed.engines.workers import Workers
from protofed.federation.engine import Engine, MakeNetworks, register_engine
from protofed.federation.setup import Setup


def _lanes(setup: Setup, networks: MakeNetworks, device: torch.device, *_: Any) -> Engine:
    from protofed.engines.lanes.engine import Lanes  # needs a GPU

    return Lanes(setup, networks, device)


def _ray(
    setup: Setup, networks: MakeNetworks, device: torch.device, count: int | None, *_: Any
) -> Engine:
    from protofed.engines.ray import Ray  # needs an extra

    return Ray(setup, networks, device, count)


register_engine("loop", Loop)
register_engine("workers", Workers)
register_engine("lanes", _lanes)
register_engine("ray", _ray)
