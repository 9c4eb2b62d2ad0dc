"""From a loss to a step of the optimizer, in lanes.

In bfloat16 a plain SGD step is one kernel over all parameters: it reads the gradients as they are,
moves the weights and writes their halves. Apart, these are three passes over the weights' memory,
which a large network's step waits for. With clipping or Adam, or without Triton, they are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from protofed.engines.lanes.bf16 import Halves
from protofed.federation.optimizers import SGD, Adam, laid_out_as

try:
    from protofed.engines.lanes import kernels
except ImportError:  # Triton comes with PyTorch for CUDA on Linux, not elsewhere
    kernels = None  # type: ignore[assignment]

R = TypeVar("R")
BLOCK = 1024  # entries a program moves: eight for each thread


class Descent:
    """Gradients, clipping and the optimizer, in the weights' own precision."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizer: SGD | Adam, clip: float | None
    ) -> None:
        self.parameters, self.optimizer, self.clip = list(parameters), optimizer, clip

    def begin(self) -> None:
        """An epoch begins; the weights may have been replaced."""

    def compute(self, loss: Callable[[], R]) -> R:
        """``loss()`` with the network's weights as a step uses them."""
        return loss()

    def step(self, total: Tensor, number: int) -> None:
        """The epoch's step of this number, down the gradient of ``total``."""
        # Not backward(): it would copy gradients once more.
        grads = torch.autograd.grad(total, self.parameters, allow_unused=True)
        self._move(grads)

    def recorded(self) -> None:
        """The epoch has been recorded as a graph."""

    def _move(self, grads: Sequence[Tensor | None]) -> None:
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


class HalfDescent(Descent):
    """The same where the loss is computed with the weights' halves."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: SGD | Adam,
        clip: float | None,
        halves: Halves,
        steps: int,
    ) -> None:
        super().__init__(parameters, optimizer, clip)
        self.halves = halves
        self._kernel: _Kernel | None = None
        if isinstance(optimizer, SGD) and clip is None and kernels is not None:
            self._kernel = _Kernel(self.parameters, optimizer, halves, steps)

    def begin(self) -> None:
        """Cast the weights: a client's are new."""
        self.halves.refresh()

    def compute(self, loss: Callable[[], R]) -> R:
        """``loss()`` with halves in place of the weights."""
        return self.halves.using(loss)

    def step(self, total: Tensor, number: int) -> None:
        """As above; the halves follow."""
        own = [(p, h) for p in self.parameters if (h := self.halves.of(p)) is not None]
        leaves = [*self.parameters, *(half for _, half in own)]
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        of: dict[int, Tensor | None] = dict(zip(map(id, leaves), grads, strict=True))
        if self._kernel is not None:
            self._kernel.step(number, of)
            return
        pairs = [(p, laid_out_as(p, g)) for p, h in own if (g := of[id(h)]) is not None]
        copies = [torch.empty_like(p, requires_grad=False) for p, _ in pairs]
        if copies:
            torch._foreach_copy_(copies, [g for _, g in pairs])
        for (parameter, _), copy in zip(pairs, copies, strict=True):
            wide = of[id(parameter)]
            of[id(parameter)] = copy if wide is None else copy + wide
        self._move([of[id(p)] for p in self.parameters])
        self.halves.refresh()

    def recorded(self) -> None:
        """Tell the kernel where the recorded steps have their gradients."""
        if self._kernel is not None:
            self._kernel.recorded()


class _Kernel:
    """One kernel's launches: what it needs to know of each parameter is a row of addresses.

    A graph replays with the addresses it was recorded with, and each recorded step has other
    ones for its gradients. They are known while recording, but cannot be copied to the GPU then:
    so each step has rows of its own, filled in when the recording is over.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], sgd: SGD, halves: Halves, steps: int
    ) -> None:
        self.parameters, self.sgd, self.halves = parameters, sgd, halves
        device = parameters[0].device
        blocks = [-(-p.numel() // BLOCK) for p in parameters]
        self.count = sum(blocks)
        self.sizes = torch.tensor([p.numel() for p in parameters], device=device)
        which = torch.repeat_interleave(torch.arange(len(blocks)), torch.tensor(blocks))
        before = torch.tensor([0, *blocks]).cumsum(0)[:-1]
        self.which = which.to(device)
        self.first = ((torch.arange(self.count) - before[which]) * BLOCK).to(device)
        columns = 5  # weight, velocity, half, the half's gradient, the weight's own
        self.addresses = torch.zeros(steps, len(blocks), columns, dtype=torch.int64, device=device)
        self._known: dict[int, list[list[int]]] = {}

    def step(self, number: int, grads: dict[int, Tensor | None]) -> None:
        """Move all parameters that have a gradient."""
        rows, kept = [], []  # kept: until the kernel is queued, what was laid out anew lives
        none: list[Tensor | None] = [None] * len(self.parameters)
        velocities = self.sgd.velocities or none
        for parameter, velocity in zip(self.parameters, velocities, strict=True):
            half = self.halves.of(parameter)
            found = [None if leaf is None else grads[id(leaf)] for leaf in (half, parameter)]
            found = [None if g is None else _aligned(laid_out_as(parameter, g)) for g in found]
            kept.append(found)
            row = [parameter, velocity, half, *found]
            rows.append([0 if t is None else t.data_ptr() for t in row])
        capturing = parameter.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing:
            self._known[number] = rows
        else:
            self.addresses[number].copy_(torch.tensor(rows))
        kernels.descend[(self.count,)](
            self.addresses,
            self.which,
            self.first,
            self.sizes,
            number * len(self.parameters),
            float(self.sgd.lr),
            float(self.sgd.momentum),
            float(self.sgd.weight_decay),
            MOMENTUM=self.sgd.momentum != 0,
            BLOCK=BLOCK,
            num_warps=4,
        )

    def recorded(self) -> None:
        """Fill in what recording found out."""
        for number, rows in self._known.items():
            self.addresses[number].copy_(torch.tensor(rows))
        self._known.clear()


def _aligned(tensor: Tensor) -> Tensor:
    """At an address that the kernel may read from: a view into a larger tensor is copied."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
