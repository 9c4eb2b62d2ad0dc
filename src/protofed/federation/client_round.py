"""One client's round: the function that every engine must agree with.

``local`` is what the loop engine calls for each client, and what a client of a deployment calls.
Its only inputs are what the client received, what it keeps, its images and the key of the draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from protofed import keys, tree
from protofed.data.augment import Choices, cropped, crops, normalized, padded
from protofed.data.task import Augment, Images
from protofed.errors import Diverged, ProtofedError, unknown
from protofed.federation.optimizers import SGD, Adam
from protofed.federation.public_images import Public
from protofed.method import Batch, BatchSource, Client, Entry, Method, Phase, Sizes, Terms
from protofed.models import Network, entries
from protofed.tree import Slot, Tree

EVALUATION_BATCH = 256
_READY_BYTES = 128 << 20  # images that are kept in memory a second time, ready for cropping
_CHUNK_BYTES = 8 << 20  # float images made at once: few enough to stay in a CPU cache


@dataclass(frozen=True)
class Training:
    """How a client trains, unless a phase of the method says otherwise."""

    batch: int
    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    optimizer: str = "sgd"


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
    bf16: bool = False
    """Whether convolutions and matrix products compute in bfloat16 (the weights stay float32)."""
    public: Public | None = None

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context in which networks run."""
        # Without its cache: that would keep the bfloat16 copies of weights which have moved on.
        return torch.autocast(device.type, torch.bfloat16, self.bf16, cache_enabled=False)


@dataclass(frozen=True)
class Site:
    """A client's name, its domain, its images (on the device it trains on), and its model.

    ``public``: the images are not its own but the round's public ones.
    """

    name: str
    domain: str
    images: Images
    model: str = ""
    public: bool = False

    def of_phase(self, setup: Setup, phase: Phase, round: int) -> Site:
        """The site with the images that a phase trains on."""
        return self if phase.data == "own" else public_site(setup, self, round)


@dataclass(frozen=True)
class Exam:
    """Who is tested, in which model, on what; the server (None) has no private state."""

    model: str
    client: str | None
    tests: Mapping[str, Images]


Scores = dict[str, dict[str, float]]
"""Accuracy in percent by inference rule (``accuracy`` is the method's own) and test set."""


@dataclass
class Reply:
    """What a client's round gives: a message, its next private state, and a short report."""

    message: Tree
    mine: Tree
    samples: int
    steps: int
    lr: float
    losses: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Of each loss term the sum over the steps that have it, and how many these are."""

    def add_loss(self, term: str, total: float, steps: int) -> None:
        """Count a phase's steps in."""
        before, count = self.losses.get(term, (0.0, 0))
        self.losses[term] = (before + total, count + steps)


def local(
    setup: Setup, network: Network, site: Site, received: Tree, mine: Tree, round: int
) -> Reply:
    """Train one client for one round. ``network`` is only a place to compute in."""
    method, device = setup.method, site.images.x.device
    received, mine = tree.to(received, device), tree.to(mine, device)
    data = Data(setup, site)
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
        public=next_public(setup, site, round),
        samples=len(data.parts["train"]),
        lr=setup.training.lr,
    )
    load(network, client.start)
    network.train()
    reply = Reply({}, {}, client.samples, 0, 0.0)
    phases = method.phases(round, setup.training.epochs)
    with setup.autocast(device):
        for number, phase in enumerate(phases):
            collect = method.proto_pass == "last_epoch" and number == len(phases) - 1
            seen = site.of_phase(setup, phase, round)
            part = data if seen is site else Data(setup, seen)
            for term, total in _train(setup, client, part, phase, round, number, collect).items():
                reply.add_loss(term, *total)
        reply.message, reply.mine = finish(method, client)
    reply.steps, reply.lr = client.steps, client.lr
    return reply


def finish(method: Method, client: Client, device: torch.device | str = "cpu") -> tuple[Tree, Tree]:
    """After training: the message and the private state, shared and private entries in them."""
    if method.proto_pass == "post":
        client.begin_prototypes()
        client.collect_post()
    message, private = method.upload(client)
    state = client.network.state_dict()
    travel = {e.name: method.shared(e) for e in entry_list(client.network)}
    message = {**message, "model": {n: state[n] for n, way in travel.items() if way == "both"}}
    private = {**private, "model": {n: state[n] for n, way in travel.items() if way == "no"}}
    return tree.copy(message, device), tree.copy(private, device)


