"""What the tests of several methods build on: small networks, given features, recorded rounds."""

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from protofed.federation.server import Server
from protofed.method import Sizes
from protofed.models import Network, Output

K, D = 3, 4


def numbers(seed, *shape):
    """Normal numbers in double precision."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


# ---- a client whose features are given ----------------------------------------------------------


class Given(nn.Module):
    """Says for 'image' i the given feature and logits: x is a vector of row numbers."""

    stages: ClassVar = {}

    def __init__(self, z, logits):
        super().__init__()
        self.z, self.logits = nn.Parameter(z), nn.Parameter(logits)

    def forward(self, x):
        return Output(self.z[x], self.logits[x])


def table(*rows_of_classes):
    """A padded table from lists of prototypes; what lies in the padding must not matter."""
    size = max(1, *(len(rows) for rows in rows_of_classes))
    mean = torch.full((len(rows_of_classes), size, D), 77.0, dtype=torch.float64)
    mask = torch.zeros(len(rows_of_classes), size)
    for k, rows in enumerate(rows_of_classes):
        for j, row in enumerate(rows):
            mean[k, j], mask[k, j] = row, 1
    return {"mean": mean, "mask": mask}


def rows_of(table, k):
    """The prototypes of a class in such a table."""
    return [
        table["mean"][k, j].tolist() for j in range(table["mask"].shape[1]) if table["mask"][k, j]
    ]


def cross_entropy(logits, y):
    """The batch mean, by a loop over plain numbers."""
    total = 0.0
    for row, k in zip(logits.tolist(), y, strict=True):
        total -= math.log(math.exp(row[k]) / sum(math.exp(v) for v in row))
    return total / len(y)


def cosine(a, b):
    """Of two lists of numbers."""
    dot = sum(p * q for p, q in zip(a, b, strict=True))
    return dot / (math.sqrt(sum(p * p for p in a)) * math.sqrt(sum(q * q for q in b)))


# ---- a small network and its server -------------------------------------------------------------


def network(seed):
    """A small network with BatchNorm, in double precision."""
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(5, D), nn.BatchNorm1d(D), nn.Tanh())
    return Network(encoder, D, K).double()


NAMES = tuple(n for n, _ in network(0).named_parameters())
SIZES = Sizes(K, D, 8, NAMES)


def server_of(method, clients, sizes=SIZES, **settings):
    """A server of that network, before its first round."""
    return Server(method, network(0), sizes, clients, rounds=9, seed=0, **settings)


def same(a, b):
    """Whether two slots are equal to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def close(a, b, tolerance):
    """Whether two slots are equal but for rounding."""
    return a.keys() == b.keys() and all(
        torch.allclose(a[n], b[n], rtol=tolerance, atol=tolerance) for n in a
    )


def recorded(federation):
    """The replies of the federation's next rounds, by client."""
    replies = {}
    train = federation.engine.train

    def recording(*args):
        replies.clear()
        for name, reply in train(*args):
            replies[name] = reply
            yield name, reply

    federation.engine.train = recording
    return replies


def check_gradients(net, value):
    """Compare the gradient of ``value()`` with finite differences, number by number.

    Returns the names that it does not reach.
    """
    value().backward()
    reached = {n: p for n, p in net.named_parameters() if p.grad is not None}
    for name, p in reached.items():
        for index in np.ndindex(*p.shape):
            kept, ends = p.data[index].item(), []
            for step in (1e-6, -1e-6):
                p.data[index] = kept + step
                ends.append(value().item())
            p.data[index] = kept
            slope = (ends[0] - ends[1]) / 2e-6
            assert p.grad[index].item() == pytest.approx(slope, abs=1e-7), name
    return {n for n, _ in net.named_parameters()} - set(reached)
