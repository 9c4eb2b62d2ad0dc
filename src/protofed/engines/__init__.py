"""Engines: where and how the clients of a round are trained.

``loop`` is the oracle: one client after another. ``workers`` runs clients on all cores of a CPU
and agrees with it bit for bit; ``lanes`` runs them on a GPU and agrees to a tolerance.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from protofed.engines.loop import Loop
from protofed.engines.workers import Workers
from protofed.errors import ProtofedError, unknown
from protofed.federation.cpu import keep_freed_memory
from protofed.federation.engine import Engine
from protofed.federation.setup import Setup
from protofed.models import Network

ENGINES = ("auto", "loop", "workers", "lanes")


def choose(engine: str, device: str, workers: int | None = None) -> tuple[str, str]:
    """The engine to use, and why."""
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    cores = workers or os.cpu_count() or 1
    if engine == "lanes" and device != "cuda":
        raise ProtofedError("engine lanes needs a GPU", "use --engine workers, or --device cuda")
    if engine == "workers" and device != "cpu":
        raise ProtofedError("engine workers runs on the CPU", "use --engine lanes on a GPU")
    if engine != "auto":
        return engine, "asked for"
    if device == "cuda":
        return "lanes", "the device is a GPU"
    if cores > 1:
        return "workers", f"the device is a CPU with {cores} workers"
    return "loop", "the device is a CPU with one worker"


def build_engine(
    name: str,
    setup: Setup,
    make_networks: Callable[[], Mapping[str, Network]],
    device: torch.device,
    workers: int | None = None,
) -> Engine:
    """The engine of that name (not ``auto``).

    ``make_networks`` makes a network to compute in for each of the clients' models.
    """
    if device.type == "cpu":
        keep_freed_memory()
    if name == "loop":
        return Loop(setup, make_networks())
    if name == "workers":
        count = workers or os.cpu_count() or 1
        return Workers(setup, [make_networks() for _ in range(count)])
    from protofed.engines.lanes.engine import Lanes

    return Lanes(setup, make_networks, device)
