"""FedSeProto, Lai et al., ECAI 2024: equations (3) and (10) to (16), algorithm 1, section 3.3.2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.package import SOME, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import (
    SGD,
    Model,
    Rows,
    average,
    class_means,
    copy,
    cross_entropy,
    encode,
    linear,
    mean,
    relu,
)

PUBLISHED: dict[str, Any] = {
    "alpha": 1.0,
    "beta": 1.0,
    "lam": 1.0,
    "decoder_step": 1.0,
    "first_phase": 0.2,
    "kd_sign": "corrected",
    "kl": "unit",
    "proto_reduction": "mean",
    "proto_pass": "post",
    "share": "auto",
}


def fedseproto(
    run: Run,
    alpha: float,
    beta: float,
    lam: float,
    decoder_step: float,
    first_phase: float,
    kd_sign: str,
    kl: str,
    proto_reduction: str,
    proto_pass: str,
    share: str,
) -> Oracle:
    travels = ("encoder.", "semantic.", "head.") if share != "prototypes" else ()
    w = {n: t for n, t in run.initial.items() if n.startswith(travels)}
    own = {
        n: {name: t for name, t in run.initials[n].items() if name not in w} for n in run.clients
    }
    c_g: Rows = [[] for _ in range(run.classes)]
    first = min(max(1, round(first_phase * run.epochs)), run.epochs - 1)
    for t in range(run.rounds):
        sent, c = {}, {}
        for n in run.participants[t]:
            w_n = copy({**own[n], **w})
            # phase 1: the basic model, H of F
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            train_only(w_n, ("encoder.", "head."))
            for epoch in range(first):
                for x, y in run.epoch(n, t, epoch, phase=0):
                    z = encode(w_n, x, training=True)
                    sgd.step(w_n, cross_entropy(linear(w_n, "head", z), y))
            # phase 2: all but H
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            train_only(w_n, ("encoder.", "semantic.", "domain.", "decoder."))
            for epoch in range(run.epochs - first):
                batches, features = run.epoch(n, t, epoch, phase=1), []
                for x, y in batches:
                    z = encode(w_n, x, training=True)
                    z_s, z_d = linear(w_n, "semantic", z), linear(w_n, "domain", z)
                    loss = cross_entropy(linear(w_n, "head", z_s), y)  # (14), (15)
                    if alpha:
                        loss = loss + alpha * kd(w_n, z, z_s, z_d, kd_sign)
                    if beta:
                        loss = loss + beta * mi(w_n, x, z_s, z_d, kl)
                    if beta and decoder_step != 1:  # the decoder alone gets more of it, or less
                        again = reconstruction(w_n, x, z_s.detach(), z_d.detach())
                        loss = loss + (decoder_step - 1) * beta * again
                    if lam:
                        loss = loss + lam * proto(z_s, y, c_g, proto_reduction)
                    features.append(z_s)
                    sgd.step(w_n, loss)
            if proto_pass == "last_epoch":
                z_s, y = torch.cat(features), torch.cat([y for _, y in batches])
            else:
                x, y = run.images(n)
                z_s = linear(w_n, "semantic", encode(w_n, x, training=False))
            c[n] = class_means(z_s, y, run.classes)  # (12)
            sent[n] = {name: w_n[name] for name in w}
            own[n] = {name: w_n[name] for name in own[n]}
        if w:
            w = average([*sent.values()], [run.samples[n] for n in sent])  # (16)
        c_g = joined([*c.values()])
        yield {
            "server": {"model": w, "prototypes": c_g},
            "sent": {n: {"model": sent[n], "prototypes": c[n]} for n in sent},
            "kept": {n: {"model": own[n]} for n in own},
        }


def train_only(w: Model, modules: tuple[str, ...]) -> None:
    """Let these modules train, and no others."""
    for name, t in copy(w).items():
        w[name] = t if name.startswith(modules) else t.detach()


def joined(c: list[Rows]) -> Rows:
    """(3), over the owners of each class."""
    owned = [[c_n[k][0] for c_n in c if c_n[k]] for k in range(len(c[0]))]
    return [[mean(rows)] if rows else [] for rows in owned]


def mi(w: Model, x: Tensor, z_s: Tensor, z_d: Tensor, kl: str) -> Tensor:
    """(10)."""
    return to_normal(z_s, kl) + to_normal(z_d, kl) + reconstruction(w, x, z_s, z_d)


def reconstruction(w: Model, x: Tensor, z_s: Tensor, z_d: Tensor) -> Tensor:
    """The error of G, as a mean over pixels and batch."""
    return ((x - decode(w, torch.cat([z_s, z_d], 1))) ** 2).mean()


def to_normal(z: Tensor, kl: str) -> Tensor:
    """KL to N(0, 1) of N(z, 1), or in each dimension of the batch's mean and variance."""
    if kl == "unit":
        return mean([(z_i**2).mean() / 2 for z_i in z])
    μ = mean(list(z))
    variance = mean([(z_i - μ) ** 2 for z_i in z]) + 1e-6
    return ((μ**2 + variance - torch.log(variance) - 1) / 2).mean()


def decode(w: Model, z: Tensor) -> Tensor:
    """G: a linear layer, then three transposed convolutions."""
    x = relu(linear(w, "decoder.0", z))
    side = round((x.shape[1] / 128) ** 0.5)
    x = x.reshape(len(x), 128, side, side)
    x = relu(doubled(w, "decoder.3", x))
    x = relu(doubled(w, "decoder.5", x))
    return doubled(w, "decoder.7", x)


