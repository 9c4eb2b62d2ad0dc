"""FPL, Huang et al. 2023: algorithm 1 and its equations (2) to (12), with every switch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import (
    MANY,
    SHORT,
    SOME,
    TRAINED,
    Oracle,
    Run,
    assert_agree,
    assert_differ,
    run,
)
from tests.oracles.plain import (
    Rows,
    average,
    class_means,
    cluster_means,
    copy,
    cosine,
    cross_entropy,
    mean,
    network,
    optimizer,
)


def fpl(
    run: Run,
    tau: float,
    cpcl: float,
    upcr: float,
    cpcl_prototypes: str,
    upcr_prototypes: str,
    finch_level: str,
    upcr_reduction: str,
    proto_pass: str,
) -> Oracle:
    θ = run.initial
    P: Rows = [[] for _ in range(run.classes)]
    G: Rows = [[] for _ in range(run.classes)]
    U: Rows = [[] for _ in range(run.classes)]
    for t in range(run.rounds):
        models, c = {}, {}
        for m in run.participants[t]:
            θ_m = copy(θ)
            local = optimizer(run, t)
            for epoch in range(run.epochs):
                features, labels = [], []
                for x, y in run.epoch(m, t, epoch):
                    z, logits = network(θ_m, x, training=True)
                    loss = cross_entropy(logits, y, run.label_smoothing)  # (11)
                    for z_i, k in zip(z, y.tolist(), strict=True):  # (12)
                        contrasted = P if cpcl_prototypes == "cluster" else G
                        target = U if upcr_prototypes == "unbiased" else G
                        loss = loss + cpcl * L_CPCL(z_i, k, contrasted, tau) / len(y)
                        loss = loss + upcr * L_UPCR(z_i, k, target, upcr_reduction) / len(y)
                    local.step(θ_m, loss)
                    features.append(z)
                    labels.append(y)
            if proto_pass == "last_epoch":
                z, y = torch.cat(features), torch.cat(labels)
            else:
                x, y = run.images(m)
                z, _ = network(θ_m, x, training=False)
            models[m], c[m] = θ_m, class_means(z, y, run.classes)  # (2)
        θ = average([*models.values()], [run.samples[m] for m in models])
        for k in range(run.classes):
            sent = [vector for m in models for vector in c[m][k]]
            G[k] = [mean(sent)] if sent else []  # (3)
            P[k] = cluster_means(sent, finch_level)  # (4), (5)
            U[k] = [mean(P[k])] if P[k] else []  # (6)
        clusters = (cpcl and cpcl_prototypes == "cluster") or (
            upcr and upcr_prototypes == "unbiased"
        )
        means = (cpcl and cpcl_prototypes == "global") or (upcr and upcr_prototypes == "global")
        yield {
            "server": {"model": θ, "cluster": P if clusters else [], "global": G if means else []},
            "sent": {m: {"model": models[m], "prototypes": c[m]} for m in models},
            "kept": {},
        }


def L_CPCL(z: Tensor, k: int, P: Rows, τ: float) -> Tensor | float:
    """(8), with the s of (7) as the code has it: the cosine divided by τ."""
    if not P[k]:
        return 0.0
    s = torch.exp(cosine(z, torch.stack([c for P_j in P for c in P_j])) / τ)
    own = torch.tensor([j == k for j, P_j in enumerate(P) for _ in P_j])
    return -torch.log(s[own].sum() / (s[own].sum() + s[~own].sum()))


def L_UPCR(z: Tensor, k: int, U: Rows, reduction: str) -> Tensor | float:
    """(10); the code divides by d."""
    if not U[k]:
        return 0.0
    squares = ((z - U[k][0]) ** 2).sum()
    return squares if reduction == "sum" else squares / len(z)


PUBLISHED: dict[str, Any] = {
    "tau": 0.02,
    "cpcl": 1.0,
    "upcr": 1.0,
    "cpcl_prototypes": "cluster",
    "upcr_prototypes": "unbiased",
    "finch_level": "last",
    "upcr_reduction": "mean",
    "proto_pass": "last_epoch",
}
PRINTED = {**PUBLISHED, "finch_level": "first", "upcr_reduction": "sum", "proto_pass": "post"}


def check(options: dict[str, Any], **settings: Any) -> None:
    found = run("fpl", options, **settings)
    assert_agree(found, fpl(found, **options))


CASES = {
    "published": (PUBLISHED, {}),
    "published, many clients": (PUBLISHED, MANY),
    "printed": (PRINTED, {}),
    "printed, many clients": (PRINTED, MANY),
    "published, classes without owners": (PUBLISHED, SOME),
    **{
        f"published, {name} and options": (
            PUBLISHED,
            {**SHORT, **TRAINED[name], "warmup_rounds": 1},
        )
        for name in TRAINED
    },
}


@pytest.mark.parametrize(("options", "settings"), CASES.values(), ids=CASES)
def test_agrees(options: dict[str, Any], settings: dict[str, Any]) -> None:
    check(options, **settings)


def test_in_some_round_nobody_has_a_certain_class() -> None:
    rounds = run("fpl", PUBLISHED, **SOME).states
    assert any(not mask.any() for mask in rounds[1]["server"]["cluster"]["mask"])


ABLATIONS = {
    "CPCL alone": {"upcr": 0.0},
    "CPCL against G": {"upcr": 0.0, "cpcl_prototypes": "global"},
    "UPCR alone": {"cpcl": 0.0},
    "UPCR toward G": {"cpcl": 0.0, "upcr_prototypes": "global"},
    "neither": {"cpcl": 0.0, "upcr": 0.0},
    "both against G": {"cpcl_prototypes": "global", "upcr_prototypes": "global"},
    "other weights": {"cpcl": 0.5, "upcr": 3.0, "tau": 0.1},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_agrees_in_the_ablations(name: str) -> None:
    check({**PUBLISHED, **ABLATIONS[name]}, **SHORT)


SWITCHES = {
    "cpcl_prototypes": ("cluster", "global"),
    "upcr_prototypes": ("unbiased", "global"),
    "finch_level": ("last", "first"),
    "upcr_reduction": ("mean", "sum"),
    "proto_pass": ("last_epoch", "post"),
}


@pytest.mark.slow
@pytest.mark.parametrize("switches", [*itertools.product(*SWITCHES.values())], ids="-".join)
def test_agrees_with_all_switches(switches: tuple[str, ...]) -> None:
    options = {**PUBLISHED, **dict(zip(SWITCHES, switches, strict=True))}
    check(options)
    check(options, **{**MANY, "rounds": 3})


WRONG = {
    "tau": 0.03,
    "cpcl": -1.0,
    "upcr": -1.0,
    "cpcl_prototypes": "global",
    "upcr_prototypes": "global",
    "finch_level": "first",
    "upcr_reduction": "sum",
    "proto_pass": "post",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_switch_is_noticed(name: str) -> None:
    found = run("fpl", PUBLISHED, **(MANY if name == "finch_level" else SHORT))
    assert_differ(found, fpl(found, **{**PUBLISHED, name: WRONG[name]}))


@pytest.mark.parametrize("name", ["finch_level", "upcr_reduction", "proto_pass"])
def test_the_published_switch_is_not_the_printed_one(name: str) -> None:
    found = run("fpl", PRINTED, **MANY)
    assert_differ(found, fpl(found, **{**PRINTED, name: PUBLISHED[name]}))
