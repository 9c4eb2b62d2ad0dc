from __future__ import annotations

import numpy as np
import pytest
import torch

from protofed.prototypes import Prototypes, cluster_means


def of_clients(means_MKd: object, counts_MK: object) -> Prototypes:
    """Class means of M clients as methods get them: a view with the clients in the middle."""
    means, counts = torch.as_tensor(means_MKd), torch.as_tensor(counts_MK)
    return Prototypes(means.transpose(0, 1), counts.T)


def test_empty_has_no_prototypes() -> None:
    none = Prototypes.empty(3, 2)
    assert none.mean.shape == (3, 2) and none.mask.tolist() == [0, 0, 0]
    assert [len(rows) for rows in none.rows()] == [0, 0, 0]
    assert none.table().mean.shape == (3, 1, 2) and none.table().mask.shape == (3, 1)


def test_pad_and_rows_are_inverse() -> None:
    clusters = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(0, 2), torch.ones(1, 2)]
    table = Prototypes.pad(clusters)
    assert table.mean.tolist() == [[[1, 2], [3, 4]], [[0, 0], [0, 0]], [[1, 1], [0, 0]]]
    assert table.mask.tolist() == [[1, 1], [0, 0], [1, 0]] and table.mask.dtype == torch.float32
    assert [rows.tolist() for rows in table.rows()] == [rows.tolist() for rows in clusters]
    assert table.table() is table


def test_pad_of_nothing() -> None:
    mean, mask = Prototypes.pad([torch.zeros(0, 3)] * 2)
    assert mean.shape == (2, 1, 3) and mask.tolist() == [[0], [0]]
    assert not mean.any()


def test_a_slot_and_back() -> None:
    table = Prototypes(torch.ones(2, 3), torch.tensor([1.0, 0.0]))
    assert set(table.slot()) == {"mean", "mask"}
    assert all(a is b for a, b in zip(Prototypes.of(table.slot()), table, strict=True))


def test_per_class_mean_counts_every_prototype_once() -> None:
    mean = torch.tensor([[[2.0], [4.0]], [[5.0], [100.0]], [[7.0], [8.0]]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    mean, mask = Prototypes(mean, mask).per_class_mean()
    assert mean.tolist() == [[3], [5], [0]]
    assert mask.tolist() == [1, 1, 0] and mask.dtype == torch.float32


def test_labeled_rows_come_client_by_client() -> None:
    means = [[[1.0], [5.0], [9.0]], [[3.0], [7.0], [9.0]]]
    rows, classes = of_clients(means, [[100, 0, 1], [1, 2, 0]]).labeled()
    assert rows.tolist() == [[1], [9], [3], [7]] and classes.tolist() == [0, 2, 0, 1]


def test_per_class_mean_counts_every_owner_once() -> None:
    means = [[[1.0], [5.0], [9.0]], [[3.0], [7.0], [9.0]], [[8.0], [0.0], [9.0]]]
    counts = [[100, 1, 0], [1, 2, 0], [0, 3, 0]]
    mean, mask = of_clients(means, counts).per_class_mean()
    # Client 2 does not have class 0: its 8 is no mean of anything. Nobody has class 2.
    assert mean.tolist() == [[2], [4], [0]]
    assert mask.tolist() == [1, 1, 0] and mask.dtype == torch.float32


def test_what_stands_where_nobody_is_has_no_effect() -> None:
    sent = of_clients([[[torch.nan]], [[2.0]]], [[0], [1]])
    assert sent.per_class_mean().mean.tolist() == [[2]]
    assert sent.reweighted_mean().mean.tolist() == [[2]]
    assert sent.mean.isnan().any(), "it leaves its own tensors alone"


@pytest.mark.parametrize("shape", [(7, 7, 33), (20, 10, 512), (17, 3, 4)])
def test_the_mean_over_clients_is_the_sum_in_their_order_to_the_bit(
    shape: tuple[int, ...], single_thread: None
) -> None:
    rng = np.random.default_rng(1)
    means = torch.from_numpy(rng.normal(size=shape).astype(np.float32))
    mean, _ = of_clients(means, torch.ones(shape[:2])).per_class_mean()
    assert torch.equal(mean, means.sum(0) / shape[0])


def test_smoothed() -> None:
    new = Prototypes(torch.tensor([[4.0], [4.0], [9.0], [9.0]]), torch.tensor([1.0, 1, 0, 0]))
    old = Prototypes(torch.tensor([[8.0], [9.0], [8.0], [9.0]]), torch.tensor([1.0, 0, 1, 0]))
    mean, mask = new.smoothed(old, 0.75)
    assert mean[:3].tolist() == [[5], [4], [8]]
    assert mask.tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("level", ["first", "last"])
def test_clusters_of_each_class(level: str) -> None:
    rng = np.random.default_rng(0)
    rows = [torch.from_numpy(rng.normal(size=(n, 5))) for n in (9, 0, 1, 12)]
    table = Prototypes.clusters(rows, level)
    for found, own in zip(table.rows(), rows, strict=True):
        assert torch.equal(found, cluster_means(own, level) if len(own) else own)
    again = Prototypes.pad(rows).clustered(level)
    assert torch.equal(again.mean, table.mean) and torch.equal(again.mask, table.mask)


def test_sums_of_bfloat16_are_float32() -> None:
    table = Prototypes(torch.ones(1, 1000, 2, dtype=torch.bfloat16), torch.ones(1, 1000))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean, mask = table.per_class_mean()
    assert mean.dtype == mask.dtype == torch.float32
    assert mean.tolist() == [[1, 1]]


@pytest.mark.parametrize("level", ["first", "last"])
def test_a_table_of_clusters_is_at_most_half_of_what_was_clustered(level: str) -> None:
    torch.manual_seed(0)
    rows = [torch.rand(owners, 4) for owners in (*range(2, 12), 11)]
    assert Prototypes.clusters(rows, level).mask.shape[1] <= 11 // 2
