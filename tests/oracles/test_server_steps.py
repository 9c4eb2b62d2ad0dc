"""Methods whose clients train as FedAvg's do; only what the server does is different.

FedAvgM (Hsu et al. 2019), FedOPT and FedAdam (Reddi et al. 2021, algorithm 2), FedNova (Wang et
al. 2020), FedBN (Li et al. 2021), and Local, whose server does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
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
from tests.oracles.plain import Model, average, copy, cross_entropy, network, optimizer

Locals = dict[str, tuple[Model, int]]
"""The model of each of the round's clients after training, and the number of its steps."""


def trained(run: Run, t: int, start: dict[str, Model], momentum: float | None = None) -> Locals:
    """The local training of a round's clients, from these models."""
    found = {}
    for m in run.participants[t]:
        θ_m, steps = copy(start[m]), 0
        local = optimizer(run, t, momentum)
        for epoch in range(run.epochs):
            for x, y in run.epoch(m, t, epoch):
                _, logits = network(θ_m, x, training=True)
                local.step(θ_m, cross_entropy(logits, y, run.label_smoothing))
                steps += 1
        found[m] = θ_m, steps
    return found


def parameters(θ: Model) -> list[str]:
    return [n for n, t in copy(θ).items() if t.requires_grad]


def rounds(
    run: Run,
    server: Callable[[Model, Locals], tuple[Model, dict[str, Model]]],
    momentum: float | None = None,
) -> Oracle:
    """Rounds in which ``server`` makes the next model, and the slots that it keeps."""
    θ = run.initial
    for t in range(run.rounds):
        every = dict.fromkeys(run.clients, θ)
        local = trained(run, t, every, momentum)
        θ, slots = server(θ, local)
        yield {
            "server": {"model": θ, **slots},
            "sent": {m: {"model": θ_m} for m, (θ_m, _) in local.items()},
            "kept": {},
        }


# ---- the servers ---------------------------------------------------------------------------------


def with_momentum(run: Run, beta: float, eta_g: float, uniform: bool) -> Oracle:
    """FedAvgM and FedOPT: v ← βv + Δ, θ ← θ − η_g v."""
    v = {n: torch.zeros_like(run.initial[n]) for n in parameters(run.initial)}

    def server(θ: Model, local: Locals) -> tuple[Model, dict[str, Model]]:
        mean = average([θ_m for θ_m, _ in local.values()],
                       [1.0 if uniform else run.samples[m] for m in local])  # fmt: skip
        for n in v:
            v[n] = beta * v[n] + (θ[n] - mean[n])
        return mean | {n: θ[n] - eta_g * v[n] for n in v}, {"v": dict(v)}

    return rounds(run, server)


def fedadam(run: Run, eta_g: float, beta1: float, beta2: float, tau: float, variant: str) -> Oracle:
    """Algorithm 2, with the mean weighted by samples."""
    m_t = {n: torch.zeros_like(run.initial[n]) for n in parameters(run.initial)}
    v_t = {n: torch.full_like(m_t[n], tau * tau) for n in m_t}

    def server(x: Model, local: Locals) -> tuple[Model, dict[str, Model]]:
        mean = average([x_i for x_i, _ in local.values()], [run.samples[i] for i in local])
        new = dict(mean)
        for n in m_t:
            Δ = mean[n] - x[n]
            m_t[n] = beta1 * m_t[n] + (1 - beta1) * Δ
            if variant == "adagrad":
                v_t[n] = v_t[n] + Δ**2
            elif variant == "yogi":
                v_t[n] = v_t[n] - (1 - beta2) * Δ**2 * torch.sign(v_t[n] - Δ**2)
            else:
                v_t[n] = beta2 * v_t[n] + (1 - beta2) * Δ**2
            new[n] = x[n] + eta_g * m_t[n] / (torch.sqrt(v_t[n]) + tau)
        return new, {"m": dict(m_t), "v": dict(v_t)}

    return rounds(run, server)


def fednova(run: Run, rho: float, normalize: bool = True) -> Oracle:
    """θ ← θ − (Σ p_m a_m) Σ p_m (θ − θ_m)/a_m."""

    def server(θ: Model, local: Locals) -> tuple[Model, dict[str, Model]]:
        total = sum(run.samples[m] for m in local)
        p = {m: run.samples[m] / total for m in local}
        a = {m: gradients(steps, rho) if normalize else 1.0 for m, (_, steps) in local.items()}
        new = average([θ_m for θ_m, _ in local.values()], [p[m] / a[m] for m in local])
        for n in parameters(θ):
            change = sum(p[m] * (θ[n] - θ_m[n]) / a[m] for m, (θ_m, _) in local.items())
            new[n] = θ[n] - sum(p[m] * a[m] for m in local) * change
        return new, {}

    return rounds(run, server, momentum=rho)


