"""FINCH: clusters without a number of clusters, by linking each row to its first neighbour.

Sarfraz, Sharma, Stiefelhagen, CVPR 2019. Shapes: N rows, d features, C clusters.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from protofed.errors import unknown
from protofed.prototypes.means import class_means, class_sums


def _link(rows_Nd: Tensor) -> Tensor:
    """Labels [N] after joining each row to the one at the smallest cosine distance."""
    norm_N1 = rows_Nd.norm(dim=1, keepdim=True)
    # A row without a direction gets cosine 0 with every other, not NaN.
    unit_Nd = rows_Nd / torch.where(norm_N1 > 0, norm_N1, 1)
    # Rows of one direction must tie exactly, so that the lowest index wins; the last bits of a
    # matrix product depend on a column's position, and four equal rows could become two pairs.
    cosine_NN = (unit_Nd @ unit_Nd.T).round(decimals=12)
    neighbour_N = cosine_NN.fill_diagonal_(-torch.inf).argmax(1).cpu().numpy()
    n = len(neighbour_N)
    links = coo_array((np.ones(n), (np.arange(n), neighbour_N)), shape=(n, n))
    _, label_N = connected_components(links, directed=False)
    # scipy does not promise an order; number the clusters as they first appear.
    _, first_C, label_N = np.unique(label_N, return_index=True, return_inverse=True)
    ordered_N = np.asarray(first_C.argsort().argsort()[label_N], dtype=np.int64)
    return torch.from_numpy(ordered_N).to(rows_Nd.device)


def _means(rows_Nd: Tensor, label_N: Tensor) -> Tensor:
    return class_means(*class_sums(rows_Nd, label_N, int(label_N.max()) + 1))


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
    label_N = finch(rows_Nd)[0 if level == "first" else -1]
    return _means(rows_Nd.double(), label_N).to(rows_Nd.dtype)
