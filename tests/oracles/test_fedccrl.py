"""FedCCRL, Wang et al. 2024: two copies of each image, in other clients' colors and by AugMix."""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from tests.oracles.package import SHORT, SOME, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, average, copy, cosine, cross_entropy, network

Style = tuple[Tensor, Tensor]


def fedccrl(
    run: Run,
    ratio: float,
    alpha: float,
    severity: float,
    chains: int,
    depth: int,
    tau: float,
    lambda1: float,
    lambda2: float,
) -> Oracle:
    θ = run.initial
    pool: dict[str, list[Style]] = {m: [] for m in run.clients}
    augmix = (severity, chains, depth)
    for t in range(run.rounds):
        models, sent, new = {}, {}, {}
        for m in run.participants[t]:
            θ_m, step = copy(θ), 0
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            others = [style for n in run.clients if n != m for style in pool[n]]
            for epoch in range(run.epochs):
                for x, y in run.epoch(m, t, epoch):
                    changed = copies(run, (m, t, step), x, others, alpha, *augmix)
                    z, logits = network(θ_m, x, training=True)
                    # buffers are replaced in θ_m, so those of a copy stay where they are
                    views = [network(dict(θ_m), part, training=True) for part in changed]
                    loss = sum(cross_entropy(own, y) for own in (logits, *(v[1] for v in views)))
                    features = sum(SC(torch.cat([v[0], z]), [*y, *y], tau) for v in views) / 2
                    predictions = JS([logits, *(v[1] for v in views)])
                    sgd.step(θ_m, loss + lambda1 * features + lambda2 * predictions)
                    step += 1
            x, _ = run.images(m)
            order = run.uniform(m, t, step - 1, 7, len(x)).argsort().tolist()
            styles = [style(x[i]) for i in order[: max(1, int(ratio * len(x)))]]
            models[m], new[m] = θ_m, styles
            pixels = torch.stack([torch.stack(s) for s in styles])
            sent[m] = {"model": θ_m, "styles": {"pixels": pixels}}
        pool |= new
        θ = average([*models.values()], [run.samples[m] for m in models])
        yield {"server": {"model": θ, "pool": table(run, pool)}, "sent": sent, "kept": {}}


def table(run: Run, pool: dict[str, list[Style]]) -> dict[str, Tensor]:
    """The pool as it is kept, with zeros where a client has fewer styles than another."""
    most = max(map(len, pool.values()))
    found = torch.zeros(len(pool), most, 2, 3, dtype=torch.float64)
    there = torch.zeros(len(pool), most)
    for row, styles in enumerate(pool.values()):
        for place, (μ, σ) in enumerate(styles):
            found[row, place, 0], found[row, place, 1] = μ, σ
            there[row, place] = 1
    return {"style": found, "there": there, "id": run.states[0]["server"]["pool"]["id"]}


def style(x: Tensor) -> Style:
    """The mean and deviation of each channel."""
    pixels = x.shape[1] * x.shape[2]
    μ = x.sum((1, 2)) / pixels
    variance = ((x - μ[:, None, None]) ** 2).sum((1, 2)) / (pixels - 1)
    return μ, torch.sqrt(variance + 1e-6)


def copies(
    run: Run, at: tuple[str, int, int], x: Tensor, others: list[Style], α: float, s: float, W: int,
    D: int,
) -> list[Tensor]:  # fmt: skip
    """(2) and (3)."""
    B = len(x)
    λ, j = run.beta(*at, 1, α, 2 * B), run.uniform(*at, 2, 2 * B)
    length, draws = run.uniform(*at, 3, W * 2 * B), run.uniform(*at, 4, D, 3, W * 2 * B)
    weights, shares = run.uniform(*at, 5, W, 2 * B), run.uniform(*at, 6, 2 * B)
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in
                 (run.setup.augment.mean, run.setup.augment.std))  # fmt: skip
    changed = []
    for i in range(2 * B):
        image = x[i % B]
        if others:
            (μ, σ), (μ_j, σ_j) = style(image), others[int(j[i] * len(others))]
            new_μ, new_σ = λ[i] * μ + (1 - λ[i]) * μ_j, λ[i] * σ + (1 - λ[i]) * σ_j
            image = (image - μ[:, None, None]) / σ[:, None, None]
            image = image * new_σ[:, None, None] + new_μ[:, None, None]
        image = torch.clamp(image * std + mean, 0, 1)
        mixed = torch.zeros_like(image)
        e = -torch.log(weights[:, i])
        for chain in range(W):
            at_chain = chain * 2 * B + i
            c = image
            for number in range(1 + int(length[at_chain] * D)):
                which, level, sign = draws[number, :, at_chain].tolist()
                level = 0.1 + (s - 0.1) * level
                c = OPERATIONS[int(which * 13)](c, level, math.copysign(level, sign - 0.5))
            mixed = mixed + e[chain] / e.sum() * c
        changed.append((shares[i] * image + (1 - shares[i]) * mixed - mean) / std)
    return [torch.stack(changed[:B]), torch.stack(changed[B:])]


def SC(z: Tensor, y: list[Tensor], τ: float) -> Tensor:
    """(5)."""
    total = torch.zeros((), dtype=z.dtype)
    for i in range(len(y)):
        s = cosine(z[i], z) / τ
        own = [s[j] for j in range(len(y)) if y[j] == y[i]]
        others = [torch.exp(s[j]) for j in range(len(y)) if j != i]
        total = total + torch.log(sum(others)) - sum(own) / len(own)
    return total / len(y)


