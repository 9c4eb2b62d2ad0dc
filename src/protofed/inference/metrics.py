"""How good predictions are: from probabilities [n, K] and labels [n] to the usual numbers, in %."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.stats import rankdata

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BINS = 15


@dataclass(frozen=True)
class Metrics:
    """Numbers in %. Per class [K], NaN if a class has no images, or none was predicted as it.

    ``precision``, ``recall``, ``f1`` and ``auc`` (one class against the rest) are per class; the
    mean over classes is what ``macro`` gives. ``calibration_error`` is the expected calibration
    error with 15 bins: by how much confidence and accuracy differ.
    """

    confusion: Ints
    """Row: true class, column: predicted."""
    auc: Floats
    calibration_error: float

    @property
    def images(self) -> int:
        return int(self.confusion.sum())

    @property
    def support(self) -> Ints:
        return np.asarray(self.confusion.sum(1))

    @property
    def accuracy(self) -> float:
        return float(_ratio(self.confusion.trace(), self.confusion.sum()))

    @property
    def recall(self) -> Floats:
        return _ratio(self.confusion.diagonal(), self.confusion.sum(1))

    @property
    def precision(self) -> Floats:
        return _ratio(self.confusion.diagonal(), self.confusion.sum(0))

    @property
    def f1(self) -> Floats:
        both = self.confusion.sum(0) + self.confusion.sum(1)
        return _ratio(2 * self.confusion.diagonal(), both)

    def macro(self) -> dict[str, float]:
        """All numbers of the whole: means over the classes that have images."""
        there = self.support > 0

        def mean(values: Floats) -> float:
            return float(np.nan_to_num(values[there]).mean()) if there.any() else float("nan")

        known = self.auc[~np.isnan(self.auc)]
        return {
            "accuracy": self.accuracy,
            "balanced accuracy": mean(self.recall),
            "precision": mean(self.precision),
            "recall": mean(self.recall),
            "F1": mean(self.f1),
            "AUC": float(known.mean()) if known.size else float("nan"),
            "calibration error": self.calibration_error,
        }


def measure(probabilities: Floats, labels: Ints) -> Metrics:
    classes = probabilities.shape[1]
    predicted = probabilities.argmax(1)
    cells = np.bincount(labels * classes + predicted, minlength=classes**2)
    auc = np.array([_auc(probabilities[:, k], labels == k) for k in range(classes)])
    return Metrics(
        cells.reshape(classes, classes), auc, _calibration_error(probabilities, predicted == labels)
    )


def fit_temperature(logits: Floats, labels: Ints) -> float:
    """The temperature that makes softmax(logits / T) most likely (Guo et al., ICML 2017)."""

    def loss(log_t: float) -> float:
        return cross_entropy(logits / np.exp(log_t), labels)

    return float(np.exp(minimize_scalar(loss, bounds=(-5, 5), method="bounded").x))


def cross_entropy(logits: Floats, labels: Ints) -> float:
    """The mean over all samples."""
    top = logits.max(1)
    normalizer = top + np.log(np.exp(logits - top[:, None]).sum(1))
    return float((normalizer - logits[np.arange(len(labels)), labels]).mean())


def _ratio(part: NDArray[np.integer], whole: NDArray[np.integer]) -> Floats:
    part, whole = np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    return np.where(whole > 0, 100 * part / np.maximum(whole, 1), np.nan)


def _auc(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """The probability that a positive scores above a negative, ties as half."""
    count, others = int(positive.sum()), int((~positive).sum())
    if not (count and others):
        return float("nan")
    ranks = rankdata(scores)[positive].sum()
    return float(100 * (ranks - count * (count + 1) / 2) / (count * others))


def _calibration_error(probabilities: Floats, right: NDArray[np.bool_]) -> float:
    confidence = probabilities.max(1)
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [
        abs(right[bins == b].mean() - confidence[bins == b].mean()) * (bins == b).sum()
        for b in np.unique(bins)
    ]
    return float(100 * sum(gaps) / max(1, len(right)))
