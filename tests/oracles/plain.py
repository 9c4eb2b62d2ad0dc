"""Arithmetic for the oracles, written to be obviously right; it uses nothing of the package.

A model θ is a dict of named tensors, as the package's ``cnn2`` and ``cnn3`` name them: parameters,
which require a gradient, and BatchNorm's buffers, which do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Model = dict[str, Tensor]
Rows = list[list[Tensor]]
"""For each class its prototypes: none, one or several vectors [d]."""

Between = Callable[[str, Tensor], Tensor]
"""From a stage's name and its maps [B, C, H, W] to those that the next layer gets."""

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


# ---- the network ---------------------------------------------------------------------------------


def copy(θ: Model) -> Model:
    """A model of its own to train."""
    return {
        name: t.detach().clone().requires_grad_(not name.endswith(BUFFERS)) for name, t in θ.items()
    }


def network(
    θ: Model, x: Tensor, training: bool, between: Between | None = None
) -> tuple[Tensor, Tensor]:
    """Features [B, d] and logits [B, K]: convolutions with BatchNorm and pooling, two layers.

    In training BatchNorm normalizes by the batch and moves the buffers in θ, otherwise it
    normalizes by them. Images and the maps after each convolution go through ``between``.
    """
    z = encode(θ, x, training, between)
    return z, linear(θ, "head", z)


def encode(θ: Model, x: Tensor, training: bool, between: Between | None = None) -> Tensor:
    between = between or (lambda stage, x: x)
    x = between("pixels", x)
    layer = 0
    while f"encoder.{layer}.weight" in θ:  # after them comes a layer without weights
        x = convolution(x, θ[f"encoder.{layer}.weight"])
        x = batch_norm(θ, f"encoder.{layer + 1}", x, training)
        x = between(f"stage{layer // 4 + 1}", relu(max_pool(x)))
        layer += 4
    x = x.reshape(len(x), -1)
    return relu(linear(θ, f"encoder.{layer + 1}", x))


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """3 × 3, with a border of zeros one pixel wide."""
    images, channels, height, width = x.shape
    bordered = x.new_zeros(images, channels, height + 2, width + 2)
    bordered[:, :, 1:-1, 1:-1] = x
    windows = bordered.unfold(2, 3, 1).unfold(3, 3, 1)  # [B, C, H, W, 3, 3]
    return torch.einsum("bchwij,ocij->bohw", windows, weight)


def batch_norm(θ: Model, name: str, x: Tensor, training: bool) -> Tensor:
    if training:
        mean = x.mean((0, 2, 3))
        variance = ((x - mean[:, None, None]) ** 2).mean((0, 2, 3))
        values = x.numel() / x.shape[1]
        unbiased = variance * values / (values - 1)
        for buffer, new in (("running_mean", mean), ("running_var", unbiased)):
            θ[f"{name}.{buffer}"] = 0.9 * θ[f"{name}.{buffer}"] + 0.1 * new.detach()
        θ[f"{name}.num_batches_tracked"] = θ[f"{name}.num_batches_tracked"] + 1
    else:
        mean, variance = θ[f"{name}.running_mean"], θ[f"{name}.running_var"]
    normal = (x - mean[:, None, None]) / torch.sqrt(variance[:, None, None] + 1e-5)
    return normal * θ[f"{name}.weight"][:, None, None] + θ[f"{name}.bias"][:, None, None]


def max_pool(x: Tensor) -> Tensor:
    """The largest of each 2 × 2 pixels."""
    corners = [x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]
    return torch.stack(corners).max(0).values


def relu(x: Tensor) -> Tensor:
    return x * (x > 0)


