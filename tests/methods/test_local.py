"""Local: nothing travels, every client goes on from its own model."""

import pytest
import torch

from protofed import tree
from protofed.config import make_config
from protofed.federation.client_round import train_client
from protofed.federation.model_state import load_model
from protofed.federation.simulation import Federation
from protofed.methods import FedAvg, FedProto, Local
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")


def federation(method=None, **settings):
    task = tiny_task()
    return Federation(make_config(task, method or Local(), **{**SHORT, **settings}), task)


def test_nothing_travels():
    result = run(tiny_task(), Local(), **SHORT)
    assert result.model == {}
    assert all(r["bytes_up"] == r["bytes_down"] == 0 for r in result.rounds)
    assert result.summary["weights"] == "nothing: no model is averaged"


def test_a_client_alone_is_what_it_is_with_others():
    together = run(tiny_task(), Local(), **SHORT)
    alone = run(tiny_task(), Local(), **{**SHORT, "clients": {"left": 2}})
    for name in ("left-0", "left-1"):
        assert tree.equal({"m": together.client_models[name]}, {"m": alone.client_models[name]})


def test_one_client_is_fedavg_bit_for_bit():
    settings = {**SHORT, "clients": {"left": 1}}
    ours, plain = (run(tiny_task(), m, **settings) for m in (Local(), FedAvg()))
    assert tree.equal({"m": ours.client_models["left-0"]}, {"m": plain.model})
    assert ours.rounds["accuracy"] == plain.rounds["accuracy"]


def test_a_round_goes_on_from_the_clients_own_model():
    one = federation()
    one.run_round()
    before = tree.copy(one.store.get("left-0"))
    one.run_round()
    network = one.make_network()
    again = train_client(one.setup, network, one.clients["left-0"], {}, before, 1)
    assert tree.equal(again.mine, one.store.get("left-0"))
    load_model(network, before["model"])  # a whole model


def test_pure_fedproto_without_its_term_is_local_bit_for_bit():
    ours = run(tiny_task(), FedProto(weight=0, share="prototypes"), **SHORT)
    plain = run(tiny_task(), Local(), **SHORT)
    assert ours.client_models.keys() == plain.client_models.keys()
    for name, model in ours.client_models.items():
        assert all(torch.equal(t, plain.client_models[name][n]) for n, t in model.items())
    assert ours.rounds["accuracy"] == plain.rounds["accuracy"]
    assert ours.rounds["beside.own.left"] == plain.rounds["beside.own.left"]
