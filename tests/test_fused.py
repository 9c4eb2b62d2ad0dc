"""Functions that an engine may replace."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from protofed.fused import replaceable, using


@replaceable
def double(x: int) -> int:
    return 2 * x


def test_a_replacement_lasts_as_long_as_its_context_and_only_in_its_thread() -> None:
    with using({"double": lambda x: -x, "other": lambda x: 0}):
        assert double(3) == -3
        with using({}):
            assert double(3) == 6
        assert double(3) == -3
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(double, 3).result() == 6
    assert double(3) == 6
    with pytest.raises(KeyError), using({"double": lambda x: {}[x]}):
        double(3)
    assert double(3) == 6


def test_a_replacement_may_leave_some_arguments_to_the_expression() -> None:
    with using({"double": lambda x: None if x < 0 else 0}):
        assert (double(3), double(-3)) == (0, -6)


def test_transforms_of_functions_have_the_expression() -> None:
    """Kernels are autograd functions that cannot be transformed."""

    @replaceable
    def square(x: Tensor) -> Tensor:
        return (x * x).sum()

    with using({"square": lambda x: x.sum() * 0}):
        assert square(torch.ones(3)) == 0
        assert torch.equal(torch.func.grad(square)(torch.ones(3)), 2 * torch.ones(3))
        assert torch.equal(torch.func.vmap(square)(torch.ones(2, 3)), 3 * torch.ones(2))
