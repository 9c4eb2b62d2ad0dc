"""What a run has learned: features, confusions, prototypes, clusters, the gap between domains.

    >>> from protofed import analysis
    >>> z, y = analysis.features("runs/glyphs-fpl-0-8d543c2646", "photo")
    >>> xy = analysis.tsne(z)

A run is a ``Result`` or its folder. Rounds count from 1; prototypes and models are kept for those
in ``keep_rounds``. ``task`` is needed only for a run on a ``Task`` object. Networks compute on the
CPU in float32, or in float64 for runs in float64. Shapes: n samples, d features, K classes, M
clients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protofed import keys
from protofed.data import Images, Task
from protofed.data.augment import normalized
from protofed.errors import ProtofedError, unknown
from protofed.federation.batches import evaluation_batch
from protofed.federation.cpu import one_thread
from protofed.federation.facts import DTYPES
from protofed.federation.model_state import load_model
from protofed.federation.simulation import initial_network, tested_images
from protofed.method import Client, ServerView, Sizes
from protofed.prototypes import finch, widened
from protofed.runs.folder import RunFolder
from protofed.runs.result import Result, load_run
from protofed.tree import Slot, Tree

Run = Result | str | Path
Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Outputs:
    """A model's outputs for images: features [n, d], labels [n], predicted classes [n]."""

    features: Floats
    labels: Ints
    predicted: Ints


@dataclass(frozen=True)
class Distances:
    """Cosine distances [K, M, M] between clients' prototypes; NaN if either lacks the class."""

    classes: tuple[str, ...]
    clients: tuple[str, ...]
    cosine: Floats


@dataclass(frozen=True)
class Clusters:
    """FINCH's clusters of one round: for each class, the clients in each cluster."""

    round: int
    members: Mapping[str, tuple[tuple[str, ...], ...]]
    domains: Mapping[str, str]
    """The domain of each client that sent prototypes."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of clusters of each class."""
        return {name: len(found) for name, found in self.members.items()}


@dataclass(frozen=True)
class DomainGap:
    """How far apart domains are in feature space; ``gap`` defines the numbers."""

    distance: float
    classes: float
    probe: float
    chance: float

    @property
    def ratio(self) -> float:
        """The distance between domains in units of that between classes; 0 if domains coincide."""
        return self.distance / self.classes if self.classes > 0 else math.nan


@dataclass(frozen=True)
class RoundPrototypes:
    """The prototypes of one round: what each client sent, and what the server made of it.

    ``sent[client]`` and ``made[slot]`` are (rows [j, d], classes [j]): one row per prototype.
    """

    round: int
    classes: tuple[str, ...]
    domains: Mapping[str, str]
    sent: Mapping[str, tuple[Floats, Ints]]
    made: Mapping[str, tuple[Floats, Ints]]


# ---- images through the model ------------------------------------------------------------------


def features(
    run: Run,
    domain: str,
    split: str = "test",
    round: int | None = None,
    *,
    task: Task | None = None,
    limit: int | None = None,
) -> tuple[Floats, Ints]:
    """Features [n, d] and labels [n] of a domain's images under the run's model.

    ``split`` is test (what the run was tested on) or train (all training images, not augmented).
    ``round`` must be one whose model was kept; None is the end of the run. ``limit`` takes at most
    that many images, always the same. If clients keep their own models, the domain's first is used.
    """
    out = next(outputs(run, domain, split, round, task=task, limit=limit))
    return out.features, out.labels


def confusion(
    run: Run,
    domain: str,
    split: str = "test",
    round: int | None = None,
    *,
    task: Task | None = None,
    limit: int | None = None,
) -> Ints:
    """Counts [K, K]: row = true class, column = predicted, by the method's own prediction rule.

    If clients keep their own models, it is the sum over the domain's clients.
    """
    run = _loaded(run)
    task = task or run.task()
    table = np.zeros((len(task.classes),) * 2, dtype=np.int64)
    for out in outputs(run, domain, split, round, task=task, limit=limit):
        table += counts(out, len(task.classes))
    return table


def counts(out: Outputs, classes: int) -> Ints:
    """The confusion matrix [K, K] of outputs."""
    cells = np.bincount(out.labels * classes + out.predicted, minlength=classes**2)
    return cells.reshape(classes, classes)


