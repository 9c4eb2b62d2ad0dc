"""``Prototypes``: what every prototype method sends, keeps and compares features with.

Shapes: K classes, J prototypes of a class (padded), d features, M clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from protofed.fused import replaceable
from protofed.prototypes.finch import cluster_means
from protofed.prototypes.means import class_means, full_precision
from protofed.tree import Slot


class Prototypes(NamedTuple):
    """The prototypes of K classes: one per class, or a padded table of several.

    One per class is ``mean`` [K, d] with ``mask`` [K]; several are [K, J, d] with [K, J]. The
    mask is positive where there is a prototype and 0 where there is none; what the mean holds
    there has no meaning.
    """

    mean: Tensor
    mask: Tensor

    @classmethod
    def empty(cls, classes: int, features: int) -> Self:
        """One per class, none of which exists yet: what round 0 has."""
        return cls(torch.zeros(classes, features), torch.zeros(classes))

    @classmethod
    def pad(cls, rows: Sequence[Tensor]) -> Self:
        """A table from each class's own prototypes [J_k, d], padded with zeros.

        J is the largest J_k and at least 1; a J_k may be 0.
        """
        size = max([1, *(len(rows_Jd) for rows_Jd in rows)])
        like = rows[0]
        mean_KJd = like.new_zeros(len(rows), size, like.shape[1])
        mask_KJ = torch.zeros(len(rows), size, device=like.device)
        for k, rows_Jd in enumerate(rows):
            mean_KJd[k, : len(rows_Jd)] = rows_Jd
            mask_KJ[k, : len(rows_Jd)] = 1
        return cls(mean_KJd, mask_KJ)

    @classmethod
    def clusters(cls, rows: Iterable[Tensor], level: str = "last", least: int = 1) -> Self:
        """The means of FINCH's clusters of each class's rows [N_k, d]; none for a class without.

        Clusters of fewer than ``least`` rows are left out.
        """
        return cls.pad([cluster_means(r, level, least) if len(r) else r for r in rows])

    @classmethod
    def of(cls, slot: Slot) -> Self:
        """The prototypes that a slot of a message or of a state holds."""
        return cls(slot["mean"], slot["mask"])

    def slot(self) -> Slot:
        """These prototypes as a slot of a message or of a state."""
        return {"mean": self.mean, "mask": self.mask}

    def table(self) -> Prototypes:
        """As a table [K, J, d] with mask [K, J], even if there is one per class."""
        if self.mask.ndim == 2:
            return self
        return Prototypes(self.mean[:, None], self.mask[:, None])

    def rows(self) -> list[Tensor]:
        """The prototypes of each class without the padding, [J_k, d] each."""
        mean_KJd, mask_KJ = self.table()
        return [mean_Jd[mask_J > 0] for mean_Jd, mask_J in zip(mean_KJd, mask_KJ, strict=True)]

    def labeled(self) -> tuple[Tensor, Tensor]:
        """The prototypes without the padding, as rows [N, d], and their classes [N].

        The second dimension comes first: all classes of one client, then those of the next.
        """
        there_MK = self.mask.T > 0
        return self.mean.transpose(0, 1)[there_MK], there_MK.nonzero()[:, 1]

    @replaceable
    @full_precision
    def per_class_mean(self) -> Prototypes:
        """One per class: the plain mean of the class's prototypes, each counted once.

        Over the clients' class means this is the mean over the class's owners (FPL (3), FedProto,
        FedSeProto (3)); over clusters it is FPL's unbiased prototype (6).
        """
        some_KJ = self.mask > 0
        # The order of summation follows the memory layout: clone keeps it, masked_fill would not.
        sum_Kd = self.mean.clone().masked_fill_(~some_KJ[..., None], 0).sum(1)
        mean_Kd = class_means(sum_Kd, some_KJ.sum(1))
        return Prototypes(mean_Kd, some_KJ.any(1).to(torch.float32))

    @full_precision
    def reweighted_mean(self) -> Prototypes:
        """One per class: prototypes weighted by their squared distance to the plain mean.

        I²PFL (3) and (4): a client far from the others counts more. Where all distances are 0 (a
        single prototype, or equal ones) it is the plain mean.
        """
        plain_Kd, mask_K = self.per_class_mean()
        means_MKd, owner_MK = self.mean.transpose(0, 1), self.mask.T > 0
        distance_MK = (means_MKd - plain_Kd).square().sum(-1).masked_fill(~owner_MK, 0)
        total_K = distance_MK.sum(0)
        weight_MK = distance_MK / total_K.masked_fill(total_K <= 0, 1)
        mean_Kd = (weight_MK[..., None] * means_MKd.masked_fill(~owner_MK[..., None], 0)).sum(0)
        return Prototypes(torch.where((total_K > 0)[:, None], mean_Kd, plain_Kd), mask_K)

    def clustered(self, level: str = "last") -> Prototypes:
        """The means of FINCH's clusters of each class's prototypes."""
        return Prototypes.clusters(self.rows(), level)

    def smoothed(self, old: Prototypes, share: float) -> Prototypes:
        """share · these + (1 − share) · old where both exist, else the one that does."""
        both = ((self.mask > 0) & (old.mask > 0))[:, None]
        either = torch.where((self.mask > 0)[:, None], self.mean, old.mean)
        mixed = share * self.mean + (1 - share) * old.mean
        return Prototypes(torch.where(both, mixed, either), torch.maximum(self.mask, old.mask))
