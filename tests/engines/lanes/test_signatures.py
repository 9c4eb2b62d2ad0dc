"""Losses are distinguished by what they compute, not by which object they are."""

from __future__ import annotations

from functools import partial
from typing import Any

from protofed.engines.lanes.signatures import loss_signature
from protofed.method import Batch, Terms
from protofed.methods import FedProto


class Scaled(FedProto):
    def scaled(self, client: Any, batch: Batch, scale: float) -> Terms:
        return {"scaled": scale * self.loss(client, batch)["ce"]}


def made(scale: object) -> Any:
    return lambda client, batch: scale


def positional(scale: float) -> Any:
    def loss(client: Any, batch: Batch, s: float = scale) -> float:
        return s

    return loss


def keyword(scale: float) -> Any:
    def loss(client: Any, batch: Batch, *, s: float = scale) -> float:
        return s

    return loss


def test_bound_methods() -> None:
    method = FedProto()
    assert loss_signature(method.loss) == loss_signature(FedProto().loss)
    assert loss_signature(method.loss) != loss_signature(FedProto(weight=2.0).loss)
    assert loss_signature(method.loss) != loss_signature(method.forward)


def test_closures_and_default_arguments() -> None:
    for make in (made, positional, keyword):
        assert make(1.0) is not make(1.0)
        assert loss_signature(make(1.0)) == loss_signature(make(1.0)) != loss_signature(make(2.0))


def test_partials() -> None:
    one, again, two = (partial(Scaled().scaled, scale=s) for s in (1.0, 1.0, 2.0))
    assert loss_signature(one) == loss_signature(again) != loss_signature(two)


def test_values_that_cannot_be_compared_make_a_loss_like_no_other() -> None:
    assert loss_signature(made([1])) != loss_signature(made([1]))