def doubled(w: Model, name: str, x: Tensor) -> Tensor:
    """A transposed convolution: every pixel paints 4 × 4 pixels, 2 apart; 1 is cut off around."""
    weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
    images, _, height, width = x.shape
    painted = torch.einsum("bchw,coij->ijbohw", x, weight)
    canvas = x.new_zeros(images, weight.shape[1], 2 * height + 2, 2 * width + 2)
    for i in range(4):
        for j in range(4):
            canvas[:, :, i : i + 2 * height : 2, j : j + 2 * width : 2] += painted[i, j]
    return canvas[:, :, 1:-1, 1:-1] + bias[:, None, None]


def kd(w: Model, z: Tensor, z_s: Tensor, z_d: Tensor, sign: str) -> Tensor:
    """(11); corrected, s_1 and s_2 change places."""
    total = torch.zeros((), dtype=z.dtype)
    every = [linear(w, "head", features) for features in (z.detach(), z_s, z_d)]
    for from_z, from_z_s, from_z_d in zip(*every, strict=True):
        s_1 = divergence(softmax(from_z), softmax(from_z_s))
        s_2 = divergence(softmax(from_z), softmax(from_z_d))
        own = torch.exp(s_1 if sign == "printed" else s_2)
        total = total - torch.log(own / (torch.exp(s_1) + torch.exp(s_2)))
    return total / len(z)


def softmax(logits: Tensor) -> Tensor:
    return torch.exp(logits) / torch.exp(logits).sum()


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q)."""
    return (p * torch.log(p / q)).sum()


def proto(z_s: Tensor, y: Tensor, c_g: Rows, reduction: str) -> Tensor:
    """(13), over the batch's classes that have a global prototype."""
    per_class = []
    for k in range(len(c_g)):
        own = [z_i for z_i, y_i in zip(z_s, y, strict=True) if y_i == k]
        if own and c_g[k]:
            squares = [(z_i - c_g[k][0]) ** 2 for z_i in own]
            per_class.append(mean([s.mean() if reduction == "mean" else s.sum() for s in squares]))
    return mean(per_class) if per_class else torch.zeros((), dtype=z_s.dtype)


# ---- tests ---------------------------------------------------------------------------------------

PRINTED = {**PUBLISHED, "kd_sign": "printed", "proto_reduction": "sum"}
WEAK = {"lam": 0.01}
"""Beside a sum over the dimensions."""

ALONE: list[dict[str, Any]] = [
    {"alpha": 0.0},
    {"alpha": 0.0, "beta": 0.0, "lam": 0.0},
    {"alpha": 0.5, "beta": 0.1, "lam": 0.1},
    {"beta": 0.0},
    {"lam": 0.0},
    {"decoder_step": 100.0},
    {"kd_sign": "printed"},
    {"kl": "moments"},
    {"proto_reduction": "sum", **WEAK},
    {"proto_pass": "last_epoch"},
    {"share": "model"},
    {"share": "prototypes"},
]

STRONG = {**PUBLISHED, "beta": 1.0}
"""Little is noticed of an L_MI that counts a hundredth."""
SHORT = {"rounds": 2, "batch": 14}
"""A step for each phase: the decoder is the most expensive of all networks here."""


def check(options: dict[str, Any], **settings: Any) -> None:
    found = run("fedseproto", options, **settings)
    assert_agree(found, fedseproto(found, **options))


def test_agrees() -> None:
    found = run("fedseproto", {})
    assert_agree(found, fedseproto(found, **PUBLISHED))


def test_agrees_as_printed_where_some_are_missing() -> None:
    found = run("fedseproto", {"reading": "printed", **WEAK}, **{**SOME, "epochs": 2})
    assert_agree(found, fedseproto(found, **{**PRINTED, **WEAK}))


def test_agrees_with_different_models() -> None:
    options = {**PUBLISHED, "share": "prototypes"}
    check(options, **SHORT, model="cnn3,cnn2")


@pytest.mark.slow
@pytest.mark.parametrize("options", ALONE, ids=repr)
def test_agrees_with_each_switch_alone(options: dict[str, Any]) -> None:
    check({**PUBLISHED, **options})
    check({**PRINTED, **WEAK, **options})


@pytest.mark.slow
def test_agrees_with_other_phases() -> None:
    check({**PUBLISHED, "first_phase": 0.6}, epochs=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 0.9},
        {"beta": 1.1},
        {"lam": 0.9},
        {"decoder_step": 1.1},
        {"kd_sign": "printed"},
        {"kl": "moments"},
        {"proto_reduction": "sum"},
        {"proto_pass": "last_epoch"},
        {"share": "prototypes"},
    ],
    ids=repr,
)
def test_a_wrong_reading_is_noticed(wrong: dict[str, Any]) -> None:
    found = run("fedseproto", STRONG, **SHORT)
    assert_differ(found, fedseproto(found, **{**STRONG, **wrong}))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("divergence", lambda right: lambda p, q: right(q, p)),
        ("kd", lambda right: lambda *given: -right(*given)),
        ("mi", lambda right: lambda w, x, z_s, z_d, kl: right(w, x, z_d, z_s, kl)),
        ("proto", lambda right: lambda *given: -right(*given)),
        ("train_only", lambda right: lambda w, modules: right(w, (*modules, "head."))),
        ("average", lambda right: lambda models, weights: right(models, [1.0] * len(models))),
    ],
)
def test_a_wrong_part_is_noticed(part: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), part, wrong(globals()[part]))
    found = run("fedseproto", STRONG, **SHORT)
    assert_differ(found, fedseproto(found, **STRONG))
