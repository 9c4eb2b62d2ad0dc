"""FedSR, Nguyen, Torr and Lim 2022: a sampled feature, L2R and CMI."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from protofed import keys
from tests.oracles.package import HALF, SHORT, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, Model, average, copy, cross_entropy, encode, linear, mean


def fedsr(run: Run, c1: float, c2: float, z_samples: int) -> Oracle:
    own = {m: {n: t for n, t in run.initial.items() if "reference" in n} for m in run.clients}
    θ = {n: t for n, t in run.initial.items() if "reference" not in n}
    for t in range(run.rounds):
        sent = {}
        for m in run.participants[t]:
            θ_m = copy(θ | own[m])
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            batches = [b for epoch in range(run.epochs) for b in run.epoch(m, t, epoch)]
            for step, (x, y) in enumerate(batches):
                μ, σ = gaussian(θ_m, x, training=True)
                z = μ + σ * run.normal(m, t, step, 1, *μ.shape)
                loss = cross_entropy(linear(θ_m, "head", z), y)
                if c1:
                    loss = loss + c1 * mean([length(z_i) for z_i in z])
                if c2:
                    loss = loss + c2 * cmi(θ_m, μ, σ, y)
                sgd.step(θ_m, loss)
            sent[m] = {n: θ_m[n] for n in θ}
            own[m] = {n: θ_m[n] for n in own[m]}
        θ = average([*sent.values()], [run.samples[m] for m in sent])
        yield {
            "server": {"model": θ},
            "sent": {m: {"model": sent[m]} for m in sent},
            "kept": {m: {"model": own[m]} for m in own},
        }


def gaussian(θ: Model, x: Tensor, training: bool) -> tuple[Tensor, Tensor]:
    """μ and σ of the features."""
    both = linear(θ, "gaussian", encode(θ, x, training))
    d = both.shape[1] // 2
    return both[:, :d], softplus(both[:, d:]) + 1e-6


def softplus(s: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(s))


def length(z: Tensor) -> Tensor:
    """L2R of a sample: not squared."""
    return torch.sqrt((z**2).sum())


def cmi(θ: Model, μ: Tensor, σ: Tensor, y: Tensor) -> Tensor:
    """The mean over the batch of KL( N(Cμ, (Cσ)²) ‖ N(r_y, ρ_y²) ), summed over the dimensions."""
    C = θ["reference.C"]
    total = torch.zeros((), dtype=μ.dtype)
    for μ_i, σ_i, k in zip(C * μ, torch.abs(C) * σ, y, strict=True):
        r, ρ = θ["reference.r"][k], softplus(θ["reference.rho"][k])
        total = total + divergence(μ_i, σ_i, r, ρ)
    return total / len(y)


def divergence(μ: Tensor, σ: Tensor, r: Tensor, ρ: Tensor) -> Tensor:
    """KL( N(μ, σ²) ‖ N(r, ρ²) )."""
    return (torch.log(ρ / σ) + (σ**2 + (μ - r) ** 2) / (2 * ρ**2) - 1 / 2).sum()


def accuracy(run: Run, t: int, θ: Model, z_samples: int) -> dict[str, float]:
    """In percent, of the mean over the samples of their probabilities."""
    key = torch.tensor(keys.key(run.setup.seed, t, "evaluation"))
    ε = keys.normal(key, 1, (z_samples, 1, run.features)).double()[:, 0]
    found = {}
    for domain, (x, y) in run.tests.items():
        μ, σ = gaussian(θ, x, training=False)
        e = [torch.exp(linear(θ, "head", μ + σ * ε_s)) for ε_s in ε]
        p = mean([e_s / e_s.sum(1, keepdim=True) for e_s in e])
        found[domain] = round(100 * (p.argmax(1) == y).double().mean().item(), 4)
    return found


DEFAULT: dict[str, Any] = {"c1": 0.01, "c2": 0.001, "z_samples": 20}
STRONG: dict[str, Any] = {"c1": 0.1, "c2": 0.01, "z_samples": 20}


def test_agrees() -> None:
    found = run("fedsr", {})
    states = [*fedsr(found, **DEFAULT)]
    assert_agree(found, iter(states))
    models = [state["server"]["model"] for state in states]
    assert found.accuracy == [accuracy(found, t, θ, 20) for t, θ in enumerate(models)]
    assert found.accuracy != [accuracy(found, t, θ, 1) for t, θ in enumerate(models)]


@pytest.mark.parametrize(
    ("options", "settings"),
    [(STRONG, HALF), ({**DEFAULT, "c1": 0.0}, SHORT), ({**DEFAULT, "c2": 0.0}, SHORT)],
    ids=["strong, half", "w/o L2R", "w/o CMI"],
)
def test_agrees_in_other_forms(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("fedsr", options, **settings)
    assert_agree(found, fedsr(found, **options))


@pytest.mark.parametrize("wrong", [{"c1": 0.02}, {"c2": 0.002}, {"c2": -0.001}], ids=repr)
def test_a_wrong_weight_is_noticed(wrong: dict[str, Any]) -> None:
    found = run("fedsr", DEFAULT, **SHORT)
    assert_differ(found, fedsr(found, **{**DEFAULT, **wrong}))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("length", lambda right: lambda z: right(z) ** 2),
        ("divergence", lambda right: lambda μ, σ, r, ρ: right(r, ρ, μ, σ)),
        ("softplus", lambda right: torch.exp),
    ],
)
def test_a_wrong_part_is_noticed(part: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), part, wrong(globals()[part]))
    found = run("fedsr", DEFAULT, **SHORT)
    assert_differ(found, fedsr(found, **DEFAULT))
