"""Large federations on a CPU: memory and time as the number of clients grows, and FINCH in blocks.

    python benchmarks/large.py [--only finch|clients|glyphs]

clients  Rounds with 10 participants out of 10, 100, 1,000 (and 10,000 where clients keep no
         state). The images are those of ``glyphs``, each repeated 25 times: the pool is the same
         whatever the number of clients, and every client has 4 of them (batch 4, 2 epochs).
         Seconds are medians per round of training with the server's step, of evaluation, and of
         everything else (checkpoints, records); memory is the peak of the process. Enough
         rounds that nearly every one of 100 clients, and a quarter of 1,000, have taken part.
glyphs   The same as a person would run it: 1,000 clients, 1 % of them a round, one image each (the
         task has 250 training images of ``inverse``), with SCAFFOLD's state on disk.
finch    The server's step of FPL and FedPLVM with 1,000 and 10,000 prototypes of each of 10
         classes (d = 512), one thread, as a run calls it; memory is what the process's peak
         grows by over what holds the uploads. Features like a trained network's: non-negative,
         around 4 domains' centres for each class.

Every measurement is a process of its own: a peak cannot be taken back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

PARTICIPANTS, SAMPLES, REPEATS = 10, 4, 25
METHODS = ("fedavg", "fpl", "scaffold", "fedbn")
STATELESS = ("fedavg", "fpl")
COMMAND = (
    "run --task glyphs --method scaffold --clients 250 --samples 1 --participation 0.01 --rounds 20"
)
ROUNDS = {10: 8, 100: 25, 1000: 30, 10_000: 8}


def megabytes() -> int:
    """The process's peak so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def rounds_of(method: str, clients: int) -> dict[str, Any]:
    """Seconds a round and the peak, of a run in a folder."""
    from protofed.data import Domain, Images, load_task
    from protofed.federation.simulation import Observer
    from protofed.runs.run import run

    small = load_task("glyphs")
    pools = {}
    for name, domain in small.domains.items():
        x, y = domain.train.x, domain.train.y
        times = -(-REPEATS * 400 // len(y))  # about as many images in every domain
        pools[name] = Domain(
            Images(x.repeat(times, 1, 1, 1), y.repeat(times)),
            Images(domain.test.x[:50], domain.test.y[:50]),
        )
    names = list(small.domains)
    each = {d: clients // 4 + (i < clients % 4) for i, d in enumerate(names)}
    task = replace(small, name="glyphs-repeated", domains=pools, clients=each)
    before = megabytes()

    class Clock(Observer):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def round(self, record: Any) -> None:
            self.ends.append(time.perf_counter())

    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="protofed-large-") as folder:
        began = time.perf_counter()
        result = run(
            task,
            method,
            protocol="glyphs",
            clients=each,
            samples=SAMPLES,
            participation=PARTICIPANTS / clients,
            rounds=ROUNDS[clients],
            batch=SAMPLES,
            epochs=2,
            device="cpu",
            out=Path(folder) / "run",
            observers=[clock],
        )
        states = Path(folder) / "run" / "clients"
        files = list(states.iterdir()) if states.is_dir() else []
        on_disk = sum(path.stat().st_size for path in files) >> 20
    rounds = result.rounds
    train = statistics.median(r["seconds"]["train"] for r in rounds[1:])
    test = statistics.median(r["seconds"]["evaluate"] for r in rounds[1:])
    whole = (clock.ends[-1] - clock.ends[0]) / (len(clock.ends) - 1)
    used = statistics.mean(sum(r["seconds"].values()) for r in rounds[1:])
    return {
        "start_s": clock.ends[0] - began - sum(rounds[0]["seconds"].values()),
        "train_s": train,
        "evaluate_s": test,
        "rest_s": whole - used,
        "before_mb": before,
        "peak_mb": megabytes(),
        "states": len(files),
        "disk_mb": on_disk,
    }


def server_step(method: str, prototypes: int) -> dict[str, Any]:
    """The method's own step on the prototypes of a round, and the memory it adds."""
    from protofed.federation.spool import Spool
    from protofed.method import ServerView, Sizes, Update
    from protofed.methods import create

    torch.set_num_threads(1)  # as in a run
    classes, features, domains = 10, 512, 4
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(domains, classes, features, generator=generator)
    spool, updates = Spool(), []
    for m in range(prototypes):
        noise = torch.rand(classes, features, generator=generator)
        mean = (centres[m % domains] + 0.5 * noise).relu()
        entries = {"mean": mean, "count": torch.ones(classes)}
        if method == "fedplvm":
            entries = {"mean": mean[:, None], "mask": torch.ones(classes, 1)}
        spool.put(str(m), {"prototypes": entries})
        updates.append(Update(str(m), 1, 1, 0.01, spool))
    server = ServerView({}, 1, 2, tuple(u.name for u in updates), Sizes(classes, features, 32))
    before = megabytes()
    began, worked = time.perf_counter(), time.process_time()
    state = create(method, {}, "glyphs").aggregate(server, {}, updates)
    seconds = time.perf_counter() - began
    mask = next(slot["mask"] for slot in state.values() if "mask" in slot)
    return {
        "seconds": seconds,
        "cpu_s": time.process_time() - worked,
        "uploads_mb": before,
        "extra_mb": megabytes() - before,
        "clusters": mask.sum(1).int().tolist(),
    }


def glyphs() -> dict[str, Any]:
    """The command of the documentation, in a process below this one."""
    with tempfile.TemporaryDirectory(prefix="protofed-large-") as folder:
        more = ["--device", "cpu", "--quiet", "--out", f"{folder}/run"]
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "protofed", *COMMAND.split(), *more], check=True)
        seconds = time.perf_counter() - began
        lines = (Path(folder) / "run" / "rounds.jsonl").read_text().splitlines()
        train = [json.loads(line)["seconds"]["train"] for line in lines[1:]]
        states = list((Path(folder) / "run" / "clients").iterdir())
    return {
        "seconds": seconds,
        "train_s": statistics.median(train),
        "peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "states": len(states),
    }


