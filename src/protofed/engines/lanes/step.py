"""From a loss to an optimizer step, in lanes.

In bfloat16 a plain SGD step is one kernel over all parameters: it reads the gradients as they are,
updates the weights and writes their bfloat16 copies. As separate kernels these are three passes
over the weights' memory, which dominate a large network's step. With clipping, with Adam, or
without Triton, they are separate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from protofed.engines.lanes.bf16 import Bf16Weights
from protofed.federation.optimizers import SGD, Adam, with_strides_of

try:
    from protofed.engines.lanes import kernels
except ImportError:  # Triton comes with PyTorch for CUDA on Linux, not elsewhere
    kernels = None  # type: ignore[assignment]

R = TypeVar("R")
BLOCK = 1024  # entries per kernel program: eight for each thread


class OptimizerStep:
    """Gradients, clipping and the optimizer, in the weights' own precision."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizer: SGD | Adam, clip: float | None
    ) -> None:
        self.parameters, self.optimizer, self.clip = list(parameters), optimizer, clip

    def begin_epoch(self) -> None:
        """The weights may have been replaced since the last epoch."""

    def compute(self, loss: Callable[[], R]) -> R:
        """``loss()`` with the network's weights as a step uses them."""
        return loss()

    def step(self, total: Tensor, number: int) -> None:
        """Step ``number`` of the epoch, down the gradient of ``total``."""
        # Not backward(), which would copy the gradients once more.
        grads = torch.autograd.grad(total, self.parameters, allow_unused=True)
        self._update(grads)

    def end_recording(self) -> None:
        """The epoch has been recorded as a graph."""

    def _update(self, grads: Sequence[Tensor | None]) -> None:
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Bf16OptimizerStep(OptimizerStep):
    """The same with a loss computed from the weights' bfloat16 copies."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: SGD | Adam,
        clip: float | None,
        bf16: Bf16Weights,
        steps: int,
    ) -> None:
        super().__init__(parameters, optimizer, clip)
        self.bf16 = bf16
        self._fused: _FusedSGD | None = None
        if isinstance(optimizer, SGD) and clip is None and kernels is not None:
            self._fused = _FusedSGD(self.parameters, optimizer, bf16, steps)

    def begin_epoch(self) -> None:
        self.bf16.refresh()

    def compute(self, loss: Callable[[], R]) -> R:
        return self.bf16.call(loss)

    def step(self, total: Tensor, number: int) -> None:
        copied = [(p, c) for p in self.parameters if (c := self.bf16.copy_of(p)) is not None]
        leaves = [*self.parameters, *(copy for _, copy in copied)]
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        grad_of: dict[int, Tensor | None] = dict(zip(map(id, leaves), grads, strict=True))
        if self._fused is not None:
            self._fused.step(number, grad_of)
            return
        pairs = [(p, with_strides_of(p, g)) for p, c in copied if (g := grad_of[id(c)]) is not None]
        wide = [torch.empty_like(p, requires_grad=False) for p, _ in pairs]
        if wide:
            torch._foreach_copy_(wide, [g for _, g in pairs])
        for (parameter, _), grad in zip(pairs, wide, strict=True):
            own = grad_of[id(parameter)]
            grad_of[id(parameter)] = grad if own is None else grad + own
        self._update([grad_of[id(p)] for p in self.parameters])
        self.bf16.refresh()

    def end_recording(self) -> None:
        if self._fused is not None:
            self._fused.end_recording()


class _FusedSGD:
    """Launches one kernel for all parameters, each described to it by a row of addresses.

    A graph replays with the addresses it was recorded with, and every recorded step has other
    addresses for its gradients. They are known while recording but cannot be copied to the GPU
    then. So each step has rows of its own, filled in when the recording has ended.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], sgd: SGD, bf16: Bf16Weights, steps: int
    ) -> None:
        self.parameters, self.sgd, self.bf16 = parameters, sgd, bf16
        device = parameters[0].device
        # on the GPU, where a schedule changes it between replays of a graph
        self.lr = torch.as_tensor(sgd.lr, dtype=torch.float32, device=device)
        blocks = [-(-p.numel() // BLOCK) for p in parameters]
        self.count = sum(blocks)
        self.sizes = torch.tensor([p.numel() for p in parameters], device=device)
        which = torch.repeat_interleave(torch.arange(len(blocks)), torch.tensor(blocks))
        before = torch.tensor([0, *blocks]).cumsum(0)[:-1]
        self.which = which.to(device)
        self.first = ((torch.arange(self.count) - before[which]) * BLOCK).to(device)
        columns = 5  # weight, velocity, copy, the copy's gradient, the weight's own gradient
        self.addresses = torch.zeros(steps, len(blocks), columns, dtype=torch.int64, device=device)
        self._recorded: dict[int, list[list[int]]] = {}

    def step(self, number: int, grad_of: dict[int, Tensor | None]) -> None:
        rows, kept = [], []  # kept: gradients that were copied live until the kernel is queued
        none: list[Tensor | None] = [None] * len(self.parameters)
        velocities = self.sgd.velocities or none
        for parameter, velocity in zip(self.parameters, velocities, strict=True):
            copy = self.bf16.copy_of(parameter)
            grads = [None if leaf is None else grad_of[id(leaf)] for leaf in (copy, parameter)]
            grads = [None if g is None else _aligned(with_strides_of(parameter, g)) for g in grads]
            kept.append(grads)
            row = [parameter, velocity, copy, *grads]
            rows.append([0 if t is None else t.data_ptr() for t in row])
        capturing = parameter.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing:
            self._recorded[number] = rows
        else:
            self.addresses[number].copy_(torch.tensor(rows))
        kernels.sgd_step[(self.count,)](
            self.addresses,
            self.which,
            self.first,
            self.sizes,
            number * len(self.parameters),
            self.lr,
            float(self.sgd.momentum),
            float(self.sgd.weight_decay),
            MOMENTUM=self.sgd.momentum != 0,
            BLOCK=BLOCK,
            num_warps=4,
        )

    def end_recording(self) -> None:
        for number, rows in self._recorded.items():
            self.addresses[number].copy_(torch.tensor(rows))
        self._recorded.clear()


def _aligned(tensor: Tensor) -> Tensor:
    """At an address the kernel can read from: a view into a larger tensor may be copied."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
