"""A federation in memory: the task split into clients, the server, the engine, and its rounds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from protofed import keys
from protofed.config import DTYPES, Config, config_task
from protofed.data import Images, Share, Task, split
from protofed.engines import build_engine, choose
from protofed.federation import tree
from protofed.federation.keep import Keeper
from protofed.federation.local import Setup, Site, Training, entry_list
from protofed.federation.records import Record, Records
from protofed.federation.server import Server
from protofed.federation.store import ClientStore
from protofed.federation.tree import Slot
from protofed.methods.base import Method, Sizes
from protofed.models import Network, build

if TYPE_CHECKING:
    from protofed.federation.result import Result


class Observer:
    """Watches a run; it sees everything and changes nothing."""

    def start(self, federation: Federation, records: Records) -> None:
        """Called before the first round, with the records of earlier rounds if resumed."""

    def client(self, round: int, done: int, total: int) -> None:
        """Called when a client of the round has finished."""

    def round(self, record: Record) -> None:
        """Called after each round."""

    def end(self, result: Result) -> None:
        """Called when the run is complete."""


class Federation:
    """A run in memory: the task split into clients, the server, the engine."""

    def __init__(
        self, config: Config, task: Task | None = None, folder: Path | None = None
    ) -> None:
        self.config = config
        self.task = task or config_task(config)
        self.method = config.method
        self.shares = make_shares(config, self.task)
        device = torch.device(config.device)
        network = initial_network(config, self.task)
        model = tree.copy({"model": network.state_dict()})["model"]
        self.setup = make_setup(config, self.task, network)
        self.sizes = self.setup.sizes
        self.sites = {s.name: _site(self.task, s, device) for s in self.shares}
        self.tests = {
            name: tested_images(self.task, name, config.leave_out, device)
            for name in self.task.domains
        }
        self.engine_name, self.engine_reason = choose(config.engine, config.device, config.workers)
        self.server = Server(
            self.method,
            network,
            self.sizes,
            list(self.sites),
            rounds=config.rounds,
            seed=config.seed,
            participation=config.participation,
            average=config.average,
            device=device if self.engine_name == "lanes" else "cpu",
        )
        self.store = ClientStore(
            lambda: self.server.initial_client(model), folder / "clients" if folder else None
        )
        self.keeper = Keeper(config, folder)
        self.engine = build_engine(
            self.engine_name, self.setup, self.make_network, device, config.workers
        )
        self.batchnorm = batchnorm_policy(network, self.method)

    def make_network(self) -> Network:
        """A network for an engine to compute in, on the run's device."""
        network = initial_network(self.config, self.task)
        return network.to(  # type: ignore[no-any-return, call-overload]
            torch.device(self.config.device), memory_format=torch.channels_last
        )

    def run_round(self, observers: Sequence[Observer] = ()) -> Record:
        """One round: broadcast, local training, upload, aggregate, evaluate."""
        began = time.perf_counter()
        server, round = self.server, self.server.round
        names, received = server.sample(), server.broadcast()
        down = tree.nbytes(received) * len(names)
        up = 0
        losses: dict[str, tuple[float, int]] = {}
        steps = 0
        sites = [self.sites[n] for n in names]
        replies = self.engine.train(sites, received, self.store.get, round)
        for done, (name, reply) in enumerate(replies, start=1):
            server.accept(name, reply)
            self.keeper.receive(round, name, reply.message, self.sizes.classes)
            self.store.stage(name, reply.mine, round)
            up += tree.nbytes(reply.message)
            steps += reply.steps
            for term, (total, count) in reply.losses.items():
                before, counted = losses.get(term, (0.0, 0))
                losses[term] = (before + total, counted + count)
            for observer in observers:
                observer.client(round, done, len(names))
        server.finish()
        self.store.accept()
        trained = time.perf_counter()
        accuracy = self.evaluate()
        self.keeper.write(self)
        return {
            "round": round,
            "accuracy": {d: round_to(a, 4) for d, a in accuracy.items()},
            "average": round_to(sum(accuracy.values()) / len(accuracy), 4),
            "loss": {term: total / count for term, (total, count) in losses.items()},
            "bytes_up": up,
            "bytes_down": down,
            "clients": len(names),
            "steps": steps,
            "seconds": {
                "train": round_to(trained - began, 3),
                "evaluate": round_to(time.perf_counter() - trained, 3),
            },
        }

    def evaluate(self) -> dict[str, float]:
        """Accuracy per domain: of the global model, or of each domain's clients' own models.

        A domain without clients is then tested with the own models of all clients.
        """
        received, round = self.server.broadcast(), max(0, self.server.round - 1)
        if self.method.evaluates == "global":
            return self.engine.evaluate(received, {}, self.tests, round)
        own: dict[str, list[float]] = {}
        seen = {site.domain for site in self.sites.values()}
        for site in self.sites.values():
            tests = {d: t for d, t in self.tests.items() if d == site.domain or d not in seen}
            scores = self.engine.evaluate(received, self.store.get(site.name), tests, round)
            for domain, score in scores.items():
                own.setdefault(domain, []).append(score)
        return {domain: sum(own[domain]) / len(own[domain]) for domain in self.tests}

    @property
    def model(self) -> Slot:
        """The global model."""
        return self.server.state.get("model", {})

    def table(self) -> list[dict[str, Any]]:
        """The client-to-domain table: samples, classes held, samples of each class held."""
        return [_table_row(self.task, share) for share in self.shares]


