from __future__ import annotations

import importlib
import itertools
import warnings

import numpy as np
import pytest
import torch

from protofed.errors import ProtofedError
from protofed.prototypes import cluster_means, finch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it has no pynndescent here, and needs none
    from finch import FINCH

pytestmark = pytest.mark.usefixtures("single_thread")

Array = np.ndarray

module = importlib.import_module("protofed.prototypes.finch")  # its name is also the function's


def at(*degrees: float) -> torch.Tensor:
    """Rows of length 1 in the plane, by their angle."""
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angle.cos(), angle.sin()], 1)


def labels(rows: torch.Tensor) -> list[list[int]]:
    return [p.tolist() for p in finch(rows)]


def data_sets(count: int) -> list[Array]:
    """Normal, non-negative and blob-like data of many sizes."""
    rng = np.random.default_rng(0)
    sets = []
    for i in range(count):
        n, d = int(rng.integers(2, 61)), int(rng.choice([2, 3, 5, 8, 16, 64]))
        rows = rng.normal(size=(n, d))
        if i % 3 == 1:
            rows = np.abs(rows)
        if i % 3 == 2:
            blobs = rng.normal(size=(int(rng.integers(1, 9)), d))
            rows = 0.2 * rows + blobs[rng.integers(0, len(blobs), n)]
        sets.append(rows.astype(np.float32))
    return sets


def same(a: Array, b: Array) -> bool:
    """Whether two label vectors are one partition."""
    return bool(((a[:, None] == a[None]) == (b[:, None] == b[None])).all())


def clear(rows: Array) -> bool:
    """Whether float32, which the package uses, can tell every row's first neighbor."""
    unit = rows.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -2)
    cosine.sort(1)
    return bool((cosine[:, -1] - cosine[:, -2] > 1e-6).all())


def test_against_the_package() -> None:
    compared = deeper = 0
    for rows in data_sets(100):
        ours = [p.numpy() for p in finch(torch.tensor(rows))]
        theirs, counts, _ = FINCH(rows, distance="cosine", ensure_early_exit=False, verbose=False)
        theirs = theirs.reshape(len(rows), -1)
        for level in range(len(counts)):
            means = rows if level == 0 else means_of(rows, ours[level - 1])
            if not clear(means):
                break
            assert same(ours[level], theirs[:, level])
            compared += 1
            deeper += level > 0
        else:
            # The package drops a partition that fell by one; none can, but into a single cluster.
            assert len(ours) == len(counts)
    assert compared > 130 and deeper > 30


def means_of(rows: Array, label: Array) -> Array:
    wide = rows.astype(np.float64)
    return np.stack([wide[label == c].mean(0) for c in range(label.max() + 1)])


def naive(rows: Array) -> list[list[int]]:
    """FINCH row by row, with all of its stop rules as they are written down."""
    rows = rows.astype(np.float64)

    def cosine(a: Array, b: Array) -> float:
        return float(sum(a * b) / np.sqrt(sum(a * a) * sum(b * b)))

    def join(points: list[Array]) -> list[int]:
        parent = list(range(len(points)))

        def root(i: int) -> int:
            while parent[i] != i:
                i = parent[i]
            return i

        for i, a in enumerate(points):
            best, best_distance = i, np.inf
            for j, b in enumerate(points):
                if j != i and 1 - cosine(a, b) < best_distance:
                    best, best_distance = j, 1 - cosine(a, b)
            parent[root(i)] = root(best)
        roots = [root(i) for i in range(len(points))]
        order = list(dict.fromkeys(roots))
        return [order.index(r) for r in roots]

    kept = [join(list(rows))]
    while True:
        last = kept[-1]
        count = max(last) + 1
        means = [rows[np.array(last) == c].mean(0) for c in range(count)]
        merged = join(means)
        new = max(merged) + 1
        if new == 1 or new >= count:
            return kept
        kept.append([merged[c] for c in last])
        if new == count - 1:
            return kept


def test_against_a_naive_implementation() -> None:
    levels = set()
    for rows in data_sets(30):
        expected = naive(rows)
        assert labels(torch.tensor(rows)) == expected
        levels.add(len(expected))
    assert {1, 2, 3} <= levels


def test_counts_at_least_halve() -> None:
    # Why a partition never stays as it is, nor falls by one to more than one: every cluster joins
    # another. Of FINCH's stop rules only "one cluster" is left.
    for rows in data_sets(100):
        counts = [len(rows), *(int(p.max()) + 1 for p in finch(torch.tensor(rows)))]
        assert all(2 * after <= before for before, after in itertools.pairwise(counts))


def test_one_two_and_three_rows_are_one_cluster() -> None:
    assert labels(at(0)) == [[0]]
    assert finch(at(0))[0].dtype == torch.int64
    assert labels(at(0, 90)) == [[0, 0]]
    for angles in ((0, 10, 180), (0, 170, 180), (0, 120, 240)):
        assert labels(at(*angles)) == [[0, 0, 0]]


def test_two_pairs_are_two_clusters() -> None:
    # 0-10 and 90-100 are each other's neighbors. The next partition would be a single cluster
    # and is not kept: the rule "1 -> discard and stop".
    assert labels(at(0, 90, 10, 100)) == [[0, 1, 0, 1]]


def test_a_single_first_cluster_is_kept() -> None:
    # 0 -> 10, 10 -> 18, 18 -> 25 <-> 18: a chain.
    assert labels(at(0, 10, 18, 25)) == [[0, 0, 0, 0]]


