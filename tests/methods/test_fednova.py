"""FedNova: normalized averaging by hand; with equal steps it is FedAvg."""

import numpy as np
import pytest
import torch
from tests.methods.helpers import NAMES, SIZES, close, network, recorded, same, server_of

from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.client_round import Reply
from protofed.federation.simulation import Federation
from protofed.method import Batch, Client
from protofed.methods import FedAvg, FedNova
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

COUNTER, RUNNING = "encoder.1.num_batches_tracked", "encoder.1.running_var"
SAME_STEPS = {**SHORT, "samples": {"left": 17, "right": 22}}  # 3 batches of 8 either way
OTHER_STEPS = {**SHORT, "samples": {"left": 9, "right": 40}, "epochs": 1}  # 2 and 5


def model(seed):
    entries = {n: t.clone() for n, t in network(seed).state_dict().items()}
    entries[RUNNING] += 0.3 * seed
    entries[COUNTER] += 5 * seed
    return entries


def feed(server, models, samples, steps):
    for name, entries in models.items():
        server.accept(name, Reply({"model": entries}, {}, samples[name], steps[name], 0.1))
    server.finish()


def normalizer(steps, rho):
    """a_m as the authors' optimizer counts it, step by step."""
    counter = total = 0.0
    for _ in range(steps):
        counter = counter * rho + 1
        total += counter
    return total


def big_task():
    return tiny_task(samples=40)


# ---- the server ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.9, 0.0, 0.5])
@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_three_rounds_by_hand(rho, average):
    samples, steps = {"a": 10, "b": 30, "c": 100}, {"a": 2, "b": 4, "c": 20}
    server = server_of(FedNova(rho=rho), list(samples), average=average)
    theta = {n: server.state["model"][n].numpy().copy() for n in NAMES}
    a = {name: normalizer(steps[name], rho) for name in steps}
    for t, active in enumerate((["a", "b", "c"], ["a", "c"], ["b"])):
        models = {name: model(1 + 3 * t + i) for i, name in enumerate(active)}
        feed(server, models, samples, steps)
        p = {name: samples[name] / sum(samples[k] for k in active) for name in active}
        together = sum(p[name] * a[name] for name in active)
        for n in NAMES:
            direction = np.zeros_like(theta[n])
            for name in active:
                direction += p[name] * (theta[n] - models[name][n].numpy()) / a[name]
            theta[n] = theta[n] - together * direction
            got = server.state["model"][n].numpy()
            assert np.allclose(got, theta[n], rtol=1e-11, atol=1e-13)
        assert set(server.state) == {"model"}


def test_buffers_are_a_mean_and_the_counter_is_not():
    models = {"a": model(1), "b": model(2)}
    server = server_of(FedNova(rho=0), ["a", "b"])
    feed(server, models, {"a": 10, "b": 30}, {"a": 2, "b": 12})  # n/a: 5 and 2.5
    expected = (2 * models["a"][RUNNING] + models["b"][RUNNING]) / 3
    assert torch.allclose(server.state["model"][RUNNING], expected, rtol=1e-12)
    counter = server.state["model"][COUNTER]
    assert counter.dtype == torch.int64
    assert counter == 10


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_equal_steps_make_it_fedavg_whatever_the_samples(rho):
    models, samples = {"a": model(1), "b": model(2), "c": model(3)}, {"a": 7, "b": 90, "c": 31}
    for tau in (1, 6, 250):
        ours, plain = server_of(FedNova(rho=rho), "abc"), server_of(FedAvg(), "abc")
        for server in (ours, plain):
            feed(server, models, samples, dict.fromkeys("abc", tau))
        assert close(ours.state["model"], plain.state["model"], 1e-12)
    feed(ours, models, samples, {"a": 1, "b": 6, "c": 2})
    feed(plain, models, samples, {"a": 1, "b": 6, "c": 2})
    assert not close(ours.state["model"], plain.state["model"], 1e-2)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_more_steps_do_not_pull_the_model_to_a_clients_own_side(rho):
    # Constant gradients g_m, real SGD: the global step must lie along Σ p_m g_m. FedAvg's does not.
    samples, steps = {"a": 10, "b": 30}, {"a": 40, "b": 3}
    rng = np.random.default_rng(3)
    shapes = {n: tuple(t.shape) for n, t in network(0).named_parameters()}
    gradients = {
        name: {n: torch.from_numpy(rng.normal(size=shape)) for n, shape in shapes.items()}
        for name in "ab"
    }
    models = {}
    for name in "ab":
        net = network(0)
        sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=rho)
        for _ in range(steps[name]):
            for n, p in net.named_parameters():
                p.grad = gradients[name][n].clone()
            sgd.step()
        models[name] = net.state_dict()
    cosines = {}
    for method in (FedNova(rho=rho), FedAvg()):
        server = server_of(method, "ab")
        start = {n: t.clone() for n, t in server.state["model"].items()}
        feed(server, models, samples, steps)
        moved = torch.cat([(start[n] - server.state["model"][n]).flatten() for n in NAMES])
        wanted = torch.cat(
            [(0.25 * gradients["a"][n] + 0.75 * gradients["b"][n]).flatten() for n in NAMES]
        )
        cosines[method.name] = torch.cosine_similarity(moved, wanted, dim=0).item()
    assert cosines["fednova"] == pytest.approx(1, abs=1e-9)
    assert cosines["fedavg"] < 0.9


