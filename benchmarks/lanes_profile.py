"""Where the time of a lanes round goes: by number of lanes, and by kernel.

python benchmarks/lanes_profile.py DATA
"""

from __future__ import annotations

import argparse
import time

import torch

from protofed.config import make_config
from protofed.engines.lanes import engine
from protofed.federation.simulation import Federation
from protofed.methods import FPL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--lanes", default="4,6,8,12")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    settings = {"device": "cuda", "data": arguments.data, "engine": "lanes", "precision": "bf16"}
    for count in map(int, arguments.lanes.split(",")):
        engine.LANES = range(count, count + 1)
        began = time.perf_counter()
        federation = Federation(make_config("digits", FPL(), rounds=100, **settings))
        federation.run_round()
        first = time.perf_counter() - began
        federation.run_round()
        rounds = [federation.run_round()["seconds"] for _ in range(4)]
        train = sorted(r["train"] for r in rounds)
        print(f"{count:2} lanes: first round {first:.1f} s, then {train} s", flush=True)
    if arguments.kernels:
        engine.LANES = range(1, 2)
        federation = Federation(make_config("digits", FPL(), rounds=100, epochs=1, **settings))
        federation.run_round()
        federation.run_round()
        federation.evaluate = lambda: {"none": 0.0}  # type: ignore[method-assign]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            steps = federation.run_round()["steps"]
        rows = sorted(
            ((e.self_device_time_total, e.count, e.key) for e in profile.key_averages()),
            reverse=True,
        )
        total, count = (sum(row[i] for row in rows) / steps for i in (0, 1))
        print(f"one lane: {count:.0f} kernels a step, {total:.0f} µs if they ran one by one")
        for time_us, calls, name in rows[:40]:
            print(f"{time_us / steps:7.2f} µs {calls / steps:6.2f} x  {name[:120]}")


if __name__ == "__main__":
    main()
