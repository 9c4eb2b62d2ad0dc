"""Prototypes: class means, their clusters, and the losses that use them."""

from __future__ import annotations

from protofed.prototypes.finch import cluster_means, finch
from protofed.prototypes.losses import consistency, contrast, cosine, nearest, paired_cosine
from protofed.prototypes.means import class_means, class_sums, full_precision, widened
from protofed.prototypes.mixing import batch_means, mixed_class_means, partners
from protofed.prototypes.table import Prototypes

__all__ = [
    "Prototypes",
    "batch_means",
    "class_means",
    "class_sums",
    "cluster_means",
    "consistency",
    "contrast",
    "cosine",
    "finch",
    "full_precision",
    "mixed_class_means",
    "nearest",
    "paired_cosine",
    "partners",
    "widened",
]
