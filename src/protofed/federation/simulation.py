"""A federation in memory: the task split into clients, the server, the engine, and its rounds."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protofed import keys, tree
from protofed.config import Config, task_settings
from protofed.data import Images, Share, Task, load_task, split
from protofed.data.split import UNUSED, hold_out, validation_rows, validation_source
from protofed.errors import Diverged, ProtofedError, unknown
from protofed.federation.attacks import attacked, choose_attackers, flipped, what_it_lacks
from protofed.federation.bounds import Bounds, OutOfBounds
from protofed.federation.client_state import ClientStore
from protofed.federation.dry_run import dry_run
from protofed.federation.engine import engine_factory
from protofed.federation.evaluation import EvalJob, Scores
from protofed.federation.facts import DTYPES, Facts, discover
from protofed.federation.finite import require_finite_model
from protofed.federation.memory import estimate
from protofed.federation.model_fit import require_fit
from protofed.federation.model_state import model_entries, travel
from protofed.federation.participants import participants
from protofed.federation.privacy import Privacy, make_privacy
from protofed.federation.public_images import is_from_task, make_public_sampler
from protofed.federation.server import Server
from protofed.federation.setup import ClientData, Schedule, Setup, Training
from protofed.method import Method, Sizes, restyled_stages
from protofed.models import Network, build
from protofed.models.dropout import key_dropout
from protofed.models.mixed import client_models
from protofed.models.network import freeze, frozen, require_registered, require_repeatable
from protofed.models.own import short_name
from protofed.models.weights import load_weights
from protofed.tree import Slot, Tree
from protofed.user_code import is_file

Record = dict[str, Any]
"""What is recorded about a round."""

NO_WEIGHTS = "nothing: no model is averaged"
"""What a run says of its averaging weights where there is nothing to average."""


TESTED_PER_DOMAIN = 20
"""Clients of a domain whose own models a round tests; if there are more, each round draws some.

Otherwise a round's time would grow with the clients that do not take part in it.
"""


class Observer:
    """Watches a run: override what you want to see. It sees everything and changes nothing.

    Rounds count from 1, as in the records.
    """

    def prepare(self, config: Config, task: Task) -> None:
        """Called first, with the settings that were asked for; not if a run is resumed."""

    def start(self, federation: Federation, records: Sequence[Record]) -> None:
        """Called before the first round, with the records of earlier rounds if resumed."""

    def reply(self, round: int, name: str, message: Tree) -> None:
        """Called with the message that a client of the round sent."""

    def refused(self, round: int, name: str, why: str) -> None:
        """Called when the message that a client sent does not count."""

    def client(self, round: int, done: int, total: int) -> None:
        """Called when a client of the round has finished."""

    def tested(self, round: int, done: int, total: int) -> None:
        """Called when one of the round's models has been tested."""

    def round(self, record: Record) -> None:
        """Called after each round."""

    def end(self, result: Any) -> None:
        """Called with the run's ``Result`` when it is complete."""

    def stopped(self) -> None:
        """Called instead of ``end`` if the run was interrupted or failed."""


class Clients(Mapping[str, ClientData]):
    """The clients by name. A client's images are taken out of the task's when they are used.

    So the images of clients that sit out are not in memory a second time; on a GPU they stay.
    """

    def __init__(
        self,
        task: Task,
        shares: Sequence[Share],
        device: torch.device,
        models: Mapping[str, str],
        mislabeled: Collection[str] = (),
    ) -> None:
        """The labels of the ``mislabeled`` clients are wrong."""
        self._task, self._device, self._models = task, device, models
        self._mislabeled = mislabeled
        self._shares = {share.name: share for share in shares}
        self._kept: dict[str, ClientData] = {}

    def __getitem__(self, name: str) -> ClientData:
        if name in self._kept:
            return self._kept[name]
        share, device = self._shares[name], self._device
        images = self._task.domains[share.domain].train
        if name in self._mislabeled:
            images = flipped(images, len(self._task.classes))
        client = ClientData(name, share.domain, images, self._models[name], share.rows)
        if device.type != "cpu":
            client = client.with_images(_taken(images, share.rows, device))
            self._kept[name] = client
        return client

    def __iter__(self) -> Iterator[str]:
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)

    def domain(self, name: str) -> str:
        return self._shares[name].domain


