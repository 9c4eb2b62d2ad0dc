"""A network's weights in bfloat16 for the length of a step, cast together.

Autocast makes a kernel of every weight's cast and another of its gradient's: two dozen of each in
a step of a small ResNet. Here one kernel casts all weights and one all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from protofed.federation.optimisers import laid_out_as

R = TypeVar("R")

CAST = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
"""The layers whose weights autocast would cast."""


def in_bfloat16(network: nn.Module, function: Callable[[], R]) -> R:
    """``function()`` while the weights of the network's layers are their bfloat16 casts.

    Gradients reach the weights themselves, in their own precision.
    """
    weights = {
        f"network.{layer}.{name}": weight
        for layer, module in network.named_modules()
        if isinstance(module, CAST)
        for name, weight in module.named_parameters(recurse=False)
    }
    result: R = functional_call(_Calls(network, function), _cast(weights), ())
    return result


class _Calls(nn.Module):
    """Lets ``functional_call`` replace the network's weights while ``function`` runs."""

    def __init__(self, network: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.network = network
        self._function = function

    def forward(self) -> Any:
        return self._function()


def _cast(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Apart, since an output of a function requires a gradient if any of its inputs does.
    trained = {n: w for n, w in weights.items() if w.requires_grad}
    frozen = {n: w for n, w in weights.items() if not w.requires_grad}
    return {
        **dict(zip(trained, _Cast.apply(*trained.values()) if trained else (), strict=True)),
        **dict(zip(frozen, _copies(list(frozen.values()), torch.bfloat16), strict=True)),
    }


def _copies(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(t, dtype=dtype) for t in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.weights = weights
        ctx.set_materialize_grads(False)
        return tuple(_copies(list(weights), torch.bfloat16))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = {
            i: (weight, laid_out_as(weight, grad))
            for i, (weight, grad) in enumerate(zip(ctx.weights, grads, strict=True))
            if grad is not None
        }
        wide = [torch.empty_like(weight) for weight, _ in pairs.values()]
        if wide:
            torch._foreach_copy_(wide, [grad for _, grad in pairs.values()])
        found = dict(zip(pairs, wide, strict=True))
        return tuple(found.get(i) for i in range(len(grads)))
