"""FedDAP, Le et al. 2026: prototypes of each class and domain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import SHORT, SOME, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, average, class_means, copy, cosine, cross_entropy, network

Table = dict[str, list[Tensor | None]]
"""For each domain the prototype of each class."""


def feddap(
    run: Run, lambda1: float, lambda2: float, tau: float, fusion: float, proto_pass: str
) -> Oracle:
    θ = run.initial
    domains = list(dict.fromkeys(map(domain, run.clients)))
    P: Table = {D: [None] * run.classes for D in domains}
    for t in range(run.rounds):
        models, sent = {}, {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs):
                features, labels = [], []
                for x, y in run.epoch(m, t, epoch):
                    z, logits = network(θ_m, x, training=True)
                    loss = cross_entropy(logits, y)
                    for z_i, k in zip(z, y.tolist(), strict=True):  # (5)
                        own = L_own(z_i, P[domain(m)][k])
                        others = L_others(z_i, k, [P[D] for D in P if domain(m) != D], tau)
                        loss = loss + (lambda1 * own + lambda2 * others) / len(y)
                    sgd.step(θ_m, loss)
                    features.append(z)
                    labels.append(y)
            z, y = torch.cat(features), torch.cat(labels)
            if proto_pass == "post":
                x, y = run.images(m)
                z, _ = network(copy(θ_m), x, training=False)
            models[m] = θ_m
            sent[m] = {"model": θ_m, "prototypes": class_means(z, y, run.classes)}  # (1)
        θ = average([*models.values()], [run.samples[m] for m in models])
        for D in domains:
            for k in range(run.classes):
                p = [q for m in sent if domain(m) == D for q in sent[m]["prototypes"][k]]
                P[D][k] = fused(p, fusion) if p else None
        rows = [[p for D in domains if (p := P[D][k]) is not None] for k in range(run.classes)]
        yield {"server": {"model": θ, "prototypes": rows}, "sent": sent, "kept": {}}


def domain(client: str) -> str:
    return client.rpartition("-")[0]


def fused(p: list[Tensor], T: float) -> Tensor:
    """(2)."""
    s = torch.stack([sum(cosine(p_i, p_j) for p_j in p) / T for p_i in p])
    e = torch.exp(s - s.max())
    return sum(e_i / e.sum() * p_i for e_i, p_i in zip(e, p, strict=True))


def L_own(z: Tensor, p: Tensor | None) -> Tensor:
    """(3)."""
    return torch.zeros(()) if p is None else 1 - cosine(z, p)


def L_others(z: Tensor, k: int, others: list[list[Tensor | None]], τ: float) -> Tensor:
    """(4)."""
    s = [(j, torch.exp(cosine(z, p) / τ)) for P_D in others for j, p in enumerate(P_D)
         if p is not None]  # fmt: skip
    own = [s_j for j, s_j in s if j == k]
    return -torch.log(sum(own) / sum(s_j for _, s_j in s)) if own else torch.zeros(())


DEFAULT: dict[str, Any] = {
    "lambda1": 10.0, "lambda2": 1.0, "tau": 0.02, "fusion": 0.001, "proto_pass": "last_epoch",
}  # fmt: skip
OTHER = {"lambda1": 0.3, "lambda2": 2.0, "tau": 0.5, "fusion": 0.5, "proto_pass": "post"}

# two clients of a domain always weigh the same
THREE = {**SHORT, "clients": {"north": 3, "south": 1, "west": 1}, "samples": 7}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": (DEFAULT, {}),
    "three": (OTHER, THREE),
    "some": (OTHER, SOME),
}


@pytest.mark.parametrize(("options", "settings"), CASES.values(), ids=CASES)
def test_agrees(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("feddap", options, **settings)
    assert_agree(found, feddap(found, **options))


@pytest.mark.parametrize("name", DEFAULT)
def test_a_wrong_switch_is_noticed(name: str) -> None:
    found = run("feddap", DEFAULT, **THREE)
    assert_differ(found, feddap(found, **{**DEFAULT, name: OTHER[name]}))


WRONG = {
    "no domains": ("domain", lambda client: ""),
    "domains are clients": ("domain", lambda client: client),
    "the plain mean": ("fused", lambda p, T: sum(p) / len(p)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_equation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("feddap", DEFAULT, **THREE)
    monkeypatch.setitem(globals(), *WRONG[name])
    assert_differ(found, feddap(found, **DEFAULT))
