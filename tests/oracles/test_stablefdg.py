"""StableFDG, Park et al. 2023: styles of another client, clusters of styles, the highlighter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import HALF, SHORT, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, Model, average, copy, cross_entropy, encode, linear, mean

Draws = tuple[Tensor, Tensor, float]
"""Of a step: for the seeds, for the drawn styles, whether to shift at all."""


def stablefdg(run: Run, p: float, highlighter: bool) -> Oracle:
    θ = run.initial
    known: dict[str, Tensor] = {}  # [mean and spread, μ and σ, channel]
    C = θ["encoder.0.weight"].shape[0]
    for t in range(run.rounds):
        models, sent = {}, {}
        partner = partners(run, known, t)
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            batches = [b for epoch in range(run.epochs) for b in run.epoch(m, t, epoch)]
            for step, (x, y) in enumerate(batches):
                half = len(x) // 2
                draws = (
                    run.uniform(m, t, step, 1, half, len(x)),
                    run.normal(m, t, step, 2, len(x) - half, 2, C),
                    run.uniform(m, t, step, 3, 1).item(),
                )
                other = known.get(partner.get(m, ""))
                pairs = [following(y, i) for i in range(len(y))]
                logits = network(θ_m, x, pairs if highlighter else None, other, p, draws)
                sgd.step(θ_m, cross_entropy(logits, y))
            models[m] = θ_m
            sent[m] = told(styles(first_stage(θ, run.images(m)[0])))
        θ = average([*models.values()], [run.samples[m] for m in models])
        known |= sent
        none = torch.zeros(2, 2, C, dtype=torch.float64)
        yield {
            "server": {
                "model": θ,
                "styles": {
                    "style": torch.stack([known.get(m, none) for m in run.clients]),
                    "mask": torch.tensor([float(m in known) for m in run.clients]),
                },
            },
            "sent": {m: {"model": models[m], "styles": {"style": sent[m]}} for m in models},
            "kept": {},
        }


# ---- styles --------------------------------------------------------------------------------------


def styles(maps: Tensor) -> list[Tensor]:
    """s_i [μ and σ, channel] of each sample."""
    found = []
    for x in maps.detach():
        n = x[0].numel()
        μ = [channel.sum() / n for channel in x]
        σ = [
            torch.sqrt(((channel - m) ** 2).sum() / (n - 1) + 1e-6)
            for channel, m in zip(x, μ, strict=True)
        ]
        found.append(torch.stack([torch.stack(μ), torch.stack(σ)]))
    return found


def told(s: list[Tensor]) -> Tensor:
    """(1)."""
    m = mean(s)
    return torch.stack([m, torch.sqrt(mean([(s_i - m) ** 2 for s_i in s]))])


def partners(run: Run, known: dict[str, Tensor], t: int) -> dict[str, str]:
    """(2): permutations until one has nobody in its own place."""
    there = [m for m in run.clients if m in known]
    places = [run.clients.index(m) for m in there]
    if not there:
        return {}
    rng = run.generator(t, "styles")
    anyone = rng.choice(places, len(run.clients))
    found = {m: run.clients[j] for m, j in zip(run.clients, anyone, strict=True) if m not in known}
    while True:
        order = [run.clients[j] for j in rng.permutation(places)]
        if all(a != b for a, b in zip(there, order, strict=True)):
            return found | dict(zip(there, order, strict=True))


def shifted(maps: Tensor, other: Tensor, draws: Draws) -> Tensor:
    """(3)."""
    s = styles(maps)
    half = len(maps) // 2
    new = clustered(s, draws[0])
    m, v = other
    for e in draws[1]:
        drawn = m + e * v
        new.append(torch.stack([drawn[0], torch.relu(drawn[1])]))
    assert len(new) == len(maps) and len(new) - half == len(draws[1])
    moved = [
        torch.stack([b[1, c] * (x[c] - a[0, c]) / a[1, c] + b[0, c] for c in range(len(x))])
        for x, a, b in zip(maps, s, new, strict=True)
    ]
    return torch.stack(moved)


def clustered(s: list[Tensor], numbers: Tensor) -> list[Tensor]:
    """k-means++ and one iteration. ``numbers`` [k, B] decide the seeds."""
    seeds: list[Tensor] = []
    for row in numbers:
        best, chosen = -1.0, 0
        for i, s_i in enumerate(s):
            rate = min((distance(s_i, seed) for seed in seeds), default=1.0)
            if rate / -math.log(row[i]) > best:
                best, chosen = rate / -math.log(row[i]), i
        seeds.append(s[chosen])
    members: list[list[Tensor]] = [[] for _ in seeds]
    for s_i in s if seeds else []:  # of one sample there is no half
        nearest = min(range(len(seeds)), key=lambda j: distance(s_i, seeds[j]))
        members[nearest].append(s_i)
    return [mean(own) for own in members]


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b) ** 2).sum().item()


# ---- the network ---------------------------------------------------------------------------------


def first_stage(θ: Model, x: Tensor) -> Tensor:
    """Of a clean pass."""
    maps = {}
    encode(θ, x, False, lambda stage, x: maps.setdefault(stage, x))
    return maps["stage1"]


def network(
    θ: Model,
    x: Tensor,
    pairs: list[int] | None,
    other: Tensor | None = None,
    p: float = 0.0,
    draws: Draws | None = None,
) -> Tensor:
    """Logits; in training, ``draws`` are given. Without ``pairs`` there is no highlighter."""
    maps = {}

    def between(stage: str, x: Tensor) -> Tensor:
        if stage == "stage1" and other is not None and draws is not None and draws[2] < p:
            x = shifted(x, other, draws)
        maps[stage] = x
        return x

    z = encode(θ, x, draws is not None, between)
    if pairs is not None:
        z = torch.cat([z, highlighted(θ, maps["stage2"], pairs)], 1)
    return linear(θ, "head", z)


def following(y: Tensor, i: int) -> int:
    for step in range(1, len(y)):
        j = (i + step) % len(y)
        if y[j] == y[i]:
            return j
    return i


def highlighted(θ: Model, maps: Tensor, pairs: list[int]) -> Tensor:
    """(4) and the second part of (5)."""
    weight, bias = θ["attention.weight"][:, :, 0, 0], θ["attention.bias"]
    x = maps.reshape(len(maps), maps.shape[1], -1).transpose(1, 2)  # [B, positions, C]
    both = x @ weight.T + bias
    q, k = both[:, :, :30], both[:, :, 30:]
    q = q / torch.sqrt((q**2).sum(2, keepdim=True))
    k = k / torch.sqrt((k**2).sum(2, keepdim=True))
    found = []
    for i, j in enumerate(pairs):
        scores = ((q[i] + q[j]) / 2) @ k[i].T  # [query, key]
        e = torch.exp(mean([*scores]))
        A = e / e.sum()
        found.append((A[:, None] * x[i]).sum(0))
    return torch.stack(found)


def accuracy(run: Run, θ: Model) -> dict[str, float]:
    """In percent."""
    found = {}
    for domain, (x, y) in run.tests.items():
        logits = network(θ, x, [*range(len(y))])
        found[domain] = round(100 * (logits.argmax(1) == y).double().mean().item(), 4)
    return found


DEFAULT: dict[str, Any] = {"p": 0.5, "highlighter": True}
ALWAYS: dict[str, Any] = {"p": 1.0, "highlighter": True}


def test_agrees() -> None:
    found = run("stablefdg", DEFAULT, epochs=1)
    states = [*stablefdg(found, **DEFAULT)]
    assert_agree(found, iter(states))
    assert found.accuracy == [accuracy(found, state["server"]["model"]) for state in states]


@pytest.mark.parametrize(
    ("options", "settings"),
    [({"p": 1.0, "highlighter": False}, SHORT), (DEFAULT, HALF)],
    ids=["w/o highlighter", "half"],
)
def test_agrees_in_other_forms(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("stablefdg", options, **settings)
    assert_agree(found, stablefdg(found, **options))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("told", lambda right: lambda s: right(s[1:])),
        ("partners", lambda right: lambda run, known, t: right(run, known, t + 1)),
        ("clustered", lambda right: lambda s, numbers: right(s, 1 - numbers)),
        ("styles", lambda right: lambda maps: right(maps * 1.001)),
        ("following", lambda right: lambda y, i: i),
        ("highlighted", lambda right: lambda θ, maps, pairs: 1.001 * right(θ, maps, pairs)),
    ],
)
def test_a_wrong_part_is_noticed(part: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), part, wrong(globals()[part]))
    found = run("stablefdg", ALWAYS, **SHORT)
    assert_differ(found, stablefdg(found, **ALWAYS))
