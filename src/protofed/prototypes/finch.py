"""FINCH: clustering without a number of clusters, by linking each row to its first neighbor.

Sarfraz, Sharma, Stiefelhagen, CVPR 2019. Shapes: N rows, d features, C clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protofed.errors import unknown
from protofed.prototypes.means import class_means, class_sums

BLOCK = 2048
"""Rows per block: the cosines of one block with another are in memory at a time, 32 MB."""

FEW = 128
"""Up to this many rows are clustered on the host: on a GPU, a hundred tiny kernels cost more."""

PART = 256
"""Clusters averaged at a time: their membership table is [N, PART], not [N, C]."""


def _neighbors(rows_Nd: Tensor) -> Tensor:
    """For each row, the index [N] of the closest other row by cosine; the lowest index on ties.

    Block by block, so that memory grows with N and not with N². A cosine belongs to both of its
    rows, so only blocks on and above the diagonal are computed. Each row still sees the others in
    the order of their indices, and only a larger cosine replaces an earlier one.
    """
    norm_N1 = rows_Nd.norm(dim=1, keepdim=True)
    # A row of norm 0 gets cosine 0 with every other row, not NaN.
    unit_Nd = rows_Nd / torch.where(norm_N1 > 0, norm_N1, 1)
    best_N = norm_N1.new_full((len(rows_Nd),), -torch.inf)
    index_N = torch.zeros_like(best_N, dtype=torch.int64)

    def meet(rows: slice, others: slice, cosine_RO: Tensor) -> None:
        largest_R, at_R = cosine_RO.max(1)
        better_R = largest_R > best_N[rows]
        best_N[rows] = torch.where(better_R, largest_R, best_N[rows])
        index_N[rows] = torch.where(better_R, at_R + others.start, index_N[rows])

    blocks = [slice(first, first + BLOCK) for first in range(0, len(rows_Nd), BLOCK)]
    for i, rows in enumerate(blocks):
        for others in blocks[i:]:
            # Rows of the same direction must tie exactly, so that the lowest index wins. The last
            # bits of a matrix product depend on a column's position, and four equal rows could
            # otherwise become two pairs.
            cosine_RO = (unit_Nd[rows] @ unit_Nd[others].T).round_(decimals=12)
            if others is rows:
                meet(rows, rows, cosine_RO.fill_diagonal_(-torch.inf))
            else:
                meet(rows, others, cosine_RO)
                meet(others, rows, cosine_RO.T)
    return index_N


def _link(rows_Nd: Tensor) -> Tensor:
    """Labels [N] after joining each row to its closest other row."""
    # Union-find in plain Python: cheaper than a sparse matrix for the few rows of most rounds.
    parent = list(range(len(rows_Nd)))

    def first(row: int) -> int:
        """The lowest row of the cluster, as far as is known."""
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    for row, neighbor in enumerate(_neighbors(rows_Nd).tolist()):
        low, high = sorted((first(row), first(neighbor)))
        parent[high] = low
    number: dict[int, int] = {}
    label = [number.setdefault(first(row), len(number)) for row in range(len(parent))]
    return torch.tensor(label, device=rows_Nd.device)


def _means(rows_Nd: Tensor, label_N: Tensor) -> Tensor:
    """The means [C, d] of the clusters, a few clusters at a time."""
    count = int(label_N.max()) + 1
    parts = []
    for first in range(0, count, PART):
        here_N = (label_N >= first) & (label_N < first + PART)
        sums = class_sums(rows_Nd[here_N], label_N[here_N] - first, min(PART, count - first))
        parts.append(class_means(*sums))
    return torch.cat(parts)


def finch(rows_Nd: Tensor) -> list[Tensor]:
    """The partitions, finest first: int64 labels [N], numbered in order of first appearance.

    Each partition joins clusters of the previous one by the means of their original rows. A
    partition into a single cluster is kept only if it is the first.
    """
    if rows_Nd.ndim != 2 or len(rows_Nd) == 0:
        raise ValueError(f"FINCH needs rows [N, d] with N > 0, got {tuple(rows_Nd.shape)}")
    rows_Nd = rows_Nd.detach().double()
    partitions = [_link(rows_Nd)]
    # Every cluster joins at least one other, so each step at least halves their number. FINCH's two
    # other stopping rules (the number stays, or drops by one to more than one) cannot apply here:
    # they belong to the variant that drops long links.
    while (label_N := partitions[-1]).max() > 0:
        coarser_N = _link(_means(rows_Nd, label_N))[label_N]
        if coarser_N.max() == 0:
            break
        partitions.append(coarser_N)
    return partitions


def cluster_means(rows_Nd: Tensor, level: str = "last", least: int = 1) -> Tensor:
    """Plain means [J, d] of the clusters of the first or the last partition.

    Clusters of fewer than ``least`` rows are left out.
    """
    if level not in ("first", "last"):
        raise unknown("FINCH level", level, ("first", "last"))
    near_Nd = rows_Nd.detach().cpu() if len(rows_Nd) <= FEW else rows_Nd.detach()
    label_N = finch(near_Nd)[0 if level == "first" else -1]
    means_Jd = _means(near_Nd.double(), label_N)
    if least > 1:
        means_Jd = means_Jd[torch.bincount(label_N) >= least]
    return means_Jd.to(rows_Nd)
