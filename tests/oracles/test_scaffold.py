"""SCAFFOLD, Karimireddy et al. 2020: algorithm 1, option II."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracles.package import (
    HALF,
    SHORT,
    TRAINED,
    Oracle,
    Run,
    assert_agree,
    assert_differ,
    run,
)
from tests.oracles.plain import average, copy, cross_entropy, network, optimizer


def scaffold(run: Run, eta_g: float, rho: float, sign: int = 1, everyone: int = 4) -> Oracle:
    x = run.initial
    names = [n for n, t in copy(x).items() if t.requires_grad]
    c = {n: torch.zeros_like(x[n]) for n in names}
    own = {i: dict(c) for i in run.clients}
    for t in range(run.rounds):
        models, change = {}, {}
        for i in run.participants[t]:
            y_i, c_i, K = copy(x), own[i], 0
            sgd = optimizer(run, t, momentum=rho)
            for epoch in range(run.epochs):
                for images, labels in run.epoch(i, t, epoch):
                    _, logits = network(y_i, images, training=True)
                    loss = cross_entropy(logits, labels, run.label_smoothing)
                    for n in names:  # the gradient of this is c − c_i
                        loss = loss + sign * ((c[n] - c_i[n]) * y_i[n]).sum()
                    sgd.step(y_i, loss)
                    K += 1
            # Σ of the steps' velocities: each is its gradient and, ρ times, the velocity before
            gradients = sum(rho**past for step in range(K) for past in range(step + 1))
            new = {n: c_i[n] - c[n] + (x[n] - y_i[n]) / (sgd.lr * gradients) for n in names}
            change[i] = {n: new[n] - c_i[n] for n in names}
            own[i], models[i] = new, y_i
        mean = average([*models.values()], [1.0] * len(models))
        x = mean | {n: x[n] + eta_g * (mean[n] - x[n]) for n in names}
        for i in models:
            c = {n: c[n] + change[i][n] / everyone for n in names}
        yield {
            "server": {"model": x, "c": c},
            "sent": {i: {"model": models[i], "change": change[i]} for i in models},
            "kept": {i: {"c_m": own[i]} for i in own},
        }


DEFAULT: dict[str, Any] = {"eta_g": 1.0, "rho": 0.0}
OTHER: dict[str, Any] = {"eta_g": 0.7, "rho": 0.9}


@pytest.mark.parametrize("settings", [{}, HALF], ids=["all", "half"])
@pytest.mark.parametrize("options", [{}, OTHER], ids=["default", "momentum"])
def test_agrees(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("scaffold", options, **settings)
    assert_agree(found, scaffold(found, **{**DEFAULT, **options}))


def test_agrees_with_the_options_of_training() -> None:
    """The control variates are divided by the learning rate of their round."""
    found = run("scaffold", OTHER, rounds=4, epochs=1, **TRAINED["sgd"])
    assert_agree(found, scaffold(found, **OTHER))


@pytest.mark.parametrize(
    "wrong", [{"eta_g": 0.8}, {"rho": 0.8}, {"sign": -1}, {"everyone": 2}], ids=repr
)
def test_a_wrong_oracle_is_noticed(wrong: dict[str, Any]) -> None:
    found = run("scaffold", OTHER, **SHORT)
    assert_differ(found, scaffold(found, **{**OTHER, **wrong}))