def JS(logits: list[Tensor]) -> Tensor:
    """(4)."""
    p = [torch.exp(own) / torch.exp(own).sum(1, keepdim=True) for own in logits]
    M = sum(p) / len(p)
    return sum((p_v * torch.log(p_v / M)).sum() for p_v in p) / (len(p) * len(M))


# ---- AugMix's operations on an image with pixels in [0, 1] ---------------------------------------


def geometric(
    a: float, b: float, c: float, d: float, right: float, down: float, x: Tensor
) -> Tensor:
    """Each pixel from column a·u + b·v + right, row c·u + d·v + down, of [−1, 1]; bilinear."""
    _, H, W = x.shape
    u = ((2 * torch.arange(W).double() + 1) / W - 1).expand(H, W)
    v = ((2 * torch.arange(H).double() + 1) / H - 1)[:, None].expand(H, W)
    column = ((a * u + b * v + right + 1) * W - 1) / 2
    row = ((c * u + d * v + down + 1) * H - 1) / 2
    total = torch.zeros_like(x)
    for i in (torch.floor(row), torch.floor(row) + 1):
        for j in (torch.floor(column), torch.floor(column) + 1):
            weight = (1 - (row - i).abs()) * (1 - (column - j).abs())
            inside = (i >= 0) & (i < H) & (j >= 0) & (j < W)
            from_ = x[:, i.long().clamp(0, H - 1), j.long().clamp(0, W - 1)]
            total = total + weight * inside * from_
    return total


def rotate(x: Tensor, level: float, signed: float) -> Tensor:
    angle = math.radians(3 * signed)
    cos, sin = math.cos(angle), math.sin(angle)
    return geometric(cos, -sin, sin, cos, 0, 0, x)


def autocontrast(x: Tensor, level: float, signed: float) -> Tensor:
    return torch.stack([(c - c.min()) / (c.max() - c.min()) for c in x])


def by_pillow(change: Any) -> Any:
    def changed(x: Tensor, level: float, signed: float) -> Tensor:
        values = torch.floor(255 * x + 0.501).byte().permute(1, 2, 0).numpy()
        result = change(Image.fromarray(values), level)
        return torch.from_numpy(np.array(result)).permute(2, 0, 1).double() / 255

    return changed


def away(origin: Any) -> Any:
    """Brightness and the like: a factor on the distance to another image."""

    def changed(x: Tensor, level: float, signed: float) -> Tensor:
        other = origin(x)
        return torch.clamp(other + (1 + 0.09 * signed) * (x - other), 0, 1)

    return changed


def gray(x: Tensor) -> Tensor:
    return (0.299 * x[0] + 0.587 * x[1] + 0.114 * x[2]).expand(3, *x.shape[1:])


def smooth(x: Tensor) -> Tensor:
    result = x.clone()
    for i in range(1, x.shape[1] - 1):
        for j in range(1, x.shape[2] - 1):
            around = x[:, i - 1 : i + 2, j - 1 : j + 2].sum((1, 2))
            result[:, i, j] = (around + 4 * x[:, i, j]) / 13
    return result


OPERATIONS = (
    rotate,
    lambda x, level, signed: geometric(1, 0.03 * signed, 0, 1, 0, 0, x),
    lambda x, level, signed: geometric(1, 0, 0.03 * signed, 1, 0, 0, x),
    lambda x, level, signed: geometric(1, 0, 0, 1, 2 * signed / 30, 0, x),
    lambda x, level, signed: geometric(1, 0, 0, 1, 0, 2 * signed / 30, x),
    autocontrast,
    by_pillow(lambda image, level: ImageOps.equalize(image)),
    by_pillow(lambda image, level: ImageOps.posterize(image, 4 - int(0.4 * level))),
    lambda x, level, signed: torch.where(x >= 1 - level / 10, 1 - x, x),
    away(torch.zeros_like),
    away(lambda x: gray(x).mean()),
    away(gray),
    away(smooth),
)


DEFAULT: dict[str, Any] = {
    "ratio": 0.1, "alpha": 0.1, "severity": 3.0, "chains": 3, "depth": 3, "tau": 0.1,
    "lambda1": 0.1, "lambda2": 0.1,
}  # fmt: skip
OTHER = {
    "ratio": 0.4, "alpha": 2.0, "severity": 9.0, "chains": 1, "depth": 2, "tau": 0.5,
    "lambda1": 1.0, "lambda2": 2.0,
}  # fmt: skip

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": (DEFAULT, SHORT),
    "other, some": (OTHER, SOME),
}


@pytest.mark.parametrize(("options", "settings"), CASES.values(), ids=CASES)
def test_agrees(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("fedccrl", options, **settings)
    assert_agree(found, fedccrl(found, **options))


@pytest.mark.parametrize("name", DEFAULT)
def test_a_wrong_number_is_noticed(name: str) -> None:
    found = run("fedccrl", DEFAULT, **SHORT)
    assert_differ(found, fedccrl(found, **{**DEFAULT, name: OTHER[name]}))


def test_every_operation_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    met = set()

    def watched(number: int) -> Any:
        return lambda *args: met.add(number) or OPERATIONS[number](*args)  # type: ignore[func-returns-value]

    watching = {"OPERATIONS": tuple(map(watched, range(len(OPERATIONS))))}
    oracle = FunctionType(copies.__code__, {**globals(), **watching})
    monkeypatch.setitem(globals(), "copies", oracle)
    for _ in fedccrl(run("fedccrl", DEFAULT, **SHORT), **DEFAULT):
        if len(met) == len(OPERATIONS):
            return
    raise AssertionError(f"only {sorted(met)}")
