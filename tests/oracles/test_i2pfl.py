"""I²PFL, Le et al., arXiv 2501.08521: equations (2) to (10) and algorithm 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import MANY, SHORT, SOME, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import (
    SGD,
    Model,
    Rows,
    average,
    class_means,
    cluster_means,
    copy,
    cosine,
    cross_entropy,
    mean,
    network,
)

PUBLISHED: dict[str, Any] = {
    "tau": 0.07,
    "alpha": 0.4,
    "lambda_intra": 10.0,
    "lambda_inter": 1.0,
    "beta": 0.99,
    "ema": "as_written",
    "inter": "reweight",
    "mixup": "feature",
    "gamma_max": False,
    "apa_reduction": "mean",
    "detach": True,
    "proto_pass": "last_epoch",
}


def i2pfl(
    run: Run,
    tau: float,
    alpha: float,
    lambda_intra: float,
    lambda_inter: float,
    beta: float,
    ema: str,
    inter: str,
    mixup: str,
    gamma_max: bool,
    apa_reduction: str,
    detach: bool,
    proto_pass: str,
) -> Oracle:
    θ = run.initial
    G: Rows = [[] for _ in range(run.classes)]
    for t in range(run.rounds):
        models, p = {}, {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            step = 0
            for epoch in range(run.epochs):
                batches = run.epoch(m, t, epoch)
                γs = run.generator(t, m, 0, epoch, "draws").beta(alpha, alpha, len(batches))
                features = []
                for (x, y), γ in zip(batches, γs, strict=True):
                    γ = max(γ, 1 - γ) if gamma_max else γ
                    h, logits = network(θ_m, x, training=True)
                    u = run.uniform(m, t, step, 1, len(y), len(y))
                    loss = cross_entropy(logits, y)  # (10)
                    if lambda_intra:
                        h_mixed = mixed(θ_m, x, h, partners(y, u), γ, mixup)
                        if h_mixed:
                            p_mixed = prototypes_of(h_mixed, y, run.classes)
                            L_apa = apa(h, y, p_mixed, apa_reduction, detach)
                            loss = loss + lambda_intra * L_apa
                    if lambda_inter:
                        loss = loss + lambda_inter * gpcl(h, y, G, tau)
                    features.append(h)
                    sgd.step(θ_m, loss)
                    step += 1
            models[m] = θ_m
            if proto_pass == "last_epoch":
                p[m] = class_means(
                    torch.cat(features), torch.cat([y for _, y in batches]), run.classes
                )
            else:
                x, y = run.images(m)
                p[m] = class_means(network(θ_m, x, training=False)[0], y, run.classes)
        θ = average([*models.values()], [run.samples[m] for m in models])
        G = smoothed(joined([*p.values()], inter), G, beta, ema)
        beside = {"prototypes": G} if lambda_inter else {}
        sent = {m: {"prototypes": p[m]} if lambda_inter else {} for m in models}
        yield {
            "server": {"model": θ, **beside},
            "sent": {m: {"model": models[m], **sent[m]} for m in models},
            "kept": {},
        }


# ---- the server ----------------------------------------------------------------------------------


def joined(p: list[Rows], inter: str) -> Rows:
    """(3) and (4) over the owners of each class, or what table 5 puts in their place."""
    g: Rows = []
    for k in range(len(p[0])):
        owned = [p_m[k][0] for p_m in p if p_m[k]]
        if not owned:
            g.append([])
        elif inter == "average":
            g.append([mean(owned)])
        elif inter == "cluster":
            g.append([mean(cluster_means(owned, "last"))])
        else:
            g.append([reweighted(owned)])
    return g


def reweighted(owned: list[Tensor]) -> Tensor:
    μ = mean(owned)  # (3)
    d = [distance(p_m, μ) for p_m in owned]
    if sum(d) == 0:
        return μ
    g = torch.zeros_like(μ)
    for d_m, p_m in zip(d, owned, strict=True):  # (4)
        g = g + d_m / sum(d) * p_m
    return g


def distance(p_m: Tensor, μ: Tensor) -> float:
    return float(((p_m - μ) ** 2).sum())


def smoothed(g: Rows, G: Rows, β: float, ema: str) -> Rows:
    """(5), or β on the past as the text has it. A class that is absent keeps its prototype."""
    new: Rows = []
    for now, before in zip(g, G, strict=True):
        if not now or not before or ema == "off":
            new.append(now or before)
        elif ema == "as_written":
            new.append([β * now[0] + (1 - β) * before[0]])
        else:
            new.append([β * before[0] + (1 - β) * now[0]])
    return new


# ---- the client ----------------------------------------------------------------------------------


def gpcl(h: Tensor, y: Tensor, G: Rows, τ: float) -> Tensor:
    """(6)."""
    total = torch.zeros((), dtype=h.dtype)
    for h_i, k in zip(h, y, strict=True):
        if G[k]:
            every = torch.exp(cosine(h_i, torch.stack([g[0] for g in G if g])) / τ)
            total = total - torch.log(torch.exp(cosine(h_i, G[k][0]) / τ) / every.sum())
    return total / len(y)


def partners(y: Tensor, u: Tensor) -> list[int] | None:
    """For each sample one of another class: that with the largest random number."""
    if len(set(y.tolist())) == 1:
        return None
    others = [[j for j in range(len(y)) if y[j] != y_i] for y_i in y]
    return [max(js, key=lambda j: float(u[i, j])) for i, js in enumerate(others)]


def mixed(
    θ: Model, x: Tensor, h: Tensor, j: list[int] | None, γ: float, mixup: str
) -> list[Tensor]:
    """(7), or what table 6 puts in its place; nothing to mix where there is a single class."""
    if mixup == "none":
        return list(h)
    if j is None:
        return []
    if mixup == "feature":
        return [γ * h[i] + (1 - γ) * h[j[i]] for i in range(len(h))]
    images = torch.stack([γ * x[i] + (1 - γ) * x[j[i]] for i in range(len(x))])
    unmoved = dict(θ)  # the second pass leaves the running statistics alone
    return list(network(unmoved, images, training=True)[0])


def prototypes_of(h_mixed: list[Tensor], y: Tensor, classes: int) -> dict[int, Tensor]:
    """(8)."""
    own = [[h_i for h_i, k in zip(h_mixed, y, strict=True) if k == c] for c in range(classes)]
    return {k: mean(rows) for k, rows in enumerate(own) if rows}


def apa(h: Tensor, y: Tensor, p: dict[int, Tensor], reduction: str, detach: bool) -> Tensor:
    """(9), as printed over the classes' mean features, else over the samples."""
    total = torch.zeros((), dtype=h.dtype)
    if reduction == "class_means":
        for k, p_k in p.items():
            h_k = mean([h_i for h_i, y_i in zip(h, y, strict=True) if y_i == k])
            total = total + ((h_k - (p_k.detach() if detach else p_k)) ** 2).sum()
        return total
    for h_i, k in zip(h, y.tolist(), strict=True):
        square = (h_i - (p[k].detach() if detach else p[k])) ** 2
        total = total + (square.mean() if reduction == "mean" else square.sum())
    return total / len(y)