def style(x_i: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each channel of a map [C, H, W], and the root of its variance."""
    means, deviations = [], []
    for channel in x_i:
        n = channel.numel()
        μ = channel.sum() / n
        means.append(μ)
        deviations.append(torch.sqrt(((channel - μ) ** 2).sum() / (n - 1) + 1e-6))
    return torch.stack(means), torch.stack(deviations)


def restyled(x_i: Tensor, μ: Tensor, σ: Tensor, μ_new: Tensor, σ_new: Tensor) -> Tensor:
    channels = zip(x_i, μ, σ, μ_new, σ_new, strict=True)
    return torch.stack([a * (x - m) / s + b for x, m, s, b, a in channels])


def linear(θ: Model, name: str, x: Tensor) -> Tensor:
    return x @ θ[f"{name}.weight"].T + θ[f"{name}.bias"]


# ---- training ------------------------------------------------------------------------------------


class SGD:
    """g ← ∇L + λθ;  v ← ρv + g;  θ ← θ − ηv.  An entry that L does not depend on stays.

    A ∇L that is longer than ``clip`` is cut to that length.
    """

    def __init__(
        self, lr: float, momentum: float, weight_decay: float, clip: float = math.inf
    ) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.clip = clip
        self.velocity: dict[str, Tensor] = {}

    def step(self, θ: Model, loss: Tensor) -> None:
        for name, gradient in gradients(θ, loss, self.clip).items():
            old = θ[name].detach()
            g = gradient + self.weight_decay * old
            v = self.momentum * self.velocity[name] + g if name in self.velocity else g
            self.velocity[name] = v
            θ[name] = (old - self.lr * v).requires_grad_()


def gradients(θ: Model, loss: Tensor, clip: float) -> Model:
    """∇L of the entries that L depends on, cut to the length ``clip``."""
    names = [name for name, t in θ.items() if t.requires_grad]
    found = torch.autograd.grad(loss, [θ[n] for n in names], allow_unused=True)
    there = {n: g for n, g in zip(names, found, strict=True) if g is not None}
    length = torch.sqrt(sum((g**2).sum() for g in there.values()))
    cut = min(1.0, clip / (length + 1e-6))  # 1e-6: as in PyTorch
    return {n: cut * g for n, g in there.items()}


class Adam:
    """g ← ∇L + λθ;  m, v ← running means of g, g²;  θ ← θ − η m̂/(√v̂ + 1e-8), without bias.

    AdamW (``decoupled``): g ← ∇L, and θ ← (1 − ηλ)θ before the step.
    """

    def __init__(
        self, lr: float, weight_decay: float, clip: float = math.inf, decoupled: bool = False
    ) -> None:
        self.lr, self.weight_decay, self.clip, self.decoupled = lr, weight_decay, clip, decoupled
        self.steps = 0
        self.m: dict[str, Tensor] = {}
        self.v: dict[str, Tensor] = {}

    def step(self, θ: Model, loss: Tensor) -> None:
        self.steps += 1
        for name, gradient in gradients(θ, loss, self.clip).items():
            old = θ[name].detach()
            g = gradient
            if self.decoupled:
                old = (1 - self.lr * self.weight_decay) * old
            else:
                g = g + self.weight_decay * old
            none = torch.zeros_like(g)
            self.m[name] = 0.9 * self.m.get(name, none) + 0.1 * g
            self.v[name] = 0.999 * self.v.get(name, none) + 0.001 * g**2
            m = self.m[name] / (1 - 0.9**self.steps)
            v = self.v[name] / (1 - 0.999**self.steps)
            θ[name] = (old - self.lr * m / (torch.sqrt(v) + 1e-8)).requires_grad_()


def optimizer(run: Any, t: int, momentum: float | None = None) -> SGD | Adam:
    """A client's optimizer in round t, by the run's settings; the momentum may be the method's."""
    lr, clip = learning_rate(run, t), run.clip_norm or math.inf
    if run.optimizer == "sgd":
        return SGD(lr, run.momentum if momentum is None else momentum, run.weight_decay, clip)
    return Adam(lr, run.weight_decay, clip, decoupled=run.optimizer == "adamw")


def learning_rate(run: Any, t: int) -> float:
    """η of round t: over the warmup it rises by equal steps, then it falls."""
    if t < run.warmup:
        return (t + 1) * run.lr / (run.warmup + 1)
    η = run.lr
    if run.schedule == "cosine":
        η = η * math.cos(math.pi / 2 * (t - run.warmup) / (run.rounds - run.warmup)) ** 2
    if run.schedule == "step":
        for round in range(run.warmup + 1, t + 1):
            η = η * run.step_factor if (round - run.warmup) % run.step_every == 0 else η
    return η


def average(models: list[Model], weights: list[float]) -> Model:
    """The weighted mean of every entry; of BatchNorm's counters the largest."""
    mean = {}
    for name, first in models[0].items():
        if not first.is_floating_point():
            mean[name] = max(model[name] for model in models)
            continue
        mean[name] = torch.zeros_like(first)
        for model, weight in zip(models, weights, strict=True):
            mean[name] = mean[name] + weight / sum(weights) * model[name].detach()
    return mean


# ---- losses --------------------------------------------------------------------------------------


def cross_entropy(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean over the batch of −log softmax(logits)_y.

    With ``smoothing`` ε, of −Σ_k q_k log softmax(logits)_k, where q_k = ε/K, and 1 − ε more at y.
    """
    total = torch.zeros((), dtype=logits.dtype)
    for row, k in zip(logits, y, strict=True):
        logs = torch.log(torch.exp(row) / torch.exp(row).sum())
        total = total - (1 - smoothing) * logs[k] - smoothing / len(row) * logs.sum()
    return total / len(y)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Of a vector [d] with another, or with each of several [n, d]."""
    return (a * b).sum(-1) / (torch.sqrt((a * a).sum(-1)) * torch.sqrt((b * b).sum(-1)))


# ---- prototypes ----------------------------------------------------------------------------------


def mean(vectors: list[Tensor]) -> Tensor:
    total = torch.zeros_like(vectors[0])
    for vector in vectors:
        total = total + vector
    return total / len(vectors)


def by_class(z: Tensor, y: Tensor, classes: int) -> Rows:
    """The features of each class."""
    return [[z_i.detach() for z_i, k in zip(z, y, strict=True) if k == c] for c in range(classes)]


def class_means(z: Tensor, y: Tensor, classes: int) -> Rows:
    """One prototype for each class that has features: their mean."""
    return [[mean(rows)] if rows else [] for rows in by_class(z, y, classes)]


def finch(rows: list[Tensor]) -> list[list[list[int]]]:
    """FINCH's partitions, finest first: clusters of indices. A single cluster only as the first.

    Two rows are linked if one is the other's first neighbor or both have the same one.
    """
    partitions = [linked(rows)]
    while len(partitions[-1]) > 1:
        finer = partitions[-1]
        joined = linked([mean([rows[i] for i in cluster]) for cluster in finer])
        if len(joined) == 1:
            break
        partitions.append([sorted(i for c in clusters for i in finer[c]) for clusters in joined])
    return partitions


def linked(rows: list[Tensor]) -> list[list[int]]:
    """The connected components of the graph of first neighbors, in order of their first rows."""
    everyone = range(len(rows))
    if len(rows) == 1:
        return [[0]]
    neighbor = [
        max((j for j in everyone if j != i), key=lambda j: float(cosine(rows[i], rows[j])))
        for i in everyone
    ]
    component = list(everyone)
    for i in everyone:
        for j in everyone:
            if j == neighbor[i] or i == neighbor[j] or neighbor[i] == neighbor[j]:
                old, new = sorted((component[i], component[j]), reverse=True)
                component = [new if c == old else c for c in component]
    return [[i for i in everyone if component[i] == c] for c in sorted(set(component))]


def cluster_means(rows: list[Tensor], level: str) -> list[Tensor]:
    """The means of the clusters in FINCH's first or last partition; none of no rows."""
    if not rows:
        return []
    partition = finch(rows)[0 if level == "first" else -1]
    return [mean([rows[i] for i in cluster]) for cluster in partition]
