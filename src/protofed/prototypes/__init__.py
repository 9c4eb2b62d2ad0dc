"""Prototypes: class means, their clusters, and the losses that use them."""

from __future__ import annotations

from protofed.prototypes.finch import cluster_means, finch
from protofed.prototypes.losses import consistency, contrast, cosine, nearest, paired_cosine
from protofed.prototypes.means import (
    class_means,
    class_sums,
    full_precision,
    owners_mean,
    pad,
    per_class_mean,
    reweighted_mean,
    smoothed,
    widened,
)

__all__ = [
    "class_means",
    "class_sums",
    "cluster_means",
    "consistency",
    "contrast",
    "cosine",
    "finch",
    "full_precision",
    "nearest",
    "owners_mean",
    "pad",
    "paired_cosine",
    "per_class_mean",
    "reweighted_mean",
    "smoothed",
    "widened",
]
