"""Restyling on lanes: I²PFL as it is, and with early features restyled.

    python benchmarks/restyle.py DATA

Office-Caltech with I²PFL's protocol (ResNet-10, batch 32), bf16. Restyled are pixels, stem and
stage 1: each sample, with probability 0.5, to the statistics of a random client plus noise.

    no kernels        draws and restyling as tensor expressions
    plain             restyling as tensor expressions
    kernels           as lanes do
    the step alone    the same; clients do not collect and send their statistics

The ways take turns; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.config import make_config
from protofed.engines.lanes import program
from protofed.federation.simulation import Federation
from protofed.fused import Kernels
from protofed.method import Client, ServerView, Sizes, Slot, Slots, Tree, Updates
from protofed.methods.i2pfl import I2PFL
from protofed.styles import restyle, style_of

STAGES = ("pixels", "stem", "stage1")
WITH_KERNELS = program._kernels


@dataclass(frozen=True)
class Restyled(I2PFL):
    """I²PFL with other clients' styles."""

    name = "i2pfl_restyled"

    @property
    def slots(self) -> Slots:
        up, down = {"styles": "styles"}, {"styles": "everybody's styles"}
        return Slots(up={**super().slots.up, **up}, down={**super().slots.down, **down})

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        return STAGES

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        styles = {s: torch.zeros(1, 2, 2, sizes.channels[s]) for s in STAGES}
        return {**super().init_server(model, sizes), "styles": styles}

    def between(self, client: Client, stage: str, x: Tensor) -> Tensor:
        bank = client.received["styles"][stage]
        own = style_of(x).detach()
        coin, choice = client.uniform(1 + len(bank), len(x)).split([1, len(bank)])
        mean, spread = bank[choice.argmax(0)].unbind(1)
        new = mean + client.normal(*own.shape) * spread
        taken = (coin[0, :, None, None] < 0.5) & (mean[:, 1:] > 0)
        return restyle(x, own, torch.where(taken, new, own))

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        message, private = super().upload(client)
        return {**message, "styles": client.styles(client.start)}, private

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        styles = {s: torch.stack([u["styles"][s] for u in updates]) for s in STAGES}
        return {**super().aggregate(server, mean, updates), "styles": styles}


@dataclass(frozen=True)
class Alone(Restyled):
    """The same without collecting styles: the step alone."""

    name = "i2pfl_restyled_alone"

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        message, private = I2PFL.upload(self, client)
        bank = client.received["styles"]
        return {**message, "styles": {s: torch.ones_like(bank[s][0]) for s in STAGES}}, private


def plain(device: torch.device) -> Kernels:
    """The kernels of draws alone: I²PFL draws, too."""
    return {n: k for n, k in WITH_KERNELS(device).items() if n not in ("style_of", "restyle")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    settings = {"device": "cuda", "data": arguments.data, "engine": "lanes", "precision": "bf16"}
    ways = {
        "i2pfl, no kernels": (I2PFL(), lambda device: {}),
        "i2pfl": (I2PFL(), WITH_KERNELS),
        "restyled, no kernels": (Restyled(), lambda device: {}),
        "restyled, plain": (Restyled(), plain),
        "restyled, kernels": (Restyled(), WITH_KERNELS),
        "the step alone": (Alone(), WITH_KERNELS),
    }
    federations = {}
    for name, (method, kernels) in ways.items():
        program._kernels = kernels  # type: ignore[assignment]
        config = make_config("office_caltech", method, protocol="i2pfl", rounds=100, **settings)
        federations[name] = Federation(config)
        for _ in range(3):  # to record the graphs, then those for all clients' styles
            federations[name].run_round()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, federation in federations.items():
            record = federation.run_round()
            seconds[name].append(1e3 * record["seconds"]["train"] / record["steps"])
    base = statistics.median(seconds["i2pfl"])
    for name, each in seconds.items():
        step = statistics.median(each)
        rounds = " ".join(f"{s:.3f}" for s in each)
        print(f"{name:22} {step:.3f} ms a client-step, {step / base:.2f} × i2pfl; {rounds}")


if __name__ == "__main__":
    main()
