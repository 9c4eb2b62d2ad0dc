"""Engines: where and how the clients of a round are trained.

``loop`` is the oracle: one client after another. ``workers`` runs clients on all cores of a CPU
and agrees with it bit for bit; ``lanes`` runs them on a GPU and agrees to a tolerance. Importing
this package makes them known to the federation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from protofed.engines.loop import Loop
from protofed.engines.workers import Workers
from protofed.federation.cpu import keep_freed_memory
from protofed.federation.engine import Engine, register_engine
from protofed.federation.setup import Setup
from protofed.models import Network

Networks = Callable[[], Mapping[str, Network]]


def _loop(setup: Setup, networks: Networks, device: torch.device, workers: int | None) -> Engine:
    if device.type == "cpu":
        keep_freed_memory()
    return Loop(setup, networks())


def _workers(setup: Setup, networks: Networks, device: torch.device, workers: int | None) -> Engine:
    keep_freed_memory()
    return Workers(setup, [networks() for _ in range(workers or os.cpu_count() or 1)])


def _lanes(setup: Setup, networks: Networks, device: torch.device, workers: int | None) -> Engine:
    from protofed.engines.lanes.engine import Lanes  # needs a GPU

    return Lanes(setup, networks, device)


register_engine("loop", _loop)
register_engine("workers", _workers)
register_engine("lanes", _lanes)
