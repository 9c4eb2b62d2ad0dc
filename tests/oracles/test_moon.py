"""MOON, Li, He, Song 2021: algorithm 1, on the feature (without a projection head)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import SHORT, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, average, copy, cosine, cross_entropy, network


def moon(run: Run, mu: float, tau: float) -> Oracle:
    θ = run.initial
    previous: dict[str, Any] = {}
    for t in range(run.rounds):
        models = {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs):
                for x, y in run.epoch(m, t, epoch):
                    z, logits = network(θ_m, x, training=True)
                    loss = cross_entropy(logits, y)
                    if m in previous:
                        z_glob = other_features(θ, x)
                        z_prev = other_features(previous[m], x)
                        for i in range(len(y)):
                            loss = loss + mu * contrast(z[i], z_glob[i], z_prev[i], tau) / len(y)
                    sgd.step(θ_m, loss)
            models[m] = θ_m
        θ = average([*models.values()], [run.samples[m] for m in models])
        previous |= models
        kept = {
            m: {
                "previous": previous.get(m, run.initial),
                "history": {"there": torch.tensor(float(m in previous))},
            }
            for m in run.clients
        }
        yield {
            "server": {"model": θ},
            "sent": {m: {"model": models[m]} for m in models},
            "kept": kept,
        }


def other_features(θ: dict[str, Tensor], x: Tensor) -> Tensor:
    """Of another model, which only looks on."""
    return network(θ, x, training=False)[0].detach()


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, τ: float) -> Tensor:
    """The paper's (3)."""
    near = torch.exp(cosine(z, z_glob) / τ)
    far = torch.exp(cosine(z, z_prev) / τ)
    return -torch.log(near / (near + far))


DEFAULT = {"mu": 5.0, "tau": 0.5}


def test_agrees() -> None:
    found = run("moon", DEFAULT)
    assert_agree(found, moon(found, **DEFAULT))


def test_a_client_that_sits_out_keeps_its_model() -> None:
    options = {"mu": 1.0, "tau": 0.1}
    half = run("moon", options, participation=0.5, rounds=5, epochs=1)
    assert any(m not in half.participants[1] for m in half.participants[0])
    assert_agree(half, moon(half, **options))


WRONG = {
    "τ": ("contrast", lambda z, near, far, τ: RIGHT(z, near, far, 1.01 * τ)),
    "sign": ("contrast", lambda z, near, far, τ: -RIGHT(z, near, far, τ)),
    "the models swapped": ("contrast", lambda z, near, far, τ: RIGHT(z, far, near, τ)),
    "training mode": ("other_features", lambda θ, x: network(copy(θ), x, True)[0].detach()),
}
RIGHT = contrast


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_equation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("moon", DEFAULT, **SHORT)
    monkeypatch.setitem(globals(), *WRONG[name])
    assert_differ(found, moon(found, **DEFAULT))
