"""The optimizers of local training.

SGD is a single call of PyTorch's kernel over all parameters. ``torch.optim.SGD`` spends a tenth of
a small network's step around it, and its first use imports PyTorch's compiler: two seconds in
every process, and over Flower a process answers each message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SGD:
    """Stochastic gradient descent with momentum and weight decay, as ``torch.optim.SGD`` has it.

    A parameter without a gradient stays as it is.
    """

    def __init__(
        self, parameters: Sequence[Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        self.parameters = list(parameters)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        # Beginning at zero, a velocity is the first gradient after the first step, as in PyTorch.
        self.velocities = [torch.zeros_like(p) for p in self.parameters] if momentum else []

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters along their gradients."""
        moved = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        if not moved:
            return
        parameters = [self.parameters[i] for i in moved]
        torch._fused_sgd_(
            parameters,
            # the kernel goes through memory, whatever the strides
            [laid_out_as(p, p.grad) for p in parameters if p.grad is not None],
            [self.velocities[i] for i in moved] if self.momentum else [],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def reset(self) -> None:
        """As new, in the same memory."""
        for velocity in self.velocities:
            velocity.zero_()


class Adam(torch.optim.Adam):
    """PyTorch's, which can be reset."""

    def count_in(self, dtype: torch.dtype) -> None:
        """Count steps in another type than PyTorch's, which on a GPU is float32."""
        for state in self.state.values():
            state["step"] = state["step"].to(dtype)

    def reset(self) -> None:
        """As new, in the same memory."""
        for state in self.state.values():
            for t in state.values():
                if isinstance(t, Tensor):
                    t.zero_()


def laid_out_as(like: Tensor, tensor: Tensor) -> Tensor:
    """``tensor`` with the strides of ``like``: kernels over many tensors want them equal.

    The stride of a dimension of size 1 says nothing, so there another one costs no copy.
    """
    if tensor.stride() == like.stride():
        return tensor
    pairs = zip(tensor.stride(), like.stride(), tensor.shape, strict=True)
    if all(mine == its for mine, its, size in pairs if size > 1):
        return tensor.as_strided(like.shape, like.stride())
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
