"""FedDyn: its terms, its duals and its server step by hand; the published bugs stay away."""

import numpy as np
import pytest
import torch
from tests.methods.helpers import (
    NAMES,
    SIZES,
    check_gradients,
    network,
    numbers,
    recorded,
    same,
    server_of,
)

from protofed import tree
from protofed.config import make_config
from protofed.federation.client_round import Reply
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.method import Batch, Client, ServerView, Update
from protofed.methods import FedAvg, FedDyn
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

Y = [0, 1, 2, 2, 0, 1]


def scene(method, moved=True, g=True):
    net = network(1)
    start = {n: t.clone() for n, t in network(2 if moved else 1).state_dict().items()}
    dual = {n: numbers(i, *start[n].shape) * (1 if g else 0) for i, n in enumerate(NAMES)}
    client = Client(
        method, net, SIZES, received={"model": start}, mine={"g": dual}, round=1, rounds=3
    )
    client.begin_step(1)
    batch = Batch(numbers(5, len(Y), 5), torch.tensor(Y), torch.arange(len(Y)))
    return client, net, start, dual, batch


def pairs(a, b):
    for n in NAMES:
        left, right = a[n].detach().flatten().tolist(), b[n].flatten().tolist()
        yield from zip(left, right, strict=True)


def federation(task=None, method=None, **settings):
    task = task or tiny_task()
    return Federation(make_config(task, method or FedDyn(), **{**SHORT, **settings}), task)


# ---- the client ---------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.01, 0.5, 2])
def test_the_linear_and_the_quadratic_term(alpha):
    method = FedDyn(alpha=alpha)
    client, net, start, g, batch = scene(method)
    terms = method.loss(client, batch)
    assert list(terms) == ["ce", "linear", "quadratic"]
    theta = dict(net.named_parameters())
    linear = -sum(t * d for t, d in pairs(theta, g))
    spring = alpha / 2 * sum((t - s) ** 2 for t, s in pairs(theta, start))
    assert terms["linear"].item() == pytest.approx(linear, rel=1e-12)
    assert terms["quadratic"].item() == pytest.approx(spring, rel=1e-12)
    plain = FedAvg().loss(scene(FedAvg())[0], batch)["ce"]
    assert terms["ce"].item() == plain.item()


def test_both_terms_change_the_local_gradient():
    # The published comparisons computed them on the global network: no gradient, FedAvg.
    method = FedDyn(alpha=0.5)
    client, net, start, g, batch = scene(method)
    terms = method.loss(client, batch)
    (terms["linear"] + terms["quadratic"]).backward()
    for name, p in net.named_parameters():
        expected = -g[name] + 0.5 * (p.detach() - start[name])
        assert p.grad is not None, name
        assert p.grad.abs().min() > 0, name
        assert torch.allclose(p.grad, expected, rtol=1e-12, atol=0), name


@pytest.mark.parametrize("term", ["ce", "linear", "quadratic"])
def test_gradients_by_finite_differences(term):
    method = FedDyn(alpha=0.5)
    client, net, _, _, batch = scene(method)

    def value():
        client.begin_step(1)
        return method.loss(client, batch)[term]

    assert check_gradients(net, value) == set()


def test_first_round_first_step_is_finite_and_adds_nothing():
    client, net, _, _, batch = scene(FedDyn(), moved=False, g=False)
    terms = FedDyn().loss(client, batch)
    assert terms["linear"].item() == 0
    assert terms["quadratic"].item() == 0
    (terms["linear"] + terms["quadratic"]).backward()
    assert all(not p.grad.any() for p in net.parameters())  # and no NaN of a norm at 0


def test_buffers_take_no_part():
    client, _, start, _, batch = scene(FedDyn(), moved=False, g=False)
    start["encoder.1.running_mean"] += 100
    assert FedDyn().loss(client, batch)["quadratic"].item() == 0


