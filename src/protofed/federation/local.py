"""One client's round: the function that every engine must agree with.

``local`` is what the loop engine calls for each client, and what a client of a deployment calls.
Its only inputs are what the client received, what it keeps, its images and the key of the draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from protofed import keys
from protofed.data.augment import Choices, cropped, normalised
from protofed.data.task import Augment, Images
from protofed.errors import Diverged, ProtofedError
from protofed.federation import tree
from protofed.federation.client import Client
from protofed.federation.tree import Slot, Tree
from protofed.methods.base import Batch, Entry, Method, Phase, Sizes
from protofed.models import Network, entries

EVALUATION_BATCH = 256
_CHUNK_BYTES = 64 << 20  # float images prepared at once; an epoch of large images does not fit


@dataclass(frozen=True)
class Training:
    """How a client trains, unless a phase of the method says otherwise."""

    batch: int
    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    optimiser: str = "sgd"


@dataclass(frozen=True)
class Setup:
    """What all clients of a run have in common."""

    method: Method
    sizes: Sizes
    augment: Augment
    training: Training
    rounds: int
    seed: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Site:
    """A client's name, its domain, and its own images (on the device it trains on)."""

    name: str
    domain: str
    images: Images


@dataclass
class Reply:
    """What a client's round gives: a message, its next private state, and a short report."""

    message: Tree
    mine: Tree
    samples: int
    steps: int
    lr: float
    losses: dict[str, float] = field(default_factory=dict)


def local(
    setup: Setup, network: Network, site: Site, received: Tree, mine: Tree, round: int
) -> Reply:
    """Train one client for one round. ``network`` is only a place to compute in."""
    method, device = setup.method, site.images.x.device
    received, mine = tree.to(received, device), tree.to(mine, device)
    data = _Data(setup, site)
    client = Client(
        method,
        network,
        setup.sizes,
        received=received,
        mine=mine,
        round=round,
        rounds=setup.rounds,
        name=site.name,
        clean=data.clean,
        samples=len(data.parts["train"]),
        lr=setup.training.lr,
    )
    load(network, client.start)
    network.train()
    losses: dict[str, float] = {}
    phases = method.phases(round, setup.training.epochs)
    for number, phase in enumerate(phases):
        collect = method.proto_pass == "last_epoch" and number == len(phases) - 1
        losses |= _train(setup, client, data, phase, round, number, collect)
    if method.proto_pass == "post":
        client.begin_prototypes()
        client.collect_post()
    message, private = method.upload(client)
    state = network.state_dict()
    travel = {e.name: method.shared(e) for e in entry_list(network)}
    message = {**message, "model": {n: state[n] for n, way in travel.items() if way == "both"}}
    private = {**private, "model": {n: state[n] for n, way in travel.items() if way == "no"}}
    return Reply(
        tree.copy(message), tree.copy(private), client.samples, client.steps, client.lr, losses
    )


def _train(
    setup: Setup, client: Client, data: _Data, phase: Phase, round: int, number: int, collect: bool
) -> dict[str, float]:
    """One phase; returns the mean of each loss term over its steps."""
    training, network = setup.training, client.network
    epochs = training.epochs if phase.epochs is None else phase.epochs
    batch_size = phase.batch or training.batch
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(phase.trainable is None or phase.trainable(name))
    parameters = [p for p in network.parameters() if p.requires_grad]
    client.lr = training.lr if phase.lr is None else phase.lr
    optimiser = _optimiser(training, phase, parameters)
    sums: dict[str, Tensor] = {}
    where = (setup.seed, round, client.name, number)
    steps = 0
    for epoch in range(epochs):
        last = collect and epoch == epochs - 1
        if last:
            client.begin_prototypes()
        for batch in data.epoch((*where, epoch), batch_size):
            client.begin_step(keys.key(*where, steps, "step"))
            terms = phase.loss(client, batch)
            total = torch.stack(list(terms.values())).sum()
            optimiser.zero_grad()
            total.backward()
            if phase.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, phase.clip)
            if last:
                client.collect(batch.y)
            optimiser.step()
            for name, term in terms.items():
                sums[name] = sums.get(name, 0) + term.detach()
            steps += 1
    client.steps += steps
    for parameter in network.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    losses = {name: float(s) / steps for name, s in sums.items()}
    for name, value in losses.items():
        if not math.isfinite(value):
            raise Diverged(
                f"client {client.name}, round {round}, phase {number}: loss term '{name}' is "
                f"{value}",
                "try a smaller --lr, or check the method's hyper-parameters",
            )
    return losses


