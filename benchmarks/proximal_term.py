"""FedProx's proximal term on lanes: with a hand-written gradient, and by autograd.

    python benchmarks/proximal_term.py DATA

Office-Caltech with I²PFL's protocol (ResNet-10, batch 32), bf16, one run at a time, with FedAvg for
comparison.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

import protofed.methods.fedprox as module
from protofed.config import make_config
from protofed.federation.simulation import Federation
from protofed.methods import FedAvg, FedProx

WRITTEN = module.squared_distance


def by_autograd(parameters: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Tensor:
    """The same sum, with every operation recorded by autograd."""
    return torch.stack([(p - start[n]).square().sum() for n, p in parameters.items()]).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    arguments = parser.parse_args()
    settings = {"device": "cuda", "data": arguments.data, "engine": "lanes", "precision": "bf16"}
    for name, method, distance in (
        ("fedavg", FedAvg(), WRITTEN),
        ("fedprox written", FedProx(), WRITTEN),
        ("fedprox autograd", FedProx(), by_autograd),
    ):
        module.squared_distance = distance
        config = make_config("office_caltech", method, protocol="i2pfl", rounds=100, **settings)
        federation = Federation(config)
        for _ in range(2):  # to record the graphs
            federation.run_round()
        records = [federation.run_round() for _ in range(5)]
        seconds = [r["seconds"]["train"] for r in records]
        step = 1e3 * statistics.median(seconds) / records[0]["steps"]
        rounds = " ".join(f"{s:.3f}" for s in seconds)
        print(f"{name:20} {step:.3f} ms a client-step, rounds {rounds}", flush=True)


if __name__ == "__main__":
    main()
