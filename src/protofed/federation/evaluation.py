"""Accuracy of models on test sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protofed import keys, tree
from protofed.data.augment import normalized
from protofed.data.task import Images
from protofed.errors import Diverged, ProtofedError
from protofed.federation.batches import evaluation_batch
from protofed.federation.finite import require_finite_model
from protofed.federation.model_state import load_model, private_as_nan
from protofed.federation.setup import Setup
from protofed.method import Client, Method
from protofed.models import Network
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class EvalJob:
    """Which model is tested on what: a client's, or (``client`` is None) the server's.

    ``model`` is the name of its architecture, ``domain`` the client's. The server has no private
    state and no domain.
    """

    model: str
    client: str | None
    tests: Mapping[str, Images]
    domain: str = ""


Scores = dict[str, dict[str, float]]
"""Accuracy in percent by inference rule (``accuracy`` is the method's own) and test set."""


def evaluate_job(
    setup: Setup,
    networks: Mapping[str, Network],
    job: EvalJob,
    received: Tree,
    mine: Callable[[str], Tree],
    round: int,
    batch: int | None = None,
) -> Scores:
    """The scores of a job, computed in the network of its model."""
    own = {} if job.client is None else mine(job.client)
    whose = {} if job.client is None else {"name": job.client, "domain": job.domain}
    return evaluate(setup, networks[job.model], received, own, job.tests, round, batch, **whose)


def evaluate(
    setup: Setup,
    network: Network,
    received: Tree,
    mine: Tree,
    tests: Mapping[str, Images],
    round: int = 0,
    batch: int | None = None,
    name: str = "server",
    domain: str = "",
) -> Scores:
    """Accuracy in percent on each test set of the model ``mine | received``.

    The server evaluates with ``mine`` empty: its view has the broadcast and nothing private. A
    client with a model of its own has the same name and domain as in training.
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
        name=name,
        domain=domain,
        mean=setup.augment.mean,
        std=setup.augment.std,
    )
    missing = private_as_nan(setup.method, network, given=client.start)
    load_model(network, client.start | missing)
    network.eval()
    scores: Scores = {}
    with torch.no_grad(), setup.autocast(device):
        for test, images in tests.items():
            accuracies = _accuracies(setup, client, missing, test, images, round, batch)
            for rule, accuracy in accuracies.items():
                scores.setdefault(rule, {})[test] = accuracy
    return scores


def _accuracies(
    setup: Setup,
    client: Client,
    missing: Slot,
    name: str,
    images: Images,
    round: int,
    batch: int | None,
) -> dict[str, float]:
    batch = batch or evaluation_batch(images.x.shape[-1])
    method, key = setup.method, keys.key(setup.seed, round, "evaluation")
    zero = torch.zeros((), dtype=torch.int64, device=client.key.device)
    hits: dict[str, Tensor] = {}
    invalid: dict[str, Tensor] = {}
    for x, y in zip(images.x.split(batch), images.y.split(batch), strict=True):
        client.begin_step(key)  # the same draws for every batch: its size cannot change a score
        inputs = normalized(x, setup.augment, setup.dtype)
        predicted = method.rules(client, inputs)
        _require_scores(method.name, predicted, [len(y), setup.sizes.classes])
        if missing and not _all_valid(predicted):
            # Do the predictions need what is missing, or are they invalid without it too?
            load_model(client.network, client.start | {n: t.zero_() for n, t in missing.items()})
            client.begin_step(key)
            if not _all_valid(method.rules(client, inputs)):
                raise _diverged(method, client.start, name)
            raise ProtofedError(
                f"{method.name} predicts with entries that clients keep to themselves "
                f"({next(iter(missing))} ...), which the server does not have",
                "such a method is evaluated by its clients: evaluates = 'clients'",
            )
        for rule, scores in predicted.items():
            hits[rule] = hits.get(rule, zero) + (scores.argmax(1) == y).sum()
            invalid[rule] = invalid.get(rule, zero) + (~_valid(scores)).sum()
    for count in invalid.values():
        if int(count):  # argmax would take such a score for the largest
            raise _diverged(method, client.start, name)
    return {rule: 100 * int(count) / len(images) for rule, count in hits.items()}


def _require_scores(method: str, predicted: Mapping[str, Tensor], shape: list[int]) -> None:
    """Raise an error if there is no score of each image for each class."""
    for rule, scores in predicted.items():
        found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        if found != shape:
            raise ProtofedError(
                f"{method} predicts {found} as '{rule}', not scores of shape {shape}",
                "predict and rules must give a score of each image for each class",
            )
    if "accuracy" not in predicted:
        raise ProtofedError(
            f"the rules of {method} are {', '.join(predicted) or 'none'}",
            'one of them must be the main one, "accuracy"',
        )


def _valid(scores: Tensor) -> Tensor:
    """Which scores can be compared. −inf can: it rules its class out."""
    return scores < math.inf


def _all_valid(predicted: Mapping[str, Tensor]) -> bool:
    return all(bool(_valid(scores).all()) for scores in predicted.values())


def _diverged(method: Method, model: Slot, domain: str) -> Diverged:
    """The error for scores that are not finite, unless the model itself is not finite."""
    require_finite_model(model, "the model")
    return Diverged(
        f"{method.name}'s scores for images of {domain} are not finite",
        "the model's entries are finite, but may be too large for its activations: try a smaller "
        "--lr; or check the method's predict",
    )
