"""Dropout with the run's keyed random numbers: the same in every engine, repeated and resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

Uniform = Callable[..., Tensor]
"""From a shape to uniform numbers in (0, 1): ``Client.uniform``."""

_WHOLE: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}
"""The modules that are replaced, and whether they drop whole channels."""


class KeyedDropout(nn.Module):
    """``nn.Dropout``, or one that drops whole channels, of the random numbers of a client's step.

    ``uniform`` gives them; each step sets it. Where there is none, a network is only measured.
    """

    def __init__(self, p: float, whole: bool) -> None:
        super().__init__()
        self.p, self.whole = p, whole
        self.uniform: Uniform | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.uniform is None or self.p == 1:
            return F.dropout(x, self.p)
        shape = [*x.shape[:2], *[1] * (x.dim() - 2)] if self.whole else x.shape
        kept = self.uniform(*shape) >= self.p
        return x * kept.to(x.dtype) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, whole={self.whole}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "uniform": None}  # a copy belongs to no client


def key_dropout(network: nn.Module) -> None:
    """Replace PyTorch's dropout in a network, which draws from a generator that no run seeds."""
    for module in network.modules():
        # not named_children: it has a module once, though it may be there under several names
        for name, child in module._modules.items():
            if isinstance(child, _DropoutNd) and type(child) in _WHOLE:
                keyed = KeyedDropout(child.p, _WHOLE[type(child)])
                setattr(module, name, keyed.train(child.training))


def draws_unkeyed(network: nn.Module, call: Callable[[], object]) -> bool:
    """Whether a call of a network draws from PyTorch's own generator."""
    dropouts = [m for m in network.modules() if isinstance(m, KeyedDropout)]
    for dropout in dropouts:
        dropout.uniform = torch.ones
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            call()
            return not torch.equal(before, torch.get_rng_state())
    finally:
        for dropout in dropouts:
            dropout.uniform = None
