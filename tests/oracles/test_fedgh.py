"""FedGH, Yi et al. 2023: own extractors, and a header that the server trains on class means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import HALF, SHORT, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, Model, class_means, copy, cross_entropy, encode, linear

HEADER = ("head.weight", "head.bias")


def fedgh(run: Run, eta: float, header_epochs: int, header_batch: int, proto_pass: str) -> Oracle:
    header = {n: run.initial[n] for n in HEADER}
    own = {m: {n: t for n, t in θ.items() if n not in HEADER} for m, θ in run.initials.items()}
    for t in range(run.rounds):
        C = {}
        for m in run.participants[t]:
            θ_m = copy(own[m] | header)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs):  # (1)
                batches, features = run.epoch(m, t, epoch), []
                for x, y in batches:
                    z = encode(θ_m, x, training=True)
                    features.append(z)
                    sgd.step(θ_m, cross_entropy(linear(θ_m, "head", z), y))
            if proto_pass == "last_epoch":
                z, y = torch.cat(features), torch.cat([y for _, y in batches])
            else:
                x, y = run.images(m)
                z = encode(θ_m, x, training=False)
            C[m] = class_means(z, y, run.classes)  # (2)
            own[m] = {n: θ_m[n] for n in own[m]}
        pairs = [(mean, k) for C_m in C.values() for k, means in enumerate(C_m) for mean in means]
        for epoch in range(header_epochs):  # (3)
            order = run.generator(t, epoch, "header").permutation(len(pairs)).tolist()
            for first in range(0, len(order), header_batch):
                batch = [pairs[i] for i in order[first : first + header_batch]]
                header = trained(header, batch, eta)
        yield {
            "server": {"model": header},
            "sent": {m: {"prototypes": C[m]} for m in C},
            "kept": {m: {"model": own[m]} for m in own},
        }


def trained(header: Model, batch: list[tuple[Tensor, int]], η: float) -> Model:
    """One step of SGD on the mean cross-entropy of the pairs."""
    header = copy(header)
    logits = linear(header, "head", torch.stack([z for z, _ in batch]))
    loss = cross_entropy(logits, torch.tensor([k for _, k in batch]))
    SGD(η, momentum=0, weight_decay=0).step(header, loss)
    return header


DEFAULT: dict[str, Any] = {
    "eta": 0.01,
    "header_epochs": 10,
    "header_batch": 10,
    "proto_pass": "post",
}
OTHER = {"eta": 0.1, "header_epochs": 2, "header_batch": 4, "proto_pass": "last_epoch"}


@pytest.mark.parametrize(
    ("options", "settings"),
    [({}, {}), (OTHER, HALF), (OTHER, {**SHORT, "model": "cnn3,cnn2"})],
    ids=["default", "other, half", "different models"],
)
def test_agrees(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("fedgh", options, **settings)
    assert_agree(found, fedgh(found, **{**DEFAULT, **options}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"eta": 0.02},
        {"eta": -0.01},
        {"header_epochs": 9},
        {"header_batch": 9},
        {"proto_pass": "last_epoch"},
    ],
    ids=repr,
)
def test_a_wrong_oracle_is_noticed(wrong: dict[str, Any]) -> None:
    found = run("fedgh", DEFAULT, **SHORT)
    assert_differ(found, fedgh(found, **{**DEFAULT, **wrong}))
