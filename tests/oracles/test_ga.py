"""GA, Zhang et al. 2023: averaging weights that follow the generalization gaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import HALF, SHORT, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, Model, average, copy, cross_entropy, network


def ga(run: Run, s0: float, metric: str, mu: float = 0.0, sign: int = 1, **_: Any) -> Oracle:
    """With μ > 0 clients train as FedProx's do."""
    θ, M = run.initial, len(run.clients)
    a = dict.fromkeys(run.clients, 1 / M)
    last: dict[str, Tensor] = {}
    for t in range(run.rounds):
        models, received, own = {}, {}, {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs):
                for x, y in run.epoch(m, t, epoch):
                    _, logits = network(θ_m, x, training=True)
                    loss = cross_entropy(logits, y)
                    for n, p in θ_m.items():
                        if mu and p.requires_grad:
                            loss = loss + mu / 2 * ((p - θ[n]) ** 2).sum()
                    sgd.step(θ_m, loss)
            models[m] = θ_m
            received[m], own[m] = score(run, m, θ, metric), score(run, m, θ_m, metric)
        # The θ that was received is the aggregate of the round before.
        gap = {m: float(last[m] - received[m]) for m in models if m in last}
        if metric == "loss":
            gap = {m: -G for m, G in gap.items()}
        if largest := max((abs(G) for G in gap.values()), default=0):
            s = s0 * (1 - (t - 1) / run.rounds)
            moved = {m: a[m] + sign * s / M * gap.get(m, 0) / largest for m in a}
            clamped = {m: min(max(a_m, 0), 1) for m, a_m in moved.items()}
            a = {m: a_m / sum(clamped.values()) for m, a_m in clamped.items()}
        last |= own
        θ = average([*models.values()], [a[m] for m in models])
        seen = dict.fromkeys(last, 1.0)
        order = run.clients
        yield {
            "server": {
                "model": θ,
                "ga": {
                    "weight": numbers(a, order),
                    "own": numbers(last, order),
                    "seen": numbers(seen, order),
                },
            },
            "sent": {
                m: {"model": models[m], "scores": {"received": received[m], "own": own[m]}}
                for m in models
            },
            "kept": {},
        }


def score(run: Run, m: str, θ: Model, metric: str) -> Tensor:
    """Of a model on a client's held-out images."""
    x, y = run.images(m, "holdout")
    _, logits = network(θ, x, training=False)
    if metric == "loss":
        return cross_entropy(logits, y).detach()
    return (logits.argmax(1) == y).double().mean()


def numbers(of: Mapping[str, Any], clients: list[str]) -> Tensor:
    """A number for each client; 0 where there is none."""
    return torch.tensor([of.get(m, 0.0) for m in clients], dtype=torch.float64)


LOSS: dict[str, Any] = {"s0": 0.2, "metric": "loss", "holdout": 0.3}
ACCURACY: dict[str, Any] = {"s0": 1.0, "metric": "accuracy", "holdout": 0.4}


def test_agrees_with_losses() -> None:
    found = run("fedavg_ga", LOSS)
    assert_agree(found, ga(found, **LOSS))


def test_agrees_with_accuracies_of_half_of_the_clients() -> None:
    found = run("fedavg_ga", ACCURACY, **HALF, lr=0.05)
    states = [*ga(found, **ACCURACY)]
    weights = states[-1]["server"]["ga"]["weight"]
    assert len(set(weights.tolist())) > 1, "no accuracy ever changed"
    assert_agree(found, iter(states))


def test_agrees_with_fedprox() -> None:
    options = {**LOSS, "mu": 0.5}
    found = run("fedga", options, **SHORT)
    assert_agree(found, ga(found, **options))
    assert_differ(found, ga(found, **{**options, "mu": 0.4}))


@pytest.mark.parametrize("wrong", [{"s0": 0.3}, {"sign": -1}, {"metric": "accuracy"}], ids=repr)
def test_a_wrong_oracle_is_noticed(wrong: dict[str, Any]) -> None:
    found = run("fedavg_ga", LOSS)
    assert_differ(found, ga(found, **{**LOSS, **wrong}))
