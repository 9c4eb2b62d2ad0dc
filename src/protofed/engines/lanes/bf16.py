"""Copies of a network's weights in bfloat16, kept alongside the weights.

Autocast launches a kernel for every weight's cast and another for its gradient's, in every step.
Here the casts are tensors that persist: the loss is computed with them, their gradients stay in
bfloat16, and the step that updates the weights also writes the copies (see ``step``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

R = TypeVar("R")

CAST = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
"""The layers whose weights autocast would cast."""


class Bf16Weights:
    """Bfloat16 copies of the weights of a network's convolutions and linear layers."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.weights = {
            f"{layer}.{name}": weight
            for layer, module in network.named_modules()
            if isinstance(module, CAST)
            for name, weight in module.named_parameters(recurse=False)
        }
        self._copy_of = {  # a weight that two layers share has one copy
            id(weight): torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=False)
            for weight in self.weights.values()
        }
        self.copies = {name: self._copy_of[id(weight)] for name, weight in self.weights.items()}

    def copy_of(self, parameter: nn.Parameter) -> Tensor | None:
        return self._copy_of.get(id(parameter))

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast all weights again, in one kernel."""
        torch._foreach_copy_(list(self.copies.values()), list(self.weights.values()))

    def call(self, function: Callable[[], R]) -> R:
        """``function()`` while the copies stand in for the network's weights.

        A copy requires a gradient if its weight does. A function that holds the weights
        themselves still sees those, and they get a gradient of their own.
        """
        for name, weight in self.weights.items():
            self.copies[name].requires_grad_(weight.requires_grad)
        replaced = {f"network.{name}": copy for name, copy in self.copies.items()}
        result: R = functional_call(_Calls(self.network, function), replaced, ())
        return result


class _Calls(nn.Module):
    """Lets ``functional_call`` replace the network's weights while ``function`` runs."""

    def __init__(self, network: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.network = network
        self._function = function

    def forward(self) -> Any:
        return self._function()