class Federation:
    """A run in memory: the task split into clients, the server, the engine."""

    def __init__(
        self,
        config: Config,
        task: Task | None = None,
        client_states: Path | None = None,
        facts: Facts | None = None,
    ) -> None:
        """``client_states`` is the folder for private states that do not fit into memory."""
        self.asked = config
        """The config as it was asked for."""
        self.task = task or load_task(config.task, **task_settings(config))
        config = config.for_task(self.task.info)
        self.facts = facts or discover(config, self.task)
        self.hash, self.name = self.facts.run_hash(config), self.facts.run_name(config)
        self.config = config = self.facts.applied(config)
        """The config with what was found: clients, device, precision, engine."""
        self.memory = estimate(config, self.task, client_states is not None)
        """The memory that the run takes; one that takes more than there is does not start."""
        self.memory.require()
        self.method = config.method
        sizes = (len(self.task.classes), self.task.image_size, config.width, config.norm)
        require_fit(self.method, config.models, *sizes)
        self.shares = make_shares(config, self.task)
        validation = rows_to_validate(config, self.task, self.shares)
        device = torch.device(config.device)
        self._here = device if config.engine != "ray" else torch.device("cpu")
        """Where images and networks are: with ray, the device is that of other machines."""
        self.models = client_models(config.model, [s.name for s in self.shares])
        """The model of each client."""
        self._initial = {
            name: initial_network(config, self.task, name, config.weights)
            for name in dict.fromkeys(self.models.values())
        }
        network = next(iter(self._initial.values()))
        public = make_public_sampler(
            self.method.public_images, self.task, self.shares, config.seed, self._here,
            config.data, config.reading,
        )  # fmt: skip
        self.setup = replace(make_setup(config, self.task, network), public=public)
        self.sizes = self.setup.sizes
        self._initial_states = {
            name: (n.state_dict(), Sizes.of(n, self.sizes.classes, self.sizes.image))
            for name, n in self._initial.items()
        }
        names = [share.name for share in self.shares]
        self.attackers = (
            choose_attackers(names, config.attackers, config.seed) if config.attack else frozenset()
        )
        if config.attack and (lacks := what_it_lacks(config.attack, self.method, network)):
            warnings.warn(
                f"attack = {config.attack} changes nothing: {self.method.name} sends no {lacks}",
                stacklevel=2,
            )
        mislabeled = self.attackers if config.attack == "flip" else ()
        self.clients = Clients(self.task, self.shares, self._here, self.models, mislabeled)
        self.tests = {
            name: tested_images(self.task, name, config.leave_out, self._here)
            for name in self.task.domains
        }
        self.validation = {
            name: _taken(validation_source(self.task, name, config.validate), rows, self._here)
            for name, rows in validation.items()
        }
        """By domain, the images to choose by; empty if none were asked for."""
        self.server = Server(
            self.method,
            network,
            self.sizes,
            list(self.clients),
            rounds=config.rounds,
            seed=config.seed,
            domains=[share.domain for share in self.shares],
            participation=config.participation,
            average=config.average,
            robust=config.robust,
            robust_fraction=config.robust_fraction,
            device=device if config.engine == "lanes" else "cpu",
        )
        self.server.bounds = make_bounds(config, self.task, self.server, self.setup.privacy)
        self.store = ClientStore(self._initial_client, client_states, share=config.participation)
        images = [domain.train for domain in self.task.domains.values()]
        images += [*self.tests.values(), *self.validation.values()]
        make_engine = engine_factory(config.engine)
        self.engine = make_engine(self.setup, self.make_networks, device, config.workers, images)
        self._trained, self._counted = Counter[str](), 0
        self.batchnorm = batchnorm_policy(network, self.method)
        self.weights = weights_policy(network, self.method, config.average)

    def make_network(self, model: str = "") -> Network:
        """A network to compute in, on the run's device, of that model (else the first)."""
        network = initial_network(self.config, self.task, model or next(iter(self._initial)))
        return network.to(  # type: ignore[no-any-return, call-overload]
            self._here, memory_format=torch.channels_last
        )

    def make_networks(self) -> dict[str, Network]:
        """A network to compute in for each of the clients' models."""
        return {model: self.make_network(model) for model in self._initial}

    def _initial_client(self, name: str) -> Tree:
        return self.server.initial_client(*self._initial_states[self.models[name]])

    def run_round(self, observers: Sequence[Observer] = ()) -> Record:
        """One round: broadcast, local training, upload, aggregate, evaluate."""
        began = time.perf_counter()
        server, round = self.server, self.server.round
        names, received = server.sample(), server.broadcast()
        privacy, releases = self.setup.privacy, self._releases()
        privacy.require(releases)
        down = tree.nbytes(received) * len(names)
        up = 0
        losses: dict[str, dict[str, tuple[float, int]]] = {}
        problems: dict[str, str] = {}
        steps = 0
        clients = [self.clients[n] for n in names]
        replies = self.engine.train(clients, received, self.store.get, round)
        with closing(replies):  # an error in here ends the clients that are still at work
            for done, (name, reply) in enumerate(replies, start=1):
                if self.config.attack and name in self.attackers:
                    key = (self.config.seed, round, name)
                    reply.message = attacked(self.config.attack, reply.message, self.model, key)
                up += tree.nbytes(reply.message)
                steps += reply.steps
                losses[name] = reply.losses
                try:
                    server.accept(name, reply)
                except OutOfBounds as error:
                    problems[name] = error.message
                else:
                    self.store.stage(name, reply.mine, round)
                for observer in observers:
                    if name in problems:
                        observer.refused(round + 1, name, problems[name])
                    else:
                        observer.reply(round + 1, name, reply.message)
                    observer.client(round + 1, done, len(names))
        for name, why in server.screen().items():
            problems[name] = why
            if self.config.bounds != "clip":
                self.store.discard(name)
                for observer in observers:
                    observer.refused(round + 1, name, why)
        if not server.updates():
            raise Diverged(
                f"round {round + 1}: every reply was refused; {names[0]}: {problems[names[0]]}",
                "try a smaller --lr, or check the method's hyper-parameters; --bounds off turns "
                "the check off",
            )
        problems = {name: problems[name] for name in names if name in problems}
        counted = len(server.updates())
        norms = self._aggregate()
        require_finite_model(
            server.state.get("model", {}), f"round {round + 1}: the averaged model"
        )
        self.store.accept()
        trained = time.perf_counter()
        scores, own = self._evaluate(observers)
        accuracy = scores.pop("accuracy")
        by_client: dict[str, dict[str, Any]] = {
            name: {"loss": mean_losses([losses[name]])} for name in names
        }
        for name, found in own.items():
            by_client.setdefault(name, {})["accuracy"] = round_to(found, 4)
        return {
            "round": round + 1,
            "accuracy": _rounded(accuracy),
            "average": round_to(sum(accuracy.values()) / len(accuracy), 4),
            **({"beside": {n: _rounded(s) for n, s in scores.items()}} if scores else {}),
            "loss": mean_losses([losses[name] for name in names]),
            **self.setup.training.record(round),
            "bytes_up": up,
            "bytes_down": down,
            "clients": counted,
            "by_client": by_client,
            "steps": steps,
            **({"problems": problems} if problems else {}),
            **({"norms": norms} if norms else {}),
            **({"privacy": privacy.spent(releases)} if privacy.budgets else {}),
            "seconds": {
                "train": round_to(trained - began, 3),
                "evaluate": round_to(time.perf_counter() - trained, 3),
            },
        }

    def _releases(self) -> int:
        """The most messages that a client has sent with those of this round."""
        if not self.setup.privacy.budgets:
            return 0
        config, names = self.config, list(self.clients)
        for round in range(
            self._counted, self.server.round + 1
        ):  # a resumed run's earlier ones too
            at = participants(config.seed, round, len(names), config.participation)
            self._trained.update(names[i] for i in at)
        self._counted = self.server.round + 1
        return max(self._trained.values())

    def _aggregate(self) -> dict[str, float]:
        """Close the round; if out of GPU memory, again with what the engine can free."""
        try:
            return self.server.finish()
        except torch.cuda.OutOfMemoryError:
            pass  # until here the error's traceback keeps alive what was being computed
        self.engine.free_memory()
        return self.server.finish()

    def evaluate(self, observers: Sequence[Observer] = ()) -> Scores:
        """Accuracy per domain: of the global model, or of the clients' own models.

        With ``everyone`` the clients' mean on their own domains is there too, as ``own``; and with
        validation images the accuracy on these, as ``validation``.
        """
        return self._evaluate(observers)[0]

    def _evaluate(self, observers: Sequence[Observer]) -> tuple[Scores, dict[str, float]]:
        """As ``evaluate``; also that of each client tested with its own model, on its domain."""
        round, found = max(0, self.server.round - 1), list[Scores]()
        tests = self._eval_jobs(round, self.tests)
        jobs = tests + (self._eval_jobs(round, self.validation) if self.validation else [])
        scored = self.engine.evaluate(jobs, self.server.broadcast(), self.store.get, round)
        with closing(scored):
            for done, scores in enumerate(scored, start=1):
                found.append(scores)
                for observer in observers:
                    observer.tested(round + 1, done, len(jobs))
        found, validated = found[: len(tests)], found[len(tests) :]
        means = {rule: _means([s[rule] for s in found], self.tests) for rule in found[0]}
        own = {
            job.client: s["accuracy"][self.clients.domain(job.client)]
            for job, s in zip(tests, found, strict=True)
            if job.client is not None
        }
        if self.method.evaluates == "everyone":
            each = [{self.clients.domain(name): accuracy} for name, accuracy in own.items()]
            means["own"] = _means(each, self.tests)
        if validated:
            means["validation"] = _means([s["accuracy"] for s in validated], self.validation)
        return means, own

    def _eval_jobs(self, round: int, images: Mapping[str, Images]) -> list[EvalJob]:
        """Who is tested on what. A domain without clients is tested with all clients' models."""
        who = self.method.evaluates
        if who == "global":
            return [EvalJob(next(iter(self._initial)), None, images)]
        seen = {share.domain for share in self.shares}
        return [
            EvalJob(
                self.models[share.name],
                share.name,
                {
                    d: t
                    for d, t in images.items()
                    if who == "everyone" or d == share.domain or d not in seen
                },
                share.domain,
            )
            for share in self._tested_clients(round)
        ]

    @property
    def examined(self) -> str:
        """In words, if clients are tested with their own models, but not all in every round."""
        most = max(self.config.domain_clients.values())
        if self.method.evaluates == "global" or most <= TESTED_PER_DOMAIN:
            return ""
        return f"{TESTED_PER_DOMAIN} clients of a domain that has more, drawn again every round"

    def _tested_clients(self, round: int) -> list[Share]:
        """The clients whose own models are tested: all, or some of a domain that has very many."""
        found: list[Share] = []
        for domain in self.task.domains:
            own = [share for share in self.shares if share.domain == domain]
            if len(own) > TESTED_PER_DOMAIN:
                rng = keys.generator(self.config.seed, round, domain, "examined")
                chosen = rng.choice(len(own), size=TESTED_PER_DOMAIN, replace=False)
                own = [own[i] for i in sorted(chosen)]
            found += own
        return found

    @property
    def model(self) -> Slot:
        return self.server.state.get("model", {})

    def own_models(self) -> dict[str, Slot]:
        """What each client has of its model, where clients are tested with models of their own.

        Empty if that is more than may stay in memory; a run's folder then has it in ``clients/``.
        """
        if self.method.evaluates == "global":
            return {}
        first = {self.models[n]: n for n in self.clients}
        sizes = {m: tree.nbytes(self._initial_client(n)) for m, n in first.items()}
        total = sum(sizes[m] for m in self.models.values())
        if self.store.folder is not None and total > self.store.limit:
            return {}
        return {n: tree.to(self.store.get(n), "cpu").get("model", {}) for n in self.clients}

    def table(self) -> list[dict[str, Any]]:
        """The client-to-domain table: samples, classes held, samples of each class held."""
        return [_table_row(self.task, share, self.models[share.name]) for share in self.shares]


