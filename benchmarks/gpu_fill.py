"""How many runs of a study a GPU does in a minute: one at a time, six, and as many as it finds.

    python benchmarks/gpu_fill.py DATA [--rounds 5] [--runs 12] [--only "6;auto"]

FPL on Office-Caltech with the protocol of I²PFL, each run a process, in four ways:

    1           one at a time (a quarter of the runs)
    6           six at a time, which take turns on the GPU
    6, MPS      six at a time through NVIDIA's Multi-Process Service
    auto        what `protofed study run` does by default: MPS, and runs added while that gains

A run of five rounds is mostly its start (PyTorch, images, recording graphs); with `--rounds 60` the
times are those of a real study. A round of warm-up compiles the kernels.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from protofed.studies.adhoc import comparison
from protofed.studies.execution import run_all
from protofed.studies.gpu_runner import GpuRunner
from protofed.studies.launch import prepare

WAYS: dict[str, tuple[int | None, bool]] = {
    "1": (1, False),
    "6": (6, False),
    "6, MPS": (6, True),
    "auto": (None, True),
}


def measure(runs: int, most: int | None, mps: bool, settings: dict[str, Any]) -> tuple[float, int]:
    """The seconds that all runs take, and their client-steps."""
    study = comparison("office_caltech", ["fpl"], runs, {}, {**settings, "device": "cuda"}).study
    console = Console(width=200, force_terminal=False)
    with tempfile.TemporaryDirectory() as pool:
        _, jobs = prepare(study, Path(pool))
        quiet = Console(quiet=True)
        began = time.perf_counter()
        failed = run_all(jobs, GpuRunner(jobs, console, most, mps), quiet)
        took = time.perf_counter() - began
        assert not failed, failed[0].message
        return took, sum(r["steps"] for job in jobs for r in job.folder.records())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--only", help="some of the ways, separated by semicolons")
    given = parser.parse_args()
    settings = {"data": given.data, "protocol": "i2pfl"}
    names = given.only.split(";") if given.only else list(WAYS)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    measure(1, 1, False, {**settings, "rounds": 1})
    for name in names:
        most, mps = WAYS[name]
        runs = max(1, given.runs // 4) if most == 1 else given.runs
        took, steps = measure(runs, most, mps, {**settings, "rounds": given.rounds})
        print(
            f"{name:8} {runs:3} runs of {given.rounds} rounds in {took:6.1f} s: "
            f"{60 * runs / took:6.1f} runs/min, {steps / took:7.0f} client-steps/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