def _optimiser(
    training: Training, phase: Phase, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    lr = training.lr if phase.lr is None else phase.lr
    momentum = training.momentum if phase.momentum is None else phase.momentum
    if (phase.optimiser or training.optimiser) == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=training.weight_decay)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=training.weight_decay)


class _Data:
    """A client's images as batches: augmented epochs for training, clean passes for the rest."""

    def __init__(self, setup: Setup, site: Site) -> None:
        self.setup, self.images = setup, site.images
        n = len(site.images)
        kept = int(n * setup.method.holdout)
        shuffled = keys.generator(setup.seed, site.name, "holdout").permutation(n)
        self.parts = {"holdout": np.sort(shuffled[:kept]), "train": np.sort(shuffled[kept:])}
        if setup.method.holdout and not (kept and n - kept):
            raise ProtofedError(
                f"client {site.name} has {n} samples: too few to hold out "
                f"{setup.method.holdout:.0%} of them",
                "give it more samples",
            )

    def epoch(self, key: tuple[int | str, ...], batch: int) -> Iterator[Batch]:
        """One pass in keyed random order; the last batch may be small."""
        setup, (x, y) = self.setup, (self.images.x, self.images.y)
        rows = self.parts["train"]
        order = torch.from_numpy(keys.generator(*key, "order").permutation(rows))
        choices = Choices.draw(keys.generator(*key, "augment"), len(x), setup.augment)
        per_batch = batch * x[0].numel() * setup.dtype.itemsize
        for chunk in order.split(batch * max(1, _CHUNK_BYTES // per_batch)):
            index = chunk.to(x.device)
            images = cropped(x[index], choices.rows(chunk, x.device), setup.augment)
            images = normalised(images, setup.augment, setup.dtype)
            yield from map(Batch, images.split(batch), y[index].split(batch), index.split(batch))

    def clean(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The images of a part in their order, without augmentation."""
        rows = torch.from_numpy(self.parts[part]).to(self.images.x.device)
        for index in rows.split(EVALUATION_BATCH):
            x = normalised(self.images.x[index], self.setup.augment, self.setup.dtype)
            yield x, self.images.y[index]


def evaluate(
    setup: Setup,
    network: Network,
    received: Tree,
    mine: Tree,
    tests: Mapping[str, Images],
    round: int = 0,
) -> dict[str, float]:
    """Accuracy in percent on each test set of the model ``mine | received``.

    The server evaluates with ``mine`` empty: the view then has the broadcast and nothing private.
    """
    device = next(network.parameters()).device
    client = Client(
        setup.method,
        network,
        setup.sizes,
        received=tree.to(received, device),
        mine=tree.to(mine, device),
        round=round,
        rounds=setup.rounds,
    )
    load(network, client.start)
    network.eval()
    accuracy = {}
    with torch.no_grad():
        for name, images in tests.items():
            right = torch.zeros((), dtype=torch.int64, device=device)
            for x, y in zip(
                images.x.split(EVALUATION_BATCH), images.y.split(EVALUATION_BATCH), strict=True
            ):
                scores = setup.method.predict(client, normalised(x, setup.augment, setup.dtype))
                right += (scores.argmax(1) == y).sum()
            accuracy[name] = 100 * int(right) / len(images)
    return accuracy


def entry_list(network: Network) -> list[Entry]:
    """The entries of the network's state."""
    return [Entry(name, kind) for name, kind in entries(network).items()]


@torch.no_grad()
def load(network: Network, model: Slot) -> None:
    """Copy a model into the network's own memory; every entry must be there, and nothing else."""
    state = network.state_dict()
    if state.keys() != model.keys():
        odd = sorted(state.keys() ^ model.keys())[:3]
        raise ProtofedError(f"the model does not fit the network: {', '.join(odd)} ...")
    for name, t in state.items():
        t.copy_(model[name])


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread: sums are split over threads, so another number gives other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