def make_shares(config: Config, task: Task) -> list[Share]:
    """The part of the task that each client of a run holds."""
    shares = split(
        task,
        config.domain_clients,
        config.domain_samples,
        config.seed,
        leftover=config.leftover,
        repair=config.repair,
        dirichlet=config.dirichlet,
        quantity=config.quantity,
    )
    if isinstance(config.validate, float):
        return hold_out(task, shares, config.validate, config.seed)
    return shares


def rows_to_validate(config: Config, task: Task, shares: Sequence[Share]) -> dict[str, Tensor]:
    """Per domain, the images that a run is validated on; none unless asked for."""
    public, validate = config.method.public_images, config.validate
    if validate is not None and public is not None:
        same = is_from_task(public, task) if validate == UNUSED else False
        if same or public.source == task.name:
            raise ProtofedError(
                f"{config.method.name} trains on public images from '{public.source}', which "
                f"would be among those of validate = {validate}",
                "use other public images: --set public=TASK"
                + ", or hold out a part of each client's: --validate 0.1" * same,
            )
    return validation_rows(task, shares, validate)


CONTRACT = {
    "evaluates": ("global", "clients", "everyone"),
    "proto_pass": ("none", "last_epoch", "post"),
}
TRAVELS = ("both", "down", "no")


def _check_contract(method: Method, network: Network) -> None:
    """Raise an error for values of a method that would silently mean something else."""
    for name, valid in CONTRACT.items():
        if (value := getattr(method, name)) not in valid:
            raise unknown(f"{name} of method {method.name}", value, valid)
    if not 0 <= method.holdout < 1:
        raise ProtofedError(
            f"holdout of method {method.name} must be at least 0 and below 1, got {method.holdout}"
        )
    for entry in model_entries(network):
        if (way := method.shared(entry)) not in TRAVELS:
            raise unknown(f"answer of {method.name}'s shared for '{entry.name}'", way, TRAVELS)
    restyled_stages(method, network)


