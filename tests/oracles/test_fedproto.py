"""FedProto, Tan et al. 2022: algorithm 1, with a common model and without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import SHORT, SOME, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, Rows, average, class_means, copy, cross_entropy, mean, network


def fedproto(run: Run, weight: float, proto_pass: str, share: str) -> Oracle:
    θ = dict.fromkeys(run.clients, run.initial)
    C: Rows = [[] for _ in range(run.classes)]
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
                    for z_i, k in zip(z, y.tolist(), strict=True):  # (3)
                        if C[k]:
                            loss = loss + weight * distance(z_i, C[k][0]) / len(y)
                    sgd.step(θ[m], loss)
                    features.append(z)
                    labels.append(y)
            if proto_pass == "last_epoch":
                z, y = torch.cat(features), torch.cat(labels)
            else:
                x, y = run.images(m)
                z, _ = network(θ[m], x, training=False)
            sent[m] = {"prototypes": class_means(z, y, run.classes)}  # (1)
        for k in range(run.classes):
            C_k = [c for m in sent for c in sent[m]["prototypes"][k]]
            C[k] = [mean(C_k)] if C_k else []  # (2)
        if share == "prototypes":
            kept = {m: {"model": θ[m]} for m in run.clients}
            yield {"server": {"prototypes": C}, "sent": sent, "kept": kept}
            continue
        for m in sent:
            sent[m]["model"] = θ[m]
        common = average([θ[m] for m in sent], [run.samples[m] for m in sent])
        θ = dict.fromkeys(run.clients, common)
        yield {"server": {"model": common, "prototypes": C}, "sent": sent, "kept": {}}


def distance(z: Tensor, C: Tensor) -> Tensor:
    """The squared error, divided by d as in the code."""
    return ((z - C) ** 2).sum() / len(z)


DEFAULT = {"weight": 1.0, "proto_pass": "last_epoch", "share": "model"}
SWITCHED = {"weight": 0.3, "proto_pass": "post", "share": "prototypes"}


@pytest.mark.parametrize("settings", [{}, SOME], ids=["all", "some"])
@pytest.mark.parametrize("options", [DEFAULT, SWITCHED], ids=["default", "switched"])
def test_agrees(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("fedproto", options, **settings)
    assert_agree(found, fedproto(found, **options))


@pytest.mark.parametrize("name", DEFAULT)
def test_a_wrong_switch_is_noticed(name: str) -> None:
    found = run("fedproto", DEFAULT, **SHORT)
    assert_differ(found, fedproto(found, **{**DEFAULT, name: SWITCHED[name]}))


WRONG = {
    "sign": ("distance", lambda z, C: -((z - C) ** 2).mean()),
    "sum over d": ("distance", lambda z, C: ((z - C) ** 2).sum()),
    "not squared": ("distance", lambda z, C: (z - C).abs().mean()),
    "one client": ("mean", lambda C_k: C_k[0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_equation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("fedproto", DEFAULT, **SHORT)
    monkeypatch.setitem(globals(), *WRONG[name])
    assert_differ(found, fedproto(found, **DEFAULT))
