"""Scores of models on test sets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from tests.federation.one_client import client_data, network, setup, start
from torch import Tensor

from protofed.errors import Diverged, ProtofedError
from protofed.federation.evaluation import evaluate
from protofed.method import Client, Method

pytestmark = pytest.mark.usefixtures("single_thread")


def test_scores_that_are_not_finite_are_an_error() -> None:
    """``argmax`` would take them for the largest score."""

    @dataclass(frozen=True)
    class Undecided(Method):
        name: ClassVar[str] = "undecided"

        def predict(self, client: Client, x: Tensor) -> Tensor:
            scores = client.forward(x).logits.clone()
            scores[0, 1] = math.nan
            return scores

    net, images = network(), client_data(10).images
    tests = {"left": images}
    words = "undecided's scores for images of left are not finite.*predict"
    with pytest.raises(Diverged, match=words):
        evaluate(setup(Undecided()), net, start(net), {}, tests, batch=3)
    huge = {"model": {n: t * 1e306 for n, t in start(net)["model"].items()}}
    with pytest.raises(Diverged, match=r"not finite.*too large.*smaller --lr"):
        evaluate(setup(), net, huge, {}, tests)
    broken = {"model": {n: t * math.nan for n, t in start(net)["model"].items()}}
    with pytest.raises(Diverged, match="the model is not finite"):
        evaluate(setup(), net, broken, {}, tests)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (lambda out: {"accuracy": out}, r"predicts Output as 'accuracy', not scores of shape"),
        (lambda out: {"accuracy": out.logits.argmax(1)}, r"predicts \[10\] as .*shape \[10, 4\]"),
        (lambda out: {"nearest": out.logits}, "the rules of wrong are nearest .*the main one"),
    ],
)
def test_predictions_that_are_not_scores(rules: Any, words: str) -> None:
    @dataclass(frozen=True)
    class Wrong(Method):
        name: ClassVar[str] = "wrong"

        def rules(self, client: Client, x: Tensor) -> dict[str, Tensor]:
            found: dict[str, Tensor] = rules(client.forward(x))
            return found

    net, images = network(), client_data(10).images
    with pytest.raises(ProtofedError, match=words):
        evaluate(setup(Wrong()), net, start(net), {}, {"left": images})


@pytest.mark.parametrize("score", [-math.inf, math.inf])
def test_a_score_may_be_minus_infinity_but_not_infinity(score: float) -> None:
    @dataclass(frozen=True)
    class Sure(Method):
        name: ClassVar[str] = "sure"

        def predict(self, client: Client, x: Tensor) -> Tensor:
            return client.forward(x).logits.index_fill(1, torch.tensor([1]), score)

    net, images = network(), client_data(10).images
    given = (setup(Sure()), net, start(net), {}, {"left": images})
    if score < 0:
        assert evaluate(*given)["accuracy"].keys() == {"left"}
    else:
        with pytest.raises(Diverged, match=r"scores .* not finite"):
            evaluate(*given)
