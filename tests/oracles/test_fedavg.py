"""FedAvg, McMahan et al. 2017: algorithm 1, with the mean weighted by samples."""

from __future__ import annotations

import pytest

from tests.oracles import plain
from tests.oracles.package import TRAINED, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import average, copy, cross_entropy, network, optimizer


def fedavg(run: Run, uniform: bool = False, fixed: tuple[str, ...] = ()) -> Oracle:
    """``fixed``: what the names of entries start or end with that stay as they are, unsent.

    BatchNorm then normalizes by its buffers, which are among them.
    """
    θ = run.initial
    stays = {n for n in θ if fixed and (n.startswith(fixed) or n.endswith(fixed))}
    for t in range(run.rounds):
        models = {}
        for m in run.participants[t]:
            θ_m = {n: t.detach() if n in stays else t for n, t in copy(θ).items()}
            local = optimizer(run, t)
            for epoch in range(run.epochs):
                for x, y in run.epoch(m, t, epoch):
                    _, logits = network(θ_m, x, training=not fixed)
                    local.step(θ_m, cross_entropy(logits, y, run.label_smoothing))
            models[m] = {n: t for n, t in θ_m.items() if n not in stays}
        θ = θ | average([*models.values()], [1 if uniform else run.samples[m] for m in models])
        yield {
            "server": {"model": θ},
            "sent": {m: {"model": models[m]} for m in models},
            "kept": {},
        }


def test_agrees() -> None:
    assert_agree(run("fedavg"), fedavg(run("fedavg")))


@pytest.mark.parametrize("name", TRAINED)
def test_agrees_with_the_options_of_training(name: str) -> None:
    found = run("fedavg", {}, rounds=4, epochs=1, **TRAINED[name])
    assert_agree(found, fedavg(found))


WRONG = [
    ("sgd", "schedule", "constant"),
    ("sgd", "step_every", 2),
    ("sgd", "step_factor", 0.1),
    ("sgd", "warmup", 0),
    ("sgd", "label_smoothing", 0.0),
    ("sgd", "clip_norm", None),
    ("adam", "optimizer", "sgd"),
    ("adam", "optimizer", "adamw"),
    ("adam", "schedule", "constant"),
    ("adam", "clip_norm", None),
    ("adamw", "optimizer", "adam"),
    ("adamw", "weight_decay", 0.0),
]


@pytest.mark.parametrize(("of", "name", "value"), WRONG)
def test_a_wrong_option_is_noticed(
    of: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run("fedavg", {}, rounds=4, epochs=1, **TRAINED[of])
    monkeypatch.setattr(found, name, value)
    assert_differ(found, fedavg(found))


def test_agrees_with_half_of_the_clients_counted_the_same() -> None:
    half = run("fedavg", participation=0.5, average="uniform")
    assert_agree(half, fedavg(half, uniform=True))


def test_agrees_with_a_frozen_backbone() -> None:
    head = run("fedavg", train="head", freeze_bn=True)
    assert_agree(head, fedavg(head, fixed=("encoder.",)))
    assert_differ(head, fedavg(head))


def test_agrees_with_frozen_statistics() -> None:
    frozen = run("fedavg", freeze_bn=True)
    assert_agree(frozen, fedavg(frozen, fixed=plain.BUFFERS))
    assert_differ(frozen, fedavg(frozen))


def test_a_wrong_mean_is_noticed() -> None:
    assert_differ(run("fedavg"), fedavg(run("fedavg"), uniform=True))


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
def test_a_wrong_optimizer_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("fedavg")
    monkeypatch.setattr(found, name, 0.9 * getattr(found, name))
    assert_differ(found, fedavg(found))


def test_wrong_running_statistics_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(θ, name, x, training):  # type: ignore[no-untyped-def]
        return right(dict(θ), name, x, training)

    right = plain.batch_norm
    monkeypatch.setattr(plain, "batch_norm", frozen)
    assert_differ(run("fedavg"), fedavg(run("fedavg")))
