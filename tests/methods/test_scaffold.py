"""SCAFFOLD: the correction, the controls and the server's step by hand."""

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
)

from protofed import tree
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.client_round import Reply
from protofed.federation.server import Server
from protofed.federation.simulation import Federation
from protofed.method import Batch, Client, effective_steps
from protofed.methods import FedAvg, Scaffold
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

Y = [0, 1, 2, 2, 0, 1]
RUNNING, COUNTER = "encoder.1.running_mean", "encoder.1.num_batches_tracked"
PLAIN = {**TINY, "momentum": 0.0}


def scene(method, steps=0, lr=0.1, controls=1.0):
    """A client in the middle of training, with a server's and its own control."""
    net = network(1)
    start = {n: t.clone() for n, t in network(2).state_dict().items()}
    c = {n: controls * numbers(10 + i, *start[n].shape) for i, n in enumerate(NAMES)}
    c_m = {n: controls * numbers(90 + i, *start[n].shape) for i, n in enumerate(NAMES)}
    received, mine = {"model": start, "c": c}, {"c_m": c_m}
    client = Client(method, net, SIZES, received=received, mine=mine, round=1, rounds=3, lr=lr)
    client.steps = steps
    client.begin_step(1)
    batch = Batch(numbers(5, len(Y), 5), torch.tensor(Y), torch.arange(len(Y)))
    return client, net, start, c, c_m, batch


def federation(task=None, method=None, **settings):
    task = task or tiny_task()
    return Federation(make_config(task, method or Scaffold(), **{**TINY, **settings}), task)


# ---- the client ---------------------------------------------------------------------------------


def test_the_correction_by_hand():
    client, net, _, c, c_m, batch = scene(Scaffold())
    terms = Scaffold().loss(client, batch)
    assert list(terms) == ["ce", "correction"]
    expected = 0.0
    for n, p in net.named_parameters():
        for index in np.ndindex(*p.shape):
            expected += (c[n][index].item() - c_m[n][index].item()) * p[index].item()
    assert terms["correction"].item() == pytest.approx(expected, rel=1e-12)
    plain = FedAvg().loss(scene(FedAvg())[0], batch)["ce"]
    assert terms["ce"].item() == plain.item()


def test_it_changes_the_gradient_by_exactly_c_minus_c_m():
    client, net, _, c, c_m, batch = scene(Scaffold())
    Scaffold().loss(client, batch)["correction"].backward()
    for n, p in net.named_parameters():
        assert torch.equal(p.grad, c[n] - c_m[n]), n
        assert p.grad.abs().min() > 0, n
    grads = []
    for method in (Scaffold(), FedAvg()):
        client, net, *_ = scene(method)
        sum(method.loss(client, batch).values()).backward()
        grads.append({n: p.grad for n, p in net.named_parameters()})
    for n in NAMES:
        difference = grads[0][n] - grads[1][n]
        assert torch.allclose(difference, c[n] - c_m[n], rtol=1e-12, atol=1e-14), n


@pytest.mark.parametrize("term", ["ce", "correction"])
def test_gradients_by_finite_differences(term):
    client, net, _, _, _, batch = scene(Scaffold())

    def value():
        client.begin_step(1)
        return Scaffold().loss(client, batch)[term]

    assert check_gradients(net, value) == set()


def test_equal_controls_add_nothing():
    client, net, _, c, _, batch = scene(Scaffold())
    client.mine["c_m"] = c
    term = Scaffold().loss(client, batch)["correction"]
    assert term.item() == 0
    term.backward()
    assert all(not p.grad.any() for p in net.parameters())