def outputs(
    run: Run,
    domain: str,
    split: str = "test",
    round: int | None = None,
    *,
    task: Task | None = None,
    limit: int | None = None,
) -> Iterator[Outputs]:
    """The outputs of the run's model for a domain's images; of each client's, if it has its own."""
    run = _loaded(run)
    run.need_model()
    task = task or run.task()
    images = _images(run, task, domain, split, limit)
    config = run.found_config
    received: Tree | None = None
    for model, mine, name, its_domain in _evaluated(run, domain, round):
        network = initial_network(config, task, model)
        sizes = Sizes.of(network, len(task.classes), task.image_size)
        initial = {name: t.clone() for name, t in network.state_dict().items()}
        received = _received(run, round, sizes) if received is None else received
        at = (round or len(run.rounds)) - 1
        client = Client(
            config.method,
            network,
            sizes,
            received=received,
            mine=mine,
            round=at,
            rounds=config.rounds,
            name=name,
            domain=its_domain,
            mean=task.augment.mean,
            std=task.augment.std,
        )
        load_model(network, initial | client.start)
        network.eval()
        parts: list[tuple[torch.Tensor, ...]] = []
        with one_thread(), torch.no_grad():
            for rows in torch.arange(len(images)).split(evaluation_batch(task.image_size)):
                ready = normalized(images.x[rows], task.augment, DTYPES[config.precision])
                client.begin_step(keys.key(config.seed, at, "evaluation"))
                scores = config.method.predict(client, ready)
                client.begin_step(keys.key(config.seed, at, "evaluation"))
                parts.append((client.forward(ready).feature, images.y[rows], scores.argmax(1)))
        yield Outputs(*(torch.cat(column).numpy() for column in zip(*parts, strict=True)))


def _loaded(run: Run) -> Result:
    return run if isinstance(run, Result) else load_run(run)


def _images(run: Result, task: Task, domain: str, split: str, limit: int | None) -> Images:
    if domain not in task.domains:
        raise unknown(f"domain of {task.name}", domain, task.domains)
    if split == "test":
        images = tested_images(task, domain, run.config.leave_out)
    elif split == "train":
        images = task.domains[domain].train
    else:
        raise unknown("split", split, ("train", "test"))
    if limit is not None and limit < len(images):
        shuffled = keys.generator("analysis", domain, split).permutation(len(images))
        rows = torch.from_numpy(np.sort(shuffled[:limit]))
        images = Images(images.x[rows], images.y[rows])
    return images


def _received(run: Result, round: int | None, sizes: Sizes) -> Tree:
    """What the server would broadcast: the model, and whatever of the rest was kept."""
    if round is not None and round != len(run.rounds):
        slots, _ = _artifact(run, "snapshots", round)
        if round in prototype_rounds(run):
            slots |= _unflat(_artifact(run, "prototypes", round)[0].get("down", {}))
        return slots
    checkpoint = RunFolder(run.folder).checkpoint() if run.folder else None
    if checkpoint is None:
        return {**run.need_model().received, "model": run.model}
    clients = tuple(row["client"] for row in run.summary.get("clients", ()))
    done, rounds = len(run.rounds), run.config.rounds
    return run.config.method.broadcast(ServerView(checkpoint.state, done, rounds, clients, sizes))


def _evaluated(run: Result, domain: str, round: int | None) -> Iterator[tuple[str, Tree, str, str]]:
    """Model name, private state, name and domain of the domain's clients, or of the server.

    The server has neither private state nor domain.
    """
    if run.config.method.evaluates == "global":
        yield "", {}, "server", ""
        return
    folder = RunFolder(run.folder) if run.folder else None
    checkpoint = folder.checkpoint() if folder else None
    if round not in (None, len(run.rounds)):
        raise ProtofedError(
            f"clients of {run.config.method.name} keep their own models, and only those of the "
            "last round"
        )
    rows = run.summary["clients"]
    for row in [row for row in rows if row["domain"] == domain] or rows:
        if folder is None or checkpoint is None:
            mine: Tree = {"model": run.client_models[row["client"]]}
        else:
            file = checkpoint.clients.get(row["client"])
            mine = folder.client_state(file) if file else {}
        yield row.get("model", ""), mine, row["client"], row["domain"]


