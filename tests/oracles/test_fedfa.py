"""FedFA, Zhou and Konukoglu 2023: noise on styles, guided by how the clients differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import HALF, SHORT, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, Model, average, copy, cross_entropy, network, restyled, style


def fedfa(run: Run, p: float, stages: str, server_var: str) -> Oracle:
    θ = run.initial
    S = {stage: torch.ones_like(θ[f"running.{stage}"]) for stage in stages.split(",")}
    for t in range(run.rounds):
        models: dict[str, Model] = {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            batches = [b for epoch in range(run.epochs) for b in run.epoch(m, t, epoch)]
            for step, (x, y) in enumerate(batches):
                between = Between(run, (m, t, step), θ_m, S, p)
                _, logits = network(θ_m, x, training=True, between=between)
                sgd.step(θ_m, cross_entropy(logits, y))
            models[m] = θ_m
        θ = average([*models.values()], [1.0 for _ in models])
        if len(models) > 1:
            S = {s: spread([θ_m[f"running.{s}"] for θ_m in models.values()], server_var) for s in S}
        yield {
            "server": {"model": θ, "variance": S},
            "sent": {m: {"model": models[m]} for m in models},
            "kept": {},
        }


class Between:
    """What happens at each stage of a step; the client's running styles move."""

    def __init__(self, run: Run, at: Any, θ: Model, S: Model, p: float) -> None:
        self.run, self.at, self.θ, self.S, self.p = run, at, θ, S, p
        self.draws = 0

    def __call__(self, stage: str, x: Tensor) -> Tensor:
        if stage not in self.S or len(x) == 1:
            return x
        self.draws += 2
        if float(self.run.uniform(*self.at, self.draws - 1, 1)) >= self.p:
            return x
        ε = self.run.normal(*self.at, self.draws, len(x), 2, x.shape[1])
        styles = [torch.stack(style(x_i)) for x_i in x]
        name = f"running.{stage}"
        self.θ[name] = moved(self.θ[name].detach(), styles)
        return noised(x, styles, self.S[stage], ε)


def moved(running: Tensor, styles: list[Tensor]) -> Tensor:
    return 0.99 * running + 0.01 * (sum(styles) / len(styles)).detach()


def noised(x: Tensor, styles: list[Tensor], S: Tensor, ε: Tensor) -> Tensor:
    width = torch.sqrt((weight(S) + 1) * (variance(styles) + 1e-6))
    new = [s + ε_i * width for s, ε_i in zip(styles, ε, strict=True)]
    return torch.stack([restyled(x_i, *s, *n) for x_i, s, n in zip(x, styles, new, strict=True)])


def weight(S: Tensor) -> Tensor:
    """γ of means and of deviations."""
    rows = []
    for S_row in S:
        g = [1 / (1 + 1 / (float(s) + 1e-6)) for s in S_row]
        rows.append([len(g) * g_c / sum(g) for g_c in g])
    return torch.tensor(rows, dtype=S.dtype)


def variance(rows: list[Tensor]) -> Tensor:
    mean = sum(rows) / len(rows)
    return sum((row - mean) ** 2 for row in rows) / (len(rows) - 1)  # type: ignore[return-value]


def spread(running: list[Tensor], server_var: str) -> Tensor:
    """S: of each channel, or of all numbers of all clients, as released."""
    if server_var == "per_channel":
        return variance(running)
    found = []
    for row in range(2):  # means, deviations
        numbers = [value for r in running for value in r[row]]
        found.append(variance(numbers).expand(running[0].shape[1]))
    return torch.stack(found)


DEFAULT: dict[str, Any] = {"p": 0.5, "stages": "stage1,stage2", "server_var": "per_channel"}
STRONG: dict[str, Any] = {"p": 0.9, "stages": "pixels,stage1", "server_var": "per_channel"}


def test_agrees() -> None:
    found = run("fedfa", {}, **SHORT)
    assert_agree(found, fedfa(found, **DEFAULT))


@pytest.mark.parametrize("server_var", ["per_channel", "scalar"])
def test_agrees_with_half_of_the_clients(server_var: str) -> None:
    options = {**STRONG, "server_var": server_var}
    found = run("fedfa", options, **HALF)
    assert_agree(found, fedfa(found, **options))


@pytest.mark.parametrize("wrong", [{"p": 0.3}, {"server_var": "scalar"}], ids=repr)
def test_a_wrong_option_is_noticed(wrong: dict[str, Any]) -> None:
    found = run("fedfa", STRONG, **SHORT)
    assert_differ(found, fedfa(found, **{**STRONG, **wrong}))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("moved", lambda right: lambda running, styles: right(0.99 * running, styles)),
        ("weight", lambda right: lambda S: right(1 / S)),
        ("variance", lambda right: lambda rows: right(rows).detach()),
    ],
)
def test_a_wrong_part_is_noticed(part: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), part, wrong(globals()[part]))
    found = run("fedfa", STRONG, **SHORT)
    assert_differ(found, fedfa(found, **STRONG))
