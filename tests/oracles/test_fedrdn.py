"""FedRDN, Yan et al. 2025: images normalized with a random client's statistics of their colors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import HALF, SHORT, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, Model, average, copy, cross_entropy, network

Statistics = tuple[Tensor, Tensor]
NEUTRAL = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)


def fedrdn(run: Run, draw: str) -> Oracle:
    θ = {n: t for n, t in run.initial.items() if n != "statistics"}
    known: dict[str, Statistics] = {}
    for t in range(run.rounds):
        models = {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            batches = [b for epoch in range(run.epochs) for b in run.epoch(m, t, epoch)]
            for step, (x, y) in enumerate(batches):
                seen = torch.stack(
                    [
                        normalized(x_i, *chosen(run, known, draw, m, t, step, i, len(x)))
                        for i, x_i in enumerate(x)
                    ]
                )
                sgd.step(θ_m, cross_entropy(network(θ_m, seen, training=True)[1], y))
            models[m] = θ_m
        θ = average([*models.values()], [run.samples[m] for m in models])
        sent = {m: statistics(run.images(m)[0]) for m in models}
        known |= sent
        slots = {m: torch.stack(known.get(m, NEUTRAL)) for m in run.clients}
        yield {
            "server": {
                "model": {**θ, "statistics": torch.stack(at_test(known))},
                "statistics": {
                    "style": torch.stack([*slots.values()]),
                    "mask": torch.tensor([float(m in known) for m in run.clients]),
                },
            },
            "sent": {
                m: {"model": models[m], "statistics": {"style": torch.stack(sent[m])}} for m in sent
            },
            "kept": {},
        }


def statistics(images: Tensor) -> Statistics:
    """(1)."""
    μ, σ = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for image in images:
        for color, pixels in enumerate(image):
            mean = pixels.sum() / pixels.numel()
            variance = ((pixels - mean) ** 2).sum() / (pixels.numel() - 1)
            μ[color] += mean / len(images)
            σ[color] += torch.sqrt(variance + 1e-6) / len(images)
    return μ, σ


def chosen(
    run: Run, known: dict[str, Statistics], draw: str, m: str, t: int, step: int, i: int, B: int
) -> Statistics:
    """(2): of the largest of a number for each client that has statistics."""
    if not known:
        return NEUTRAL
    M = len(run.clients)
    if draw == "image":
        numbers = run.uniform(m, t, step, 1, B, 1, M)[i, 0]
        return known[largest(run, known, numbers)]
    numbers = run.uniform(m, t, step, 1, 1, 2, M)[0]
    of_mean, of_deviation = (largest(run, known, row) for row in numbers)
    return known[of_mean][0], known[of_deviation][1]


def largest(run: Run, known: dict[str, Statistics], numbers: Tensor) -> str:
    return max(known, key=lambda j: numbers[run.clients.index(j)].item())


def normalized(image: Tensor, μ: Tensor, σ: Tensor) -> Tensor:
    return torch.stack([(image[c] - μ[c]) / σ[c] for c in range(3)])


def at_test(known: dict[str, Statistics]) -> Statistics:
    """(3)."""
    μ, σ = (sum(values) / len(known) for values in zip(*known.values(), strict=True))
    return μ, σ


def accuracy(run: Run, θ: Model) -> dict[str, float]:
    """In percent."""
    found = {}
    for domain, (x, y) in run.tests.items():
        seen = torch.stack([normalized(x_i, *θ["statistics"]) for x_i in x])
        _, logits = network(θ, seen, training=False)
        found[domain] = round(100 * (logits.argmax(1) == y).double().mean().item(), 4)
    return found


@pytest.mark.parametrize("draw", ["image", "batch"])
def test_agrees(draw: str) -> None:
    found = run("fedrdn", {"draw": draw})
    states = [*fedrdn(found, draw)]
    assert_agree(found, iter(states))
    assert found.accuracy == [accuracy(found, state["server"]["model"]) for state in states]


def test_a_client_that_sits_out_keeps_its_place() -> None:
    found = run("fedrdn", {}, **HALF)
    assert {*found.participants[0]} != {*found.clients}
    assert_agree(found, fedrdn(found, "image"))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("statistics", lambda right: lambda x: right(x[:-1])),
        ("normalized", lambda right: lambda x, μ, σ: right(x, μ, σ**2)),
        ("largest", lambda right: lambda run, known, numbers: right(run, known, -numbers)),
        ("at_test", lambda right: lambda known: next(iter(known.values()))),
    ],
)
def test_a_wrong_part_is_noticed(part: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), part, wrong(globals()[part]))
    found = run("fedrdn", {"draw": "image"}, **SHORT)
    assert_differ(found, fedrdn(found, "image"))


def test_the_two_ways_to_draw_differ() -> None:
    found = run("fedrdn", {"draw": "image"}, **SHORT)
    assert_differ(found, fedrdn(found, "batch"))
