"""The FedMLP-style method: class prototypes, and those of groups of classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracles.package import Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import (
    SGD,
    Rows,
    average,
    class_means,
    copy,
    cosine,
    cross_entropy,
    finch,
    mean,
    network,
)


def fedmlp(run: Run, lambda1: float, lambda2: float, tau: float, proto_pass: str) -> Oracle:
    θ = run.initial
    C: Rows = [[] for _ in range(run.classes)]
    S, group = grouped(C)
    for t in range(run.rounds):
        models, c = {}, {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs):
                batches, features = run.epoch(m, t, epoch), []
                for x, y in batches:
                    z, logits = network(θ_m, x, training=True)
                    features.append(z)
                    loss = cross_entropy(logits, y)  # (4)
                    for z_i, k in zip(z, y.tolist(), strict=True):
                        if C[k]:
                            near = ((z_i - C[k][0]) ** 2).mean()
                            s = torch.exp(cosine(z_i, torch.stack([S_j[0] for S_j in S])) / tau)
                            contrast = -torch.log(s[group[k]] / s.sum())
                            loss = loss + (lambda1 * near + lambda2 * contrast) / len(y)
                    sgd.step(θ_m, loss)
            if proto_pass == "last_epoch":
                z, y = torch.cat(features), torch.cat([y for _, y in batches])
            else:
                x, y = run.images(m)
                z, _ = network(θ_m, x, training=False)
            models[m], c[m] = θ_m, class_means(z, y, run.classes)  # (1)
        θ = average([*models.values()], [run.samples[m] for m in models])
        owned = [[c_m[k][0] for c_m in c.values() if c_m[k]] for k in range(run.classes)]
        C = [[mean(rows)] if rows else [] for rows in owned]  # (2)
        S, group = grouped(C)
        yield {
            "server": {"model": θ, "prototypes": C, "semantic": S},
            "sent": {m: {"model": models[m], "prototypes": c[m]} for m in models},
            "kept": {},
        }


def grouped(C: Rows) -> tuple[Rows, dict[int, int]]:
    """(3): the centers of the groups, and the group of each class."""
    known = [k for k, rows in enumerate(C) if rows]
    if not known:
        return [], {}
    groups = [[known[i] for i in cluster] for cluster in finch([C[k][0] for k in known])[0]]
    centers = [[mean([C[k][0] for k in group])] for group in groups]
    return centers, {k: s for s, group in enumerate(groups) for k in group}


DEFAULT: dict[str, Any] = {
    "lambda1": 1.0,
    "lambda2": 1.0,
    "tau": 0.5,
    "proto_pass": "last_epoch",
}
OTHER: dict[str, Any] = {"lambda1": 0.5, "lambda2": 2.0, "tau": 0.4, "proto_pass": "post"}
TWO_GROUPS = {"epochs": 1}
"""The third round contrasts two groups of classes; a single group has no contrast."""


def test_agrees() -> None:
    found = run("fedmlp", {}, **TWO_GROUPS)
    states = [*fedmlp(found, **DEFAULT)]
    assert len(states[1]["server"]["semantic"]) == 2
    assert_agree(found, iter(states))


def test_agrees_where_a_class_is_absent() -> None:
    found = run("fedmlp", OTHER, participation=0.25, rounds=4)
    assert_agree(found, fedmlp(found, **OTHER))


@pytest.mark.parametrize("name", OTHER)
def test_a_wrong_oracle_is_noticed(name: str) -> None:
    found = run("fedmlp", DEFAULT, **TWO_GROUPS)
    assert_differ(found, fedmlp(found, **{**DEFAULT, name: OTHER[name]}))