@pytest.mark.parametrize(("steps", "lr"), [(1, 0.1), (7, 0.25)])
def test_the_new_control_by_hand(steps, lr):
    client, net, start, c, c_m, _ = scene(Scaffold(), steps, lr)
    message, mine = Scaffold().upload(client)
    assert (list(message), list(mine)) == (["change"], ["c_m"])
    assert set(message["change"]) == set(mine["c_m"]) == set(NAMES)  # trainable, no buffers
    for n, p in net.named_parameters():
        theta, theta_t = p.detach().numpy(), start[n].numpy()
        expected = c_m[n].numpy() - c[n].numpy() + (theta_t - theta) / (steps * lr)
        assert np.allclose(mine["c_m"][n].numpy(), expected, rtol=1e-12, atol=1e-13)
        change = expected - c_m[n].numpy()
        assert np.allclose(message["change"][n].numpy(), change, rtol=1e-11, atol=1e-13)
        assert not mine["c_m"][n].requires_grad
        assert not message["change"][n].requires_grad


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_of_constant_gradients_the_control_is_the_gradient(rho, steps):
    # SGD itself does the steps: with c_m the mean gradient, momentum must cancel out
    method = Scaffold(rho=rho)
    client, net, start, c, c_m, _ = scene(method, steps, lr=0.05)
    gradient = {n: numbers(50 + i, *start[n].shape) for i, n in enumerate(NAMES)}
    with torch.no_grad():
        for n, t in net.state_dict().items():
            t.copy_(start[n])
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=rho)
    for _ in range(steps):
        for n, p in net.named_parameters():
            p.grad = gradient[n] + c[n] - c_m[n]
        sgd.step()
    _, mine = method.upload(client)
    for n in NAMES:
        assert torch.allclose(mine["c_m"][n], gradient[n], rtol=1e-9, atol=1e-11), n


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9, 0.999])
def test_effective_steps_by_stepping(rho):
    velocity = way = 0.0
    for steps in range(1, 60):
        velocity = rho * velocity + 1
        way += velocity
        assert effective_steps(steps, rho) == pytest.approx(way, rel=1e-9)
    assert effective_steps(7, 0.0) == 7


def test_state_begins_at_0_over_trainable_entries_only():
    model = network(1).state_dict()
    for state, slot in (
        (Scaffold().init_client(model, SIZES), "c_m"),
        (Scaffold().init_server(model, SIZES), "c"),
    ):
        assert list(state) == [slot]
        assert set(state[slot]) == set(NAMES)
        assert not any(t.any() for t in state[slot].values())
        assert all(state[slot][n].shape == model[n].shape for n in NAMES)


def test_defaults_limits_and_the_phase():
    assert Scaffold().options() == {"eta_g": 1.0, "rho": 0.0}
    (phase,) = Scaffold().phases(0, 10)
    assert (phase.momentum, phase.epochs, phase.lr) == (0.0, None, None)
    assert Scaffold(rho=0.9).phases(0, 10)[0].momentum == 0.9
    for wrong in ({"rho": 1.0}, {"rho": -0.1}, {"eta_g": 0.0}):
        with pytest.raises(ProtofedError):
            Scaffold(**wrong)


# ---- the server ---------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [1.0, 0.4, 1.5])
def test_three_rounds_by_hand_with_some_of_five_clients(eta):
    M = 5
    names = [f"m{i}" for i in range(M)]
    server = Server(Scaffold(eta_g=eta), network(0), SIZES, names, rounds=9, seed=0)
    theta = {n: server.state["model"][n].numpy().copy() for n in NAMES}
    c = {n: np.zeros_like(theta[n]) for n in NAMES}
    for t, active in enumerate((["m0", "m3"], ["m1", "m4"], ["m3", "m4", "m0"])):
        models, changes = {}, {}
        for i, name in enumerate(active):
            models[name] = {k: e.clone() for k, e in network(100 * t + i).state_dict().items()}
            models[name][RUNNING] += i + 1
            models[name][COUNTER] += 3 * i + 1
            changes[name] = {
                n: numbers(1000 * t + 10 * i + j, *theta[n].shape) for j, n in enumerate(NAMES)
            }
            message = {"model": models[name], "change": changes[name]}
            # unequal samples and steps: nothing here goes by them
            server.accept(name, Reply(message, {}, 1 + 50 * i, 1 + i, 0.1))
        server.finish()
        for n in NAMES:
            step = np.zeros_like(theta[n])
            for name in active:
                step += (models[name][n].numpy() - theta[n]) / len(active)
                c[n] = c[n] + changes[name][n].numpy() / M
            theta[n] = theta[n] + eta * step
            assert np.allclose(server.state["c"][n].numpy(), c[n], rtol=1e-12, atol=1e-13)
            assert np.allclose(server.state["model"][n].numpy(), theta[n], rtol=1e-12, atol=1e-13)
        means = [m[RUNNING] for m in models.values()]
        running = server.state["model"][RUNNING]
        assert torch.allclose(running, sum(means) / len(means))  # averaged, whatever η_g
        counter = server.state["model"][COUNTER]
        assert counter.dtype == torch.int64
        assert counter == 3 * (len(active) - 1) + 1
    assert set(server.state) == set(server.broadcast()) == {"model", "c"}


# ---- whole runs ---------------------------------------------------------------------------------


