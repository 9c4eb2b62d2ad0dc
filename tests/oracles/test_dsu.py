"""DSU, Li et al. 2022: noise on styles, as wide as the batch's scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import HALF, SHORT, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, average, copy, cross_entropy, network, restyled, style


def dsu(run: Run, p: float, stages: str) -> Oracle:
    θ = run.initial
    for t in range(run.rounds):
        models = {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            batches = [b for epoch in range(run.epochs) for b in run.epoch(m, t, epoch)]
            for step, (x, y) in enumerate(batches):
                draw = 0

                def between(stage: str, x: Tensor, at: Any = (m, t, step)) -> Tensor:
                    nonlocal draw
                    if stage not in stages.split(",") or len(x) == 1:
                        return x
                    draw += 2
                    coin = float(run.uniform(*at, draw - 1, 1))
                    ε = run.normal(*at, draw, len(x), 2, x.shape[1])
                    return noised(x, ε) if coin < p else x

                _, logits = network(θ_m, x, training=True, between=between)
                sgd.step(θ_m, cross_entropy(logits, y))
            models[m] = θ_m
        θ = average([*models.values()], [run.samples[m] for m in models])
        yield {
            "server": {"model": θ},
            "sent": {m: {"model": models[m]} for m in models},
            "kept": {},
        }


def noised(x: Tensor, ε: Tensor) -> Tensor:
    styles = [style(x_i) for x_i in x]
    Σ_μ, Σ_σ = (scatter(list(rows)) for rows in zip(*styles, strict=True))
    return torch.stack(
        [
            restyled(x_i, μ, σ, μ + ε_i[0] * Σ_μ, σ + ε_i[1] * Σ_σ)
            for x_i, (μ, σ), ε_i in zip(x, styles, ε, strict=True)
        ]
    )


def scatter(rows: list[Tensor]) -> Tensor:
    """The root of the variance of each entry, with a gradient."""
    mean = sum(rows) / len(rows)
    return torch.sqrt(sum((row - mean) ** 2 for row in rows) / (len(rows) - 1) + 1e-6)


DEFAULT: dict[str, Any] = {"p": 0.5, "stages": "stage1,stage2"}
STRONG: dict[str, Any] = {"p": 0.8, "stages": "pixels,stage1"}


def test_agrees() -> None:
    found = run("dsu", {}, **SHORT)
    assert_agree(found, dsu(found, **DEFAULT))


def test_agrees_with_pixels() -> None:
    found = run("dsu", STRONG, **HALF)
    assert_agree(found, dsu(found, **STRONG))


@pytest.mark.parametrize("wrong", [{"p": 0.3}, {"stages": "stage1"}], ids=repr)
def test_a_wrong_option_is_noticed(wrong: dict[str, Any]) -> None:
    found = run("dsu", STRONG, **SHORT)
    assert_differ(found, dsu(found, **{**STRONG, **wrong}))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("scatter", lambda right: lambda rows: right(rows).detach()),
        ("style", lambda right: lambda x: tuple(s.detach() for s in right(x))),
        ("noised", lambda right: lambda x, ε: right(x, ε.flip(1))),
    ],
)
def test_a_wrong_part_is_noticed(part: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), part, wrong(globals()[part]))
    found = run("dsu", STRONG, **SHORT)
    assert_differ(found, dsu(found, **STRONG))
