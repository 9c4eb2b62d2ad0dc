"""FedProc: schedule, contrast and prototypes against plain numbers; the zero round 0."""

import math
from itertools import product

import pytest
import torch
from tests.methods.helpers import (
    D,
    Given,
    K,
    check_gradients,
    cosine,
    cross_entropy,
    numbers,
    same,
)
from torch import nn

from protofed.config import make_config
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.method import Batch, Client, ServerView, Sizes, Update
from protofed.methods import FedAvg, FedProc
from protofed.models import Network
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

SIZES = Sizes(K, D, 8)
Y = [0, 1, 2, 2, 0, 0]


def prototypes(mask=(1, 1, 1)):
    mean = numbers(7, K, D)
    mean[torch.tensor(mask) == 0] = 77.0  # what lies there must not matter
    return {"mean": mean, "mask": torch.tensor(mask, dtype=torch.float32)}


def scene(method, round, rounds, y=Y, C=None):
    net = Given(numbers(1, len(y), D), numbers(2, len(y), K))
    received = method.init_server({}, SIZES) if C is None else {"prototypes": C}
    client = Client(method, net, SIZES, received=received, mine={}, round=round, rounds=rounds)
    client.begin_step(1)
    rows = torch.arange(len(y))
    return client, net, Batch(rows, torch.tensor(y), rows)


def gpc(z, y, C, tau=1.0):
    """(1/B) Σ_i −log e^{cos(z,C^y)/τ} / Σ_k e^{cos(z,C^k)/τ} over the classes there are."""
    there = [k for k in range(K) if C["mask"][k] > 0]
    total = 0.0
    for i, own in enumerate(y):
        if own in there:
            e = {k: math.exp(cosine(z[i].tolist(), C["mean"][k].tolist()) / tau) for k in there}
            total -= math.log(e[own] / sum(e.values()))
    return total / len(y)


def federation(task=None, method=None, **settings):
    task = task or tiny_task()
    return Federation(make_config(task, method or FedProc(), **{**TINY, **settings}), task)


# ---- the client ---------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [2, 3, 7])
def test_the_schedule_at_every_round(T):
    C = prototypes()
    for t in range(T):
        client, net, batch = scene(FedProc(), t, T, C=C)
        terms = FedProc().loss(client, batch)
        alpha = 1 - t / (T - 1)
        assert list(terms) == ["ce", "gpc"]
        contrast = alpha * gpc(net.z.detach(), Y, C)
        plain = (1 - alpha) * cross_entropy(net.logits, Y)
        assert terms["gpc"].item() == pytest.approx(contrast, rel=1e-6)
        assert terms["ce"].item() == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("tau", [1, 0.1])
def test_the_contrast_is_the_formula(tau):
    method, C = FedProc(tau=tau), prototypes()
    client, net, batch = scene(method, 0, 3, C=C)  # α = 1
    got = method.loss(client, batch)["gpc"].item()
    assert got == pytest.approx(gpc(net.z.detach(), Y, C, tau), rel=1e-12)


def test_defaults():
    assert FedProc().options() == {"tau": 1.0, "warmup": False, "proto_pass": "last_epoch"}


def test_a_class_without_prototype_adds_0_and_stays_in_the_mean():
    C = prototypes((1, 1, 0))
    client, net, batch = scene(FedProc(), 0, 3, C=C)
    term = FedProc().loss(client, batch)["gpc"]
    assert term.item() == pytest.approx(gpc(net.z.detach(), Y, C), rel=1e-12)
    term.backward()
    absent = torch.tensor(Y) == 2
    assert not net.z.grad[absent].any()
    assert net.z.grad[~absent].abs().sum(1).min() > 0


def test_gradient_by_finite_differences():
    C = prototypes((1, 1, 0))
    C["mean"].requires_grad_()
    client, net, batch = scene(FedProc(tau=0.5), 1, 5, C=C)  # α = 3/4
    FedProc(tau=0.5).loss(client, batch)["gpc"].backward()
    assert C["mean"].grad is None
    z = net.z.detach()
    for i, v in product(range(len(Y)), range(D)):
        step = torch.zeros_like(z)
        step[i, v] = 1e-5
        slope = 0.75 * (gpc(z + step, Y, C, 0.5) - gpc(z - step, Y, C, 0.5)) / 2e-5
        assert net.z.grad[i, v].item() == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("t", [1, 2])
def test_gradient_in_the_weights_by_finite_differences(t):
    torch.manual_seed(0)
    net = Network(nn.Sequential(nn.Linear(5, D), nn.Tanh()), D, K).double()
    method, received = FedProc(), {"prototypes": prototypes()}
    client = Client(method, net, SIZES, received=received, mine={}, round=t, rounds=5)
    batch = Batch(numbers(5, len(Y), 5), torch.tensor(Y), torch.arange(len(Y)))

    def value():
        client.begin_step(1)
        return torch.stack(list(method.loss(client, batch).values())).sum()

    assert check_gradients(net, value) == set()


def test_round_0_has_loss_0_and_gradient_0():
    client, net, batch = scene(FedProc(), 0, 3)
    terms = FedProc().loss(client, batch)
    total = torch.stack(list(terms.values())).sum()
    assert total.item() == 0
    total.backward()
    assert torch.equal(net.z.grad, torch.zeros_like(net.z))
    assert torch.equal(net.logits.grad, torch.zeros_like(net.logits))