def gradients(steps: int, ρ: float) -> float:
    """How many gradients that many steps add up to: a step repeats those before it ρ times."""
    return sum(ρ**past for step in range(steps) for past in range(step + 1))


def private(run: Run, keeps: Callable[[str], bool]) -> Oracle:
    """FedAvg of the entries that a client does not keep: FedBN and, with none left, Local."""
    θ = {n: t for n, t in run.initial.items() if not keeps(n)}
    own = {m: {n: t for n, t in start.items() if keeps(n)} for m, start in run.initials.items()}
    for t in range(run.rounds):
        local = trained(run, t, {m: θ | own[m] for m in own})
        sent = {m: {n: θ_m[n] for n in θ} for m, (θ_m, _) in local.items()}
        own |= {m: {n: θ_m[n] for n in own[m]} for m, (θ_m, _) in local.items()}
        θ = average([*sent.values()], [run.samples[m] for m in sent])
        yield {
            "server": {"model": θ},
            "sent": {m: {"model": sent[m]} for m in sent},
            "kept": {m: {"model": own[m]} for m in own},
        }


# ---- tests ---------------------------------------------------------------------------------------

ADAM: dict[str, Any] = {"eta_g": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}


def test_fedavgm() -> None:
    found = run("fedavgm")
    assert_agree(found, with_momentum(found, 0.9, 1.0, uniform=False))
    assert_differ(found, with_momentum(found, 0.8, 1.0, uniform=False))


@pytest.mark.parametrize("name", TRAINED)
def test_fedavgm_with_the_options_of_training(name: str) -> None:
    found = run("fedavgm", {}, rounds=3, epochs=1, **TRAINED[name])
    assert_agree(found, with_momentum(found, 0.9, 1.0, uniform=False))


def test_fednova_with_a_schedule() -> None:
    options = {**SHORT, "schedule": "cosine", "warmup_rounds": 1, "clip_norm": 0.5, "batch": 3}
    found = run("fednova", {}, **options)
    assert_agree(found, fednova(found, 0.9))


def test_fedopt() -> None:
    found = run("fedopt", {}, **HALF)
    assert_agree(found, with_momentum(found, 0.9, 0.25, uniform=True))
    assert_differ(found, with_momentum(found, 0.9, 0.25, uniform=False))


@pytest.mark.parametrize("variant", ["adam", "yogi", "adagrad"])
def test_fedadam(variant: str) -> None:
    found = run("fedadam", {"variant": variant}, epochs=1)
    assert_agree(found, fedadam(found, **ADAM, variant=variant))
    assert_differ(found, fedadam(found, **{**ADAM, "beta1": 0.8}, variant=variant))
    assert_differ(found, fedadam(found, **{**ADAM, "tau": 1.1e-3}, variant=variant))


def test_fedadam_has_three_variants() -> None:
    found = run("fedadam", {"variant": "adam"}, epochs=1)
    assert_differ(found, fedadam(found, **ADAM, variant="yogi"))
    assert_differ(found, fedadam(found, **ADAM, variant="adagrad"))


@pytest.mark.parametrize("rho", [0.9, 0.0])
def test_fednova(rho: float) -> None:
    unequal = {"batch": 3, **SHORT}  # 14, 11 and 13 samples: 5, 4 and 5 steps
    found = run("fednova", {"rho": rho}, **unequal)
    assert_agree(found, fednova(found, rho))
    assert_differ(found, fednova(found, rho, normalize=False))


def test_fedbn() -> None:
    found = run("fedbn", {}, **HALF)
    norms = ("encoder.1.", "encoder.5.")
    assert_agree(found, private(found, lambda n: n.startswith(norms)))
    assert_differ(found, private(found, lambda n: n.startswith(norms) and "running" in n))


def test_local() -> None:
    found = run("local", {}, **SHORT, model="cnn3,cnn2")
    assert_agree(found, private(found, lambda n: True))
    assert_differ(found, private(found, lambda n: "encoder" in n))
