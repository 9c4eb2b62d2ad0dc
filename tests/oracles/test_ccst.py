"""CCST, Chen et al. 2023: images redrawn in all clients' styles by an encoder and a decoder."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.oracles.package import HALF, SHORT, Oracle, Run, assert_agree, assert_differ, run
from tests.oracles.plain import SGD, average, copy, cross_entropy, network, relu
from tests.some_methods import options_of

Style = tuple[Tensor, Tensor]
FILES = options_of("ccst")
Φ, Ψ = (load_file(FILES[part].removeprefix("file:")) for part in ("encoder", "decoder"))
# what comes before each convolution, besides a border: see net.py of the public release
BEFORE_Φ = {0: "", 2: "", 5: "", 9: "halve", 12: "", 16: "halve", 19: "", 22: "", 25: "",
            29: "halve"}  # fmt: skip
BEFORE_Ψ = {1: "", 5: "double", 8: "", 11: "", 14: "", 18: "double", 21: "", 25: "double", 28: ""}
OTHER = {"styles": "single", "single": 9, "variants": 2, "enlarge": 1}
DEFAULT = {"styles": "overall", "single": 16, "variants": 3, "enlarge": 2}


def ccst(run: Run, styles: str, single: int, variants: int, enlarge: int) -> Oracle:
    θ = run.initial
    N = single if styles == "single" else 1
    bank: dict[str, list[Style]] = {}
    for t in range(run.rounds):
        models, sent = {}, {}
        for m in run.participants[t]:
            θ_m, step = copy(θ), 0
            sgd = SGD(run.lr, run.momentum, run.weight_decay)
            for epoch in range(run.epochs * (variants if t else 1)):
                for x, y in run.epoch(m, t, epoch):
                    seen = redrawn(run, bank, m, t, step, x, N, enlarge) if t else x
                    logits = network(θ_m, seen, training=True)[1]
                    sgd.step(θ_m, cross_entropy(logits, y))
                    step += 1
            x, _ = run.images(m)
            maps = [encoded(image, enlarge) for image in pixels(run, x)]
            if styles == "single":
                order = run.uniform(m, t, step - 1, 3 if t else 1, len(x)).argsort().tolist()
                sent[m] = [style(maps[order[n % len(x)]]) for n in range(single)]
            else:
                everywhere = torch.cat([map_.flatten(1) for map_ in maps], 1)
                sent[m] = [style(everywhere, divide_by=everywhere.shape[1])]
            models[m] = θ_m
        bank |= sent
        θ = average([*models.values()], [1.0] * len(models))
        none = torch.zeros(N, 2, len(Φ["29.bias"]), dtype=torch.float64)
        tables = {m: torch.stack([torch.stack(s) for s in found]) for m, found in bank.items()}
        yield {
            "server": {
                "model": θ,
                "bank": {
                    "style": torch.stack([tables.get(m, none) for m in run.clients]),
                    "mask": torch.tensor([float(m in bank) for m in run.clients]),
                },
            },
            "sent": {m: {"model": models[m], "style": {"style": tables[m]}} for m in models},
            "kept": {},
        }


def pixels(run: Run, x: Tensor) -> Tensor:
    mean, std = (torch.tensor(v)[:, None, None] for v in look(run))
    return x * std + mean


def look(run: Run) -> tuple[Any, Any]:
    return run.setup.augment.mean, run.setup.augment.std


def redrawn(
    run: Run, bank: dict[str, list[Style]], m: str, t: int, step: int, x: Tensor, N: int, times: int
) -> Tensor:
    """(2): the style of the client with the largest number, of those there are and m itself."""
    M = len(run.clients)
    whose, which = run.uniform(m, t, step, 1, len(x), M), run.uniform(m, t, step, 2, len(x))
    there = [n for n, client in enumerate(run.clients) if client in bank or client == m]
    images = []
    for i, image in enumerate(x):
        j = run.clients[max(there, key=lambda n: whose[i, n].item())]
        if j == m:
            images.append(image)
            continue
        (old,) = pixels(run, image[None])
        new = decoded(adain(encoded(old, times), *bank[j][int(which[i] * N)]), image.shape[1])
        mean, std = (torch.tensor(v)[:, None, None] for v in look(run))
        images.append((new.clamp(0, 1) - mean) / std)
    return torch.stack(images)


def encoded(image: Tensor, times: int) -> Tensor:
    x = resized(image, times * image.shape[1])
    for place, before in BEFORE_Φ.items():
        x = halved(x) if before else x
        x = convolution(x, Φ, place)
        x = relu(x) if place else x
    return x


def decoded(x: Tensor, side: int) -> Tensor:
    for place, before in BEFORE_Ψ.items():
        if before:
            x = x[:, [r // 2 for r in range(2 * x.shape[1])]]
            x = x[:, :, [c // 2 for c in range(2 * x.shape[2])]]
        x = convolution(x, Ψ, place)
        x = relu(x) if place != 28 else x
    return resized(x, side)


def style(map_: Tensor, divide_by: int = 0) -> Style:
    """Of a map [C, ...]."""
    values = map_.flatten(1)
    μ = values.sum(1) / values.shape[1]
    variance = ((values - μ[:, None]) ** 2).sum(1) / (divide_by or values.shape[1] - 1)
    return μ, torch.sqrt(variance + 1e-5)


def adain(map_: Tensor, μ_new: Tensor, σ_new: Tensor) -> Tensor:
    rows = zip(map_, *style(map_), μ_new, σ_new, strict=True)
    return torch.stack([a * (x - μ) / σ + b for x, μ, σ, b, a in rows])


def convolution(x: Tensor, weights: dict[str, Tensor], place: int) -> Tensor:
    """Of an image whose border, if the kernel needs one, mirrors what lies inside."""
    weight, bias = (weights[f"{place}.{kind}"].double() for kind in ("weight", "bias"))
    if weight.shape[2] == 3:
        rows, columns = ([1, *range(n), n - 2] for n in x.shape[1:])
        x = x[:, rows][:, :, columns]
    windows = x.unfold(1, weight.shape[2], 1).unfold(2, weight.shape[3], 1)
    return torch.einsum("chwij,ocij->ohw", windows, weight) + bias[:, None, None]


def halved(x: Tensor) -> Tensor:
    """The largest of each 2 × 2 pixels."""
    return torch.stack([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]).max(0).values


def resized(x: Tensor, side: int) -> Tensor:
    """Each new pixel is a mean of old ones, with weights that fall linearly with distance."""
    old = x.shape[1]
    step = old / side
    reach = max(1.0, step)
    table = torch.zeros(side, old, dtype=torch.float64)
    for new in range(side):
        center = (new + 0.5) * step
        for i in range(old):
            table[new, i] = max(0.0, 1 - abs(i + 0.5 - center) / reach)
        table[new] /= table[new].sum()
    return torch.einsum("ai,bj,cij->cab", table, table, x)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "overall": (DEFAULT, SHORT),
    "single": (OTHER, SHORT),
    "some": ({**DEFAULT, "variants": 1}, HALF),
}


@pytest.mark.parametrize(("options", "settings"), CASES.values(), ids=CASES)
def test_agrees(options: dict[str, Any], settings: dict[str, Any]) -> None:
    found = run("ccst", FILES | options, **settings)
    states = [*ccst(found, **options)]
    assert_agree(found, iter(states))
    assert math.prod(states[0]["server"]["bank"]["mask"].tolist()) == (settings is SHORT)


@pytest.mark.parametrize("name", OTHER)
def test_a_wrong_number_is_noticed(name: str) -> None:
    options = {**DEFAULT, "styles": "single"}
    wrong = "overall" if name == "styles" else OTHER[name]
    found = run("ccst", FILES | options, **SHORT)
    assert_differ(found, ccst(found, **{**options, name: wrong}))
