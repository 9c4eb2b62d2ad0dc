"""ProtoStyle: styles of all clients in a second view, pseudo-domains that count alike, APA."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import MANY, SHORT, SOME, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import (
    SGD,
    Model,
    average,
    copy,
    cross_entropy,
    encode,
    finch,
    mean,
    network,
    restyled,
    style,
)
from tests.oracles.test_i2pfl import apa, mixed, partners, prototypes_of

STAGES = ("pixels", "stage1")
Styles = dict[str, Tensor]
"""[μ and σ, channel] of each stage."""


def protostyle(
    run: Run, p: float, lambda_view: float, lambda_intra: float, alpha: float, balanced: bool
) -> Oracle:
    θ = run.initial
    known: dict[str, Styles] = {}
    chance: dict[str, float] = {}
    for t in range(run.rounds):
        models, sent = {}, {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            step = 0
            for epoch in range(run.epochs):
                batches = run.epoch(m, t, epoch)
                γs = run.generator(t, m, 0, epoch, "draws").beta(alpha, alpha, len(batches))
                for (x, y), γ in zip(batches, γs, strict=True):
                    B = len(y)
                    u, v = (run.uniform(m, t, step, draw, 2 * B).tolist() for draw in (1, 2))
                    new = [
                        known[drawn(u[i], chance)] if known and i >= B and v[i] < p else None
                        for i in range(2 * B)
                    ]
                    x, y = torch.cat([x, x]), torch.cat([y, y])
                    h, logits = network(θ_m, x, training=True, between=in_styles(new))
                    JS = [disagreement(logits[i], logits[B + i]) for i in range(B)]
                    loss = cross_entropy(logits, y) + lambda_view * sum(JS) / B
                    w = run.uniform(m, t, step, 3, 2 * B, 2 * B)
                    h_mixed = mixed(θ_m, x, h, partners(y, w), γ, "feature")
                    if h_mixed:
                        p_mixed = prototypes_of(h_mixed, y, run.classes)
                        loss = loss + lambda_intra * apa(h, y, p_mixed, "mean", True)
                    sgd.step(θ_m, loss)
                    step += 1
            models[m] = θ_m
            sent[m] = mean_styles(θ, run.images(m)[0])
        known |= sent
        there = [m for m in run.clients if m in known]
        group = dict(zip(there, domains([known[m] for m in there]), strict=True))
        θ = average([*models.values()], weights(run, [*models], group, balanced))
        sizes = [[*group.values()].count(g) for g in group.values()]
        chance = {m: 1 / len(set(group.values())) / n for m, n in zip(group, sizes, strict=True)}
        until = [sum(chance.get(m, 0.0) for m in run.clients[: i + 1])
                 for i in range(len(run.clients))]  # fmt: skip
        none = {stage: torch.zeros_like(s) for stage, s in known[there[0]].items()}
        every = [known.get(m, none) for m in run.clients]
        table = {stage: torch.stack([s[stage] for s in every]) for stage in STAGES}
        yield {
            "server": {
                "model": θ,
                "styles": {**table, "until": torch.tensor(until, dtype=torch.float64)},
            },
            "sent": {m: {"model": models[m], "styles": sent[m]} for m in models},
            "kept": {},
        }


def mean_styles(θ: Model, x: Tensor) -> Styles:
    """(1), in a clean pass under the received model."""
    maps: dict[str, Tensor] = {}
    encode(θ, x, False, lambda stage, x: maps.setdefault(stage, x))
    return {
        stage: mean([torch.stack(style(x_i)) for x_i in maps[stage].detach()]) for stage in STAGES
    }


def domains(styles: list[Styles]) -> list[int]:
    """(2)."""
    rows = []
    for stage in STAGES:
        values = [[*s[stage][0].tolist(), *(math.log(σ) for σ in s[stage][1].tolist())]
                  for s in styles]  # fmt: skip
        columns = []
        for column in zip(*values, strict=True):
            μ = sum(column) / len(column)
            σ = math.sqrt(sum((v - μ) ** 2 for v in column) / len(column))
            columns.append([(v - μ) / max(σ, 1e-12) / math.sqrt(len(values[0])) for v in column])
        rows.append([torch.tensor(row, dtype=torch.float64) for row in zip(*columns, strict=True)])
    clusters = finch([torch.cat(parts) for parts in zip(*rows, strict=True)])[0]
    if len(clusters) == 1:
        return [*range(len(styles))]
    return [next(g for g, own in enumerate(clusters) if i in own) for i in range(len(styles))]


def weights(run: Run, clients: list[str], group: dict[str, int], balanced: bool) -> list[float]:
    """(3)."""
    if not balanced:
        return [run.samples[m] for m in clients]
    N = [sum(run.samples[j] for j in clients if group[j] == group[m]) for m in clients]
    return [run.samples[m] / N_g for m, N_g in zip(clients, N, strict=True)]


def drawn(u: float, chance: dict[str, float]) -> str:
    """The client at which the chances of it and all before it reach u."""
    for m in chance:
        u -= chance[m]
        if u <= 1e-12:
            return m
    raise AssertionError("chances sum to less than 1")


def in_styles(new: list[Styles | None]) -> Any:
    """(4)."""

    def between(stage: str, x: Tensor) -> Tensor:
        if stage not in STAGES:
            return x
        return torch.stack([
            x_i if s is None else restyled(x_i, *style(x_i), *s[stage])
            for x_i, s in zip(x, new, strict=True)
        ])  # fmt: skip

    return between


def disagreement(a: Tensor, b: Tensor) -> Tensor:
    """(5) of a sample, from the logits of its views."""
    p = [torch.exp(v - v.max()) / torch.exp(v - v.max()).sum() for v in (a, b)]
    M = (p[0] + p[1]) / 2
    return sum((q * torch.log(q / M)).sum() for q in p) / 2


DEFAULT: dict[str, Any] = {
    "p": 1.0, "lambda_view": 1.0, "lambda_intra": 10.0, "alpha": 0.4, "balanced": True,
}  # fmt: skip
OTHER = {"p": 0.6, "lambda_view": 3.0, "lambda_intra": 0.5, "alpha": 2.0, "balanced": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": (DEFAULT, SHORT),
    "many": ({**DEFAULT, "lambda_intra": 1.0}, MANY),
    "other": (OTHER, SHORT),
    "some": ({**DEFAULT, "p": 0.6}, SOME),
}


@pytest.mark.parametrize(("options", "settings"), CASES.values(), ids=CASES)
def test_agrees(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("protostyle", options, **settings)
    assert_agree(found, protostyle(found, **options))


@pytest.mark.parametrize("name", DEFAULT)
def test_a_wrong_switch_is_noticed(name: str) -> None:
    found = run("protostyle", DEFAULT, **SHORT)
    assert_differ(found, protostyle(found, **{**DEFAULT, name: OTHER[name]}))


WRONG = {
    "every client a domain": ("domains", lambda styles: [*range(len(styles))]),
    "one domain": ("domains", lambda styles: [0] * len(styles)),
    "all in one style": ("drawn", lambda u, chance: next(iter(chance))),
    "no disagreement": ("disagreement", lambda a, b: 0 * a.sum()),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_equation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("protostyle", DEFAULT, **MANY)
    monkeypatch.setitem(globals(), *WRONG[name])
    assert_differ(found, protostyle(found, **DEFAULT))