# ---- tests ---------------------------------------------------------------------------------------

PRINTED = {
    **PUBLISHED,
    "apa_reduction": "class_means",
    "detach": False,
    "proto_pass": "post",
}
WEAK = {"lambda_intra": 0.02}
"""Beside a sum over the dimensions: with 10, training diverges."""

ABLATIONS: dict[str, dict[str, Any]] = {
    "w/o APA, averaging, EMA as in the text": {
        "lambda_intra": 0.0,
        "inter": "average",
        "ema": "as_text",
        "tau": 0.02,
    },
    "w/o GPCL, MixUp of images": {"lambda_inter": 0.0, "mixup": "input", "gamma_max": True},
    "w/o EMA, clustering, w/o MixUp": {
        "ema": "off",
        "inter": "cluster",
        "mixup": "none",
        "detach": False,
        "lambda_intra": 1.0,
    },
}

ALONE: list[dict[str, Any]] = [
    {"tau": 0.02},
    {"alpha": 0.2},
    {"lambda_intra": 0.0},
    {"lambda_inter": 0.0},
    {"lambda_intra": 0.05, "lambda_inter": 0.5},
    {"beta": 0.5},
    {"ema": "as_text"},
    {"ema": "off"},
    {"inter": "average"},
    {"inter": "cluster"},
    {"mixup": "input"},
    {"mixup": "none"},
    {"gamma_max": True},
    {"apa_reduction": "sum", **WEAK},
    {"apa_reduction": "class_means", **WEAK},
    {"detach": False, "lambda_intra": 1.0},
    {"proto_pass": "post"},
]


def check(options: dict[str, Any], **settings: Any) -> None:
    found = run("i2pfl", options, **settings)
    assert_agree(found, i2pfl(found, **options))


@pytest.mark.parametrize(
    ("given", "switches"),
    [({}, PUBLISHED), ({"reading": "printed", **WEAK}, {**PRINTED, **WEAK})],
    ids=["published", "printed"],
)
@pytest.mark.parametrize("settings", [{}, SOME], ids=["all", "some"])
def test_agrees(given: dict[str, Any], switches: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("i2pfl", given, **settings)
    assert_agree(found, i2pfl(found, **switches))


@pytest.mark.parametrize("name", ABLATIONS)
def test_agrees_in_the_ablations(name: str) -> None:
    check({**PUBLISHED, **ABLATIONS[name]}, **SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("options", ALONE, ids=repr)
def test_agrees_with_each_switch_alone(options: dict[str, Any]) -> None:
    check({**PUBLISHED, **options})
    check({**PRINTED, **WEAK, **options}, **SOME)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tau": 0.075},
        {"alpha": 0.5},
        {"lambda_intra": 9.0},
        {"lambda_inter": 0.9},
        {"beta": 0.98},
        {"ema": "as_text"},
        {"ema": "off"},
        {"inter": "average"},
        {"inter": "cluster"},
        {"mixup": "input"},
        {"mixup": "none"},
        {"gamma_max": True},
        {"apa_reduction": "sum"},
        {"apa_reduction": "class_means"},
        {"detach": False},
        {"proto_pass": "post"},
    ],
    ids=repr,
)
def test_a_wrong_reading_is_noticed(wrong: dict[str, Any]) -> None:
    found = run("i2pfl", PUBLISHED, **SHORT)
    assert_differ(found, i2pfl(found, **{**PUBLISHED, **wrong}))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("distance", lambda right: lambda p_m, μ: right(p_m, μ) ** 0.5),
        ("gpcl", lambda right: lambda *given: -right(*given)),
        ("apa", lambda right: lambda *given: -right(*given)),
        ("partners", lambda right: lambda y, u: right(y, -u)),
        ("cosine", lambda right: lambda a, b: (a * b).sum(-1)),
    ],
)
def test_a_wrong_part_is_noticed(part: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), part, wrong(globals()[part]))
    found = run("i2pfl", PUBLISHED, **SHORT)
    assert_differ(found, i2pfl(found, **PUBLISHED))


def test_a_wrong_level_of_finch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**PUBLISHED, "inter": "cluster"}
    found = run("i2pfl", options, **MANY)
    assert_agree(found, i2pfl(found, **options))
    right = cluster_means
    monkeypatch.setitem(globals(), "cluster_means", lambda rows, _: right(rows, "first"))
    assert_differ(found, i2pfl(found, **options))
