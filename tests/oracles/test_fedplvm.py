"""FedPLVM, Wang et al. 2024: algorithm 1, with clusters at the clients and at the server."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import MANY, SHORT, SOME, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import (
    SGD,
    Rows,
    average,
    by_class,
    cluster_means,
    copy,
    cosine,
    cross_entropy,
    mean,
    network,
)


def fedplvm(
    run: Run,
    alpha: float,
    tau: float,
    lam: float,
    *,
    client_level: str = "last",
    server_level: str = "last",
    training_mode: bool = False,
) -> Oracle:
    """The last three arguments are for wrong oracles."""
    θ = run.initial
    G: Rows = [[] for _ in range(run.classes)]
    for t in range(run.rounds):
        models, sent = {}, {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs):
                for x, y in run.epoch(m, t, epoch):
                    z, logits = network(θ_m, x, training=True)
                    loss = cross_entropy(logits, y)
                    for z_i, k in zip(z, y.tolist(), strict=True):
                        if G[k]:
                            prototype = L_con(z_i, k, G, alpha, tau) + L_cor(z_i, mean(G[k]))
                            loss = loss + lam * prototype / len(y)
                    sgd.step(θ_m, loss)
            x, y = run.images(m)
            z, _ = network(copy(θ_m), x, training=training_mode)
            clusters = [cluster_means(z_k, client_level) for z_k in by_class(z, y, run.classes)]
            models[m], sent[m] = θ_m, {"model": θ_m, "prototypes": clusters}
        θ = average([*models.values()], [run.samples[m] for m in models])
        for k in range(run.classes):
            of_all = [c for m in sent for c in sent[m]["prototypes"][k]]
            G[k] = cluster_means(of_all, server_level)
        yield {"server": {"model": θ, "prototypes": G}, "sent": sent, "kept": {}}


def L_con(z: Tensor, k: int, G: Rows, α: float, τ: float) -> Tensor:
    """The α-sparsity contrast."""
    cosines = cosine(z, torch.stack([c for G_j in G for c in G_j]))
    s = torch.exp(cosines.clamp(1e-6, 1) ** α / τ)
    own = torch.tensor([j == k for j, G_j in enumerate(G) for _ in G_j])
    return -torch.log(s[own].sum() / s.sum())


def L_cor(z: Tensor, mean_G: Tensor) -> Tensor:
    """The correction."""
    return 2 * (cosine(z, mean_G) - 1) ** 2


DEFAULT = {"alpha": 0.25, "tau": 0.07, "lam": 1.0}
OTHER = {"alpha": 1.0, "tau": 0.2, "lam": 10.0}
# Some client has several clusters of a class in its first partition and fewer in its last.
LARGE = {**SHORT, "samples": {"north": 24, "south": 48, "west": 36}, "batch": 12, "seed": 24}


CASES = {
    "default": (DEFAULT, {}),
    "large": (DEFAULT, LARGE),
    "many": (DEFAULT, MANY),
    "other": (OTHER, SOME),
}


@pytest.mark.parametrize(("options", "settings"), CASES.values(), ids=CASES)
def test_agrees(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("fedplvm", options, **settings)
    assert_agree(found, fedplvm(found, **options))


@pytest.mark.parametrize("name", DEFAULT)
def test_a_wrong_number_is_noticed(name: str) -> None:
    found = run("fedplvm", DEFAULT, **SHORT)
    assert_differ(found, fedplvm(found, **{**DEFAULT, name: 1.1 * DEFAULT[name]}))


def test_a_wrong_sign_is_noticed() -> None:
    found = run("fedplvm", DEFAULT, **SHORT)
    assert_differ(found, fedplvm(found, **{**DEFAULT, "lam": -1.0}))


def test_a_wrong_prototype_pass_is_noticed() -> None:
    found = run("fedplvm", DEFAULT, **SHORT)
    assert_differ(found, fedplvm(found, **DEFAULT, training_mode=True))


def test_a_wrong_level_of_finch_is_noticed() -> None:
    found = run("fedplvm", DEFAULT, **LARGE)
    assert_differ(found, fedplvm(found, **DEFAULT, client_level="first"))
    found = run("fedplvm", DEFAULT, **MANY)
    assert_differ(found, fedplvm(found, **DEFAULT, server_level="first"))