def test_the_clients_objective_and_momentum():
    client = Client(FedNova(), network(1), SIZES, received={}, mine={}, round=0, rounds=3)
    client.begin_step(1)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 5)))
    batch = Batch(x, torch.tensor([0, 1, 2, 0]), torch.arange(4))
    assert list(FedNova().loss(client, batch)) == ["ce"]
    assert FedNova().upload(client) == ({}, {})
    assert FedNova().options() == {"rho": 0.9}
    (phase,) = FedNova().phases(0, 10)
    assert (phase.momentum, phase.epochs) == (0.9, None)
    assert FedNova(rho=0).phases(0, 10)[0].momentum == 0
    with pytest.raises(ProtofedError):
        FedNova(rho=1.0)


# ---- whole runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_a_run_with_equal_steps_is_fedavg_to_1e_6(rho):
    settings = {**SAME_STEPS, "momentum": rho, "rounds": 2}
    ours, plain = (run(tiny_task(), m, **settings) for m in (FedNova(rho=rho), FedAvg()))
    assert close(ours.model, plain.model, 1e-6)
    assert ours.rounds["bytes_up"] == plain.rounds["bytes_up"]
    assert ours.rounds["bytes_down"] == plain.rounds["bytes_down"]


def test_a_run_with_other_steps_is_not():
    settings = {**OTHER_STEPS, "rounds": 1}
    ours, plain = (run(big_task(), m, **settings) for m in (FedNova(), FedAvg()))
    assert ours.rounds[0]["loss"] == plain.rounds[0]["loss"]  # round 0 trains the same
    assert not close(ours.model, plain.model, 1e-3)


def test_one_client_is_fedavg_to_rounding():
    settings = {**SHORT, "clients": {"left": 1}, "rounds": 2}
    ours, plain = (run(tiny_task(), m, **settings) for m in (FedNova(), FedAvg()))
    assert close(ours.model, plain.model, 1e-6)


def test_rho_is_the_momentum_that_clients_train_with():
    settings = [{**OTHER_STEPS, "rounds": 2, "momentum": m} for m in (0.0, 0.9)]
    models = [run(big_task(), FedNova(rho=0.9), **s).model for s in settings]
    assert same(*models)
    assert not same(models[0], run(big_task(), FedNova(rho=0.5), **settings[0]).model)


def test_a_run_takes_the_steps_that_were_made_and_partial_participation():
    settings = {**OTHER_STEPS, "participation": 0.5, "precision": "fp64"}
    config = make_config(big_task(), FedNova(), **settings)
    federation = Federation(config, big_task())
    replies, seen = recorded(federation), set()
    for _ in range(4):
        start = federation.model
        federation.run_round()
        total = sum(r.samples for r in replies.values())
        parts = []
        for name, reply in replies.items():
            assert reply.steps == (2 if name.startswith("left") else 5)
            a = normalizer(reply.steps, 0.9)
            parts.append((reply.samples / total, a, reply.message["model"]))
        seen.add(tuple(sorted(r.steps for r in replies.values())))
        together = sum(p * a for p, a, _ in parts)
        for n in federation.sizes.parameters:
            direction = sum(p / a * (start[n] - m[n]) for p, a, m in parts)
            expected = start[n] - together * direction
            assert torch.allclose(federation.model[n], expected, rtol=1e-9, atol=1e-12)
    assert (2, 5) in seen
    assert federation.store.accept() == {}