def _artifact(run: Result, kind: str, round: int) -> tuple[Tree, dict[str, Any]]:
    if run.folder is None:
        what = {"prototypes": "prototypes of its rounds", "snapshots": "models of earlier rounds"}
        raise ProtofedError(
            f"this run has no folder, and so no {what[kind]}", "run it with out=FOLDER"
        )
    rounds = _artifact_rounds(run, kind)
    if round not in rounds:
        there = f"rounds {', '.join(map(str, rounds))}" if rounds else "nothing"
        sends = " (if its method sends any)" if kind == "prototypes" else ""
        raise ProtofedError(
            f"the run kept no {kind} of round {round}; it kept {there}",
            f"run it with --keep-rounds {round}{sends}",
        )
    return RunFolder(run.folder).artifact(kind, round)


def _artifact_rounds(run: Run, kind: str) -> list[int]:
    folder = _loaded(run).folder
    return RunFolder(folder).artifact_rounds(kind) if folder else []


def _unflat(slot: Slot) -> Tree:
    found: Tree = {}
    for name, t in slot.items():
        of, _, entry = name.rpartition(".")
        found.setdefault(of, {})[entry] = t
    return found


# ---- features ----------------------------------------------------------------------------------


TSNE_STEPS = 500
"""Half the usual number: on features of 800 images the divergence is 1.5 % higher, and neighbors
stay together just as well (trustworthiness 0.989, 0.976, 0.982 either way)."""


def tsne(features: Floats, seed: int = 0) -> Floats:
    """Embed features in the plane [n, 2] by t-SNE, the same on any number of cores.

    The perplexity is 30, or less for few samples; it starts from the principal components,
    perturbed by the seed.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    rows = np.asarray(features, dtype=np.float64)
    n = len(rows)
    if n < 4:  # nothing to embed: along the first coordinate
        return np.stack([np.arange(n), np.zeros(n)], axis=1).astype(np.float64)
    with threadpool_limits(1):
        rows = PCA(min(50, *rows.shape), svd_solver="full").fit_transform(rows)
        start = np.zeros((n, 2))
        start[:, : rows.shape[1]] = rows[:, :2]
        start *= 1e-4 / max(float(start.std()), 1e-12)
        start += np.random.default_rng(seed).normal(scale=1e-6, size=(n, 2))
        perplexity, init = min(30.0, (n - 1) / 3), start.astype(np.float32)
        options = {"max_iter": TSNE_STEPS, "random_state": seed, "n_jobs": 1}
        places = TSNE(perplexity=perplexity, init=init, **options).fit_transform(rows)
    return np.asarray(places, dtype=np.float64)


def domain_gap(
    run: Run, split: str = "test", *, task: Task | None = None, limit: int | None = 500
) -> DomainGap:
    """How far apart the domains are in the run's feature space, as ``gap`` measures it."""
    run = _loaded(run)
    task = task or run.task()
    return gap({d: features(run, d, split, task=task, limit=limit) for d in task.domains})


def gap(domains: Mapping[str, tuple[Floats, Ints]]) -> DomainGap:
    """The gap between domains, from features and labels of each.

    ``distance`` is 1 − cosine between the class means of two domains, averaged over the classes
    both have and over the pairs of domains. ``classes``, its scale, is the same between two classes
    of one domain. ``probe`` is the five-fold cross-validated accuracy in % of a logistic regression
    that predicts the domain from the feature, with equally many samples of each; ``chance`` is that
    of guessing. Near chance, the features do not show the domain.
    """
    means = {
        name: {int(k): z[y == k].mean(0, dtype=np.float64) for k in np.unique(y)}
        for name, (z, y) in domains.items()
    }
    pairs = itertools.combinations(means.values(), 2)
    across = [(a[k], b[k]) for a, b in pairs for k in a.keys() & b.keys()]
    within = [p for own in means.values() for p in itertools.combinations(own.values(), 2)]
    distance, classes = (
        float(np.mean([_cosine_distance(a, b) for a, b in some])) if some else math.nan
        for some in (across, within)
    )
    return DomainGap(
        distance, classes, _probe([z for z, _ in domains.values()]), 100 / len(domains)
    )


