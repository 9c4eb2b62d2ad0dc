"""MixStyle, Zhou et al. 2021: styles mixed within a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import HALF, SHORT, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, average, copy, cross_entropy, network, restyled, style


def mixstyle(run: Run, p: float, alpha: float, stages: str) -> Oracle:
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
                    if stage not in stages.split(","):
                        return x
                    draw += 3
                    coin = float(run.uniform(*at, draw - 2, 1))
                    λ = run.beta(*at, draw - 1, alpha, len(x))
                    order = run.uniform(*at, draw, len(x)).tolist()
                    π = sorted(range(len(x)), key=lambda i: order[i])
                    return mixed(x, λ, π) if coin < p else x

                _, logits = network(θ_m, x, training=True, between=between)
                sgd.step(θ_m, cross_entropy(logits, y))
            models[m] = θ_m
        θ = average([*models.values()], [run.samples[m] for m in models])
        yield {
            "server": {"model": θ},
            "sent": {m: {"model": models[m]} for m in models},
            "kept": {},
        }


def mixed(x: Tensor, λ: Tensor, π: list[int]) -> Tensor:
    styles = [fixed(style(x_i)) for x_i in x]
    found = []
    for x_i, own, λ_i, j in zip(x, styles, λ, π, strict=True):
        new = [λ_i * mine + (1 - λ_i) * other for mine, other in zip(own, styles[j], strict=True)]
        found.append(restyled(x_i, *own, *new))
    return torch.stack(found)


def fixed(style: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Without a gradient."""
    μ, σ = style
    return μ.detach(), σ.detach()


DEFAULT: dict[str, Any] = {"p": 0.5, "alpha": 0.1, "stages": "stage1"}
STRONG: dict[str, Any] = {"p": 0.8, "alpha": 0.7, "stages": "pixels,stage1,stage2"}


def test_agrees() -> None:
    found = run("mixstyle", {}, **SHORT)
    assert_agree(found, mixstyle(found, **DEFAULT))


def test_agrees_at_all_stages() -> None:
    found = run("mixstyle", STRONG, **HALF)
    assert_agree(found, mixstyle(found, **STRONG))


@pytest.mark.parametrize(
    "wrong", [{"p": 0.3}, {"alpha": 0.2}, {"stages": "stage1,stage2"}], ids=repr
)
def test_a_wrong_option_is_noticed(wrong: dict[str, Any]) -> None:
    found = run("mixstyle", STRONG, **SHORT)
    assert_differ(found, mixstyle(found, **{**STRONG, **wrong}))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("fixed", lambda right: lambda style: style),
        ("mixed", lambda right: lambda x, λ, π: right(x, 1 - λ, π)),
        ("restyled", lambda right: lambda x, μ, σ, b, a: right(x, μ, σ, b, σ)),
    ],
)
def test_a_wrong_part_is_noticed(part: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), part, wrong(globals()[part]))
    found = run("mixstyle", STRONG, **SHORT)
    assert_differ(found, mixstyle(found, **STRONG))
