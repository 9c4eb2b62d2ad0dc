"""MOON: the contrast against loops over plain numbers, and what a client remembers."""

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.methods.helpers import D, K, cosine, numbers, recorded, same
from torch import nn

from protofed import tree
from protofed.config import make_config
from protofed.federation.simulation import Federation
from protofed.method import Batch, Client, Sizes
from protofed.methods import FedAvg, Moon
from protofed.models import Network
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

SIZES = Sizes(K, D, 8)
Y = [0, 1, 2, 2, 0, 1]


def network(seed):
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(5, D), nn.BatchNorm1d(D), nn.Tanh())
    net = Network(encoder, D, K).double()
    net.encoder[1].running_mean += numbers(seed, D)  # statistics that differ from any batch's
    net.encoder[1].running_var += numbers(seed + 1, D).abs()
    return net


def scene(method, there=1.0):
    """The network being trained, the received one and the previous one: three different ones."""
    net, received, previous = network(1), network(2), network(3)
    mine = {"previous": previous.state_dict(), "history": {"there": torch.tensor(there)}}
    client = Client(
        method,
        net,
        SIZES,
        received={"model": received.state_dict()},
        mine=mine,
        round=1,
        rounds=3,
    )
    net.train()
    client.begin_step(1)
    batch = Batch(numbers(5, len(Y), 5), torch.tensor(Y), torch.arange(len(Y)))
    return client, net, received, previous, batch


def contrast(z, z_glob, z_prev, tau):
    """(1/B) Σ_i −log e^{cos(z,z_glob)/τ} / (e^{cos(z,z_glob)/τ} + e^{cos(z,z_prev)/τ})."""
    total = 0.0
    for a, g, p in zip(z.tolist(), z_glob.tolist(), z_prev.tolist(), strict=True):
        near, far = math.exp(cosine(a, g) / tau), math.exp(cosine(a, p) / tau)
        total -= math.log(near / (near + far))
    return total / len(z)


def features(net, x, training):
    net = copy.deepcopy(net).train(training)
    return net(x).feature.detach()


def reference(net, received, previous, x, tau):
    return contrast(
        features(net, x, True), features(received, x, False), features(previous, x, False), tau
    )


def federation(task=None, method=None, **settings):
    task = task or tiny_task(clients=1)
    return Federation(make_config(task, method or Moon(), **{**SHORT, **settings}), task)


@pytest.mark.parametrize(("mu", "tau"), [(5, 0.5), (1, 0.5), (5, 0.1)])
def test_contrast_is_the_formula_with_both_others_in_evaluation_mode(mu, tau):
    method = Moon(mu=mu, tau=tau)
    client, net, received, previous, batch = scene(method)
    before = copy.deepcopy(net)
    terms = method.loss(client, batch)
    assert list(terms) == ["ce", "moon"]
    expected = mu * reference(before, received, previous, batch.x, tau)
    assert terms["moon"].item() == pytest.approx(expected, rel=1e-10)
    swapped = mu * reference(before, previous, received, batch.x, tau)
    assert terms["moon"].item() != pytest.approx(swapped, rel=0.01)  # near and far are not alike
    training = features(received, batch.x, True), features(previous, batch.x, True)
    other = mu * contrast(features(before, batch.x, True), *training, tau)
    assert terms["moon"].item() != pytest.approx(other, rel=0.01)  # nor are the two modes


def test_defaults_are_the_published_comparisons():
    assert Moon().options() == {"mu": 5.0, "tau": 0.5}


def test_ce_is_the_one_of_the_weights_being_trained():
    client, net, *_, batch = scene(Moon())
    logits = copy.deepcopy(net)(batch.x).logits.tolist()
    expected = sum(
        -math.log(math.exp(r[k]) / sum(map(math.exp, r))) for r, k in zip(logits, Y, strict=True)
    )
    assert Moon().loss(client, batch)["ce"].item() == pytest.approx(expected / len(Y), rel=1e-12)


def test_the_contrast_has_a_gradient_and_it_agrees_with_differences():
    method = Moon(mu=2, tau=0.5)
    client, net, received, previous, batch = scene(method)
    method.loss(client, batch)["moon"].backward()
    size = 0.0
    for name, p in net.named_parameters():
        if name.startswith("head"):
            assert p.grad is None  # features only
            continue
        for index in np.ndindex(*p.shape):
            kept, ends = p.data[index].item(), []
            for step in (1e-6, -1e-6):
                p.data[index] = kept + step
                ends.append(2 * reference(net, received, previous, batch.x, 0.5))
            p.data[index] = kept
            slope = (ends[0] - ends[1]) / 2e-6
            assert p.grad[index].item() == pytest.approx(slope, abs=1e-7), name
            size += p.grad[index].item() ** 2
    assert math.sqrt(size) > 1e-2


def test_a_step_against_the_gradient_nears_the_global_and_leaves_the_previous_features():
    method = Moon(mu=1)
    client, net, received, previous, batch = scene(method)
    others = features(received, batch.x, False), features(previous, batch.x, False)

    def gap():
        z = features(net, batch.x, True)
        near, far = (
            sum(cosine(a, b) for a, b in zip(z.tolist(), other.tolist(), strict=True))
            for other in others
        )
        return far - near

    before = gap()
    method.loss(client, batch)["moon"].backward()
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    assert gap() < before - 1e-3


