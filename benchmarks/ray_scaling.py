"""What Ray costs and gives on one machine: a study's runs, and one federation's clients.

    python benchmarks/ray_scaling.py [--runs 4] [--rounds 5] [--only study|engine]

Study: FedAvg on glyphs, one round of one epoch, several seeds, by processes of this machine and on
a Ray cluster on it (which is started and stopped inside the clock), one run at a time and two.
Engine: rounds of FedAvg that take turns, without evaluation, on a cluster that is running:

    silo    10 clients × 60 to 100 images, 5 epochs: this package's embedded task
    small   80 clients × 10 images, 1 epoch: where sending a client costs most
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import statistics
import tempfile
import time
from pathlib import Path

import torch

import protofed
from protofed import tree
from protofed.cluster import require_ray
from protofed.config import make_config
from protofed.federation.cpu import one_thread
from protofed.federation.simulation import Federation

WORKLOADS = {"silo": {}, "small": {"clients": 20, "samples": 10, "epochs": 1}}
ENGINES = {
    "loop": {"engine": "loop"},
    "workers, 2 threads": {"engine": "workers", "workers": 2},
    "ray, 1 actor": {"engine": "ray", "workers": 1},
    "ray, 2 actors": {"engine": "ray", "workers": 2},
}


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def study(runs: int) -> None:
    print(f"\nstudy: {runs} runs, seconds in all", flush=True)
    for jobs in (1, 2):
        for ray in (None, "local"):
            with tempfile.TemporaryDirectory() as pool:
                began = time.perf_counter()
                protofed.compare(
                    "glyphs", ["fedavg"], seeds=runs, rounds=1, epochs=1, device="cpu",
                    runs=Path(pool), jobs=jobs, ray=ray, progress=False,
                )  # fmt: skip
                took = time.perf_counter() - began
            where = "Ray" if ray else "processes"
            print(f"  {where:<10} {jobs} at a time  {took:6.1f}  {load()}", flush=True)


def engine(workload: str, rounds: int) -> None:
    settings = {**WORKLOADS[workload], "device": "cpu", "rounds": 1000, "seed": 0}
    federations: dict[str, Federation] = {}
    took: dict[str, list[float]] = {name: [] for name in ENGINES}
    print(f"\nengine, {workload}: seconds a round", flush=True)
    for name, more in ENGINES.items():
        federations[name] = Federation(make_config("glyphs", "fedavg", **settings, **more))
        federations[name]._evaluate = lambda _: ({"accuracy": {"none": 0.0}}, {})  # type: ignore
    for round in range(rounds + 1):
        for name, federation in federations.items():
            began = time.perf_counter()
            federation.run_round()
            if round:  # the first one starts actors and sends images
                took[name].append(time.perf_counter() - began)
            else:
                print(f"  {name:<20} first {time.perf_counter() - began:6.2f}", flush=True)
    states = [federation.server.state for federation in federations.values()]
    assert all(tree.equal(states[0], state) for state in states), "engines differ"
    for federation in federations.values():
        federation.engine.close()  # or actors keep the cores that the next ones need
    for name, seconds in took.items():
        low, high = min(seconds), max(seconds)
        median = statistics.median(seconds)
        print(f"  {name:<20} median {median:6.2f}  ({low:.2f} to {high:.2f})", flush=True)
    print(f"  all engines agree bit for bit after {rounds + 1} rounds; {load()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("study", "engine"))
    given = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {load()}")
    if given.only != "engine":
        study(given.runs)
    if given.only != "study":
        began = time.perf_counter()
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        ray = require_ray()
        ray.init("local", num_cpus=3, include_dashboard=False, logging_level="error")  # all actors
        with one_thread():
            seconds = time.perf_counter() - began
            print(f"\nRay {ray.__version__}, a local cluster starts in {seconds:.1f} s", flush=True)
            for workload in WORKLOADS:
                engine(workload, given.rounds)


if __name__ == "__main__":
    main()
