from __future__ import annotations

import numpy as np
import pytest
import torch

from protofed.prototypes import class_means, class_sums


def test_class_sums_and_means() -> None:
    feature = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]])
    sums, count = class_sums(feature, torch.tensor([2, 2, 0]), 4)
    assert sums.tolist() == [[10, 20], [0, 0], [4, 6], [0, 0]]
    assert count.tolist() == [1, 0, 2, 0]
    assert class_means(sums, count).tolist() == [[10, 20], [0, 0], [2, 3], [0, 0]]
    # Sums of two batches add up, whole-number counts serve as well, and nobody is nobody.
    assert class_means(sums + sums, (count + count).long()).tolist()[2] == [2, 3]
    some = torch.full((1, 2), 7.0, requires_grad=True)
    mean = class_means(some, torch.zeros(1))
    mean.sum().backward()
    assert mean.tolist() == [[0, 0]]
    assert some.grad is not None and some.grad.tolist() == [[0, 0]]  # NaN if it divided by 0


def test_class_sums_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    feature, y = rng.normal(size=(50, 7)), rng.integers(0, 5, 50)
    sums, count = class_sums(torch.tensor(feature), torch.tensor(y), 6)
    for k in range(6):
        np.testing.assert_allclose(sums[k], feature[y == k].sum(0), atol=1e-12)
        assert count[k] == (y == k).sum()


@pytest.mark.parametrize("autocast", [False, True])
def test_class_sums_of_bfloat16_are_float32(autocast: bool) -> None:
    # In bfloat16 256 + 1 is 256: a sum or a count of 1000 would be lost.
    feature = torch.ones(1000, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        sums, count = class_sums(feature, torch.zeros(1000, dtype=torch.int64), 1)
    assert sums.dtype == count.dtype == torch.float32
    assert sums.tolist() == [[1000, 1000]] and count.tolist() == [1000]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        sums, _ = class_sums(torch.full((1, 1), 1.001), torch.zeros(1, dtype=torch.int64), 1)
    assert sums.item() == pytest.approx(1.001, abs=1e-6)
