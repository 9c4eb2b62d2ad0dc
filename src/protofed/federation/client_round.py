"""One client's round: the function that every engine must agree with.

The loop engine calls ``train_client`` for each client, and so does a client of a deployment. Its
only inputs are what the client received, its private state, its images and the key of its draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from protofed import keys, tree
from protofed.errors import ProtofedError
from protofed.federation.batches import ClientBatches, next_public_batches
from protofed.federation.finite import require_finite_losses
from protofed.federation.model_state import load_model, travel
from protofed.federation.optimizers import make_optimizer
from protofed.federation.privacy import collect_private, protected
from protofed.federation.setup import ClientData, Setup
from protofed.method import Batch, Client, Method, Phase, Terms
from protofed.models import Network
from protofed.models.network import trainable
from protofed.tree import Slot, Tree


@dataclass
class Reply:
    """What a client's round produces: a message, its next private state, and a short report."""

    message: Tree
    mine: Tree
    samples: int
    steps: int
    lr: float
    losses: dict[str, tuple[float, int]] = field(default_factory=dict)
    """For each loss term, its sum over the steps that have it, and how many these are."""

    def add_loss(self, term: str, total: float, steps: int) -> None:
        before, count = self.losses.get(term, (0.0, 0))
        self.losses[term] = (before + total, count + steps)


def train_client(
    setup: Setup, network: Network, data: ClientData, received: Tree, mine: Tree, round: int
) -> Reply:
    """Train one client for one round. ``network`` is only a place to compute in."""
    method, device = setup.method, data.images.x.device
    received, mine = tree.to(received, device), tree.to(mine, device)
    own = ClientBatches(setup, data)
    client = Client(
        method,
        network,
        setup.sizes,
        received=received,
        mine=mine,
        round=round,
        rounds=setup.rounds,
        name=data.name,
        domain=data.domain,
        clean=own.clean,
        public=next_public_batches(setup, data, round),
        samples=len(own.parts["train"]),
        lr=setup.training.lr,
        min_class_count=setup.min_class_count,
        small_classes=own.small_classes(),
        label_smoothing=setup.training.label_smoothing,
        mean=setup.augment.mean,
        std=setup.augment.std,
    )
    load_model(network, client.start)
    key = (setup.seed, round, data.name)
    if setup.proto_pass == "received":
        with setup.autocast(device):
            collect_private(setup.privacy, client, key, setup.min_class_count)
    network.train()
    reply = Reply({}, {}, client.samples, 0, 0.0)
    phases = method.phases(round, setup.training.epochs)
    # in memory, both may be what other clients get, or what an interrupted round is repeated from
    given = {"client.received": received, "client.mine": mine}
    with setup.autocast(device), tree.unchanged(given, partial(_changed, method)):
        for number, phase in enumerate(phases):
            collect = setup.proto_pass == "last_epoch" and number == len(phases) - 1
            images = data.for_phase(setup, phase, round)
            batches = own if images is data else ClientBatches(setup, images)
            losses = _train_phase(setup, client, batches, phase, round, number, collect)
            for term, total in losses.items():
                reply.add_loss(term, *total)
        reply.message, reply.mine = finish_round(setup, client, key)
    reply.steps, reply.lr = client.steps, client.lr
    return reply


def _changed(method: Method, what: str) -> ProtofedError:
    return ProtofedError(
        f"{method.name} changes {what} in place",
        "a client's hooks must make new tensors; upload returns the next private state",
    )


def finish_round(
    setup: Setup, client: Client, key: tuple[int | str, ...], device: torch.device | str = "cpu"
) -> tuple[Tree, Tree]:
    """The message and the private state after training, each with its entries of the model.

    ``key`` is that of the noise, if there is any.
    """
    method = setup.method
    if client.label_smoothing and not client.smoothed:
        raise ProtofedError(
            f"label_smoothing has no effect on {method.name}: its loss never calls "
            "client.cross_entropy",
            "use it in place of F.cross_entropy, or leave out --label-smoothing",
        )
    if setup.proto_pass == "post":
        client.begin_prototypes()
        client.collect_post()
    sent = method.upload(client)
    two = isinstance(sent, tuple) and len(sent) == 2
    if not two or not all(isinstance(slots, Mapping) for slots in sent):
        raise ProtofedError(
            f"upload of {method.name} returns {tree.in_words(sent):.200}",
            "it must return two trees: the message, and the client's next private state",
        )
    if any("model" in slots for slots in sent):
        raise ProtofedError(
            f"upload of {method.name} returns a slot 'model', which is not the method's to fill",
            "shared says which entries of the trained model are sent; give what you send another "
            "name",
        )
    message, private = sent
    state = client.network.state_dict()
    ways = travel(method, client.network)
    message = {**message, "model": {n: state[n] for n, way in ways.items() if way == "both"}}
    private = {**private, "model": {n: state[n] for n, way in ways.items() if way == "no"}}
    message = protected(setup.privacy, client, key, message)
    return tree.copy(message, device), tree.copy(private, device)


