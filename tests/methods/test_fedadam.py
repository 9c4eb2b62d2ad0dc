"""FedAdam, FedYogi, FedAdagrad: the server's steps by hand, the state, what travels."""

import math

import numpy as np
import pytest
import torch
from tests.methods.helpers import NAMES, SIZES, network, recorded, server_of

from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.client_round import Reply
from protofed.federation.simulation import Federation
from protofed.method import Batch, Client
from protofed.methods import FedAdam, FedAvg
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

COUNTER, RUNNING = "encoder.1.num_batches_tracked", "encoder.1.running_var"
VARIANTS = ["adam", "yogi", "adagrad"]


def model(seed, scale=1.0):
    """A client's entries near the initial model; nothing of them is equal between two seeds."""
    entries = {n: t.clone() for n, t in network(0).state_dict().items()}
    rng = np.random.default_rng(seed)
    for n in NAMES:
        entries[n] += scale * torch.from_numpy(rng.normal(size=tuple(entries[n].shape)))
    entries[RUNNING] += 0.3 * seed
    entries[COUNTER] += 5 * seed
    return entries


def feed(server, models, samples):
    for name, entries in models.items():
        server.accept(name, Reply({"model": entries}, {}, samples[name], 1, 0.1))
    server.finish()


def number(method, theta, m, v, delta):
    """One entry's step, written out for plain numbers."""
    m = method.beta1 * m + (1 - method.beta1) * delta
    square = delta * delta
    if method.variant == "adam":
        v = method.beta2 * v + (1 - method.beta2) * square
    elif method.variant == "yogi":
        v = v - (1 - method.beta2) * square * ((v > square) - (v < square))
    else:
        v = v + square
    return theta + method.eta_g * m / (math.sqrt(v) + method.tau), m, v


# ---- the server ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "options", [{}, {"eta_g": 0.3, "beta1": 0.5, "beta2": 0.8, "tau": 0.1}, {"beta1": 0.0}]
)
def test_three_rounds_by_hand(variant, options):
    method = FedAdam(variant=variant, **options)
    samples = {"a": 10, "b": 30, "c": 100}
    server = server_of(method, list(samples))
    theta = {n: server.state["model"][n].flatten().tolist() for n in NAMES}
    m = {n: [0.0] * len(theta[n]) for n in NAMES}
    v = {n: [method.tau**2] * len(theta[n]) for n in NAMES}
    scales = (0.3, 0.01, 0.5)  # so that Yogi's v also falls: v above and below Δ²
    for t, active in enumerate((["a", "b", "c"], ["a", "c"], ["b"])):
        models = {name: model(1 + 3 * t + i, scales[t]) for i, name in enumerate(active)}
        feed(server, models, samples)
        total = sum(samples[name] for name in active)
        for n in NAMES:
            for i in range(len(theta[n])):
                mean = sum(samples[k] / total * models[k][n].flatten()[i].item() for k in active)
                delta = mean - theta[n][i]
                theta[n][i], m[n][i], v[n][i] = number(method, theta[n][i], m[n][i], v[n][i], delta)
            for slot, expected in (("model", theta), ("m", m), ("v", v)):
                got = server.state[slot][n].flatten().tolist()
                assert np.allclose(got, expected[n], rtol=1e-10, atol=1e-14), (slot, n)
        expected = sum(samples[k] / total * models[k][RUNNING] for k in active)
        assert torch.allclose(server.state["model"][RUNNING], expected, rtol=1e-12)
        counter = server.state["model"][COUNTER]
        assert counter.dtype == torch.int64
        assert counter == max(int(entries[COUNTER]) for entries in models.values())


def test_yogis_v_falls_by_the_square_only():
    # far above Δ² Adam's v shrinks by a factor, Yogi's by (1−β₂)Δ²
    v, square = torch.tensor([4.0]), torch.tensor([1e-4])
    assert FedAdam(variant="yogi")._next_v(v, square).item() == pytest.approx(4 - 1e-6, abs=1e-7)
    assert FedAdam(variant="adam")._next_v(v, square).item() == pytest.approx(3.96, abs=1e-5)
    assert FedAdam(variant="adagrad")._next_v(v, square).item() == pytest.approx(4.0001, abs=1e-6)
    v = torch.tensor([1e-4])
    assert FedAdam(variant="yogi")._next_v(v, 4 + 0 * v).item() == pytest.approx(0.0401, abs=1e-6)


def test_the_first_step_has_no_bias_correction():
    # Δ ≪ τ, where it would show: m/(1 − β₁) is ten times as long as m
    server = server_of(FedAdam(), ["a"])
    start = server.state["model"]
    near = {n: t + 1e-9 if n in NAMES else t for n, t in start.items()}
    feed(server, {"a": near}, {"a": 5})
    for n in NAMES:
        step = server.state["model"][n] - start[n]
        expected = 0.01 * 0.1 * (near[n] - start[n]) / (1e-3 * math.sqrt(0.99) + 1e-3)
        assert torch.allclose(step, expected, rtol=1e-4, atol=1e-15)