def make_setup(config: Config, task: Task, network: Network) -> Setup:
    """What all clients of a run have in common, wherever they are."""
    _check_contract(config.method, network)
    sizes = Sizes.of(network, len(task.classes), task.image_size)
    return Setup(
        config.method,
        sizes,
        task.augment,
        Training(
            config.batch,
            config.epochs,
            config.lr,
            config.momentum,
            config.weight_decay,
            config.optimizer,
            config.clip_norm,
            config.label_smoothing,
            config.sampling,
            Schedule(
                config.schedule,
                config.rounds,
                config.warmup_rounds,
                config.step_every,
                config.step_factor,
            ),
        ),
        config.rounds,
        config.seed,
        DTYPES[config.precision],
        bf16=config.precision == "bf16",
        min_class_count=config.min_class_count,
        privacy=make_privacy(config, network, sizes),
    )


def make_bounds(config: Config, task: Task, server: Server, privacy: Privacy) -> Bounds | None:
    """The bounds of a run's replies, as its config asks for; the ``server`` is a new one."""
    if config.bounds == "off":
        return None
    first = server.broadcast()  # kept: a resumed run must have the same bounds

    def sizes() -> dict[str, float]:
        network = initial_network(config, task)
        return dry_run(make_setup(config, task, network), network, server, first)

    noise = privacy.prototypes.count_noise if privacy.prototypes is not None else 0.0
    clip, method = config.bounds == "clip", server.method
    return Bounds(sizes, len(server.clients), clip, noise, method.size_limit, method.slots.rows)