def test_two_levels() -> None:
    # Four pairs at 0, 30, 180 and 210 degrees join into two groups; those into one: discarded.
    rows = at(0, 2, 180, 182, 30, 32, 210, 212)
    assert labels(rows) == [[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 0, 0, 1, 1]]
    first, last = cluster_means(rows, "first"), cluster_means(rows, "last")
    torch.testing.assert_close(first, rows.reshape(4, 2, 2).mean(1))
    torch.testing.assert_close(last, rows.reshape(2, 2, 2, 2).mean((0, 2)))


def test_means_are_of_the_original_rows_not_of_means() -> None:
    # Clusters of 3 and of 2 rows joined: the mean weighs rows, not clusters.
    rows = torch.cat([at(0, 1, 2), at(20, 21), at(180, 181), at(200, 201)])
    assert labels(rows) == [[0, 0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0, 0, 1, 1, 1, 1]]
    expected = torch.stack([rows[:5].mean(0), rows[5:].mean(0)])
    torch.testing.assert_close(cluster_means(rows, "last"), expected)


def test_the_distance_is_cosine() -> None:
    # By Euclid the two short rows and the two long ones would pair.
    rows = at(0, 60, 2, 62) * torch.tensor([1.0, 1.0, 100.0, 100.0])[:, None]
    assert labels(rows) == [[0, 1, 0, 1]]
    torch.testing.assert_close(
        cluster_means(rows, "first"), torch.stack([rows[[0, 2]].mean(0), rows[[1, 3]].mean(0)])
    )


def test_lowest_index_on_ties() -> None:
    # Row 2 is as near to row 0 as to row 4, and joins row 0's pair.
    rows = torch.tensor([[1.0, 0, 0], [1, 0, 0.1], [1, 1, 0], [0, 1, 0.1], [0, 1, 0]])
    cosine = torch.nn.functional.normalize(rows, dim=1) @ torch.nn.functional.normalize(rows[2:3]).T
    torch.testing.assert_close(cosine[0], cosine[4])
    assert labels(rows) == [[0, 0, 0, 1, 1]]
    assert labels(rows.flip(0)) == [[0, 0, 0, 1, 1]]


def test_equal_directions_are_one_cluster_in_spite_of_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in range(2, 40):
        direction = torch.rand(1, 37, generator=generator, dtype=torch.float64)
        rows = direction * (torch.rand(n, 1, generator=generator, dtype=torch.float64) + 0.5)
        assert labels(rows) == [[0] * n]


def test_rows_without_a_direction() -> None:
    assert labels(torch.zeros(5, 3)) == [[0] * 5]
    rows = torch.cat([at(0, 2, 40, 42), torch.zeros(1, 2, dtype=torch.float64)])
    # Cosine 0 with every other: a tie, so the lowest index.
    assert labels(rows) == [[0, 0, 1, 1, 0]]
    assert cluster_means(rows).isfinite().all()


def at_once(rows: torch.Tensor) -> list[int]:
    """The first neighbors from the whole matrix of cosines."""
    norm = rows.norm(dim=1, keepdim=True)
    unit = rows / torch.where(norm > 0, norm, 1)
    cosine = (unit @ unit.T).round(decimals=12)
    return cosine.fill_diagonal_(-torch.inf).argmax(1).tolist()


def awkward() -> list[torch.Tensor]:
    """Rows with ties, duplicates, one direction at several lengths, and none at all."""
    generator = torch.Generator().manual_seed(3)
    plain = torch.rand(41, 16, generator=generator, dtype=torch.float64)
    twice = torch.cat([plain, plain[::2], plain[5:20]])
    lengths = torch.rand(len(twice), 1, generator=generator, dtype=torch.float64) + 0.1
    holes = twice.clone()
    holes[::7] = 0
    grid = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=3)), dtype=torch.float64)
    return [plain, twice, twice * lengths, holes, grid, torch.zeros(20, 3), torch.ones(21, 3)]


@pytest.mark.parametrize("block", [9, 50])
def test_blocks_of_any_size_give_the_same_labels(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [*awkward(), *(torch.tensor(rows, dtype=torch.float64) for rows in data_sets(6))]
    expected = [(at_once(rows), labels(rows), cluster_means(rows)) for rows in sets]
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "PART", block)
    for rows, (neighbors, partitions, means) in zip(sets, expected, strict=True):
        assert module._neighbors(rows).tolist() == neighbors
        assert labels(rows) == partitions
        torch.testing.assert_close(cluster_means(rows), means, rtol=1e-12, atol=1e-12)


def test_more_rows_than_a_block() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(module.BLOCK + 300, 12, generator=generator, dtype=torch.float64)
    rows[-5:] = rows[:5]
    assert module._neighbors(rows).tolist() == at_once(rows)
    first, *_ = finch(rows)
    assert first[-5:].tolist() == first[:5].tolist()
    assert int(first.max()) + 1 > module.PART
    means = cluster_means(rows, "first")
    for c in (0, module.PART - 1, module.PART, int(first.max())):
        torch.testing.assert_close(means[c], rows[first == c].mean(0))


def test_cluster_means_keep_the_dtype_and_need_no_gradient_path() -> None:
    rows = at(0, 90, 10, 100).to(torch.bfloat16)
    assert cluster_means(rows).dtype == torch.bfloat16
    assert cluster_means(at(5)).tolist() == at(5).tolist()


def test_errors() -> None:
    with pytest.raises(ValueError, match="N > 0"):
        finch(torch.zeros(0, 3))
    with pytest.raises(ProtofedError, match=r"unknown FINCH level 'lasst'.*last"):
        cluster_means(at(0, 1), "lasst")
