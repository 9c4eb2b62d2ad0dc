"""Losses that pull features toward prototypes.

Shapes: B batch, K classes, d features, J prototypes of a class (padded), N rows.

These run in every training step, even inside a captured graph: tensor expressions only, nothing
that looks at a value, and masked_fill rather than torch.where with a number, which would copy
the number from the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protofed.errors import unknown
from protofed.fused import replaceable
from protofed.prototypes.means import full_precision
from protofed.prototypes.table import Prototypes

# Stands in for minus infinity. Finite, because a sample without prototypes subtracts two such
# numbers, and inf - inf is NaN.
ABSENT = -1e30

# A row shorter than 1e-12 has no direction. The backward pass of rsqrt cubes it, and (1e-24)^-1.5
# still fits into float32.
NO_LENGTH = 1e-24


def _unit(rows_Nd: Tensor) -> Tensor:
    # A feature whose ReLUs are all dead has no direction. The usual max(norm, eps) would give it a
    # gradient of 1/eps. Both fills are needed: 0 gives the row cosine 0 and gradient 0, and 1
    # keeps the backward pass of rsqrt from 0 · inf = NaN.
    square_N1 = (rows_Nd * rows_Nd).sum(-1, keepdim=True)
    none_N1 = square_N1 <= NO_LENGTH
    return rows_Nd * square_N1.masked_fill(none_N1, 1).rsqrt().masked_fill(none_N1, 0)


@full_precision
def cosine(a_Bd: Tensor, b_Nd: Tensor) -> Tensor:
    """Cosines [B, N]; a row of norm 0 has cosine 0 with everything, and gradient 0."""
    return _unit(a_Bd) @ _unit(b_Nd).to(a_Bd.dtype).T


@full_precision
def paired_cosine(a_Bd: Tensor, b_Bd: Tensor) -> Tensor:
    """Cosines [B] of the rows of ``a`` with the same rows of ``b``; 0 for a row of norm 0."""
    return (_unit(a_Bd) * _unit(b_Bd)).sum(1)


@replaceable
@full_precision
def contrast(
    z_Bd: Tensor, y_B: Tensor, prototypes: Prototypes, tau: float | Tensor, power: float = 1.0
) -> Tensor:
    """Contrast with the prototypes of all classes (FPL (8), I²PFL (6)).

    Batch mean of -log(Σ_own exp(cos/τ) / Σ_all exp(cos/τ)). A sample whose class has no prototype
    contributes 0 and still counts in the mean. No gradient reaches the prototypes. ``power``
    replaces cos by cos^power (FedPLVM's α-sparsity), with cosines clamped to [1e-6, 1]: a negative
    one has no fractional power, and the slope at 0 is infinite.
    """
    mean_KJd, mask_KJ = prototypes.table()
    classes, _, features = mean_KJd.shape
    prototype_Nd = mean_KJd.detach().to(z_Bd.dtype).reshape(-1, features)
    cosine_BN = cosine(z_Bd, prototype_Nd)
    if power != 1:
        cosine_BN = cosine_BN.clamp(1e-6, 1) ** power
    logit_BKJ = (cosine_BN / tau).view(-1, *mask_KJ.shape)
    other_BK = y_B[:, None] != torch.arange(classes, device=y_B.device)
    all_BKJ = logit_BKJ.masked_fill(mask_KJ <= 0, ABSENT)
    own_BKJ = all_BKJ.masked_fill(other_BK[..., None], ABSENT)
    loss_B = all_BKJ.flatten(1).logsumexp(1) - own_BKJ.flatten(1).logsumexp(1)
    unknown_B = (mask_KJ <= 0).all(1)[y_B]
    return loss_B.masked_fill(unknown_B, 0).mean()


@replaceable
@full_precision
def consistency(
    z_Bd: Tensor, y_B: Tensor, prototypes: Prototypes, reduction: str = "mean", detach: bool = True
) -> Tensor:
    """Batch mean of the squared distance to the prototype of its class, as mean or sum over d.

    "mean" is FedProto's loss and that of FPL's code, "sum" is FPL (10) as printed. A sample whose
    class has no prototype contributes 0 and still counts in the mean. With ``detach`` no gradient
    reaches the prototypes.
    """
    if reduction not in ("mean", "sum"):
        raise unknown("reduction", reduction, ("mean", "sum"))
    mean_Kd = prototypes.mean.detach() if detach else prototypes.mean
    difference_Bd = (z_Bd - mean_Kd[y_B]).masked_fill((prototypes.mask <= 0)[y_B][:, None], 0)
    square_B = (difference_Bd * difference_Bd).sum(1)
    return square_B.mean() / (z_Bd.shape[1] if reduction == "mean" else 1)


@full_precision
def nearest(z_Bd: Tensor, prototypes: Prototypes) -> Tensor:
    """Scores [B, K]: minus the squared distance to each class's prototype, if it has one."""
    square_BK = torch.cdist(z_Bd, prototypes.mean.to(z_Bd.dtype)).square()
    return (-square_BK).masked_fill(prototypes.mask == 0, ABSENT)
