"""The package's side of an oracle: its run, what the oracle may take from it, the comparison.

The run is of the task and settings of the golden values: four clients of three domains and unequal
size, one of them without a class, with a last batch that is not full.

An oracle is a generator that computes the rounds by itself. It takes from the run the initial
weights, the batches and the random draws, nothing else, and yields after every round

    {"server": {slot: ...}, "sent": {client: {slot: ...}}, "kept": {client: {slot: ...}}}

with all that the server has, the round's clients have sent and all clients keep. A slot is named
tensors or, for prototypes, a list of vectors for each class. Empty slots may be left out.

With ``PROTOFED_ORACLE_ENGINE=lanes PROTOFED_ORACLE_DEVICE=cuda`` the run is computed by lanes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protofed import keys, tree
from protofed.config import make_config
from protofed.data import Images
from protofed.data.augment import normalized
from protofed.federation.batches import ClientBatches
from protofed.federation.setup import ClientData
from protofed.federation.simulation import Clients, Federation, Observer, initial_network
from protofed.tree import Tree
from tests.golden.cases import SMALL, tiny_task

TOLERANCE = 1e-9
"""Agreement: the largest difference between two numbers."""

POWER = 1e-6
"""A wrong oracle differs by more than this."""

State = Mapping[str, Any]
Oracle = Iterator[State]

# A step size at which no loss diverges, and a weight decay that is large enough to be noticed.
SETTINGS = {**SMALL, "lr": 0.01, "weight_decay": 0.01}
SHORT = {"rounds": 2, "epochs": 1}
HALF = {"rounds": 4, "epochs": 1, "participation": 0.5}
# FINCH's first and last partition differ, which takes eight owners of a class or more.
MANY = {**SHORT, "clients": {"north": 6, "south": 6, "west": 5}, "samples": 7, "seed": 23}
# In some rounds nobody has a certain class.
SOME = {"rounds": 3, "epochs": 1, "participation": 0.5, "dirichlet": 0.3}
# The options of training, so that every one of them is met, and all three optimizers.
TRAINED: dict[str, dict[str, Any]] = {
    "sgd": {
        "schedule": "step", "step_every": 1, "step_factor": 0.3, "warmup_rounds": 1,
        "label_smoothing": 0.2, "clip_norm": 0.5, "sampling": "balanced",
    },
    "adam": {"optimizer": "adam", "schedule": "cosine", "label_smoothing": 0.1, "clip_norm": 0.1},
    "adamw": {"optimizer": "adamw", "lr": 0.002, "weight_decay": 0.1, "warmup_rounds": 2},
}  # fmt: skip
WHERE = {
    "engine": os.environ.get("PROTOFED_ORACLE_ENGINE", "loop"),
    "device": os.environ.get("PROTOFED_ORACLE_DEVICE", "cpu"),
}


class Run(Observer):
    """A run of the package, with its state after every round."""

    def __init__(self, method: str, options: Mapping[str, Any], settings: Mapping[str, Any]):
        task = tiny_task()
        config = make_config(task, method, options, **{**SETTINGS, **settings, **WHERE})
        federation = Federation(config, task)
        self.setup = federation.setup
        self.rounds, self.epochs = config.rounds, config.epochs
        self.batch, self.lr = config.batch, config.lr
        self.momentum, self.weight_decay = config.momentum, config.weight_decay
        self.optimizer, self.clip_norm = config.optimizer, config.clip_norm
        self.schedule, self.warmup = config.schedule, config.warmup_rounds
        self.step_every, self.step_factor = config.step_every, config.step_factor
        self.label_smoothing = config.label_smoothing
        self.classes, self.features = len(task.classes), federation.sizes.features
        self.clients = list(federation.clients)
        self.initial = initial_network(config, task).state_dict()
        self.initials = {
            name: initial_network(config, task, model).state_dict()
            for name, model in federation.models.items()
        }
        """Every client's initial network, where they differ."""
        data = Clients(task, federation.shares, torch.device("cpu"), federation.models)
        self._batches = {name: ClientBatches(self.setup, data[name]) for name in self.clients}
        self.samples = {n: len(b.parts["train"]) for n, b in self._batches.items()}
        self.participants: list[list[str]] = []
        """The clients of each round."""
        self.accuracy: list[dict[str, float]] = []
        """The accuracy on each domain after each round, in percent."""
        self.tests = {
            name: (normalized(d.test.x, task.augment, torch.float64), d.test.y)
            for name, d in task.domains.items()
        }
        self.states: list[State] = []
        self._sent: dict[str, Tree] = {}
        for _ in range(self.rounds):
            self.participants.append(federation.server.sample())
            self._sent = {}
            self.accuracy.append(federation.run_round([self])["accuracy"])
            self.states.append(
                {
                    "server": _copied(federation.server.state),
                    "sent": self._sent,
                    "kept": {name: _copied(federation.store.get(name)) for name in self.clients},
                }
            )

    def reply(self, round: int, name: str, message: Tree) -> None:
        self._sent[name] = _copied(message)

    # ---- what an oracle takes ------------------------------------------------------------------

    def epoch(
        self, client: str, round: int, epoch: int, phase: int = 0, batch: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """An epoch's augmented images and labels, batch by batch."""
        key = (self.setup.seed, round, client, phase, epoch)
        return [(b.x, b.y) for b in self._batches[client].epoch(key, batch or self.batch)]

    def images(self, client: str, part: str = "train") -> tuple[Tensor, Tensor]:
        """All images and labels of a client, not augmented."""
        x, y = zip(*self._batches[client].clean(part), strict=True)
        return torch.cat(x), torch.cat(y)

    def public_images(self, round: int) -> Tensor:
        """The public images of a round."""
        x, _ = zip(*self._public(round).clean("train"), strict=True)
        return torch.cat(x)

    def public_epoch(
        self, client: str, round: int, epoch: int, batch: int
    ) -> list[tuple[Tensor, Tensor]]:
        """An epoch's public images and which of the round's they are, batch by batch."""
        key = (self.setup.seed, round, client, 0, epoch)
        return [(b.x, b.rows) for b in self._public(round).epoch(key, batch)]

    def _public(self, round: int) -> ClientBatches:
        assert self.setup.public is not None
        drawn = self.setup.public.draw(round)
        images = Images(drawn.x.cpu(), drawn.y.cpu())
        return ClientBatches(self.setup, ClientData("", "", images, public=True))

    def uniform(
        self, client: str, round: int, step: int, draw: int, *shape: int, phase: int = 0
    ) -> Tensor:
        """Uniform numbers of a training step; steps and rounds count from 0, draws from 1."""
        return keys.uniform(self._key(client, round, step, phase), draw, shape).double()

    def normal(
        self, client: str, round: int, step: int, draw: int, *shape: int, phase: int = 0
    ) -> Tensor:
        """Standard normal numbers of a training step."""
        return keys.normal(self._key(client, round, step, phase), draw, shape).double()

    def beta(self, client: str, round: int, step: int, draw: int, a: float, *shape: int) -> Tensor:
        """Numbers of the Beta(a, a) distribution of a training step."""
        return keys.beta(self._key(client, round, step, 0), draw, shape, a).double()

    def generator(self, *key: int | str) -> np.random.Generator:
        """The host's random numbers with this key: a round, a purpose, what lies between."""
        return keys.generator(self.setup.seed, *key)

    def _key(self, client: str, round: int, step: int, phase: int) -> Tensor:
        return torch.tensor(keys.key(self.setup.seed, round, client, phase, step, "step"))


KEPT = 4  # tens of megabytes each
_RUNS: dict[str, Run] = {}


def run(method: str, options: Mapping[str, Any] | None = None, **settings: Any) -> Run:
    """The package's run with these options; the latest are kept for tests that share them."""
    name = repr((method, options, settings))
    if name not in _RUNS:
        if len(_RUNS) == KEPT:
            del _RUNS[next(iter(_RUNS))]
        _RUNS[name] = Run(method, options or {}, settings)
    return _RUNS[name]


def _copied(state: Tree) -> Tree:
    return tree.copy(state, "cpu")


# ---- the comparison ------------------------------------------------------------------------------


def assert_agree(run: Run, oracle: Oracle) -> None:
    """Whether every number of every round is the oracle's."""
    for number, (found, expected) in enumerate(zip(run.states, oracle, strict=True)):
        for where, difference in _differences(found, expected).items():
            assert difference < TOLERANCE, f"round {number}, {where}: {difference:.1e}"


def assert_differ(run: Run, oracle: Oracle) -> None:
    """Whether some number of some round is not the oracle's, by far."""
    for found, expected in zip(run.states, oracle, strict=True):
        if max(_differences(found, expected).values()) > POWER:
            return
    raise AssertionError("a wrong oracle agrees")


def _differences(found: State, expected: State) -> dict[str, float]:
    """For each tensor or vector the largest difference; infinite if one side lacks it."""
    ours, theirs = _flat(_plain(found)), _flat(expected)
    apart = {}
    for where in ours.keys() | theirs.keys():
        a, b = ours.get(where), theirs.get(where)
        same = a is not None and b is not None and a.shape == b.shape
        difference = float((a.double() - b.detach().double()).abs().max()) if same else float("inf")
        apart[where] = float("inf") if difference != difference else difference
    return apart


def _plain(state: Any) -> Any:
    """The state with padded tables of prototypes as lists of vectors."""
    if not isinstance(state, Mapping):
        return state
    if "mean" not in state:
        return {name: _plain(part) for name, part in state.items()}
    mean, there = state["mean"], state["mask" if "mask" in state else "count"]
    if there.ndim == 1:
        mean, there = mean[:, None], there[:, None]
    return [
        [row for row, mask in zip(*rows, strict=True) if mask > 0]
        for rows in zip(mean, there, strict=True)
    ]


def _flat(state: Any, where: str = "") -> dict[str, Tensor]:
    if isinstance(state, Tensor):
        return {where: state}
    parts = state.items() if isinstance(state, Mapping) else enumerate(state)
    return {w: t for name, part in parts for w, t in _flat(part, f"{where}/{name}").items()}
