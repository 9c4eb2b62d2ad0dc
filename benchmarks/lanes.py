"""Lanes against plain eager PyTorch on a GPU: a round of FPL on Digits.

    python benchmarks/lanes.py DATA [--rounds 5] [--long] [--only resnet18/16]

20 clients 6/4/3/7 (600 / 72 / 732 / 100 samples), ResNet-10, batch 64, 10 epochs: 1,180 client
steps per round, over the real mix of batch sizes. Three ways to do the same work in one process:

    lanes     this package's GPU engine, bf16
    eager     its loop engine on the GPU: plain eager PyTorch with the loss as tensor expressions
    sample    the same loop with FPL's loss computed sample by sample, as the published code does

and lanes with ResNet-18 and a batch of 16. Times are of rounds with prototypes (round 0 is
warm-up) and include the server's part but not evaluation. ``--long`` adds 100 rounds, each with
evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import torch

from protofed.config import make_config
from protofed.federation.cpu import one_thread
from protofed.federation.simulation import Federation
from protofed.method import Batch, Terms
from protofed.methods import FPL
from protofed.runs.run import tf32


@dataclasses.dataclass(frozen=True)
class FPLBySample(FPL):
    """FPL's two terms in a Python loop over the batch; for timing only."""

    def loss(self, client, batch: Batch) -> Terms:  # type: ignore[no-untyped-def]
        z, logits = client.forward(batch.x)
        terms = {"ce": torch.nn.functional.cross_entropy(logits, batch.y)}
        mean, mask = client.received["cluster"]["mean"], client.received["cluster"]["mask"]
        cpcl, upcr = [], []
        for i in range(len(batch.y)):
            label = batch.y[i].item()
            own = mean[label][mask[label] > 0]
            if len(own) == 0:
                continue
            everything = mean[mask > 0]
            to_own = torch.nn.functional.cosine_similarity(z[i : i + 1], own) / self.tau
            to_all = torch.nn.functional.cosine_similarity(z[i : i + 1], everything) / self.tau
            cpcl.append(to_all.logsumexp(0) - to_own.logsumexp(0))
            upcr.append((z[i] - own.mean(0)).square().mean())
        if cpcl:
            terms["cpcl"] = torch.stack(cpcl).sum() / len(batch.y)
            terms["upcr"] = torch.stack(upcr).sum() / len(batch.y)
        return terms


CARD = 989
"""TFLOP/s of an H200 in bfloat16, without sparsity, as stated by NVIDIA."""
IMAGES = sum(n * s for n, s in ((6, 600), (4, 72), (3, 732), (7, 100)))
"""Samples of all clients: the size of one local epoch of a round."""
GFLOP = {"resnet10": 1.51, "resnet18": 3.34}
"""Per image, forward and backward."""


def seconds_a_round(
    federation: Federation, warm: int, rounds: int
) -> tuple[list[float], list[float], int]:
    """Training and evaluation seconds of the rounds after the first, and steps a round."""
    for _ in range(warm):  # lanes record their graphs, and prototypes appear
        federation.run_round()
    train, test, steps = [], [], 0
    for _ in range(rounds):
        record = federation.run_round()
        train.append(record["seconds"]["train"])
        test.append(record["seconds"]["evaluate"])
        steps = record["steps"]
    return train, test, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--only", help="one of the ways, as the output calls it")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    common = {"device": "cuda", "data": arguments.data, "rounds": 100, "protocol": "fpl"}
    lanes, loop = {"engine": "lanes"}, {"engine": "loop"}
    # (method, settings, warm-up rounds, timed rounds); the slow ways do fewer epochs or rounds of
    # the same steps
    ways = {
        "lanes bf16": (FPL(), {**lanes, "precision": "bf16"}, 2, arguments.rounds),
        "lanes tf32": (FPL(), {**lanes, "precision": "tf32"}, 2, 2),
        "eager bf16": (FPL(), {**loop, "precision": "bf16", "epochs": 5}, 1, 2),
        "eager tf32": (FPL(), {**loop, "precision": "tf32", "epochs": 5}, 1, 2),
        "sample tf32": (FPLBySample(), {**loop, "precision": "tf32", "epochs": 1}, 1, 2),
        "resnet18/16": (
            FPL(),
            {**lanes, "precision": "bf16", "model": "resnet18", "batch": 16},
            2,
            3,
        ),
    }
    per_step = {}
    for name, (method, settings, warm, rounds) in ways.items():
        if arguments.only not in (None, name):
            continue
        config = make_config("digits", method, **common, **settings)
        with one_thread(), tf32(config.precision == "tf32"):
            train, test, steps = seconds_a_round(Federation(config), warm, rounds)
        per_step[name] = 1e3 * statistics.median(train) / steps
        tflops = 1e-3 * GFLOP[str(config.model)] * IMAGES * config.epochs / statistics.median(train)
        print(
            f"{name:12} {per_step[name]:8.3f} ms per client-step  (rounds: "
            f"{' '.join(f'{t:.3f}' for t in train)} s, {steps} steps; evaluation "
            f"{statistics.median(test):.3f} s; {tflops:.0f} TFLOP/s, "
            f"{tflops / CARD:.0%} of the card)",
            flush=True,
        )
    for name in ("eager bf16", "eager tf32", "sample tf32"):
        if arguments.only is None:
            ratio = per_step[name] / per_step["lanes bf16"]
            print(f"lanes bf16 is {ratio:.1f} times {name}", flush=True)
    if arguments.long:
        config = make_config("digits", FPL(), **common, engine="lanes", precision="bf16")
        federation = Federation(config)
        began = time.perf_counter()
        with one_thread():
            for _ in range(100):
                record = federation.run_round()
        torch.cuda.synchronize()
        print(f"100 rounds with evaluation: {time.perf_counter() - began:.1f} s; {record}")


if __name__ == "__main__":
    main()
