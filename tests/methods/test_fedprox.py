"""FedProx: its spring against loops over plain numbers, and where it must be FedAvg."""

import numpy as np
import pytest
import torch
from tests.methods.helpers import D, K, cross_entropy, network, numbers, same

from protofed.config import make_config
from protofed.federation.client_round import train_client
from protofed.federation.simulation import Federation
from protofed.method import Batch, Client, Sizes
from protofed.methods import FedAvg, FedProx
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

SIZES = Sizes(K, D, 8)
Y = [0, 1, 2, 2, 0, 1]


def scene(method, moved=True):
    net, start = network(1), network(1).state_dict()
    if moved:
        start = {n: t + numbers(i, *t.shape) for i, (n, t) in enumerate(start.items())}
    client = Client(method, net, SIZES, received={"model": start}, mine={}, round=1, rounds=3)
    client.begin_step(1)
    return client, net, start, Batch(numbers(5, len(Y), 5), torch.tensor(Y), torch.arange(len(Y)))


def squares(net, start):
    total = 0.0
    for name, p in net.named_parameters():
        for a, b in zip(p.detach().flatten().tolist(), start[name].flatten().tolist(), strict=True):
            total += (a - b) ** 2
    return total


def federation(method, task=None, **settings):
    task = task or tiny_task()
    return Federation(make_config(task, method, **{**SHORT, **settings}), task)


def reply_of(method, **settings):
    run = federation(method, **settings)
    site = run.clients["left-0"]
    return train_client(run.setup, run.make_network(), site, run.server.broadcast(), {}, 0)


@pytest.mark.parametrize("mu", [1e-4, 0.01, 2])
def test_loss_is_cross_entropy_and_half_mu_times_the_sum_of_squares(mu):
    method = FedProx(mu=mu)
    client, net, start, batch = scene(method)
    terms = method.loss(client, batch)
    assert list(terms) == ["ce", "prox"]
    assert terms["prox"].item() == pytest.approx(mu / 2 * squares(net, start), rel=1e-12)
    logits = network(1)(batch.x).logits
    assert terms["ce"].item() == pytest.approx(cross_entropy(logits, Y), rel=1e-12)


def test_buffers_are_not_held_by_the_spring():
    client, _, start, batch = scene(FedProx(mu=1), moved=False)
    start["encoder.1.running_mean"] += 100
    start["encoder.1.running_var"] += 100
    assert FedProx(mu=1).loss(client, batch)["prox"].item() == 0


def test_gradient_is_mu_times_the_distance_and_agrees_with_differences():
    method = FedProx(mu=0.3)
    client, net, start, batch = scene(method)
    method.loss(client, batch)["prox"].backward()
    for name, p in net.named_parameters():
        assert torch.allclose(p.grad, 0.3 * (p.detach() - start[name]), rtol=1e-12, atol=0)
        for index in np.ndindex(*p.shape):
            kept, ends = p.data[index].item(), []
            for step in (1e-5, -1e-5):
                p.data[index] = kept + step
                ends.append(0.15 * squares(net, start))
            p.data[index] = kept
            slope = (ends[0] - ends[1]) / 2e-5
            assert p.grad[index].item() == pytest.approx(slope, abs=1e-7)


def test_at_the_start_value_and_gradient_are_0_and_finite():
    # The derivative of norm() at 0 is 0/0 in some frameworks; the sum of squares has none of it.
    client, net, _, batch = scene(FedProx(mu=5), moved=False)
    term = FedProx(mu=5).loss(client, batch)["prox"]
    assert term.item() == 0
    term.backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        assert torch.equal(p.grad, torch.zeros_like(p)), name


def test_the_default_is_the_coefficient_in_force_in_the_published_code():
    assert FedProx().mu == 0.01 * 0.01 == 1e-4
    assert FedProx.create({}, "digits").mu == FedProx.create({}, "pacs").mu == 1e-4


def test_the_first_step_is_fedavgs_and_the_second_is_not():
    one = {"epochs": 1, "batch": 64}  # all 22 samples in one step
    assert same(
        reply_of(FedProx(mu=10), **one).message["model"], reply_of(FedAvg(), **one).message["model"]
    )
    two = {"epochs": 2, "batch": 64}
    prox, plain = reply_of(FedProx(mu=10), **two), reply_of(FedAvg(), **two)
    assert not same(prox.message["model"], plain.message["model"])


def test_a_stronger_spring_keeps_the_client_nearer():
    distances = []
    for mu in (0.0, 0.5, 5.0):
        run = federation(FedProx(mu=mu), momentum=0.0)
        start = run.server.broadcast()["model"]
        reply = train_client(
            run.setup, run.make_network(), run.clients["left-0"], {"model": start}, {}, 0
        )
        moved = reply.message["model"]
        distances.append(sum(float((moved[n] - start[n]).square().sum()) for n in run.model))
    assert distances[0] > distances[1] > distances[2] > 0


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_mu_0_is_fedavg_bit_for_bit(participation):
    settings = {**SHORT, "participation": participation}
    plain = run(tiny_task(), FedAvg(), **settings)
    off = run(tiny_task(), FedProx(mu=0), **settings)
    on = run(tiny_task(), FedProx(mu=0.1), **settings)
    assert same(plain.model, off.model)
    assert plain.rounds["loss.ce"] == off.rounds["loss.ce"]
    assert not same(plain.model, on.model)


def test_missing_class_one_client_and_half_the_clients_keep_nothing():
    missing = tiny_task({"left": [0, 1, 2], "right": [0, 1]})
    for task, settings in (
        (missing, {}),
        (None, {"clients": {"left": 1}}),
        (None, {"participation": 0.5}),
    ):
        one = federation(FedProx(mu=0.1), task, **settings)
        for _ in range(2):
            record = one.run_round()
            assert record["loss"]["prox"] > 0
        assert all(t.isfinite().all() for t in one.model.values())
        assert one.store.accept() == {}  # no client keeps anything
