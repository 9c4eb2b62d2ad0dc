"""A network's weights in bfloat16, kept beside them.

Autocast makes a kernel of every weight's cast and another of its gradient's, in every step. Here
the casts (*halves*) are tensors of their own: the loss is computed with them, their gradients stay
in bfloat16, and who steps the weights writes the halves too (see ``descent``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import functional_call

R = TypeVar("R")

CAST = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
"""The layers whose weights autocast would cast."""


class Halves:
    """The weights of a network's layers in bfloat16."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.weights = {
            f"{layer}.{name}": weight
            for layer, module in network.named_modules()
            if isinstance(module, CAST)
            for name, weight in module.named_parameters(recurse=False)
        }
        self._of = {  # one for a weight that two layers have in common
            id(weight): torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=False)
            for weight in self.weights.values()
        }
        self.halves = {name: self._of[id(weight)] for name, weight in self.weights.items()}

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The half of a parameter, if it has one."""
        return self._of.get(id(parameter))

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast all weights anew, in one kernel."""
        torch._foreach_copy_(list(self.halves.values()), list(self.weights.values()))

    def using(self, function: Callable[[], R]) -> R:
        """``function()`` while the network's weights are the halves.

        A half takes a gradient where its weight does; what asks for the weights themselves gets
        these, and a gradient of its own.
        """
        for name, weight in self.weights.items():
            self.halves[name].requires_grad_(weight.requires_grad)
        replaced = {f"network.{name}": half for name, half in self.halves.items()}
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