def test_the_dual_moves_against_the_clients_change():
    method = FedDyn(alpha=0.5)
    client, net, start, g, _ = scene(method)
    message, mine = method.upload(client)
    assert message == {}
    assert list(mine) == ["g"]
    assert set(mine["g"]) == set(NAMES)  # trainable entries, no buffers
    for n, p in net.named_parameters():
        expected = g[n] - 0.5 * (p.detach() - start[n])
        assert torch.allclose(mine["g"][n], expected, rtol=1e-12, atol=0)
        assert not mine["g"][n].requires_grad


def test_state_begins_at_0_over_trainable_entries_only():
    model = network(1).state_dict()
    for state, slot in (
        (FedDyn().init_client(model, SIZES), "g"),
        (FedDyn().init_server(model, SIZES), "h"),
    ):
        assert list(state) == [slot]
        assert set(state[slot]) == set(NAMES)
        assert not any(t.any() for t in state[slot].values())
        assert all(state[slot][n].shape == model[n].shape for n in NAMES)


def test_defaults_and_the_phase():
    assert FedDyn().options() == {"alpha": 0.01, "clip": 10.0, "variant": "correct"}
    (phase,) = FedDyn().phases(0, 10)
    assert (phase.clip, phase.epochs) == (10.0, None)
    assert FedDyn(variant="reference").phases(0, 10)[0].clip is None


def test_gradients_are_clipped_together():
    settings = {"momentum": 0.0, "weight_decay": 0.0, "epochs": 1, "batch": 64, "lr": 0.5}
    moves = {}
    for clip in (1e-3, 1e6):
        one = federation(method=FedDyn(clip=clip), **settings)
        start, replies = one.model, recorded(one)
        one.run_round()
        moved = replies["left-0"].message["model"]
        parameters = [n for n, _ in one.make_network().named_parameters()]
        moves[clip] = sum(float((moved[n] - start[n]).square().sum()) for n in parameters) ** 0.5
    assert moves[1e-3] == pytest.approx(0.5 * 1e-3, rel=1e-2)  # one step: lr times the norm
    assert moves[1e6] > 2 * moves[1e-3]


# ---- the server ---------------------------------------------------------------------------------


def test_three_rounds_by_hand_with_two_of_five_clients():
    alpha, M = 0.25, 5
    names = [f"m{i}" for i in range(M)]
    server = server_of(FedDyn(alpha=alpha), names)
    theta = {n: server.state["model"][n].numpy().copy() for n in NAMES}
    h = {n: np.zeros_like(theta[n]) for n in NAMES}
    for t, active in enumerate((["m0", "m3"], ["m1", "m4"], ["m3", "m4", "m0"])):
        models = {
            name: {n: e.clone() for n, e in network(100 * t + i).state_dict().items()}
            for i, name in enumerate(active)
        }
        for i, (name, model) in enumerate(models.items()):
            model["encoder.1.running_mean"] += i + 1
            model["encoder.1.num_batches_tracked"] += 3 * i + 1
            samples = 1 + 50 * i  # unequal: a mean by sample counts would show
            server.accept(name, Reply({"model": model}, {}, samples, 1, 0.1))
        server.finish()
        for n in NAMES:
            for model in models.values():  # h ← h − (α/M) Σ_active (θ_m − θ^t)
                h[n] = h[n] - alpha / M * (model[n].numpy() - theta[n])
            mean = sum(model[n].numpy() for model in models.values()) / len(active)
            theta[n] = mean - h[n] / alpha
            assert np.allclose(server.state["h"][n].numpy(), h[n], rtol=1e-12, atol=1e-14)
            assert np.allclose(server.state["model"][n].numpy(), theta[n], rtol=1e-12, atol=1e-13)
        running = server.state["model"]["encoder.1.running_mean"]
        means = [m["encoder.1.running_mean"] for m in models.values()]
        assert torch.allclose(running, sum(means) / len(means))  # averaged, not moved by h
        counter = server.state["model"]["encoder.1.num_batches_tracked"]
        assert counter.dtype == torch.int64
        assert counter == 3 * (len(active) - 1) + 1


