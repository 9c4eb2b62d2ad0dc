from __future__ import annotations

import numpy as np
import pytest
import torch

from protofed.prototypes import class_means, class_sums, owners_mean, pad, per_class_mean


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


def test_owners_mean_counts_every_owner_once() -> None:
    means = torch.tensor([[[1.0], [5.0], [9.0]], [[3.0], [7.0], [9.0]], [[8.0], [0.0], [9.0]]])
    counts = torch.tensor([[100, 1, 0], [1, 2, 0], [0, 3, 0]])
    mean, mask = owners_mean(means, counts)
    # Client 2 does not have class 0: its 8 is no mean of anything. Nobody has class 2.
    assert mean.tolist() == [[2], [4], [0]]
    assert mask.tolist() == [1, 1, 0] and mask.dtype == torch.float32


def test_owners_mean_ignores_what_stands_where_nobody_is() -> None:
    mean, _ = owners_mean(torch.tensor([[[torch.nan]], [[2.0]]]), torch.tensor([[0], [1]]))
    assert mean.tolist() == [[2]]


def test_pad() -> None:
    clusters = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(0, 2), torch.ones(1, 2)]
    mean, mask = pad(clusters, 2)
    assert mean.tolist() == [[[1, 2], [3, 4]], [[0, 0], [0, 0]], [[1, 1], [0, 0]]]
    assert mask.tolist() == [[1, 1], [0, 0], [1, 0]] and mask.dtype == torch.float32


def test_pad_of_nothing() -> None:
    mean, mask = pad([torch.zeros(0, 3)] * 2, 3)
    assert mean.shape == (2, 1, 3) and mask.tolist() == [[0], [0]]
    assert not mean.any()


def test_per_class_mean_counts_every_prototype_once() -> None:
    mean = torch.tensor([[[2.0], [4.0]], [[5.0], [100.0]], [[7.0], [8.0]]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    mean, mask = per_class_mean(mean, mask)
    assert mean.tolist() == [[3], [5], [0]]
    assert mask.tolist() == [1, 1, 0] and mask.dtype == torch.float32
