"""FedProx, Li et al. 2020: algorithm 2, with inexact local solutions by SGD."""

from __future__ import annotations

import pytest

from tests.oracles.package import Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, average, copy, cross_entropy, network


def fedprox(run: Run, mu: float) -> Oracle:
    θ = run.initial
    for t in range(run.rounds):
        models = {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs):
                for x, y in run.epoch(m, t, epoch):
                    _, logits = network(θ_m, x, training=True)
                    loss = cross_entropy(logits, y)
                    for name, entry in θ_m.items():
                        if entry.requires_grad:
                            loss = loss + mu / 2 * ((entry - θ[name]) ** 2).sum()
                    sgd.step(θ_m, loss)
            models[m] = θ_m
        θ = average([*models.values()], [run.samples[m] for m in models])
        yield {
            "server": {"model": θ},
            "sent": {m: {"model": models[m]} for m in models},
            "kept": {},
        }


def test_agrees() -> None:
    found = run("fedprox", {"mu": 0.3})
    assert_agree(found, fedprox(found, 0.3))


@pytest.mark.parametrize("mu", [0.31, -0.3])
def test_another_weight_is_noticed(mu: float) -> None:
    found = run("fedprox", {"mu": 0.3})
    assert_differ(found, fedprox(found, mu))