def initial_network(
    config: Config, task: Task, model: str = "", weights: str | Path | None = None
) -> Network:
    """The network with the keyed initial weights that all clients of that model start from.

    If clients have different models and none is named, it is the first. The backbone's weights come
    from the file ``weights``, if one is given: code that only computes in the network needs none.
    """
    model = model or config.models[0]
    with keys.torch_draws(config.seed, short_name(model), "init"):
        classes = len(task.classes)
        backbone = build(model, classes, task.image_size, config.width, config.norm)
        if weights is not None:
            load_weights(backbone, model, weights)
        freeze(backbone, config.train, config.freeze_bn)
        sizes = Sizes.of(backbone, classes, task.image_size)
        network = config.method.network(backbone, sizes)
    if not isinstance(network, Network):
        raise ProtofedError(
            f"network of {config.method.name} returns {network!r:.100}",
            "it must return the backbone, with modules added to it, or another Network",
        )
    require_registered(network)
    key_dropout(network)
    if is_file(model):
        key_dropout(backbone)  # of which the method may have made a copy
        require_repeatable(backbone, short_name(model), task.image_size)
    return network.to(DTYPES[config.precision])


def batchnorm_policy(network: Network, method: Method) -> str:
    """What happens to BatchNorm between clients, in words."""
    norms = {e.name for e in model_entries(network) if e.kind == "bn"}
    fixed = norms & frozen(network)
    if not norms:
        return "the model has no BatchNorm"
    words = {
        "both": "averaged like weights" + ", running statistics included" * (not fixed),
        "down": "set by the server",
        "no": "kept by each client",
    }
    ways = {way for name, way in travel(method, network).items() if name in norms - fixed}
    found = [words[w] for w in sorted(ways)]
    if fixed:
        what = "running statistics" if ways else "all of it"
        found.insert(0, f"{what} frozen as at the start, and used in training")
    return "; ".join(found)