def _train(
    setup: Setup, client: Client, data: Data, phase: Phase, round: int, number: int, collect: bool
) -> dict[str, tuple[float, int]]:
    """One phase; returns the sum of each loss term over its steps, and their number."""
    training, network = setup.training, client.network
    epochs = training.epochs if phase.epochs is None else phase.epochs
    batch_size = phase.batch or training.batch
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(phase.trainable is None or phase.trainable(name))
    parameters = [p for p in network.parameters() if p.requires_grad]
    client.lr = training.lr if phase.lr is None else phase.lr
    stepper = optimizer(training, phase, parameters)
    sums: dict[str, Tensor] = {}
    where = (setup.seed, round, client.name, number)
    steps = 0
    for epoch in range(epochs):
        last = collect and epoch == epochs - 1
        if last:
            client.begin_prototypes()
        each = -(-len(data.parts["train"]) // batch_size)
        table = _draws(setup, (*where, epoch), each, client)
        for row, batch in enumerate(data.epoch((*where, epoch), batch_size)):
            client.begin_step(keys.key(*where, steps, "step"))
            client.drawn = {name: t[row] for name, t in table.items()}
            terms = loss_terms(phase, client, batch)
            total = torch.stack(list(terms.values())).sum()
            stepper.zero_grad()
            total.backward()
            if phase.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, phase.clip)
            if last:
                client.collect(batch.y)
            stepper.step()
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


def loss_terms(phase: Phase, client: Client, batch: Batch) -> Terms:
    """The phase's loss; errors tell whose, and in words if BatchNorm needs more than one image."""
    try:
        return phase.loss(client, batch)
    except ProtofedError:
        raise
    except Exception as error:
        if len(batch.y) != 1 or "more than 1 value per channel" not in str(error):
            where = f"{client.method.name}, client {client.name}"  # its round may lie on a GPU
            error.add_note(f"in the loss of {where}, batch x {list(batch.x.shape)}")
            raise
        raise ProtofedError(
            f"client {client.name}: a batch of one image, of which BatchNorm has no statistics",
            "choose another --batch or --samples, so that its last batch has more, or --norm group",
        ) from error


def require_finite_losses(client: str, round: int, phase: int, losses: Mapping[str, float]) -> None:
    """An error that names client, round, phase and terms if a loss is not finite."""
    odd = [f"'{name}' is {value}" for name, value in losses.items() if not math.isfinite(value)]
    if odd:  # one term that breaks soon breaks the others, so all are named
        raise Diverged(
            f"client {client}, round {round + 1}, phase {phase}: loss term {', '.join(odd)}",
            "try a smaller --lr, or check the method's hyper-parameters",
        )


def _draws(setup: Setup, key: tuple[int | str, ...], steps: int, client: Client) -> Slot:
    """The method's host draws of an epoch, as tensors [steps, ...] where the client computes."""
    arrays = setup.method.draws(keys.generator(*key, "draws"), steps)
    device = client.key.device
    return {n: torch.from_numpy(a).to(device, setup.dtype) for n, a in arrays.items()}


def optimizer(training: Training, phase: Phase, parameters: list[torch.nn.Parameter]) -> SGD | Adam:
    """The optimizer of a phase, with fresh state."""
    lr = training.lr if phase.lr is None else phase.lr
    decay = training.weight_decay
    name = phase.optimizer or training.optimizer
    if name not in ("sgd", "adam"):
        raise unknown("optimizer of a phase", name, ("sgd", "adam"))
    if name == "adam":
        return Adam(parameters, lr=lr, weight_decay=decay, capturable=parameters[0].is_cuda)
    momentum = training.momentum if phase.momentum is None else phase.momentum
    return SGD(parameters, lr, momentum, decay)


