"""FedAvgM: momentum on the weighted change by hand; with none it is FedAvg."""

import numpy as np
import pytest
import torch
from tests.methods.helpers import NAMES, SIZES, close, network, recorded, server_of

from protofed.config import make_config
from protofed.federation.client_round import Reply
from protofed.federation.simulation import Federation
from protofed.method import Batch, Client
from protofed.methods import FedAvg, FedAvgM
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

COUNTER, RUNNING = "encoder.1.num_batches_tracked", "encoder.1.running_var"
UNEQUAL = {**SHORT, "samples": {"left": 9, "right": 22}}


def model(seed):
    """Entries of a client after training: everything differs, the counter too."""
    entries = {n: t.clone() for n, t in network(seed).state_dict().items()}
    entries[RUNNING] += 0.3 * seed
    entries[COUNTER] += 5 * seed
    return entries


def feed(server, models, samples):
    for name, entries in models.items():
        server.accept(name, Reply({"model": entries}, {}, samples[name], 1, 0.1))
    server.finish()


@pytest.mark.parametrize("beta", [0.9, 0.0, 0.5])
def test_three_rounds_of_momentum_by_hand(beta):
    samples = {"a": 10, "b": 30, "c": 100}
    server = server_of(FedAvgM(beta=beta), list(samples))
    theta = {n: server.state["model"][n].numpy().copy() for n in NAMES}
    v = {n: np.zeros_like(theta[n]) for n in NAMES}
    for t, active in enumerate((["a", "b", "c"], ["a", "c"], ["b"])):
        models = {name: model(1 + 3 * t + i) for i, name in enumerate(active)}
        feed(server, models, samples)
        total = sum(samples[name] for name in active)
        for n in NAMES:
            delta = theta[n].copy()
            for name in active:
                delta -= samples[name] / total * models[name][n].numpy()
            v[n] = beta * v[n] + delta
            theta[n] = theta[n] - v[n]
            got = {slot: server.state[slot][n].numpy() for slot in ("v", "model")}
            assert np.allclose(got["v"], v[n], rtol=1e-11, atol=1e-13)
            assert np.allclose(got["model"], theta[n], rtol=1e-11, atol=1e-13)
        expected = sum(samples[k] / total * models[k][RUNNING] for k in active)
        assert torch.allclose(server.state["model"][RUNNING], expected, rtol=1e-12)  # no momentum
        counter = server.state["model"][COUNTER]
        assert counter.dtype == torch.int64
        assert counter == max(int(m[COUNTER]) for m in models.values())


def test_the_protocols_average_holds():
    models = {"a": model(1), "b": model(2)}
    server = server_of(FedAvgM(), ["a", "b"], average="uniform")
    feed(server, models, {"a": 1, "b": 99})
    for n in NAMES:
        expected = (models["a"][n] + models["b"][n]) / 2
        assert torch.allclose(server.state["model"][n], expected, rtol=1e-12, atol=1e-15)


def test_v_holds_trainable_entries_begins_at_0_and_stays_at_the_server():
    server = server_of(FedAvgM(), ["a"])
    assert set(server.state["v"]) == set(NAMES)
    assert not any(t.any() for t in server.state["v"].values())
    assert set(server.state) == {"model", "v"}
    assert set(server.broadcast()) == {"model"}


def test_without_a_change_only_momentum_moves():
    server = server_of(FedAvgM(), ["a"])
    feed(server, {"a": model(1)}, {"a": 3})
    before, v = server.state["model"], server.state["v"]
    feed(server, {"a": before}, {"a": 3})
    for n in NAMES:
        assert torch.allclose(server.state["model"][n], before[n] - 0.9 * v[n], rtol=1e-12)


def test_the_clients_objective_is_cross_entropy_alone():
    client = Client(FedAvgM(), network(1), SIZES, received={}, mine={}, round=0, rounds=3)
    client.begin_step(1)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 5)))
    batch = Batch(x, torch.tensor([0, 1, 2, 0]), torch.arange(4))
    assert list(FedAvgM().loss(client, batch)) == ["ce"]
    assert FedAvgM().upload(client) == ({}, {})
    assert FedAvgM().options() == {"beta": 0.9}


# ---- whole runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_momentum_it_is_fedavg_to_rounding(participation):
    settings = {**UNEQUAL, "participation": participation, "precision": "fp64"}
    ours, plain = (run(tiny_task(), m, **settings) for m in (FedAvgM(beta=0), FedAvg()))
    assert close(ours.model, plain.model, 1e-9)
    assert not close(run(tiny_task(), FedAvgM(), **settings).model, plain.model, 1e-3)


@pytest.mark.parametrize("clients", [{}, {"clients": {"left": 1}}])
def test_the_first_round_is_fedavgs_and_so_are_the_bytes(clients):
    settings = {**UNEQUAL, **clients}
    ours, plain = (
        Federation(make_config(tiny_task(), m, **settings), tiny_task())
        for m in (FedAvgM(), FedAvg())
    )
    records = [(a.run_round(), a.model) for a in (ours, plain)]
    assert close(records[0][1], records[1][1], 1e-6)
    for what in ("loss", "bytes_up", "bytes_down"):
        assert records[0][0][what] == records[1][0][what]
    ours.run_round(), plain.run_round()
    assert not close(ours.model, plain.model, 1e-3)


def test_momentum_outlives_a_round_of_other_clients():
    config = make_config(tiny_task(), FedAvgM(), **{**UNEQUAL, "participation": 0.5})
    federation = Federation(config, tiny_task())
    replies, active = recorded(federation), []
    for _ in range(3):
        start, old = federation.model, federation.server.state["v"]
        federation.run_round()
        active.append(tuple(replies))
        total = sum(r.samples for r in replies.values())
        v = federation.server.state["v"]
        for n in federation.sizes.parameters:
            mean = sum(r.samples / total * r.message["model"][n] for r in replies.values())
            assert torch.allclose(v[n], 0.9 * old[n] + start[n] - mean, rtol=1e-4, atol=1e-6)
            assert torch.allclose(federation.model[n], start[n] - v[n], atol=1e-6)
    assert len(set(active)) > 1  # not always the same clients
    assert federation.store.accept() == {}  # no client keeps anything
