"""Metrics against scikit-learn's, and by hand where it has none."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as theirs

from protofed.inference.metrics import fit_temperature, measure
from protofed.inference.model import softmax

rng = np.random.default_rng(0)
LABELS = rng.choice(4, 300, p=[0.5, 0.3, 0.15, 0.05])
LOGITS = rng.normal(size=(300, 4)) + 1.5 * np.eye(4)[LABELS]


def test_like_scikit_learn() -> None:
    p = softmax(LOGITS)
    found, predicted = measure(p, LABELS), p.argmax(1)
    macro = found.macro()
    precision, recall, f1, support = theirs.precision_recall_fscore_support(LABELS, predicted)
    np.testing.assert_allclose(found.precision, 100 * precision)
    np.testing.assert_allclose(found.recall, 100 * recall)
    np.testing.assert_allclose(found.f1, 100 * f1)
    np.testing.assert_array_equal(found.support, support)
    np.testing.assert_array_equal(found.confusion, theirs.confusion_matrix(LABELS, predicted))
    assert found.images == 300
    assert macro["accuracy"] == pytest.approx(100 * theirs.accuracy_score(LABELS, predicted))
    balanced = theirs.balanced_accuracy_score(LABELS, predicted)
    assert macro["balanced accuracy"] == pytest.approx(100 * balanced)
    auc = theirs.roc_auc_score(LABELS, p, multi_class="ovr", average=None)
    np.testing.assert_allclose(found.auc, 100 * np.asarray(auc))
    assert macro["AUC"] == pytest.approx(100 * float(np.mean(auc)))


def test_calibration_error_by_hand() -> None:
    # 4 of confidence 0.75 of which 3 are right: no gap; 2 of confidence 1.0, one right: gap 0.5
    p = np.array([[0.75, 0.25]] * 4 + [[1.0, 0.0]] * 2)
    y = np.array([0, 0, 0, 1, 0, 1])
    assert measure(p, y).calibration_error == pytest.approx(100 * 0.5 * 2 / 6)


def test_classes_without_images() -> None:
    found = measure(np.array([[0.6, 0.4, 0.0], [0.2, 0.8, 0.0]]), np.array([0, 0]))
    assert np.isnan(found.recall[1]) and np.isnan(found.precision[2]) and np.isnan(found.auc).all()
    macro = found.macro()
    assert macro["accuracy"] == macro["balanced accuracy"] == 50
    assert np.isnan(macro["AUC"])
    empty = measure(np.zeros((0, 3)), np.zeros(0, dtype=np.int64))
    assert empty.images == 0 and np.isnan(empty.accuracy)


def test_a_temperature_undoes_overconfidence() -> None:
    y = np.array([rng.choice(4, p=p) for p in softmax(LOGITS)])
    assert fit_temperature(LOGITS, y) == pytest.approx(1, abs=0.2)
    assert fit_temperature(5 * LOGITS, y) == pytest.approx(5 * fit_temperature(LOGITS, y), rel=1e-3)
