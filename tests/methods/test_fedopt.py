"""FedOPT: server momentum by hand on tiny models, buffers, counters and what travels."""

import numpy as np
import pytest
import torch
from tests.methods.helpers import NAMES, SIZES, network, recorded, same, server_of

from protofed import tree
from protofed.config import make_config
from protofed.federation.client_round import Reply
from protofed.federation.simulation import Federation
from protofed.method import Batch, Client
from protofed.methods import FedAvg, FedOpt
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

COUNTER, RUNNING = "encoder.1.num_batches_tracked", "encoder.1.running_var"


def model(seed):
    """Entries of a client after training: everything differs, the counter too."""
    entries = {n: t.clone() for n, t in network(seed).state_dict().items()}
    entries["encoder.1.running_mean"] += 0.1 * seed
    entries[RUNNING] += 0.3 * seed
    entries[COUNTER] += 5 * seed
    return entries


def feed(server, models, samples=None):
    for i, (name, entries) in enumerate(models.items()):
        count = samples[i] if samples else 10 ** (i + 1)  # unequal: they must not matter
        server.accept(name, Reply({"model": entries}, {}, count, 1, 0.1))
    server.finish()


@pytest.mark.parametrize(("eta", "beta"), [(0.25, 0.9), (0.5, 0.0), (1.0, 0.5)])
def test_three_rounds_of_momentum_by_hand(eta, beta):
    names = ["a", "b", "c"]
    server = server_of(FedOpt(eta_g=eta, beta=beta), names)
    theta = {n: server.state["model"][n].numpy().copy() for n in NAMES}
    v = {n: np.zeros_like(theta[n]) for n in NAMES}
    for t, active in enumerate((names, ["a", "c"], names)):
        models = {name: model(1 + 3 * t + i) for i, name in enumerate(active)}
        feed(server, models)
        for n in NAMES:
            mean = sum(m[n].numpy() for m in models.values()) / len(active)
            v[n] = beta * v[n] + (theta[n] - mean)
            theta[n] = theta[n] - eta * v[n]
            got = {slot: server.state[slot][n].numpy() for slot in ("v", "model")}
            assert np.allclose(got["v"], v[n], rtol=1e-12, atol=1e-14)
            assert np.allclose(got["model"], theta[n], rtol=1e-12, atol=1e-14)


def test_the_first_round_takes_a_quarter_of_the_way():
    server = server_of(FedOpt(), ["a", "b"])
    start = {n: t.clone() for n, t in server.state["model"].items()}
    models = {"a": model(1), "b": model(2)}
    feed(server, models)
    for n in NAMES:
        mean = (models["a"][n] + models["b"][n]) / 2
        expected = start[n] + 0.25 * (mean - start[n])
        assert torch.allclose(server.state["model"][n], expected, rtol=1e-12)


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_buffers_are_replaced_by_their_plain_mean(average):
    server = server_of(FedOpt(), ["a", "b", "c"], average=average)
    for t in range(2):
        models = {name: model(1 + 3 * t + i) for i, name in enumerate("abc")}
        feed(server, models)
        for n in ("encoder.1.running_mean", RUNNING):
            mean = sum(m[n] for m in models.values()) / 3
            assert torch.allclose(server.state["model"][n], mean, rtol=1e-12)  # no η, no momentum


def test_the_integer_counter_is_never_averaged():
    server = server_of(FedOpt(), ["a", "b"])
    feed(server, {"a": model(3), "b": model(1)})
    counter = server.state["model"][COUNTER]
    assert counter.dtype == torch.int64
    assert counter.item() == 15  # the largest of 15 and 5
    assert COUNTER not in server.state["v"]


def test_v_holds_trainable_entries_and_stays_at_the_server():
    server = server_of(FedOpt(), ["a", "b"])
    assert set(server.state["v"]) == set(NAMES)
    assert not any(t.any() for t in server.state["v"].values())
    feed(server, {"a": model(1), "b": model(2)})
    assert set(server.state) == {"model", "v"}
    assert set(server.broadcast()) == {"model"}
    assert tree.nbytes(server.broadcast()) == tree.nbytes({"model": server.state["model"]})


def test_without_momentum_and_with_step_1_it_is_the_uniform_mean():
    models = {"a": model(1), "b": model(2)}
    ours, plain = server_of(FedOpt(eta_g=1, beta=0), "ab"), server_of(FedAvg(), "ab")
    feed(ours, models, samples=[1, 99])
    feed(plain, models, samples=[7, 7])
    for n, t in ours.state["model"].items():
        assert torch.allclose(t, plain.state["model"][n], rtol=1e-12, atol=1e-15)
    weighted = server_of(FedAvg(), "ab")
    feed(weighted, models, samples=[1, 99])
    assert not torch.allclose(
        ours.state["model"]["head.weight"], weighted.state["model"]["head.weight"], atol=1e-2
    )


def test_equal_clients_at_the_global_model_leave_it_where_momentum_carries_it():
    server = server_of(FedOpt(), ["a"])
    feed(server, {"a": model(1)})
    before = {n: t.clone() for n, t in server.state["model"].items()}
    v = {n: t.clone() for n, t in server.state["v"].items()}
    feed(server, {"a": before})  # Δ = 0: only momentum moves
    for n in NAMES:
        assert torch.allclose(server.state["v"][n], 0.9 * v[n], rtol=1e-12)
        expected = before[n] - 0.25 * 0.9 * v[n]
        assert torch.allclose(server.state["model"][n], expected, rtol=1e-12)


def test_the_clients_objective_is_cross_entropy_alone():
    net = network(1)
    client = Client(FedOpt(), net, SIZES, received={}, mine={}, round=0, rounds=3)
    client.begin_step(1)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 5)))
    batch = Batch(x, torch.tensor([0, 1, 2, 0]), torch.arange(4))
    terms = FedOpt().loss(client, batch)
    assert list(terms) == ["ce"]
    assert FedOpt().upload(client) == ({}, {})


def test_defaults():
    assert FedOpt().options() == {"eta_g": 0.25, "beta": 0.9}


# ---- whole runs ---------------------------------------------------------------------------------


def test_round_0_trains_like_fedavg_and_bytes_are_fedavgs():
    ours, plain = (run(tiny_task(), m, **SHORT) for m in (FedOpt(), FedAvg()))
    assert ours.rounds[0]["loss"] == plain.rounds[0]["loss"]
    assert ours.rounds[1]["loss"] != plain.rounds[1]["loss"]
    for direction in ("bytes_up", "bytes_down"):
        assert ours.rounds[direction] == plain.rounds[direction]
    assert not same(ours.model, plain.model)


def test_momentum_outlives_a_round_of_other_clients():
    config = make_config(tiny_task(), FedOpt(), **{**SHORT, "participation": 0.5})
    federation = Federation(config, tiny_task())
    replies, active = recorded(federation), []
    for _ in range(3):
        start, old = federation.model, federation.server.state["v"]
        federation.run_round()
        active.append(tuple(replies))
        v = federation.server.state["v"]
        for n in federation.sizes.parameters:
            mean = sum(r.message["model"][n] for r in replies.values()) / 2
            expected = 0.9 * old[n] + start[n] - mean
            assert torch.allclose(v[n], expected, rtol=1e-4, atol=1e-6)
            assert torch.allclose(federation.model[n], start[n] - 0.25 * v[n], atol=1e-6)
    assert len(set(active)) > 1  # not always the same clients
    assert federation.store.accept() == {}  # no client keeps anything