def test_m_counts_all_clients_not_the_active_ones():
    names = [f"m{i}" for i in range(4)]
    start, moved = network(0).state_dict(), network(9).state_dict()
    spool = Spool()
    spool.put("m2", {"model": moved})
    zero = FedDyn().init_server(start, SIZES)
    view = ServerView({"model": start, **zero}, 0, 3, tuple(names), SIZES)
    new = FedDyn(alpha=0.1).aggregate(view, moved, [Update("m2", 5, 1, 0.1, spool)])
    for n in NAMES:
        change = moved[n] - start[n]
        assert torch.allclose(new["h"][n], -0.1 / 4 * change, rtol=1e-12)
        # the model moves from the mean by −h/α: a quarter of the change further, not all of it
        assert torch.allclose(new["model"][n] - moved[n], change / 4, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(new["model"]["head.weight"], moved["head.weight"], atol=0.01)


def test_h_is_not_broadcast():
    server = server_of(FedDyn(), ["a", "b"])
    assert set(server.state) == {"model", "h"}
    assert set(server.broadcast()) == {"model"}


# ---- whole runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_reference_variant_is_fedavg_bit_for_bit(participation):
    settings = {**SHORT, "participation": participation}
    plain = run(tiny_task(), FedAvg(), **settings)
    reference = run(tiny_task(), FedDyn(variant="reference"), **settings)
    assert same(plain.model, reference.model)
    assert reference.rounds["loss"] == plain.rounds["loss"]
    assert reference.rounds["bytes_up"] == plain.rounds["bytes_up"]
    assert not same(plain.model, run(tiny_task(), FedDyn(), **settings).model)


def test_the_reference_variant_keeps_no_state():
    one = federation(method=FedDyn(variant="reference"))
    one.run_round()
    assert one.store.accept() == {}
    assert set(one.server.state) == {"model"}


def test_round_0_moves_the_mean_by_itself_once_more():
    # h/α = −(mean − θ^0) when all take part, so θ^1 = mean + (mean − θ^0), and g_m = −α(θ_m − θ^0)
    one = federation(method=FedDyn(alpha=0.1), precision="fp64")
    start, replies = one.model, recorded(one)
    one.run_round()
    assert len(replies) == 4
    for n in one.sizes.parameters:
        mean = sum(r.message["model"][n] for r in replies.values()) / 4
        assert torch.allclose(one.model[n], 2 * mean - start[n], rtol=1e-9, atol=1e-12)
        for name, reply in replies.items():
            expected = -0.1 * (reply.message["model"][n] - start[n])
            assert torch.allclose(one.store.get(name)["g"][n], expected, rtol=1e-9, atol=1e-14)


def test_who_sits_out_keeps_its_g_and_h_is_the_mean_of_all_clients_g():
    half = federation(participation=0.5, precision="fp64", method=FedDyn(alpha=0.1))
    rested = trained_again = 0
    seen = set()
    for _ in range(5):
        before = {name: tree.copy(half.store.get(name)) for name in half.clients}
        active = half.server.sample()
        assert len(active) == 2
        start, replies = half.model, recorded(half)
        half.run_round()
        for name in half.clients:
            g = half.store.get(name)["g"]
            if name in active:
                for n in half.sizes.parameters:
                    change = replies[name].message["model"][n] - start[n]
                    expected = before[name]["g"][n] - 0.1 * change
                    assert torch.allclose(g[n], expected, rtol=1e-9, atol=1e-13)
                trained_again += name in seen
            else:
                assert same(g, before[name]["g"])
                rested += name in seen
        seen |= set(active)
        # both add −α(θ_m − θ^t) of the same clients, h over all M of them
        for n, h in half.server.state["h"].items():
            mean = sum(half.store.get(name)["g"][n] for name in half.clients) / 4
            assert torch.allclose(h, mean, rtol=1e-9, atol=1e-13)
    assert rested
    assert trained_again


def test_a_clients_g_changes_what_it_learns():
    one = federation(participation=1.0)
    one.run_round()
    name, site = next(iter(one.clients.items()))
    mine = one.store.get(name)
    none = {"g": {n: torch.zeros_like(t) for n, t in mine["g"].items()}}
    received = one.server.broadcast()
    models = [
        next(iter(one.engine.train([site], received, lambda _, g=state: g, 1)))[1].message["model"]
        for state in (mine, none)
    ]
    assert not same(*models)