class Data:
    """A client's images as batches: augmented epochs for training, clean passes for the rest."""

    def __init__(self, setup: Setup, site: Site) -> None:
        self.setup, self.images = setup, site.images
        self._padded: Tensor | None = None
        n = len(site.images)
        if site.public:  # seen as they are, all of them
            plain = Augment(padding=0, flip=False, mean=setup.augment.mean, std=setup.augment.std)
            self.setup = replace(setup, augment=plain)
            self.parts = {"holdout": np.arange(0), "train": np.arange(n)}
            return
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
        rng = keys.generator(*key, "augment")
        choices = Choices.draw(rng, len(x), setup.augment, x.shape[-1])
        ready = self.ready()
        per_batch = batch * x[0].numel() * setup.dtype.itemsize
        for chunk in order.split(batch * max(1, _CHUNK_BYTES // per_batch)):
            index = chunk.to(x.device)
            chosen = choices.rows(chunk, x.device)
            if ready is None:
                images = cropped(x[index], chosen, setup.augment)
            else:
                images = crops(ready, index, chosen, setup.augment)
            images = normalized(images, setup.augment, setup.dtype)
            yield from map(Batch, images.split(batch), y[index].split(batch), index.split(batch))

    def ready(self) -> Tensor | None:
        """The images prepared for cropping, once for all epochs; None where they do not allow it.

        A resized crop or colors need them as they are, and very many must not be kept twice.
        """
        x, augment = self.images.x, self.setup.augment
        plain = augment.resized_crop is None and augment.jitter is None and not augment.grayscale
        if self._padded is None and plain and x.numel() <= _READY_BYTES:
            self._padded = padded(x, augment)
        return self._padded

    def clean(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The images of a part in their order, without augmentation."""
        rows = torch.from_numpy(self.parts[part]).to(self.images.x.device)
        for index in rows.split(EVALUATION_BATCH):
            x = normalized(self.images.x[index], self.setup.augment, self.setup.dtype)
            yield x, self.images.y[index]


def public_site(setup: Setup, site: Site, round: int) -> Site:
    """The client with a round's public images in the place of its own."""
    if setup.public is None:
        raise ProtofedError(
            f"{setup.method.name} needs public images, and there are none here",
            "its public_images must say where they come from",
        )
    return replace(site, images=setup.public.draw(round), public=True)


def next_public(setup: Setup, site: Site, round: int) -> BatchSource | None:
    """Clean batches of the next round's public images; None where a run has none."""
    if setup.public is None:
        return None
    return lambda part: Data(setup, public_site(setup, site, round + 1)).clean(part)


def examine(
    setup: Setup,
    networks: Mapping[str, Network],
    exam: Exam,
    received: Tree,
    mine: Callable[[str], Tree],
    round: int,
    batch: int = EVALUATION_BATCH,
) -> Scores:
    """The scores of an exam."""
    private = {} if exam.client is None else mine(exam.client)
    network = networks[exam.model]
    return evaluate(setup, network, received, private, exam.tests, round, batch)


def evaluate(
    setup: Setup,
    network: Network,
    received: Tree,
    mine: Tree,
    tests: Mapping[str, Images],
    round: int = 0,
    batch: int = EVALUATION_BATCH,
) -> Scores:
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
    key = keys.key(setup.seed, round, "evaluation")
    absent = _absent(network, setup.method, client.start)
    load(network, client.start | absent)
    network.eval()
    accuracy: Scores = {}
    with torch.no_grad(), setup.autocast(device):
        for name, images in tests.items():
            right: dict[str, Tensor] = {}
            undecided: dict[str, Tensor] = {}
            for x, y in zip(images.x.split(batch), images.y.split(batch), strict=True):
                # the same draws for every batch: however the images are cut, so are the scores
                client.begin_step(key)
                batch_x = normalized(x, setup.augment, setup.dtype)
                said = setup.method.rules(client, batch_x)
                if absent and not _all_decide(said):
                    load(network, client.start | {n: t.zero_() for n, t in absent.items()})
                    client.begin_step(key)
                    if not _all_decide(setup.method.rules(client, batch_x)):
                        raise _diverged(setup.method, client.start, name)
                    raise ProtofedError(
                        f"{setup.method.name} predicts with entries that clients keep to "
                        f"themselves ({next(iter(absent))} ...), which the server does not have",
                        "such a method is evaluated by its clients: evaluates = 'clients'",
                    )
                for rule, scores in said.items():
                    zero = torch.zeros((), dtype=torch.int64, device=device)
                    right[rule] = right.get(rule, zero) + (scores.argmax(1) == y).sum()
                    undecided[rule] = undecided.get(rule, zero) + (~_decides(scores)).sum()
            for rule, hits in right.items():
                if int(undecided[rule]):  # argmax would take such a score for the largest
                    raise _diverged(setup.method, client.start, name)
                accuracy.setdefault(rule, {})[name] = 100 * int(hits) / len(images)
    return accuracy


def _decides(scores: Tensor) -> Tensor:
    """Which scores are numbers; −inf is one, and says that it is never this class."""
    return scores < math.inf


def _all_decide(said: Mapping[str, Tensor]) -> bool:
    return all(bool(_decides(scores).all()) for scores in said.values())


def _diverged(method: Method, model: Slot, domain: str) -> Diverged:
    """The error for scores that are no numbers, unless entries of the model are none either."""
    require_finite(model, "the model")
    return Diverged(
        f"{method.name} gives scores that are no numbers for test images of {domain}",
        "the model's entries are numbers, but may be too large for its activations: try a smaller "
        "--lr; or look at the method's predict",
    )


def require_finite(model: Slot, what: str) -> None:
    """An error if entries of a model are not finite: losses show that only a step later."""
    floats = {name: t for name, t in model.items() if t.is_floating_point() and t.numel()}
    if not floats or bool(torch.stack(torch._foreach_norm(list(floats.values()))).isfinite().all()):
        return
    odd = [name for name, t in floats.items() if not bool(t.isfinite().all())]
    if odd:  # a norm overflows earlier than its entries
        raise Diverged(
            f"{what} is not finite: {len(odd)} of its entries, {odd[0]} among them",
            "a client's last step diverged: try a smaller --lr, or check the method's "
            "hyper-parameters; or its weights or aggregate gave numbers that are none",
        )


def _absent(network: Network, method: Method, model: Slot) -> Slot:
    """The private entries that a server's model lacks, as NaN: a prediction must not need them."""
    state = network.state_dict()
    return {
        e.name: torch.full_like(state[e.name], math.nan)
        for e in entry_list(network)
        if e.name not in model and method.shared(e) == "no" and state[e.name].is_floating_point()
    }


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
        if model[name].shape != t.shape:
            raise ProtofedError(
                f"the model does not fit the network: {name} is {tuple(model[name].shape)}, "
                f"not {tuple(t.shape)}"
            )
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
