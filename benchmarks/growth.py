"""How a round's cost grows: with clients, with classes, with the size of features.

    python benchmarks/growth.py [--rounds 3] [--methods fedavg,fpl]

One quantity grows and all others stay, on images of noise through the package's own API:

    clients    10, 100, 1,000 with 10 images each, of which a tenth takes part in a round
    classes    10, 65, 345 (Office-Home's, DomainNet's), 10 clients with 400 images
    features   512, 1024, 2048 of a ResNet-10 (width 64, 128, 256), 2 clients with 8 images

Seconds are medians a round after the first: *clients* is local training, *server* what follows
(averages, FINCH), *evaluate* the test set. Bytes are those of all messages of a round.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from typing import Any

import numpy as np
import torch

from protofed.config import make_config
from protofed.data import Domain, Images, Task
from protofed.data.task import Augment
from protofed.federation.cpu import one_thread
from protofed.federation.simulation import Federation

COMMON = {"batch": 32, "epochs": 1, "lr": 0.001, "device": "cpu", "protocol": "glyphs"}
SWEEPS: dict[str, list[dict[str, Any]]] = {
    "clients": [{"clients": n, "samples": 10, "participation": 0.1} for n in (10, 100, 1000)],
    "classes": [{"classes": n, "samples": 400} for n in (10, 65, 345)],
    "features": [
        {"model": "resnet10", "width": w, "clients": 2, "samples": 8} for w in (64, 128, 256)
    ],
}


def noise(classes: int, clients: int, samples: int) -> Task:
    rng = np.random.default_rng(0)

    def images(count: int) -> Images:
        x = torch.from_numpy(rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8))
        return Images(x, torch.arange(count) % classes)

    return Task(
        name="noise",
        classes=tuple(map(str, range(classes))),
        domains={"all": Domain(images(clients * samples), images(40))},
        augment=Augment(),
        clients={"all": clients},
        samples={"all": samples},
    )


def measure(method: str, rounds: int, classes: int = 10, **settings: Any) -> dict[str, float]:
    clients, samples = settings.pop("clients", 10), settings.pop("samples")
    task = noise(classes, clients, samples)
    config = make_config(task, method, rounds=rounds + 1, **{**COMMON, **settings})
    federation = Federation(config, task)
    server: list[float] = []
    finish = federation.server.finish

    def timed() -> None:
        began = time.perf_counter()
        finish()
        server.append(time.perf_counter() - began)

    federation.server.finish = timed  # type: ignore[method-assign]
    records = [federation.run_round() for _ in range(rounds + 1)][1:]
    train = [r["seconds"]["train"] for r in records]
    return {
        "clients": statistics.median(t - s for t, s in zip(train, server[1:], strict=True)),
        "server": statistics.median(server[1:]),
        "evaluate": statistics.median(r["seconds"]["evaluate"] for r in records),
        "up": records[-1]["bytes_up"] / 1e6,
        "down": records[-1]["bytes_down"] / 1e6,
        "steps": records[-1]["steps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default="fedavg,fpl")
    parser.add_argument("--sweep", choices=SWEEPS)
    options = parser.parse_args()
    load = ", ".join(f"{v:.2f}" for v in os.getloadavg())
    print(f"python {platform.python_version()}, torch {torch.__version__}")
    print(f"{os.cpu_count()} cores ({platform.machine()}), load average at the start {load}")
    for sweep, points in SWEEPS.items():
        if options.sweep not in (None, sweep):
            continue
        for method in options.methods.split(","):
            for point in points:
                with one_thread():
                    r = measure(method, options.rounds, **point)
                shown = ", ".join(f"{k} {v}" for k, v in point.items())
                print(
                    f"{sweep:8} {method:7} {shown:47} clients {r['clients']:7.3f} s "
                    f"({1e3 * r['clients'] / r['steps']:.1f} ms a step), server "
                    f"{r['server']:.3f} s, evaluate {r['evaluate']:.3f} s, up {r['up']:.1f} MB, "
                    f"down {r['down']:.1f} MB",
                    flush=True,
                )
    load = ", ".join(f"{v:.2f}" for v in os.getloadavg())
    print(f"load average at the end {load}")


if __name__ == "__main__":
    main()
