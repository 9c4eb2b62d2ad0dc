"""SGD against numpy and against PyTorch's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from protofed.federation.optimizers import SGD, with_strides_of

SHAPES = ((4, 3, 3, 3), (5, 4), (7,), (4, 3, 1, 1))


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, generator=generator, dtype=dtype) for s in SHAPES]
    return [t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in made]


def give(parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = None if grad is None else grad.clone()


@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.01), (0.0, 0.0), (0.0, 0.3), (0.5, 0.0)])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1).double()], ids=["number", "tensor"])
def test_by_hand(lr: float | Tensor, momentum: float, decay: float) -> None:
    parameters = tensors(0)
    theirs = [p.numpy().copy() for p in parameters]
    velocities = [np.zeros_like(p) for p in theirs]
    sgd = SGD(parameters, lr, momentum, decay)
    for step in range(1, 4):
        grads = tensors(step)
        give(parameters, grads)
        sgd.step()
        for p, v, g in zip(theirs, velocities, grads, strict=True):
            v[...] = momentum * v + g.numpy() + decay * p
            p -= float(lr) * v
        for p, q in zip(parameters, theirs, strict=True):
            np.testing.assert_allclose(p.numpy(), q, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_against_pytorch(tensor: bool, dtype: torch.dtype) -> None:
    ours, theirs = tensors(0, dtype), tensors(0, dtype)
    lr = torch.tensor(0.05, dtype=dtype) if tensor else 0.05
    both = SGD(ours, lr, 0.9, 1e-5), torch.optim.SGD(theirs, 0.05, 0.9, weight_decay=1e-5)
    for step in range(1, 6):
        # one never has a gradient, and one has none in a step in the middle
        grads: list[Tensor | None] = list(tensors(step, dtype))
        grads[1] = None
        grads[2] = None if step == 3 else grads[2]
        for optimizer, parameters in zip(both, (ours, theirs), strict=True):
            give(parameters, grads)
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)
    assert torch.equal(ours[1], tensors(0, dtype)[1])


def test_a_gradient_may_have_other_strides() -> None:
    ours, theirs = tensors(0), tensors(0)
    grads = [g.contiguous() for g in tensors(1)]
    assert grads[0].stride() != ours[0].stride(), "or nothing is tested"
    for parameters in (ours, theirs):
        give(parameters, grads)
    SGD(ours, 0.1, 0.9, 0.0).step()
    for p, q, g in zip(ours, theirs, grads, strict=True):
        torch.testing.assert_close(p, q - 0.1 * g, rtol=0, atol=1e-15)


def test_reset_and_zero_grad() -> None:
    parameters = tensors(0)
    sgd = SGD(parameters, 0.1, 0.9, 0.0)
    give(parameters, tensors(1))
    sgd.step()
    sgd.reset()
    fresh = [p.clone() for p in parameters]
    for p in (parameters, fresh):
        give(p, tensors(2))
    sgd.step()
    SGD(fresh, 0.1, 0.9, 0.0).step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, fresh, strict=True))
    sgd.zero_grad()
    assert all(p.grad is None for p in parameters)
    sgd.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, fresh, strict=True))


def test_layouts() -> None:
    like = torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last)
    same = torch.randn(4, 3, 1, 1)
    assert with_strides_of(like, same).data_ptr() == same.data_ptr(), "sizes of 1 cost no copy"
    like = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    other = torch.randn(4, 3, 2, 2)
    moved = with_strides_of(like, other)
    assert moved.stride() == like.stride() and torch.equal(moved, other)


def test_a_run_does_not_wait_for_pytorchs_compiler() -> None:
    """Importing it takes seconds, and with Flower each message has a process of its own."""
    program = (
        "import sys, protofed; from protofed.testing.checks import TINY, tiny_task\n"
        "protofed.run(tiny_task(), 'fpl', **{**TINY, 'rounds': 2, 'epochs': 1})\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
