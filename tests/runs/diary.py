"""A method with private state that matters, and ways to stop a run of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from protofed import tree
from protofed.federation.simulation import Observer
from protofed.method import Batch, Client, Entry, Method, Sizes, Terms
from protofed.runs.folder import RunFolder
from protofed.runs.records import Record, without_times
from protofed.runs.result import Result
from protofed.testing.checks import TINY, tiny_task
from protofed.tree import Slot, Tree

TASK = tiny_task()
QUICK: dict[str, Any] = {**TINY, "epochs": 1, "samples": 8}
"""Four clients, one step each a round."""


@dataclass(frozen=True)
class Diary(Method):
    """Private state that matters: BatchNorm, a counter, and a point the head is drawn to."""

    name: ClassVar[str] = "diary"
    fails_in: int = -1

    @property
    def evaluates(self) -> str:
        return "clients"

    def shared(self, entry: Entry) -> Literal["both", "down", "no"]:
        return "no" if entry.kind == "bn" else "both"

    def init_client(self, model: Slot, sizes: Sizes) -> Tree:
        return {"diary": {"rounds": torch.tensor(0), "bias": torch.ones(sizes.classes)}}

    def loss(self, client: Client, batch: Batch) -> Terms:
        drift = client.parameters["head.bias"] - client.mine["diary"]["bias"]
        if int(client.round) == self.fails_in and client.name == "right-0":
            drift = drift * float("nan")
        return {**super().loss(client, batch), "drift": drift.square().sum()}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        diary = client.mine["diary"]
        bias = client.parameters["head.bias"] + client.uniform(client.classes)
        return {"note": {"n": diary["rounds"]}}, {
            "diary": {"rounds": diary["rounds"] + 1, "bias": bias}
        }


class At(Observer):
    """Does something when a client of a round has finished."""

    def __init__(self, round: int, client: int, act: Callable[[], object]) -> None:
        self.at, self.act = (round, client), act

    def client(self, round: int, done: int, total: int) -> None:
        if (round - 1, done) == self.at:
            self.act()


def ctrl_c() -> None:
    raise KeyboardInterrupt


def same(a: Result, b: Result) -> bool:
    models = tree.equal({"model": a.model}, {"model": b.model})
    return models and without_times(a.rounds) == without_times(b.rounds)


def numbers(folder: Path) -> list[Record]:
    return without_times(RunFolder(folder).records())


def states(folder: Path | None) -> dict[str, Tree]:
    """The private state of every client as the folder's checkpoint has it."""
    assert folder is not None
    found = RunFolder(folder)
    checkpoint = found.checkpoint()
    assert checkpoint is not None
    return {name: found.client_state(file) for name, file in checkpoint.clients.items()}
