"""FedTGP, Zhang et al. 2024: own models, and prototypes that the server trains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import SHORT, SOME, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import (
    SGD,
    Model,
    Rows,
    average,
    class_means,
    copy,
    cross_entropy,
    mean,
    network,
    relu,
)


def fedtgp(
    run: Run,
    lam: float,
    margin: float,
    eta: float,
    server_epochs: int,
    server_batch: int,
    proto_pass: str,
    share: str,
) -> Oracle:
    θ = {m: run.initials[m] for m in run.clients}
    P: Rows = [[] for _ in range(run.classes)]
    G = None
    for t in range(run.rounds):
        sent: dict[str, Any] = {}
        for m in run.participants[t]:
            θ[m] = copy(θ[m])
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs):
                features, labels = [], []
                for x, y in run.epoch(m, t, epoch):
                    z, logits = network(θ[m], x, training=True)
                    loss = cross_entropy(logits, y)
                    for z_i, k in zip(z, y.tolist(), strict=True):  # (5)
                        if P[k]:
                            loss = loss + lam * ((z_i - P[k][0]) ** 2).mean() / len(y)
                    sgd.step(θ[m], loss)
                    features.append(z)
                    labels.append(y)
            z, y = torch.cat(features), torch.cat(labels)
            if proto_pass == "post":
                x, y = run.images(m)
                z, _ = network(θ[m], x, training=False)
            sent[m] = {"prototypes": class_means(z, y, run.classes)}  # (1)
        C = [[c for m in sent for c in sent[m]["prototypes"][k]] for k in range(run.classes)]
        δ = widest([mean(C_k) for C_k in C if C_k], margin)
        known = [bool(P[k] or C[k]) for k in range(run.classes)]
        G = G or initial(run, t)
        pairs = [(c, k) for m in sent for k in range(run.classes) for c in sent[m]["prototypes"][k]]
        for epoch in range(server_epochs):  # (4)
            order = run.generator(t, epoch, "prototypes").permutation(len(pairs)).tolist()
            for first in range(0, len(order), server_batch):
                G = copy(G)
                new = [prototype(G, k) if known[k] else None for k in range(run.classes)]
                batch = order[first : first + server_batch]
                losses = [pair_loss(*pairs[i], new, δ) for i in batch]
                SGD(eta, momentum=0, weight_decay=0).step(G, sum(losses) / len(losses))
        P = [[prototype(G, k).detach()] if known[k] else [] for k in range(run.classes)]
        server: dict[str, Any] = {"prototypes": P, "generator": G}
        if share == "prototypes":
            kept = {m: {"model": θ[m]} for m in run.clients}
            yield {"server": server, "sent": sent, "kept": kept}
            continue
        for m in sent:
            sent[m]["model"] = θ[m]
        server["model"] = average([θ[m] for m in sent], [run.samples[m] for m in sent])
        θ = dict.fromkeys(run.clients, server["model"])
        yield {"server": server, "sent": sent, "kept": {}}


def initial(run: Run, t: int) -> Model:
    """Standard normal embeddings; layers uniform in ±1/√d."""
    rng, d = run.generator(t, "generator"), run.features
    sizes = {"embedding": (run.classes, d), "weight1": (d, d), "weight2": (d, d)}
    sizes |= {"bias1": (d,), "bias2": (d,)}
    G = {}
    for name, size in sizes.items():
        normal = name == "embedding"
        drawn = rng.standard_normal(size) if normal else rng.uniform(-(d**-0.5), d**-0.5, size)
        G[name] = torch.from_numpy(drawn)
    return G


def prototype(G: Model, k: int) -> Tensor:
    """(3)."""
    return G["weight2"] @ relu(G["weight1"] @ G["embedding"][k] + G["bias1"]) + G["bias2"]


def widest(Q: list[Tensor], most: float) -> float:
    """(2)."""
    closest = [min(math.dist(q, p) for j, p in enumerate(Q) if j != i) for i, q in enumerate(Q)]
    return min(max(closest), most)


def pair_loss(c: Tensor, y: int, P: list[Tensor | None], δ: float) -> Tensor:
    """The term of (4) for one prototype of a client; classes that nobody has had are left out."""
    e = {
        k: torch.exp(-torch.sqrt(((c - P_k) ** 2).sum()) - (δ if k == y else 0))
        for k, P_k in enumerate(P)
        if P_k is not None
    }
    return -torch.log(e[y] / sum(e.values()))


# few steps at the server: the oracle takes each prototype by itself
DEFAULT: dict[str, Any] = {
    "lam": 10.0, "margin": 100.0, "eta": 0.01, "server_epochs": 2, "server_batch": 10,
    "proto_pass": "post", "share": "prototypes",
}  # fmt: skip
OTHER = {
    "lam": 1.0, "margin": 0.3, "eta": 0.1, "server_epochs": 1, "server_batch": 4,
    "proto_pass": "last_epoch", "share": "model",
}  # fmt: skip


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": (DEFAULT, {}),
    "other, some": (OTHER, SOME),
    "different models": (DEFAULT, {**SHORT, "model": "cnn3,cnn2"}),
}


@pytest.mark.parametrize(("options", "settings"), CASES.values(), ids=CASES)
def test_agrees(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("fedtgp", options, **settings)
    assert_agree(found, fedtgp(found, **options))


@pytest.mark.parametrize("name", DEFAULT)
def test_a_wrong_switch_is_noticed(name: str) -> None:
    found = run("fedtgp", DEFAULT, **SHORT)
    assert_differ(found, fedtgp(found, **{**DEFAULT, name: OTHER[name]}))


WRONG = {
    "another margin": ("widest", lambda Q, most: 0.0),
    "a linear generator": ("relu", lambda x: x),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_equation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("fedtgp", DEFAULT, **SHORT)
    monkeypatch.setitem(globals(), *WRONG[name])
    assert_differ(found, fedtgp(found, **DEFAULT))