def test_a_step_is_at_most_about_eta_and_towards_the_mean():
    server = server_of(FedAdam(), ["a"])
    start = server.state["model"]
    feed(server, {"a": model(1, 5.0)}, {"a": 5})
    for n in NAMES:
        step = server.state["model"][n] - start[n]
        assert (step.abs() <= 0.01 * (1 + 1e-9)).all()
        assert torch.equal(step.sign(), (model(1, 5.0)[n] - start[n]).sign())


def test_the_protocols_average_holds():
    models = {"a": model(1), "b": model(2)}
    server = server_of(FedAdam(), ["a", "b"], average="uniform")
    start = server.state["model"]
    feed(server, models, {"a": 1, "b": 99})
    for n in NAMES:
        expected = 0.1 * ((models["a"][n] + models["b"][n]) / 2 - start[n])
        assert torch.allclose(server.state["m"][n], expected, rtol=1e-12, atol=1e-15)


def test_state_at_first_and_what_is_broadcast():
    server = server_of(FedAdam(tau=0.02), ["a"])
    assert set(server.state) == {"model", "m", "v"}
    for slot, value in (("m", 0.0), ("v", 0.0004)):
        assert set(server.state[slot]) == set(NAMES)  # trainable, no buffers
        for n, t in server.state[slot].items():
            assert t.shape == server.state["model"][n].shape
            assert torch.allclose(t, torch.full_like(t, value), rtol=1e-12, atol=0)
    assert set(server.broadcast()) == {"model"}


def test_without_a_change_only_momentum_moves():
    server = server_of(FedAdam(), ["a"])
    feed(server, {"a": model(1)}, {"a": 3})
    before, m, v = (server.state[slot] for slot in ("model", "m", "v"))
    feed(server, {"a": before}, {"a": 3})
    for n in NAMES:
        expected = before[n] + 0.01 * 0.9 * m[n] / ((0.99 * v[n]).sqrt() + 1e-3)
        assert torch.allclose(server.state["model"][n], expected, rtol=1e-12)


def test_the_clients_objective_is_cross_entropy_alone_and_defaults():
    client = Client(FedAdam(), network(1), SIZES, received={}, mine={}, round=0, rounds=3)
    client.begin_step(1)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 5)))
    batch = Batch(x, torch.tensor([0, 1, 2, 0]), torch.arange(4))
    assert list(FedAdam().loss(client, batch)) == ["ce"]
    assert FedAdam().upload(client) == ({}, {})
    assert FedAdam().options() == {
        "eta_g": 0.01,
        "beta1": 0.9,
        "beta2": 0.99,
        "tau": 1e-3,
        "variant": "adam",
    }
    wrongs = ({"tau": 0.0}, {"variant": "sgd"}, {"beta2": 1.1}, {"eta_g": 0.0}, {"beta1": 1.0})
    for wrong in wrongs:  # with a β₁ of 1, m would stay 0 and the model as it is
        with pytest.raises(ProtofedError):
            FedAdam(**wrong)


# ---- whole runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [{}, {"clients": {"left": 1}}])
def test_round_0_trains_like_fedavg_and_bytes_are_fedavgs(clients):
    settings = {**SHORT, **clients, "rounds": 2}
    ours, plain = (run(tiny_task(), m, **settings) for m in (FedAdam(), FedAvg()))
    assert ours.rounds[0]["loss"] == plain.rounds[0]["loss"]
    assert ours.rounds[1]["loss"] != plain.rounds[1]["loss"]
    for direction in ("bytes_up", "bytes_down"):
        assert ours.rounds[direction] == plain.rounds[direction]


@pytest.mark.parametrize("variant", VARIANTS)
def test_moments_outlive_a_round_of_other_clients(variant):
    method = FedAdam(variant=variant)
    settings = {**SHORT, "participation": 0.5, "precision": "fp64"}
    federation = Federation(make_config(tiny_task(), method, **settings), tiny_task())
    replies, active = recorded(federation), []
    name = "head.bias"
    for _ in range(3):
        before = {slot: federation.server.state[slot][name].tolist() for slot in "mv"}
        start = federation.model[name].tolist()
        federation.run_round()
        active.append(tuple(replies))
        sent = [r.message["model"][name].tolist() for r in replies.values()]
        for i, theta in enumerate(start):
            delta = sum(s[i] for s in sent) / len(sent) - theta
            stepped, m, v = number(method, theta, before["m"][i], before["v"][i], delta)
            state = federation.server.state
            assert state["m"][name][i].item() == pytest.approx(m, rel=1e-9, abs=1e-15)
            assert state["v"][name][i].item() == pytest.approx(v, rel=1e-9, abs=1e-15)
            assert state["model"][name][i].item() == pytest.approx(stepped, rel=1e-9, abs=1e-15)
    assert len(set(active)) > 1  # not always the same clients
    assert federation.store.accept() == {}  # no client keeps anything
