"""FedBN: every BatchNorm stays at its client, shortcuts included; clients test their own models."""

import pytest
import torch
from torch import nn

from protofed import tree
from protofed.config import make_config
from protofed.data.augment import normalized
from protofed.federation.model_state import load_model, model_entries
from protofed.federation.simulation import Federation
from protofed.methods import FedAvg, FedBN
from protofed.models import build
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

RESNET = {**TINY, "model": "resnet10", "width": 8, "epochs": 1, "rounds": 2}


def batch_norms(network):
    """The state entries of BatchNorm layers, found by walking the modules."""
    return {
        f"{path}.{name}"
        for path, module in network.named_modules()
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d))
        for name in module.state_dict()
    }


def federation(task=None, method=None, **settings):
    task = task or tiny_task()
    return Federation(make_config(task, method or FedBN(), **{**TINY, **settings}), task)


def recorded(federation):
    """What the federation's next rounds send down, and the replies by client."""
    down, replies = {}, {}
    train = federation.engine.train

    def recording(sites, received, mine, round):
        replies.clear()
        down.clear()
        down.update(received)
        for name, reply in train(sites, received, mine, round):
            replies[name] = reply
            yield name, reply

    federation.engine.train = recording
    return down, replies


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# ---- what stays and what travels ----------------------------------------------------------------


def test_every_batchnorm_of_a_resnet_stays_shortcuts_included():
    network = build("resnet10", 4, 8, 8)
    expected = batch_norms(network)
    assert len(expected) == 12 * 5  # stem, 8 in the blocks, 3 in shortcuts; 5 entries each
    assert sum("shortcut" in n for n in expected) == 3 * 5
    assert not any("bn" in n for n in expected)  # a test by name would keep none
    stays = {e.name for e in model_entries(network) if FedBN().shared(e) == "no"}
    assert stays == expected
    assert {FedBN().shared(e) for e in model_entries(network)} == {"no", "both"}


def test_nothing_of_batchnorm_travels_and_each_client_keeps_its_own():
    one = federation(**RESNET)
    down, replies = recorded(one)
    network = one.make_network()
    norms, everything = batch_norms(network), network.state_dict()
    rest = set(everything) - norms
    size = sum(everything[n].numel() * everything[n].element_size() for n in rest)
    for _ in range(2):
        record = one.run_round()
        assert set(down) == {"model"}
        assert set(down["model"]) == set(one.model) == rest
        for name, reply in replies.items():
            assert set(reply.message) == {"model"}
            assert set(reply.message["model"]) == rest
            mine = one.store.get(name)
            assert {slot for slot, entries in mine.items() if entries} == {"model"}
            assert set(mine["model"]) == norms
        assert record["bytes_up"] == record["bytes_down"] == 4 * size
    shortcut = next(n for n in norms if "shortcut" in n and n.endswith("running_mean"))
    kept = [one.store.get(name)["model"][shortcut] for name in one.clients]
    assert not any(torch.equal(kept[0], other) for other in kept[1:])
    assert one.batchnorm == "kept by each client"


def test_group_norm_is_not_batchnorm():
    network = build("resnet10", 4, 8, 8, "group")
    assert {FedBN().shared(e) for e in model_entries(network)} == {"both"}


def test_a_client_starts_from_its_own_batchnorm_and_the_global_rest():
    one = federation()
    one.run_round()
    received, before = one.server.broadcast(), tree.copy(one.store.get("left-0"))
    counter = "encoder.1.num_batches_tracked"
    assert before["model"][counter] == 6  # 22 samples in batches of 8, 2 epochs
    one.run_round()
    assert one.store.get("left-0")["model"][counter] == 12  # it counts on: nothing was reset
    # the same round from the initial BatchNorm ends elsewhere
    site, fresh = one.clients["left-0"], one.server.initial_client(one.make_network().state_dict())
    models = [
        next(iter(one.engine.train([site], received, lambda _, m=mine: m, 1)))[1].message["model"]
        for mine in (before, fresh)
    ]
    assert not same(*models)


