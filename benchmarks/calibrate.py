"""Run a list of (task, method, seed) on a GPU and write each run's summary as it is done.

python benchmarks/calibrate.py DATA OUT office_caltech fedavg,fpl 0,1,2 [--rounds 100]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from protofed.runs.run import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("task")
    parser.add_argument("methods")
    parser.add_argument("seeds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--protocol")
    arguments = parser.parse_args()
    log = arguments.out / f"{arguments.task}-{arguments.protocol or 'default'}.jsonl"
    for seed in map(int, arguments.seeds.split(",")):
        for method in arguments.methods.split(","):
            began = time.perf_counter()
            result = run(
                arguments.task,
                method,
                seed=seed,
                rounds=arguments.rounds,
                protocol=arguments.protocol,
                data=arguments.data,
                device="cuda",
            )
            with log.open("a") as file:
                file.write(json.dumps({**result.summary, "rounds_log": result.rounds}) + "\n")
            print(f"{result}  {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