def test_the_first_round_is_fedavgs_without_momentum_bit_for_bit():
    # all clients have 22 samples; the correction is 0 and η_g = 1 takes the mean itself
    ours, plain = (federation(method=m, momentum=0.0) for m in (Scaffold(), FedAvg()))
    losses = [one.run_round()["loss"] for one in (ours, plain)]
    assert same(ours.model, plain.model)
    assert losses[0]["ce"] == losses[1]["ce"]
    assert losses[0]["correction"] == 0
    losses = [one.run_round()["loss"] for one in (ours, plain)]
    assert losses[0]["correction"] != 0
    assert not same(ours.model, plain.model)


def test_eta_g_half_goes_half_the_way():
    whole, half = (federation(method=Scaffold(eta_g=eta), precision="fp64") for eta in (1, 0.5))
    start = half.model
    whole.run_round(), half.run_round()
    for n in half.sizes.parameters:
        expected = (start[n] + whole.model[n]) / 2
        assert torch.allclose(half.model[n], expected, rtol=1e-12, atol=1e-15)


def test_one_client_is_fedavg_without_momentum_bit_for_bit():
    # its control is the server's: there is no drift to take out
    settings = {**PLAIN, "clients": {"left": 1}}
    ours, plain = (run(tiny_task(), m, **settings) for m in (Scaffold(), FedAvg()))
    assert same(ours.model, plain.model)


def test_momentum_is_the_methods_own():
    models = [run(tiny_task(), Scaffold(), **{**TINY, "momentum": m}).model for m in (0.9, 0.0)]
    assert same(*models)
    ours = federation(method=Scaffold(rho=0.9), momentum=0.0)
    plain = federation(method=FedAvg(), momentum=0.9)
    ours.run_round(), plain.run_round()
    assert same(ours.model, plain.model)


@pytest.mark.parametrize(("participation", "active"), [(1.0, 4), (0.5, 2)])
def test_controls_sum_to_the_servers_and_who_sits_out_keeps_its_own(participation, active):
    one = federation(participation=participation, precision="fp64")
    replies, rested, seen = recorded(one), 0, set()
    for _ in range(4):
        before = {name: tree.copy(one.store.get(name)) for name in one.clients}
        start, c = one.model, one.server.state["c"]
        one.run_round()
        assert len(replies) == active
        for name in one.clients:
            c_m = one.store.get(name)["c_m"]
            if name not in replies:
                assert same(c_m, before[name]["c_m"])
                rested += name in seen
                continue
            reply = replies[name]
            assert (reply.steps, reply.lr) == (6, 0.05)  # 22 samples in batches of 8, 2 epochs
            for n in one.sizes.parameters:
                way = (start[n] - reply.message["model"][n]) / (6 * 0.05)
                expected = before[name]["c_m"][n] - c[n] + way
                assert torch.allclose(c_m[n], expected, rtol=1e-9, atol=1e-13)
                change = reply.message["change"][n]
                assert torch.allclose(change, c_m[n] - before[name]["c_m"][n], atol=1e-13)
        seen |= set(replies)
        for n, c in one.server.state["c"].items():
            total = sum(one.store.get(name)["c_m"][n] for name in one.clients)
            assert torch.allclose(c, total / 4, rtol=1e-9, atol=1e-13)
        assert any(c.any() for c in one.server.state["c"].values())
    assert bool(rested) == (active < 4)


def test_both_controls_change_what_a_client_learns():
    one = federation()
    one.run_round()
    name, site = next(iter(one.clients.items()))
    mine, received = one.store.get(name), one.server.broadcast()

    def none(slot):
        return {n: torch.zeros_like(t) for n, t in slot.items()}

    def trained(received, mine):
        return next(iter(one.engine.train([site], received, lambda _: mine, 1)))[1].message

    models = [
        trained(received, mine)["model"],
        trained(received, {"c_m": none(mine["c_m"])})["model"],
        trained({**received, "c": none(received["c"])}, mine)["model"],
    ]
    assert not any(same(models[i], models[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_traffic_is_the_models_and_the_trainable_entries_once_more():
    ours, plain = (run(tiny_task(), m, **{**TINY, "rounds": 2}) for m in (Scaffold(), FedAvg()))
    extra = 4 * 4 * sum(p.numel() for p in federation().make_network().parameters())
    for direction in ("bytes_up", "bytes_down"):
        for a, b in zip(ours.rounds[direction], plain.rounds[direction], strict=True):
            assert a == b + extra
            assert 1.9 < a / b <= 2
