"""Sums over all weights whose gradients are written down: against autograd's own, in float64."""

import pytest
import torch
from torch.autograd import gradcheck

from protofed.errors import NoSecondDerivative
from protofed.method import inner_product, squared_distance

SHAPES = {"conv": (2, 3, 2, 2), "bias": (2,), "scalar": ()}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
    return {n: w.requires_grad_(seed == 0) for n, w in draw.items()}


@pytest.mark.parametrize("term", [squared_distance, inner_product])
def test_gradients_are_those_of_finite_differences(term):
    here, there = weights(0), weights(1)

    def value(*by):
        return term(dict(zip(here, by, strict=True)), there)

    assert gradcheck(value, tuple(here.values()))
    assert gradcheck(lambda *by: 0.3 * value(*by).square(), tuple(here.values()))
    with pytest.raises(NoSecondDerivative, match="no second derivative"):
        torch.autograd.grad(value(*here.values()), list(here.values()), create_graph=True)


def test_values_and_order_of_names():
    here, there = weights(0), weights(1)
    turned = dict(reversed(there.items()))
    distance = sum((here[n] - there[n]).square().sum() for n in here)
    torch.testing.assert_close(squared_distance(here, turned), distance)
    torch.testing.assert_close(
        inner_product(here, turned), sum((here[n] * there[n]).sum() for n in here)
    )


def test_a_distance_of_zero_has_a_gradient_of_zero():
    here = weights(0)
    squared_distance(here, {n: w.detach() for n, w in here.items()}).backward()
    assert all(torch.equal(w.grad, torch.zeros_like(w)) for w in here.values())
