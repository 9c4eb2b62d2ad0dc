"""Where a round's time goes: ``protofed run --profile`` records one round as a Chrome trace."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, supported_activities

from protofed.federation.engine import engine_factory
from protofed.federation.simulation import Federation, Observer
from protofed.runs.records import Record

FILE = "trace.json.gz"
LONGEST = 30.0
"""Seconds after which a round is no longer recorded."""


class Profile(Observer):
    """Records one round: every operation of every thread, and of the GPU where there is one.

    The loop engine does that round in place of workers, whose processes could not be seen. The
    round is the second that is run: in the first, kernels are chosen and graphs recorded. A
    run with only one round to go records that one. No more than one, since a trace has a line for
    each operation: for a small CNN some 25 KB per step, compressed. After half a minute the
    recording ends with the next client that is done.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.recorded: int | None = None
        """The round that was recorded, counted from 1."""
        self._profiler: torch.profiler.profile | None = None

    def start(self, federation: Federation, records: Sequence[Record]) -> None:
        self._federation, self._engine = federation, federation.engine
        if federation.config.rounds - len(records) == 1:
            self._begin()

    def client(self, round: int, done: int, total: int) -> None:
        if self._profiler is not None and time.monotonic() - self._began > LONGEST:
            self._write(round)

    def round(self, record: Record) -> None:
        if self._profiler is not None:
            self._write(record["round"])
        elif self.recorded is None:
            self._begin()

    def _begin(self) -> None:
        self._began, federation = time.monotonic(), self._federation
        if federation.config.engine == "workers":
            make_loop, device = engine_factory("loop"), torch.device(federation.config.device)
            federation.engine = make_loop(
                federation.setup, federation.make_networks, device, None, ()
            )
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes its own start and stop
        wanted = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
        # Without all threads it would see the main one alone, which waits for the others.
        threads = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler.profile(
            activities=[a for a in wanted if a in supported_activities()],
            experimental_config=threads,
        )
        self._profiler.start()

    def _write(self, round: int) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self.path))
        self._profiler, self.recorded = None, round
        self._federation.engine = self._engine
