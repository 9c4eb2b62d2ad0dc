"""COPA, Wu and Gong 2021, without its normalization: one extractor, a head for each client."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.oracles.package import HALF, SHORT, Oracle, Run, State, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, Model, average, copy, cross_entropy, encode, linear

HEAD = ("head.weight", "head.bias")


def copa(run: Run, wrong: str = "") -> Oracle:
    f = {n: t for n, t in run.initial.items() if n not in HEAD}
    heads = {m: {n: run.initial[n] for n in HEAD} for m in run.clients}
    trained: set[str] = set()
    for t in range(run.rounds):
        models = {}
        for m in run.participants[t]:
            θ_m = copy(f | heads[m])
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs):
                for x, y in run.epoch(m, t, epoch):
                    z = encode(θ_m, x, training=True)
                    loss = cross_entropy(linear(θ_m, "head", z), y)
                    for j in run.clients:
                        if j != m or wrong == "its own head twice":
                            loss = loss + cross_entropy(linear(heads[j], "head", z), y)
                    sgd.step(θ_m, loss / 4 if wrong == "mean over the heads" else loss)
            models[m] = θ_m
        f = average([{n: θ_m[n] for n in f} for θ_m in models.values()], counts(run, models, wrong))
        heads = heads | {m: {n: θ_m[n].detach() for n in HEAD} for m, θ_m in models.items()}
        trained |= models.keys()
        yield {
            "server": {"model": f, "heads": collected(heads, trained)},
            "sent": {m: {"model": {n: θ_m[n] for n in f}, "head": named(heads[m])}
                     for m, θ_m in models.items()},
            "kept": {m: {"model": heads[m]} for m in heads},
        }  # fmt: skip


def counts(run: Run, models: dict[str, Model], wrong: str) -> list[float]:
    return [1.0 if wrong == "plain mean" else run.samples[m] for m in models]


def named(head: Model) -> Model:
    return {n.removeprefix("head."): t for n, t in head.items()}


def collected(heads: dict[str, Model], trained: set[str]) -> Model:
    """All heads, with a 1 for those that have been sent."""
    return {
        "weight": torch.stack([heads[m]["head.weight"] for m in heads]),
        "bias": torch.stack([heads[m]["head.bias"] for m in heads]),
        "mask": torch.tensor([float(m in trained) for m in heads]),
    }


def ensemble(f: Model, heads: Model, x: Tensor) -> Tensor:
    """The mean over the heads that have been sent of their probabilities."""
    z = encode(f, x, training=False)
    total = torch.zeros((), dtype=x.dtype)
    for weight, bias, sent in zip(*heads.values(), strict=True):
        if sent:
            e = torch.exp(linear({"head.weight": weight, "head.bias": bias}, "head", z))
            total = total + e / e.sum(1, keepdim=True)
    return total


@pytest.mark.parametrize("settings", [{}, HALF], ids=["all", "half"])
def test_agrees(settings: dict[str, float]) -> None:
    found = run("copa", {}, **settings)
    states = [*copa(found)]
    assert_agree(found, iter(states))
    rounds = list(zip(found.accuracy, states, strict=True))
    assert all(measured == accuracy(found, state) for measured, state in rounds)
    # one head does not do as well, or as badly, as all of them
    assert any(measured != accuracy(found, state, heads=1) for measured, state in rounds)


def accuracy(run: Run, state: State, heads: int = 4) -> dict[str, float]:
    """The ensemble's, in percent."""
    f, every = state["server"]["model"], state["server"]["heads"]
    some = {n: t[:heads] for n, t in every.items()}
    right = {d: ensemble(f, some, x).argmax(1) == y for d, (x, y) in run.tests.items()}
    return {d: round(100 * r.double().mean().item(), 4) for d, r in right.items()}


@pytest.mark.parametrize("wrong", ["its own head twice", "mean over the heads", "plain mean"])
def test_a_wrong_oracle_is_noticed(wrong: str) -> None:
    found = run("copa", {}, **SHORT)
    assert_differ(found, copa(found, wrong))
