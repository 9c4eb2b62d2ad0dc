"""Runs that share a GPU, by the number of processes, of lanes, and of work queues of each process.

    python benchmarks/work_queues.py DATA [--task office_caltech] [--protocol i2pfl]
        [--method fpl] [--processes 1,6,12] [--lanes 8] [--queues default,8,32] [--rounds 6]

A process's streams share its work queues, whose number CUDA takes from the environment variable
CUDA_DEVICE_MAX_CONNECTIONS: streams in one queue wait for each other. Through MPS, processes share
one pool of queues. All processes do the same run with the same seed: each does two rounds, waits
for the others, and then does the rounds that are timed. Times are milliseconds of the GPU for
one client-step. The runs must end with the same losses and accuracies to the last bit; how many
different ends there were is printed, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext

import torch

from protofed.config import make_config
from protofed.engines.lanes import engine
from protofed.federation.cpu import one_thread
from protofed.federation.facts import WORK_QUEUES
from protofed.federation.simulation import Federation
from protofed.methods import create
from protofed.studies.gpu_runner import visible_gpus
from protofed.studies.mps import mps_daemon


def run(given: argparse.Namespace) -> None:
    """One of the processes: says that it is ready, waits for a line, and prints what came out."""
    engine.LANES = range(int(given.lanes), int(given.lanes) + 1)
    settings = {"data": given.data, "protocol": given.protocol, "rounds": 100}
    settings |= {"device": given.device, **({"model": given.model} if given.model else {})}
    if given.device == "cuda":
        settings |= {"engine": "lanes", "precision": "bf16"}
    with one_thread():
        federation = Federation(make_config(given.task, create(given.method), **settings))
        for _ in range(2):  # lanes record their graphs, and prototypes appear
            federation.run_round()
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        records = [federation.run_round() for _ in range(given.rounds)]
        seconds = time.perf_counter() - began
    end = {key: records[-1][key] for key in ("loss", "accuracy")}
    steps = sum(record["steps"] for record in records)
    print(json.dumps({"steps": steps, "seconds": seconds, "end": end}), flush=True)


def together(given: argparse.Namespace, processes: int, lanes: int, queues: str) -> str:
    """So many processes at once, and what came out."""
    variables = {k: v for k, v in os.environ.items() if k != WORK_QUEUES}
    if queues != "default":
        variables[WORK_QUEUES] = queues
    shared = processes > 1 and given.device == "cuda"
    with mps_daemon(visible_gpus()) if shared else nullcontext({}) as mps:
        command = [sys.executable, __file__, *sys.argv[1:], "--lanes", str(lanes), "--one"]
        pipe = subprocess.PIPE
        children = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**variables, **mps})
            for _ in range(processes)
        ]
        for child in children:
            assert child.stdout is not None and child.stdin is not None
            if child.stdout.readline().strip() != "ready":
                for each in children:
                    each.kill()
                return "a process did not start"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        said = [child.communicate()[0] for child in children]
    ends = [json.loads(text.strip().splitlines()[-1]) for text in said]
    milliseconds = 1e3 * max(e["seconds"] for e in ends) / sum(e["steps"] for e in ends)
    different = len({json.dumps(e["end"]) for e in ends})
    return f"{milliseconds:7.3f} ms a client-step, {different} different end(s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--task", default="office_caltech")
    parser.add_argument("--method", default="fpl")
    parser.add_argument("--protocol", default="i2pfl")
    parser.add_argument("--model")
    parser.add_argument("--processes", default="1,6,12")
    parser.add_argument("--lanes", default="8")
    parser.add_argument("--queues", default="default,8,32")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run(given)
        return
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; {given.method} on {given.task}", flush=True)
    counts = (map(int, text.split(",")) for text in (given.processes, given.lanes))
    for processes, lanes, queues in itertools.product(*counts, given.queues.split(",")):
        said = together(given, processes, lanes, queues)
        print(f"{processes:3} processes, {lanes:2} lanes, queues {queues:>7}: {said}", flush=True)


if __name__ == "__main__":
    main()
