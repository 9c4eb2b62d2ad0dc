"""Copying a model into a network."""

from __future__ import annotations

import pytest
import torch
from tests.federation.one_client import CLASSES, client_data, network, setup, start

from protofed import tree
from protofed.errors import ProtofedError
from protofed.federation.client_round import train_client
from protofed.federation.model_state import load_model

pytestmark = pytest.mark.usefixtures("single_thread")


def test_load_wants_exactly_the_networks_entries() -> None:
    net = network()
    whole = start(net)["model"]
    short = {n: t for n, t in whole.items() if n != "head.bias"}
    with pytest.raises(ProtofedError, match=r"head\.bias"):
        load_model(net, short)
    with pytest.raises(ProtofedError, match="stranger"):
        load_model(net, {**whole, "stranger": torch.ones(1)})
    with pytest.raises(ProtofedError, match=r"head\.bias"):
        train_client(setup(), net, client_data(), {"model": short}, {}, 0)


@pytest.mark.parametrize("shape", [(1,), (), (CLASSES + 1,)])
def test_load_refuses_another_shape(shape: tuple[int, ...]) -> None:
    net = network()
    with pytest.raises(ProtofedError, match=r"head\.bias"):
        load_model(net, {**start(net)["model"], "head.bias": torch.ones(shape)})


def test_load_copies() -> None:
    net = network()
    model = {n: t + 1 for n, t in start(net)["model"].items()}
    addresses = [p.data_ptr() for p in net.parameters()]
    load_model(net, model)
    assert tree.equal(start(net), {"model": model})
    assert addresses == [p.data_ptr() for p in net.parameters()]
    model["head.bias"].add_(1)
    assert not tree.equal(start(net), {"model": model})