def make_shares(config: Config, task: Task) -> list[Share]:
    """The part of the task that each client of a run holds."""
    return split(
        task,
        config.clients,
        config.samples,
        config.seed,
        leftover=config.leftover,
        repair=config.repair,
        dirichlet=config.dirichlet,
        quantity=config.quantity,
    )


def make_setup(config: Config, task: Task, network: Network) -> Setup:
    """What all clients of a run have in common, wherever they are."""
    names = tuple(name for name, _ in network.named_parameters())
    return Setup(
        config.method,
        Sizes(len(task.classes), network.features, task.image_size, names),
        task.augment,
        Training(config.batch, config.epochs, config.lr, config.momentum, config.weight_decay),
        config.rounds,
        config.seed,
        DTYPES[config.precision],
        bf16=config.precision == "bf16",
    )


def initial_network(config: Config, task: Task) -> Network:
    """The network with the keyed initial weights that all clients start from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keys.key(config.seed, config.model, "init"))
        classes = len(task.classes)
        backbone = build(config.model, classes, task.image_size, config.width, config.norm)
        sizes = Sizes(classes, backbone.features, task.image_size)
        return config.method.network(backbone, sizes).to(DTYPES[config.precision])


def batchnorm_policy(network: Network, method: Method) -> str:
    """What happens to BatchNorm between clients, in words."""
    ways = {method.shared(e) for e in entry_list(network) if e.kind == "bn"}
    if not ways:
        return "the model has no BatchNorm"
    words = {
        "both": "averaged like weights, running statistics included",
        "down": "set by the server",
        "no": "kept by each client",
    }
    return "; ".join(words[w] for w in sorted(ways))


def round_to(value: float, digits: int) -> float:
    """``round`` under a name that does not hide behind the word for a communication round."""
    return round(value, digits)


def _site(task: Task, share: Share, device: torch.device) -> Site:
    images = task.domains[share.domain].train
    own = Images(images.x[share.rows].to(device), images.y[share.rows].to(device))
    return Site(share.name, share.domain, own)


def tested_images(task: Task, name: str, left_out: str | None, device: torch.device) -> Images:
    """What a domain is tested on: nothing of a domain that is left out has been trained on."""
    images = task.domains[name].test
    if name == left_out and task.whole_unseen:
        both = (images, task.domains[name].train)
        images = Images(torch.cat([i.x for i in both]), torch.cat([i.y for i in both]))
    return Images(images.x.to(device), images.y.to(device))


def _table_row(task: Task, share: Share) -> dict[str, Any]:
    labels = task.domains[share.domain].train.y[share.rows]
    counts = torch.bincount(labels, minlength=len(task.classes)).tolist()
    held = {c: n for c, n in zip(task.classes, counts, strict=True) if n}
    row = {"client": share.name, "domain": share.domain, "samples": len(share.rows)}
    noted = {"note": share.note} if share.note else {}
    return {**row, "classes": len(held), "per_class": held, **noted}