def apart(*arguments: str) -> dict[str, Any]:
    """A measurement in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("finch", "clients", "glyphs"))
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, *rest = options.measure
        found = {
            "clients": lambda: rounds_of(rest[0], int(rest[1])),
            "finch": lambda: server_step(rest[0], int(rest[1])),
            "glyphs": glyphs,
        }[what]()
        print(json.dumps(found))
        return
    load = ", ".join(f"{v:.2f}" for v in os.getloadavg())
    print(f"python {platform.python_version()}, torch {torch.__version__}")
    print(f"{os.cpu_count()} cores ({platform.machine()}), load average at the start {load}")
    if options.only in (None, "finch"):
        print("\nthe server's step, 10 classes, d = 512, one thread")
        for method in ("fpl", "fedplvm"):
            for prototypes in (1000, 10_000):
                r = apart("finch", method, str(prototypes))
                print(
                    f"  {method:8} {prototypes:6} prototypes of each class: {r['seconds']:6.2f} s "
                    f"({r['cpu_s']:.2f} s of CPU), {r['extra_mb']:4} MB more than the "
                    f"{r['uploads_mb']} MB with the uploads; clusters {r['clusters']}",
                    flush=True,
                )
    if options.only in (None, "clients"):
        print(f"\n{PARTICIPANTS} participants a round; rest: checkpoints and records")
        for method in METHODS:
            for clients in ROUNDS:
                if clients == 10_000 and method not in STATELESS:
                    continue
                r = apart("clients", method, str(clients))
                print(
                    f"  {method:8} {clients:6} clients: train {r['train_s']:.3f} s, evaluate "
                    f"{r['evaluate_s']:.3f} s, rest {r['rest_s']:.3f} s a round; start "
                    f"{r['start_s']:.1f} s; peak {r['peak_mb']} MB ({r['before_mb']} MB with the "
                    f"images); {r['states']} states on disk, {r['disk_mb']} MB",
                    flush=True,
                )
    if options.only in (None, "glyphs"):
        r = apart("glyphs")
        print(
            f"\nprotofed {COMMAND}\n"
            f"  {r['seconds']:.1f} s in all, {r['train_s']:.3f} s of training a round, "
            f"peak {r['peak_mb']} MB, {r['states']} states on disk",
            flush=True,
        )
    load = ", ".join(f"{v:.2f}" for v in os.getloadavg())
    print(f"load average at the end {load}")


if __name__ == "__main__":
    main()
