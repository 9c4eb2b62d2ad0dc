"""FedDyn, Acar et al. 2021: algorithm 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracles.package import HALF, SHORT, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, average, copy, cross_entropy, network
from tests.oracles.test_fedavg import fedavg


def feddyn(run: Run, alpha: float, clip: float, sign: int = 1, everyone: int = 4) -> Oracle:
    θ = run.initial
    names = [n for n, t in copy(θ).items() if t.requires_grad]
    h = {n: torch.zeros_like(θ[n]) for n in names}
    g = {m: dict(h) for m in run.clients}
    for t in range(run.rounds):
        models = {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay, clip)
            for epoch in range(run.epochs):
                for x, y in run.epoch(m, t, epoch):
                    _, logits = network(θ_m, x, training=True)
                    loss = cross_entropy(logits, y)
                    for n in names:
                        loss = loss - sign * (g[m][n] * θ_m[n]).sum()
                        loss = loss + alpha / 2 * ((θ_m[n] - θ[n]) ** 2).sum()
                    sgd.step(θ_m, loss)
            g[m] = {n: g[m][n] - alpha * (θ_m[n] - θ[n]) for n in names}
            models[m] = θ_m
        for θ_m in models.values():
            h = {n: h[n] - alpha / everyone * (θ_m[n] - θ[n]) for n in names}
        mean = average([*models.values()], [1.0] * len(models))
        θ = mean | {n: mean[n] - h[n] / alpha for n in names}
        yield {
            "server": {"model": θ, "h": h},
            "sent": {m: {"model": models[m]} for m in models},
            "kept": {m: {"g": g[m]} for m in g},
        }


DEFAULT: dict[str, Any] = {"alpha": 0.01, "clip": 10.0}
STRONG: dict[str, Any] = {"alpha": 0.5, "clip": 1.0}
"""Everything is noticed, the clipping too."""


@pytest.mark.parametrize("settings", [{}, HALF], ids=["all", "half"])
@pytest.mark.parametrize("options", [{}, STRONG], ids=["default", "strong"])
def test_agrees(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("feddyn", options, **settings)
    assert_agree(found, feddyn(found, **{**DEFAULT, **options}))


def test_the_reference_is_fedavg() -> None:
    found = run("feddyn", {"variant": "reference"}, **SHORT)
    assert_agree(found, fedavg(found))


@pytest.mark.parametrize(
    "wrong", [{"alpha": 0.4}, {"clip": 10.0}, {"sign": -1}, {"everyone": 2}], ids=repr
)
def test_a_wrong_oracle_is_noticed(wrong: dict[str, Any]) -> None:
    found = run("feddyn", STRONG, **SHORT)
    assert_differ(found, feddyn(found, **{**STRONG, **wrong}))