def test_warmup_makes_round_0_cross_entropy_and_changes_no_other_round():
    client, net, batch = scene(FedProc(warmup=True), 0, 3)
    terms = FedProc(warmup=True).loss(client, batch)
    assert terms["gpc"].item() == 0
    assert terms["ce"].item() == pytest.approx(cross_entropy(net.logits, Y), rel=1e-12)
    for t in (1, 2):
        values = []
        for method in (FedProc(), FedProc(warmup=True)):
            client, _, batch = scene(method, t, 3, C=prototypes())
            values.append({n: v.item() for n, v in method.loss(client, batch).items()})
        assert values[0] == values[1]


def test_the_last_round_is_pure_cross_entropy():
    client, net, batch = scene(FedProc(), 4, 5, C=prototypes())
    terms = FedProc().loss(client, batch)
    assert terms["gpc"].item() == 0
    assert terms["ce"].item() == pytest.approx(cross_entropy(net.logits, Y), rel=1e-12)
    torch.stack(list(terms.values())).sum().backward()
    assert not net.z.grad.any()
    assert net.logits.grad.any()


# ---- the server ---------------------------------------------------------------------------------


def test_prototypes_are_the_plain_mean_over_owners():
    means = list(numbers(3, 3, K, D))
    counts = [[100, 1, 0], [1, 1, 0], [1, 0, 0]]
    spool, updates = Spool(), []
    for i in range(3):
        count = torch.tensor(counts[i]).float()
        spool.put(f"m{i}", {"prototypes": {"mean": means[i], "count": count}})
        updates.append(Update(f"m{i}", sum(counts[i]), 1, 0.1, spool))
    old = {"model": {}, "prototypes": prototypes()}
    view = ServerView(old, 1, 3, ("m0", "m1", "m2", "m3"), SIZES)
    new = FedProc().aggregate(view, {"w": torch.ones(2)}, updates)
    assert set(new) == {"model", "prototypes"}
    assert new["model"]["w"].tolist() == [1, 1]
    C = new["prototypes"]
    assert torch.allclose(C["mean"][0], (means[0][0] + means[1][0] + means[2][0]) / 3)
    assert torch.allclose(C["mean"][1], (means[0][1] + means[1][1]) / 2)
    assert not C["mean"][2].any()
    assert C["mask"].tolist() == [1, 1, 0]  # and the old ones are forgotten


def test_upload_is_the_mean_per_class():
    client, net, batch = scene(FedProc(), 0, 3, y=[0, 1, 1, 0, 1])
    client.begin_prototypes()
    FedProc().loss(client, batch)
    client.collect(batch.y)
    message, private = FedProc().upload(client)
    assert private == {}
    z = net.z.detach()
    expected = torch.stack([(z[0] + z[3]) / 2, (z[1] + z[2] + z[4]) / 3, torch.zeros(D)])
    assert torch.allclose(message["prototypes"]["mean"], expected, rtol=1e-12)
    assert message["prototypes"]["count"].tolist() == [2, 3, 0]


# ---- whole runs ---------------------------------------------------------------------------------


def test_round_0_moves_only_batchnorm_statistics_when_nothing_decays():
    one = federation(weight_decay=0.0, clients={"left": 1})
    start = one.model
    record = one.run_round()
    assert record["loss"] == {"ce": 0, "gpc": 0}
    for n, t in one.model.items():
        moved = not torch.equal(t, start[n])
        assert moved == (n not in one.sizes.parameters), n
    assert one.server.state["prototypes"]["mask"].tolist() == [1, 1, 1, 1]  # for round 1


def test_round_0_decays_the_weights_and_does_nothing_else():
    settings = {"weight_decay": 0.1, "momentum": 0.0, "lr": 0.05, "clients": {"left": 1}}
    one = federation(precision="fp64", **settings)
    start = one.model
    steps = one.run_round()["steps"]
    for n in one.sizes.parameters:
        assert torch.allclose(one.model[n], start[n] * (1 - 0.05 * 0.1) ** steps, rtol=1e-12)


def test_round_0_with_warmup_is_fedavg_bit_for_bit():
    one = {**TINY, "rounds": 3}
    ours, plain = federation(method=FedProc(warmup=True), **one), federation(method=FedAvg(), **one)
    ours.run_round()
    plain.run_round()
    assert same(ours.model, plain.model)
    ours.run_round()
    plain.run_round()
    assert not same(ours.model, plain.model)


def test_the_terms_recorded_over_a_run_follow_the_schedule():
    loss = run(tiny_task(), FedProc(), **TINY).rounds["loss"]
    assert loss[0] == {"ce": 0, "gpc": 0}
    assert loss[1]["ce"] > 0
    assert loss[1]["gpc"] > 0
    assert loss[2]["ce"] > 0
    assert loss[2]["gpc"] == 0


def test_the_last_round_trains_as_fedavg_would_from_there():
    ours = federation()
    ours.run_round()
    ours.run_round()
    plain = federation(method=FedAvg())
    plain.server.state = {"model": ours.model}
    plain.server.round = 2
    ours.run_round()
    plain.run_round()
    assert same(ours.model, plain.model)


def test_missing_class_one_client_and_half_the_clients():
    missing = tiny_task({"left": [0, 1], "right": [2, 3]}, clients=1)
    half = federation(missing, participation=0.5, rounds=6)
    own = {"left-0": [1, 1, 0, 0], "right-0": [0, 0, 1, 1]}
    seen = set()
    for _ in range(6):
        (name,) = half.server.sample()
        half.run_round()
        seen.add(name)
        assert half.server.state["prototypes"]["mask"].tolist() == own[name]
    assert seen == set(own)
    assert all(t.isfinite().all() for t in half.model.values())
    assert half.store.accept() == {}  # no client keeps anything
    alone = run(tiny_task(), FedProc(), **{**TINY, "clients": {"left": 1}})
    assert all(t.isfinite().all() for t in alone.model.values())