def _train_phase(
    setup: Setup,
    client: Client,
    batches: ClientBatches,
    phase: Phase,
    round: int,
    number: int,
    collect: bool,
) -> dict[str, tuple[float, int]]:
    """Train one phase; returns the sum of each loss term over its steps, and their number."""
    training, network = setup.training.for_phase(phase), client.network
    moving = moving_parameters(client, phase)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in moving)
    parameters = list(moving.values())
    client.lr = training.lr_in(round)
    optimizer = make_optimizer(training, parameters, client.lr)
    sums: dict[str, Tensor] = {}
    where = (setup.seed, round, client.name, number)
    steps = 0
    for epoch in range(training.epochs):
        last = collect and epoch == training.epochs - 1
        if last:
            client.begin_prototypes()
        steps_per_epoch = -(-len(batches.parts["train"]) // training.batch)
        table = _draws(setup, (*where, epoch), steps_per_epoch, client)
        for row, batch in enumerate(batches.epoch((*where, epoch), training.batch)):
            client.begin_step(keys.key(*where, steps, "step"))
            client.drawn = {name: t[row] for name, t in table.items()}
            terms = loss_terms(phase, client, batch)
            total = torch.stack(list(terms.values())).sum()
            optimizer.zero_grad()
            total.backward()
            if training.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, training.clip)
            if last:
                client.collect(batch.y)
            optimizer.step()
            for name, term in terms.items():
                sums[name] = sums.get(name, 0) + term.detach()
            steps += 1
    client.steps += steps
    for parameter in network.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    losses = {name: float(s) for name, s in sums.items()}
    require_finite_losses(client.name, round, number, losses)
    return {name: (total, steps) for name, total in losses.items()}


def moving_parameters(client: Client, phase: Phase) -> dict[str, nn.Parameter]:
    """The parameters that a phase trains, by name."""
    found = trainable(client.network)
    moving = {n: p for n, p in found.items() if phase.trainable is None or phase.trainable(n)}
    if moving:
        return moving
    name = client.method.name
    if len(found) < len(dict(client.network.named_parameters())):
        raise ProtofedError(
            f"{name} has a phase that trains only the backbone", "it cannot run with --train head"
        )
    raise ProtofedError(
        f"{name} has a phase that trains nothing",
        f"its trainable selects no parameter; their names are {', '.join([*found][:3])}, ...",
    )


def loss_terms(phase: Phase, client: Client, batch: Batch) -> Terms:
    """The phase's loss; errors say whose it is, and explain a batch too small for BatchNorm."""
    try:
        return _require_terms(client.method.name, phase.loss(client, batch))
    except ProtofedError:
        raise
    except Exception as error:
        if len(batch.y) != 1 or "more than 1 value per channel" not in str(error):
            # without the round, which may be a tensor on a GPU
            where = f"{client.method.name}, client {client.name}"
            error.add_note(f"in the loss of {where}, batch x {list(batch.x.shape)}")
            if isinstance(error, KeyError):
                slots = (", ".join(t) or "no slots" for t in (client.received, client.mine))
                error.add_note("client.received has {}; client.mine has {}".format(*slots))
            raise
        raise ProtofedError(
            f"client {client.name}: a batch of one image, too small for BatchNorm",
            "choose another --batch or --samples, so that its last batch is larger, or --norm "
            "group",
        ) from error


def _require_terms(method: str, terms: Terms) -> Terms:
    """The terms of a loss, if a step can be taken down their sum."""
    named = isinstance(terms, Mapping) and terms
    if not named or any(not isinstance(t, Tensor) or t.numel() != 1 for t in terms.values()):
        raise ProtofedError(
            f"the loss of {method} returns {tree.in_words(terms):.200}",
            'it must return named terms, each a tensor with one number: {"ce": ...}',
        )
    if not any(t.requires_grad for t in terms.values()):
        raise ProtofedError(
            f"the loss of {method} does not depend on what the phase trains",
            "compute some term from client.forward, with gradients",
        )
    return terms


def _draws(setup: Setup, key: tuple[int | str, ...], steps: int, client: Client) -> Slot:
    """The method's host draws of an epoch, as tensors [steps, ...] on the client's device."""
    arrays = setup.method.draws(keys.generator(*key, "draws"), steps)
    device = client.key.device
    return {n: torch.from_numpy(a).to(device, setup.dtype) for n, a in arrays.items()}
