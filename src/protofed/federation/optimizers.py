"""The optimizers of local training.

SGD is a single call of PyTorch's fused kernel over all parameters. ``torch.optim.SGD`` makes a
small network's step 10 % slower, and its first use imports PyTorch's compiler. That takes two
seconds in every process, and Flower starts a new process for every message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protofed.config import OPTIMIZERS
from protofed.errors import unknown
from protofed.federation.setup import Training


class SGD:
    """Stochastic gradient descent with momentum and weight decay, as in ``torch.optim.SGD``.

    A parameter without a gradient does not change. ``lr`` is a tensor if a recorded step must read
    it at every replay.
    """

    def __init__(
        self, parameters: Sequence[Tensor], lr: float | Tensor, momentum: float, weight_decay: float
    ) -> None:
        self.parameters = list(parameters)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        # A velocity that starts at zero is the gradient after the first step, as in PyTorch.
        self.velocities = [torch.zeros_like(p) for p in self.parameters] if momentum else []

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient."""
        updated = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        if not updated:
            return
        parameters = [self.parameters[i] for i in updated]
        # kernels walk through memory and ignore strides
        grads = [with_strides_of(p, p.grad) for p in parameters if p.grad is not None]
        velocities = [self.velocities[i] for i in updated] if self.momentum else []
        if isinstance(self.lr, Tensor):
            # The fused kernel takes a tensor too, but on a GPU only in float32.
            if self.weight_decay:
                grads = list(torch._foreach_add(grads, parameters, alpha=self.weight_decay))
            if velocities:
                torch._foreach_mul_(velocities, self.momentum)
                torch._foreach_add_(velocities, grads)
            torch._foreach_sub_(parameters, torch._foreach_mul(velocities or grads, self.lr))
            return
        torch._fused_sgd_(
            parameters,
            grads,
            velocities,
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
    """PyTorch's Adam or AdamW, with a reset that keeps its memory, as a CUDA graph needs."""

    def count_in(self, dtype: torch.dtype) -> None:
        """Convert the step counters to this type; on a GPU, PyTorch makes them float32."""
        for state in self.state.values():
            state["step"] = state["step"].to(dtype)

    def reset(self) -> None:
        """Back to the initial state, in the same memory."""
        for state in self.state.values():
            for t in state.values():
                if isinstance(t, Tensor):
                    t.zero_()


def make_optimizer(
    training: Training, parameters: list[torch.nn.Parameter], lr: float | Tensor
) -> SGD | Adam:
    """A new optimizer; ``training`` has the settings of the phase it is for."""
    kind, decay = training.optimizer, training.weight_decay
    if kind == "sgd":
        return SGD(parameters, lr, training.momentum, decay)
    if kind not in OPTIMIZERS:
        raise unknown("optimizer of a phase", kind, OPTIMIZERS)
    return Adam(
        parameters,
        lr=lr,
        weight_decay=decay,
        decoupled_weight_decay=kind == "adamw",
        capturable=parameters[0].is_cuda,
    )


def with_strides_of(like: Tensor, tensor: Tensor) -> Tensor:
    """``tensor`` with the strides of ``like``, which has the same shape; a copy only if needed.

    Kernels over lists of tensors need equal strides. The stride of a dimension of size 1 has no
    meaning, so it is replaced without a copy.
    """
    if tensor.stride() == like.stride():
        return tensor
    pairs = zip(tensor.stride(), like.stride(), tensor.shape, strict=True)
    if all(given == wanted for given, wanted, size in pairs if size > 1):
        return tensor.as_strided(like.shape, like.stride())
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