def _probe(groups: list[Floats]) -> float:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    size = min(map(len, groups))
    if len(groups) < 2 or size < 2:
        return math.nan
    rng = np.random.default_rng(0)
    z = np.concatenate([g[rng.permutation(len(g))[:size]] for g in groups])
    y = np.repeat(np.arange(len(groups)), size)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=300))
    folds = StratifiedKFold(min(5, size), shuffle=True, random_state=0)
    with threadpool_limits(1):
        return 100 * float(np.mean(cross_val_score(model, z, y, cv=folds)))


def _cosine_distance(a: Floats, b: Floats) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return 1 - float(a @ b) / norms if norms > 0 else 1.0


# ---- prototypes --------------------------------------------------------------------------------


def model_rounds(run: Run) -> list[int]:
    """The rounds, from 1, whose global model the run kept in addition to the final one."""
    return _artifact_rounds(run, "snapshots")


def prototype_rounds(run: Run) -> list[int]:
    """The rounds whose prototypes the run kept."""
    return _artifact_rounds(run, "prototypes")


def prototypes(run: Run, round: int | None = None) -> RoundPrototypes:
    """The prototypes of a round that was kept; None is the last such round."""
    run = _loaded(run)
    if round is None:
        round = (prototype_rounds(run) or [len(run.rounds)])[-1]
    slots, metadata = _artifact(run, "prototypes", round)
    clients = metadata["clients"]
    sent = {}
    for i, row in enumerate(clients):
        every = [_rows(entries) for entries in _unflat(slots.get(f"up{i}", {})).values()]
        sent[row["client"]] = tuple(np.concatenate(column) for column in zip(*every, strict=True))
    made = {slot: _rows(entries) for slot, entries in _unflat(slots.get("down", {})).items()}
    domains = {row["client"]: row["domain"] for row in clients}
    return RoundPrototypes(round, tuple(metadata["classes"]), domains, sent, made)  # type: ignore[arg-type]


def prototype_distances(run: Run, round: int | None = None) -> Distances:
    """Pairwise cosine distances between the clients' prototypes of each class.

    A client that sent several prototypes of a class counts with their mean.
    """
    kept = prototypes(run, round)
    clients = tuple(kept.sent)
    cosine = np.full((len(kept.classes), len(clients), len(clients)), np.nan)
    for k in range(len(kept.classes)):
        own = {
            m: rows[labels == k].mean(0, dtype=np.float64)
            for m, (rows, labels) in enumerate(kept.sent.values())
            if (labels == k).any()
        }
        for a, b in itertools.product(own, own):
            cosine[k, a, b] = _cosine_distance(own[a], own[b]) if a != b else 0.0
    return Distances(kept.classes, clients, cosine)


def clusters(run: Run) -> list[Clusters]:
    """What FINCH finds in the clients' prototypes of each kept round.

    At the method's ``finch_level``, if it has one, otherwise the last partition: for FPL these are
    the clusters that its server made. A client with several prototypes may be in several clusters.
    """
    run = _loaded(run)
    level = 0 if run.config.method.options().get("finch_level") == "first" else -1
    found = []
    for round in prototype_rounds(run):
        kept = prototypes(run, round)
        members: dict[str, tuple[tuple[str, ...], ...]] = {}
        for k, name in enumerate(kept.classes):
            rows = [(c, row) for c, (z, y) in kept.sent.items() for row in z[y == k]]
            groups: dict[int, dict[str, None]] = {}  # clients of each cluster, in order
            if rows:
                labels = finch(torch.from_numpy(np.stack([row for _, row in rows])))[level]
                for (client, _), label in zip(rows, labels.tolist(), strict=True):
                    groups.setdefault(label, {})[client] = None
            members[name] = tuple(tuple(groups[j]) for j in sorted(groups))
        found.append(Clusters(round, members, kept.domains))
    return found


def _rows(entries: Slot) -> tuple[Floats, Ints]:
    """The prototypes that are present in [K, d] or [K, J, d], one per row, and their classes."""
    mean = entries["mean"]
    size = entries.get("count", entries.get("mask"))
    there = torch.ones(mean.shape[:-1], dtype=torch.bool) if size is None else size > 0
    return widened(mean[there]).numpy(), there.nonzero()[:, 0].numpy()