def test_no_gradient_reaches_the_other_models():
    client, _, _, _, batch = scene(Moon())
    others = [*client.start.values(), *client.mine["previous"].values()]
    for t in others:
        if t.is_floating_point():
            t.requires_grad_()
    torch.stack(list(Moon().loss(client, batch).values())).sum().backward()
    assert all(t.grad is None for t in others)


def test_no_batchnorm_buffer_moves_but_by_the_main_pass():
    client, net, received, previous, batch = scene(Moon())
    plain = copy.deepcopy(net).train()
    kept = tree.copy({"r": received.state_dict(), "p": previous.state_dict()})
    parameters = list(net.parameters())
    Moon().loss(client, batch)
    plain(batch.x)  # what FedAvg does
    buffers = dict(net.named_buffers())
    assert same(buffers, dict(plain.named_buffers()))
    assert buffers["encoder.1.num_batches_tracked"] == 1
    assert not torch.equal(buffers["encoder.1.running_mean"], network(1).encoder[1].running_mean)
    assert tree.equal({"r": client.start, "p": client.mine["previous"]}, kept)
    assert all(m.training for m in net.modules())
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))


def test_a_first_round_has_no_contrast_and_no_gradient_of_it():
    client, net, *_, batch = scene(Moon(), there=0.0)
    terms = Moon().loss(client, batch)
    assert terms["moon"].item() == 0
    terms["moon"].backward()
    assert all(p.grad is None or not p.grad.any() for p in net.parameters())


def test_before_the_first_round_nothing_is_there():
    model = network(1).state_dict()
    state = Moon().init_client(model, SIZES)
    assert set(state) == {"previous", "history"}
    assert state["history"]["there"].item() == 0
    assert same(state["previous"], model)  # finite, so that 0 times the contrast is 0


def test_upload_sends_nothing_more_and_keeps_a_copy_of_the_final_model():
    client, net, *_, batch = scene(Moon())
    Moon().loss(client, batch)
    message, mine = Moon().upload(client)
    assert message == {}
    assert set(mine) == {"previous", "history"}
    assert mine["history"]["there"].item() == 1
    assert same(mine["previous"], net.state_dict())  # buffers too
    with torch.no_grad():
        net.head.weight += 1
    assert not torch.equal(mine["previous"]["head.weight"], net.head.weight)


# ---- whole runs ---------------------------------------------------------------------------------


def test_mu_0_is_fedavg_bit_for_bit_and_round_0_always_is():
    plain = run(tiny_task(), FedAvg(), **SHORT)
    off = run(tiny_task(), Moon(mu=0), **SHORT)
    on = run(tiny_task(), Moon(), **SHORT)
    assert same(plain.model, off.model)
    assert not same(plain.model, on.model)
    assert on.rounds[0]["loss"] == {"ce": plain.rounds[0]["loss"]["ce"], "moon": 0}
    assert on.rounds[1]["loss"]["moon"] > 0
    one = {**SHORT, "rounds": 1}
    assert same(run(tiny_task(), FedAvg(), **one).model, run(tiny_task(), Moon(), **one).model)


def test_in_round_1_of_full_participation_previous_is_the_clients_own_last_model():
    two = federation(clients=1)
    replies = recorded(two)
    two.run_round()
    for name, reply in replies.items():
        kept = two.store.get(name)
        assert same(kept["previous"], reply.message["model"])
        assert not same(kept["previous"], two.model)  # not the average
    two.run_round()
    for name, reply in replies.items():
        assert same(two.store.get(name)["previous"], reply.message["model"])


def test_who_sits_out_keeps_its_older_model_and_a_late_first_round_has_no_contrast():
    half = federation(participation=0.5)
    held, expected = {}, {}
    orders = []
    for _ in range(6):
        (name,) = half.server.sample()
        record = half.run_round()
        first = name not in orders
        assert (record["loss"]["moon"] == 0) == first
        orders.append(name)
        held[name] = half.store.get(name)["previous"]
        expected[name] = half.model  # one client a round: the average is its model
        for client in half.clients:
            state = half.store.get(client)
            if client in expected:
                assert same(state["previous"], expected[client])
                assert state["history"]["there"] == 1
            else:
                assert state["history"]["there"] == 0
    changes = sum(a != b for a, b in pairwise(orders))
    assert set(orders) == set(half.clients)
    assert changes >= 2  # somebody sat out and came back
    assert not same(*expected.values())


def test_a_feature_of_norm_0_gives_log_2_and_a_finite_gradient():
    client, net, *_, batch = scene(Moon(mu=1))
    with torch.no_grad():
        net.encoder[1].weight.zero_()
        net.encoder[1].bias.zero_()
    term = Moon(mu=1).loss(client, batch)["moon"]
    assert term.item() == pytest.approx(math.log(2), rel=1e-12)
    term.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
