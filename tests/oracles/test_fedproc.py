"""FedProc, Mu et al. 2021: contrast with global prototypes that fades into cross-entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import (
    SGD,
    Rows,
    average,
    class_means,
    copy,
    cosine,
    cross_entropy,
    mean,
    network,
)


def fedproc(run: Run, tau: float, warmup: bool, proto_pass: str) -> Oracle:
    θ = run.initial
    C: Rows = [[] for _ in range(run.classes)]
    for t in range(run.rounds):
        models, c = {}, {}
        α = 0 if warmup and t == 0 else 1 - t / (run.rounds - 1)
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs):
                batches, features = run.epoch(m, t, epoch), []
                for x, y in batches:
                    z, logits = network(θ_m, x, training=True)
                    features.append(z)
                    loss = (1 - α) * cross_entropy(logits, y)
                    for z_i, k in zip(z, y.tolist(), strict=True):
                        loss = loss + α * L_gpc(z_i, k, C, tau) / len(y)
                    sgd.step(θ_m, loss)
            if proto_pass == "last_epoch":
                z, y = torch.cat(features), torch.cat([y for _, y in batches])
            else:
                x, y = run.images(m)
                z, _ = network(θ_m, x, training=False)
            models[m], c[m] = θ_m, class_means(z, y, run.classes)
        θ = average([*models.values()], [run.samples[m] for m in models])
        owned = [[c_m[k][0] for c_m in c.values() if c_m[k]] for k in range(run.classes)]
        C = [[mean(rows)] if rows else [] for rows in owned]
        yield {
            "server": {"model": θ, "prototypes": C},
            "sent": {m: {"model": models[m], "prototypes": c[m]} for m in models},
            "kept": {},
        }


def L_gpc(z: Tensor, k: int, C: Rows, τ: float) -> Tensor | float:
    if not C[k]:
        return 0.0
    every = torch.exp(cosine(z, torch.stack([C_j[0] for C_j in C if C_j])) / τ)
    return -torch.log(torch.exp(cosine(z, C[k][0]) / τ) / every.sum())


DEFAULT: dict[str, Any] = {"tau": 1.0, "warmup": False, "proto_pass": "last_epoch"}
OTHER: dict[str, Any] = {"tau": 0.5, "warmup": True, "proto_pass": "post"}


@pytest.mark.parametrize("options", [{}, OTHER], ids=["default", "other"])
def test_agrees(options: dict[str, Any]) -> None:
    found = run("fedproc", options)
    assert_agree(found, fedproc(found, **{**DEFAULT, **options}))


@pytest.mark.parametrize("name", OTHER)
def test_a_wrong_oracle_is_noticed(name: str) -> None:
    found = run("fedproc", DEFAULT, epochs=1)
    assert_differ(found, fedproc(found, **{**DEFAULT, name: OTHER[name]}))
