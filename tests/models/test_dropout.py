"""Dropout of a step's keyed numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from protofed.models.dropout import KeyedDropout, draws_unkeyed, key_dropout

DRAWN = torch.tensor([[0.1, 0.4], [0.6, 0.9]])


def drawn(*shape: int) -> torch.Tensor:
    return DRAWN.view(shape) if len(shape) == 2 else DRAWN.view(2, 2, *shape[2:])


def test_it_keeps_what_is_drawn_above_p_and_scales_it() -> None:
    dropout = KeyedDropout(0.2, whole=False)
    dropout.uniform = drawn
    x = torch.tensor([[1.0, 2.0], [4.0, 8.0]], requires_grad=True)
    y = dropout(x)
    assert torch.allclose(y, torch.tensor([[0, 2.5], [5, 10]]))
    y.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.tensor([[0, 1.25], [1.25, 1.25]]))
    assert torch.equal(dropout.eval()(x), x)


def test_whole_channels() -> None:
    dropout = KeyedDropout(0.2, whole=True)
    dropout.uniform = drawn
    y = dropout(torch.ones(2, 2, 3, 3))
    assert torch.allclose(y.sum((2, 3)), torch.tensor([[0, 11.25], [11.25, 11.25]]))


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_pytorchs_modules_are_replaced_wherever_they_are(kind: type[nn.Module]) -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(kind(0.3), nn.ReLU()), kind(0.1).eval())
    key_dropout(network)
    inner, last = network[1][0], network[2]  # type: ignore[index]
    assert (inner.p, inner.whole, inner.training) == (0.3, kind is not nn.Dropout, True)
    assert (last.p, last.training) == (0.1, False)
    assert not draws_unkeyed(network, lambda: network(torch.ones(2, 2)))
    assert inner.uniform is None


def test_a_module_that_is_there_twice() -> None:
    dropout = nn.Dropout(0.5)
    network = nn.Sequential(dropout, nn.Linear(2, 2), dropout)
    key_dropout(network)
    assert not draws_unkeyed(network, lambda: network(torch.ones(2, 2)))


def test_a_copy_draws_from_no_client() -> None:
    dropout = KeyedDropout(0.5, whole=False)
    dropout.uniform = drawn
    assert copy.deepcopy(dropout).uniform is None


def test_other_draws_are_noticed_and_do_not_move_the_generator() -> None:
    network = nn.Sequential(nn.Dropout(0.5))
    before = torch.get_rng_state()
    assert draws_unkeyed(network, lambda: network(torch.ones(2, 2)))
    assert torch.equal(before, torch.get_rng_state())