def test_the_rest_is_averaged_by_samples():
    one = federation(samples={"left": 9, "right": 22}, precision="fp64")
    _, replies = recorded(one)
    one.run_round()
    total = sum(r.samples for r in replies.values())
    assert len({r.samples for r in replies.values()}) == 2
    for n in one.model:
        mean = sum(r.samples / total * r.message["model"][n] for r in replies.values())
        assert torch.allclose(one.model[n], mean, rtol=1e-12, atol=1e-14)


def test_who_sits_out_keeps_its_batchnorm():
    half = federation(participation=0.5)
    _, replies = recorded(half)
    rested, seen = 0, set()
    for _ in range(4):
        before = {name: tree.copy(half.store.get(name)) for name in half.clients}
        half.run_round()
        assert len(replies) == 2
        for name in half.clients:
            after = half.store.get(name)["model"]
            assert same(after, before[name]["model"]) == (name not in replies)
            rested += name in seen and name not in replies
        seen |= set(replies)
    assert rested


# ---- evaluation ---------------------------------------------------------------------------------


def accuracies(one, clients, domain):
    """The accuracy on a domain of each client's own model, computed with a network of its own."""
    network, images = one.make_network(), one.tests[domain]
    found = []
    for name in clients:
        load_model(network, {**one.model, **one.store.get(name)["model"]})
        network.eval()
        with torch.no_grad():
            x = normalized(images.x, one.setup.augment, one.setup.dtype)
            right = (network(x).logits.argmax(1) == images.y).sum().item()
        found.append(100 * right / len(images.y))
    return found


def test_a_domain_is_tested_by_its_own_clients():
    assert FedBN().evaluates == "clients"
    one = federation(**RESNET, clients={"left": 3, "right": 2}, samples=14)
    for _ in range(3):
        record = one.run_round()
    told = set()
    for domain in ("left", "right"):
        own = [name for name, site in one.clients.items() if site.domain == domain]
        others = [name for name in one.clients if name not in own]
        scores = accuracies(one, own, domain)
        assert record["accuracy"][domain] == pytest.approx(sum(scores) / len(scores), abs=1e-3)
        told |= {tuple(scores), tuple(accuracies(one, others, domain))}
    assert len(told) == 4  # other clients' models would give other numbers


def test_a_domain_without_clients_is_tested_by_all():
    one = federation(clients={"left": 2})
    record = one.run_round()
    scores = accuracies(one, list(one.clients), "right")
    assert record["accuracy"]["right"] == pytest.approx(sum(scores) / 2, abs=1e-3)


# ---- special cases ------------------------------------------------------------------------------


def test_one_client_is_fedavg_bit_for_bit():
    settings = {**TINY, "clients": {"left": 1}}
    ours, plain = (run(tiny_task(), m, **settings) for m in (FedBN(), FedAvg()))
    assert same(ours.model, {n: plain.model[n] for n in ours.model})
    assert len(ours.model) < len(plain.model)
    assert ours.rounds["accuracy"] == plain.rounds["accuracy"]


def test_round_0_trains_like_fedavg():
    ours, plain = (run(tiny_task(), m, **{**TINY, "rounds": 2}) for m in (FedBN(), FedAvg()))
    assert ours.rounds[0]["loss"] == plain.rounds[0]["loss"]
    assert ours.rounds[1]["loss"] != plain.rounds[1]["loss"]
    assert ours.summary["evaluated"] == "clients"


def test_without_batchnorm_it_is_fedavg_bit_for_bit():
    settings = {**TINY, "norm": "none"}
    ours, plain = (run(tiny_task(), m, **settings) for m in (FedBN(), FedAvg()))
    assert same(ours.model, plain.model)
    assert ours.rounds["accuracy"] == plain.rounds["accuracy"]
