"""FINCH: clusters without a number of clusters, by linking each row to its first neighbor.

Sarfraz, Sharma, Stiefelhagen, CVPR 2019. Shapes: N rows, d features, C clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protofed.errors import unknown
from protofed.prototypes.means import class_means, class_sums

BLOCK = 2048
"""Rows whose cosines with as many others are in memory at a time: 32 MB."""

FEW = 128
"""Rows clustered on the host: a hundred tiny operations, many of which a GPU's host waits for."""

PART = 256
"""Clusters whose means are taken at a time: their table of members is [N, PART], not [N, C]."""


def _neighbors(rows_Nd: Tensor) -> Tensor:
    """For each row the index [N] of the one at the smallest cosine distance; the lowest on ties.

    Block by block, so that memory grows with N and not with N². A cosine belongs to both of its
    rows, so only blocks on and above the diagonal are computed. Every row still meets the others
    in the order of their indices, and only a larger cosine takes the place of an earlier one.
    """
    norm_N1 = rows_Nd.norm(dim=1, keepdim=True)
    # A row without a direction gets cosine 0 with every other, not NaN.
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
            # Rows of one direction must tie exactly, so that the lowest index wins; the last bits
            # of a matrix product depend on a column's position, and four equal rows could become
            # two pairs.
            cosine_RO = (unit_Nd[rows] @ unit_Nd[others].T).round_(decimals=12)
            if others is rows:
                meet(rows, rows, cosine_RO.fill_diagonal_(-torch.inf))
            else:
                meet(rows, others, cosine_RO)
                meet(others, rows, cosine_RO.T)
    return index_N


def _link(rows_Nd: Tensor) -> Tensor:
    """Labels [N] after joining each row to the one at the smallest cosine distance."""
    # Union-find in plain Python: for the few rows of most rounds cheaper than a sparse matrix.
    parent = list(range(len(rows_Nd)))

    def first(row: int) -> int:
        """The lowest row of the cluster, as far as it is known."""
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
    """The means [C, d] of the clusters, some clusters at a time."""
    count = int(label_N.max()) + 1
    parts = []
    for first in range(0, count, PART):
        here_N = (label_N >= first) & (label_N < first + PART)
        sums = class_sums(rows_Nd[here_N], label_N[here_N] - first, min(PART, count - first))
        parts.append(class_means(*sums))
    return torch.cat(parts)


def finch(rows_Nd: Tensor) -> list[Tensor]:
    """The kept partitions, finest first: int64 labels [N], numbered as clusters first appear.

    Each partition joins clusters of the one before, by the means of their original rows. A
    partition into one cluster is kept only if it is the first.
    """
    if rows_Nd.ndim != 2 or len(rows_Nd) == 0:
        raise ValueError(f"FINCH needs rows [N, d] with N > 0, got {tuple(rows_Nd.shape)}")
    rows_Nd = rows_Nd.detach().double()
    partitions = [_link(rows_Nd)]
    # Every cluster joins at least one other, so a count at least halves. FINCH's two other stops
    # (a count that stays, or falls by one to more than one) therefore cannot happen here; they
    # belong to the variant that drops long links.
    while (label_N := partitions[-1]).max() > 0:
        coarser_N = _link(_means(rows_Nd, label_N))[label_N]
        if coarser_N.max() == 0:
            break
        partitions.append(coarser_N)
    return partitions


def cluster_means(rows_Nd: Tensor, level: str = "last") -> Tensor:
    """Plain means [J, d] of the clusters of the first or the last kept partition."""
    if level not in ("first", "last"):
        raise unknown("FINCH level", level, ("first", "last"))
    near_Nd = rows_Nd.detach().cpu() if len(rows_Nd) <= FEW else rows_Nd.detach()
    label_N = finch(near_Nd)[0 if level == "first" else -1]
    return _means(near_Nd.double(), label_N).to(rows_Nd)