def weights_policy(network: Network, method: Method, average: str) -> str:
    """What the mean of the clients' models is weighted by, in words."""
    if "both" not in travel(method, network).values():
        return NO_WEIGHTS
    return method.weighting or average


def mean_losses(losses: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """The mean over all steps of each loss term, summed in the clients' order.

    ``losses`` has, for each client, the sum of each term and the number of steps in it.
    """
    sums: dict[str, tuple[float, int]] = {}
    for of_client in losses:
        for term, (total, count) in of_client.items():
            before, counted = sums.get(term, (0.0, 0))
            sums[term] = (before + total, counted + count)
    return {term: total / count for term, (total, count) in sums.items()}


def round_to(value: float, digits: int) -> float:
    """``round`` under another name: here, ``round`` means a communication round."""
    return round(value, digits)


def _means(
    scores: Sequence[Mapping[str, float]], domains: Mapping[str, Images]
) -> dict[str, float]:
    """For each domain that was tested, the plain mean over those who were tested on it."""
    each = {d: [s[d] for s in scores if d in s] for d in domains}
    return {d: sum(found) / len(found) for d, found in each.items() if found}


def _rounded(accuracy: Mapping[str, float]) -> dict[str, float]:
    return {domain: round_to(a, 4) for domain, a in accuracy.items()}


def tested_images(
    task: Task, name: str, left_out: str | None, device: torch.device | str = "cpu"
) -> Images:
    """What a domain is tested on; no image of a domain that is left out was trained on."""
    images = task.domains[name].test
    if name == left_out and task.whole_unseen:
        both = (images, task.domains[name].train)
        images = Images(torch.cat([i.x for i in both]), torch.cat([i.y for i in both]))
    return Images(images.x.to(device), images.y.to(device))


def _taken(images: Images, rows: Tensor, device: torch.device) -> Images:
    return Images(images.x[rows].to(device), images.y[rows].to(device))


def _table_row(task: Task, share: Share, model: str) -> dict[str, Any]:
    labels = task.domains[share.domain].train.y[share.rows]
    found, counts = labels.unique(return_counts=True)
    held = {task.classes[k]: n for k, n in zip(found.tolist(), counts.tolist(), strict=True)}
    row = {"client": share.name, "domain": share.domain, "model": model}
    noted = {"note": share.note} if share.note else {}
    held_by = {"samples": len(share.rows), "classes": len(held), "per_class": held}
    return {**row, **held_by, **noted}
