"""The optimizers of local training.

SGD is a single call of PyTorch's kernel over all parameters. ``torch.optim.SGD`` adds a tenth to a
small network's step, and its first use imports PyTorch's compiler: two seconds in every process,
and with Flower every message is answered by a new process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protofed.errors import unknown
from protofed.federation.setup import Training


class SGD:
    """Stochastic gradient descent with momentum and weight decay, as in ``torch.optim.SGD``.

    A parameter without a gradient does not change.
    """

    def __init__(
        self, parameters: Sequence[Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        self.parameters = list(parameters)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        # Starting from zero, a velocity equals the first gradient after one step, as in PyTorch.
        self.velocities = [torch.zeros_like(p) for p in self.parameters] if momentum else []

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient."""
        moved = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        if not moved:
            return
        parameters = [self.parameters[i] for i in moved]
        torch._fused_sgd_(
            parameters,
            # the kernel walks through memory and ignores strides
            [with_strides_of(p, p.grad) for p in parameters if p.grad is not None],
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
        """Back to the initial state, in the same memory."""
        for velocity in self.velocities:
            velocity.zero_()


class Adam(torch.optim.Adam):
    """PyTorch's Adam, with a reset."""

    def count_in(self, dtype: torch.dtype) -> None:
        """Count steps in this type; PyTorch's counters are float32 on a GPU."""
        for state in self.state.values():
            state["step"] = state["step"].to(dtype)

    def reset(self) -> None:
        """Back to the initial state, in the same memory."""
        for state in self.state.values():
            for t in state.values():
                if isinstance(t, Tensor):
                    t.zero_()


def make_optimizer(training: Training, parameters: list[torch.nn.Parameter]) -> SGD | Adam:
    """The optimizer of a phase, with fresh state; ``training`` is the phase's."""
    lr, decay = training.lr, training.weight_decay
    if training.optimizer == "sgd":
        return SGD(parameters, lr, training.momentum, decay)
    if training.optimizer == "adam":
        return Adam(parameters, lr=lr, weight_decay=decay, capturable=parameters[0].is_cuda)
    raise unknown("optimizer of a phase", training.optimizer, ("sgd", "adam"))


def with_strides_of(like: Tensor, tensor: Tensor) -> Tensor:
    """``tensor`` with the strides of ``like``: kernels over many tensors need them equal.

    The stride of a dimension of size 1 has no meaning, so a different one there costs no copy.
    """
    if tensor.stride() == like.stride():
        return tensor
    pairs = zip(tensor.stride(), like.stride(), tensor.shape, strict=True)
    if all(mine == its for mine, its, size in pairs if size > 1):
        return tensor.as_strided(like.shape, like.stride())
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
