"""FedMD, Li and Wang 2019: clients agree on the logits of public images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracles.package import Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, Adam, copy, cross_entropy, mean, network


def fedmd(
    run: Run, warm_up: int, digest_epochs: int, digest_batch: int, digest_lr: float
) -> Oracle:
    own = dict(run.initials)
    consensus = torch.empty(0)
    for t in range(run.rounds):
        logits = {}
        for m in run.participants[t]:
            θ_m = copy(own[m])
            if t >= warm_up:  # (3)
                adam = Adam(digest_lr, run.weight_decay)
                for epoch in range(digest_epochs):
                    for x, rows in run.public_epoch(m, t, epoch, digest_batch):
                        _, said = network(θ_m, x, training=True)
                        adam.step(θ_m, torch.abs(said - consensus[rows]).mean())
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs):  # (4)
                for x, y in run.epoch(m, t, epoch, phase=int(t >= warm_up)):
                    _, said = network(θ_m, x, training=True)
                    sgd.step(θ_m, cross_entropy(said, y))
            _, said = network(θ_m, run.public_images(t + 1), training=False)  # (1)
            own[m], logits[m] = θ_m, said.detach()
        consensus = mean([*logits.values()])  # (2)
        yield {
            "server": {"consensus": {"logits": consensus, "round": torch.tensor(t + 1)}},
            "sent": {m: {"logits": {"public": logits[m]}} for m in logits},
            "kept": {m: {"model": own[m]} for m in own},
        }


DEFAULT: dict[str, Any] = {
    "warm_up": 1,
    "digest_epochs": 1,
    "digest_batch": 256,
    "digest_lr": 0.001,
}
OTHER: dict[str, Any] = {
    "warm_up": 2,
    "digest_epochs": 2,
    "digest_batch": 5,
    "digest_lr": 0.01,
}
FEW: dict[str, Any] = {"public": "south", "images": 13}


def test_agrees_with_different_models() -> None:
    found = run("fedmd", {}, model="cnn3,cnn2")
    assert_agree(found, fedmd(found, **DEFAULT))


def test_agrees_with_other_options() -> None:
    found = run("fedmd", {**OTHER, **FEW})
    assert_agree(found, fedmd(found, **OTHER))


@pytest.mark.parametrize("name", OTHER)
def test_a_wrong_oracle_is_noticed(name: str) -> None:
    found = run("fedmd", FEW, epochs=1)
    assert_differ(found, fedmd(found, **{**DEFAULT, name: OTHER[name]}))
