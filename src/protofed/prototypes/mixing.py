"""Prototypes of one batch: class means of its features, or of features mixed across classes.

Shapes: B batch, K classes, d features.
"""

from __future__ import annotations

from torch import Tensor

from protofed.fused import replaceable
from protofed.prototypes.means import class_means, class_sums, full_precision
from protofed.prototypes.table import Prototypes


@replaceable
def mixed_class_means(
    z_Bd: Tensor, y_B: Tensor, gamma: Tensor, score_BB: Tensor, classes: int
) -> Prototypes:
    """Class means of γ · z_i + (1 − γ) · z_j, where j is i's partner of another class.

    There are none if all samples are of one class (I²PFL (7) and (8)).
    """
    j_B, mixable_B = partners(score_BB, y_B)
    return batch_means(_mixed(z_Bd, z_Bd[j_B], gamma), y_B, classes, mixable_B.any())


def partners(score_BB: Tensor, y_B: Tensor) -> tuple[Tensor, Tensor]:
    """For each sample, the one of another class with the largest score, and if there is one."""
    other_BB = y_B[:, None] != y_B
    return score_BB.masked_fill(~other_BB, -1).argmax(1), other_BB.any(1)


def batch_means(z_Bd: Tensor, y_B: Tensor, classes: int, there: Tensor | bool = True) -> Prototypes:
    """The class means of a batch, if they are ``there``."""
    sum_Kd, count_K = class_sums(z_Bd, y_B, classes)
    return Prototypes(class_means(sum_Kd, count_K), (count_K > 0) & there)


@full_precision
def _mixed(z_Bd: Tensor, partner_Bd: Tensor, gamma: Tensor) -> Tensor:
    return gamma * z_Bd + (1 - gamma) * partner_Bd
