"""FPL: each equation, through the method's own hooks, against loops over plain numbers."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from tests.methods.helpers import D, Given, K, cosine, numbers, rows_of, table
from torch import nn

from protofed.config import make_config
from protofed.federation.client_round import train_client
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.method import Batch, Client, ServerView, Sizes, Update
from protofed.methods import FPL, FedAvg, FedProto
from protofed.models import Network
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

SIZES = Sizes(K, D, 8)
FAST = {**TINY, "rounds": 3}


pytestmark = pytest.mark.usefixtures("single_thread")


def scene(method, y, received, dtype=torch.float64, z=None):
    z = numbers(1, len(y), D) if z is None else z
    net = Given(z.to(dtype), numbers(2, len(y), K).to(dtype))
    client = Client(method, net, SIZES, received=received, mine={}, round=1, rounds=3)
    client.begin_step(1)
    rows = torch.arange(len(y))
    return client, net, Batch(rows, torch.tensor(y), rows)


def eq8(z, y, table, tau):
    """(1/B) Σ_i −log Σ_{c∈P^y} e^{cos/τ} / Σ_{c∈P} e^{cos/τ}."""
    total = 0.0
    for i, k in enumerate(y):
        if not rows_of(table, k):
            continue
        own = every = 0.0
        for other in range(len(table["mask"])):
            for c in rows_of(table, other):
                e = math.exp(cosine(z[i].tolist(), c) / tau)
                every += e
                own += e if other == k else 0
        total -= math.log(own / every)
    return total / len(y)


def eq10(z, y, table, reduction):
    """(1/B) Σ_i Σ_v (z_iv − U_yv)², U the mean of the class's clusters (Eq. 6); or mean over v."""
    total = 0.0
    for i, k in enumerate(y):
        rows = rows_of(table, k)
        if rows:
            U = [sum(r[v] for r in rows) / len(rows) for v in range(D)]
            total += sum((float(z[i, v].detach()) - U[v]) ** 2 for v in range(D))
    return total / len(y) / (D if reduction == "mean" else 1)


P = table(numbers(11, 3, D), numbers(12, 1, D), numbers(13, 2, D))  # 3, 1 and 2 clusters
G = table(numbers(21, 1, D), numbers(22, 1, D), numbers(23, 1, D))
Y = [0, 1, 2, 2, 0, 0]


# ---- the client ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.02, 0.2, 1])
def test_cpcl_is_eq_8_with_several_clusters_per_class(tau):
    method = FPL(tau=tau)
    client, net, batch = scene(method, Y, {"cluster": P})
    terms = method.loss(client, batch)
    assert list(terms) == ["ce", "cpcl", "upcr"]
    assert terms["cpcl"].item() == pytest.approx(eq8(net.z, Y, P, tau), rel=1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_upcr_is_eq_10(reduction):
    method = FPL(upcr_reduction=reduction)
    client, net, batch = scene(method, Y, {"cluster": P})
    got = method.loss(client, batch)["upcr"].item()
    assert got == pytest.approx(eq10(net.z, Y, P, reduction), rel=1e-12)
    other = eq10(net.z, Y, P, "sum" if reduction == "mean" else "mean")
    assert got != pytest.approx(other, rel=0.1)


def test_weights_scale_their_own_term_only():
    client, _, batch = scene(FPL(), Y, {"cluster": P})
    one = FPL().loss(client, batch)
    client.begin_step(1)
    other = FPL(cpcl=3, upcr=0.25).loss(client, batch)
    assert other["ce"] == one["ce"]
    assert other["cpcl"].item() == pytest.approx(3 * one["cpcl"].item(), rel=1e-12)
    assert other["upcr"].item() == pytest.approx(one["upcr"].item() / 4, rel=1e-12)


@pytest.mark.parametrize("contrast", ["cluster", "global"])
@pytest.mark.parametrize("target", ["unbiased", "global"])
def test_each_term_uses_the_prototypes_it_is_told(contrast, target):
    method = FPL(tau=0.5, cpcl_prototypes=contrast, upcr_prototypes=target)
    client, net, batch = scene(method, Y, {"cluster": P, "global": G})
    terms = method.loss(client, batch)
    contrasted = P if contrast == "cluster" else G
    drawn_to = P if target == "unbiased" else G
    assert terms["cpcl"].item() == pytest.approx(eq8(net.z, Y, contrasted, 0.5), rel=1e-10)
    assert terms["upcr"].item() == pytest.approx(eq10(net.z, Y, drawn_to, "mean"), rel=1e-10)


def test_missing_class_adds_zero_and_stays_in_the_mean():
    partly = table(numbers(11, 2, D), numbers(12, 1, D), [])
    method = FPL(tau=0.5)
    client, net, batch = scene(method, Y, {"cluster": partly})
    terms = method.loss(client, batch)
    assert terms["cpcl"].item() == pytest.approx(eq8(net.z, Y, partly, 0.5), rel=1e-10)
    assert terms["upcr"].item() == pytest.approx(eq10(net.z, Y, partly, "mean"), rel=1e-10)
    (terms["cpcl"] + terms["upcr"]).backward()
    absent = torch.tensor(Y) == 2
    assert not net.z.grad[absent].any()
    assert net.z.grad[~absent].abs().sum(1).min() > 0


def test_a_batch_without_any_prototype_has_terms_zero_and_the_gradient_of_ce():
    only_0 = table(numbers(11, 2, D), [], [])
    for received in ({"cluster": only_0}, FPL().init_server({}, SIZES)):
        client, net, batch = scene(FPL(), [1, 2, 2], received)
        terms = FPL().loss(client, batch)
        assert terms["cpcl"].item() == 0
        assert terms["upcr"].item() == 0
        torch.stack(list(terms.values())).sum().backward()
        plain, other, batch = scene(FedAvg(), [1, 2, 2], {})
        FedAvg().loss(plain, batch)["ce"].backward()
        assert torch.equal(net.logits.grad, other.logits.grad)
        assert not net.z.grad.any()


def test_round_0_is_fedavgs_loss():
    received = FPL().init_server({}, SIZES)
    client, _, batch = scene(FPL(), Y, received, torch.float32)
    plain, _, same = scene(FedAvg(), Y, {}, torch.float32)
    ours, theirs = FPL().loss(client, batch), FedAvg().loss(plain, same)
    assert torch.stack(list(ours.values())).sum() == theirs["ce"]


@pytest.mark.parametrize("tau", [0.001, 0.01])
def test_small_tau_is_finite_in_float32(tau):
    # the feature of sample 0 is a prototype of another class: the worst case of the contrast
    z = numbers(1, len(Y), D)
    z[0] = P["mean"][1, 0]
    method = FPL(tau=tau)
    client, net, batch = scene(method, Y, {"cluster": P}, torch.float32, z)
    terms = method.loss(client, batch)
    torch.stack(list(terms.values())).sum().backward()
    assert terms["cpcl"].dtype == torch.float32
    assert math.isfinite(terms["cpcl"].item())
    assert terms["cpcl"].item() > 10  # it is large, not clipped away
    assert net.z.grad.isfinite().all()
    assert net.z.grad.abs().max() > 0


def test_prototypes_are_detached():
    ours = {"mean": P["mean"].clone().requires_grad_(), "mask": P["mask"]}
    client, net, batch = scene(FPL(), Y, {"cluster": ours})
    torch.stack(list(FPL().loss(client, batch).values())).sum().backward()
    assert ours["mean"].grad is None
    assert net.z.grad.any()


@pytest.mark.parametrize("term", ["cpcl", "upcr"])
def test_gradient_in_the_features_by_finite_differences(term):
    method = FPL(tau=0.3)
    client, net, batch = scene(method, Y, {"cluster": P})
    method.loss(client, batch)[term].backward()
    reference = (lambda z: eq8(z, Y, P, 0.3)) if term == "cpcl" else lambda z: eq10(z, Y, P, "mean")
    z = net.z.detach()
    for i, v in product(range(len(Y)), range(D)):
        step = torch.zeros_like(z)
        step[i, v] = 1e-5
        slope = (reference(z + step) - reference(z - step)) / 2e-5
        assert net.z.grad[i, v].item() == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("term", ["ce", "cpcl", "upcr"])
def test_gradient_in_the_weights_by_finite_differences(term):
    torch.manual_seed(0)
    net = Network(nn.Sequential(nn.Linear(5, D), nn.Tanh()), D, K).double()
    method = FPL(tau=0.3)
    client = Client(method, net, SIZES, received={"cluster": P}, mine={}, round=1, rounds=3)
    batch = Batch(numbers(5, len(Y), 5), torch.tensor(Y), torch.arange(len(Y)))

    def value():
        client.begin_step(1)
        return method.loss(client, batch)[term]

    value().backward()
    checked = 0
    for name, p in net.named_parameters():
        if p.grad is None:
            assert term != "ce"
            assert name.startswith("head")  # prototype terms do not see the head
            continue
        for index in np.ndindex(*p.shape):
            kept = p.data[index].item()
            p.data[index] = kept + 1e-6
            up = value().item()
            p.data[index] = kept - 1e-6
            down = value().item()
            p.data[index] = kept
            assert p.grad[index].item() == pytest.approx((up - down) / 2e-6, abs=1e-7)
            checked += 1
    assert checked >= D * 5 + D


def test_upload_is_eq_2():
    client, net, batch = scene(FPL(), [0, 1, 1, 0, 1], FPL().init_server({}, SIZES))
    client.begin_prototypes()
    for rows in ([0, 1], [2, 3, 4]):
        client.begin_step(1)
        part = Batch(*(t[rows] for t in batch))
        FPL().loss(client, part)
        client.collect(part.y)
    message, private = FPL().upload(client)
    assert private == {}
    assert list(message) == ["prototypes"]
    z = net.z.detach()
    expected = torch.stack([(z[0] + z[3]) / 2, (z[1] + z[2] + z[4]) / 3, torch.zeros(D)])
    assert torch.allclose(message["prototypes"]["mean"], expected, rtol=1e-12)
    assert message["prototypes"]["count"].tolist() == [2, 3, 0]
    assert not message["prototypes"]["mean"].requires_grad


# ---- the server ---------------------------------------------------------------------------------


def at(degrees, length):
    """A prototype in the plane of the first two features."""
    a = math.radians(degrees)
    return torch.tensor([length * math.cos(a), length * math.sin(a), 0, 0], dtype=torch.float64)


def updates_of(prototypes):
    """``prototypes``: per client a dict class -> vector; counts are unequal on purpose."""
    spool = Spool()
    updates = []
    for m, own in enumerate(prototypes):
        mean, count = torch.zeros(K, D, dtype=torch.float64), torch.zeros(K)
        for k, row in own.items():
            mean[k], count[k] = row, 1 + 10 * m
        spool.put(f"m{m}", {"prototypes": {"mean": mean, "count": count}})
        updates.append(Update(f"m{m}", int(count.sum()), 1, 0.1, spool))
    return updates


def aggregate(method, prototypes, state=None):
    updates = updates_of(prototypes)
    view = ServerView(state or {}, 0, 3, tuple(u.name for u in updates), SIZES)
    return method.aggregate(view, {"w": torch.ones(2)}, updates)


def held(slot, k):
    return slot["mean"][k][slot["mask"][k] > 0]


# Clusters by eye: (0°, 2°, 4.5°), (10°, 12°) | (60°, 62°), (75°, 77°); lengths differ as well.
PLANE = [at(d, 1 + 0.3 * i) for i, d in enumerate((0, 60, 2, 75, 10, 62, 4.5, 77, 12))]
FINE = [(0, 2, 6), (1, 5), (3, 7), (4, 8)]
COARSE = [(0, 2, 4, 6, 8), (1, 3, 5, 7)]


@pytest.mark.parametrize(("level", "clusters"), [("first", FINE), ("last", COARSE)])
def test_finch_level_decides_the_clusters_and_the_state_holds_their_means(level, clusters):
    new = aggregate(FPL(finch_level=level), [{0: row} for row in PLANE])
    assert set(new) == {"model", "cluster"}
    assert new["model"]["w"].tolist() == [1, 1]
    expected = torch.stack([torch.stack([PLANE[i] for i in c]).mean(0) for c in clusters])
    got = held(new["cluster"], 0)
    assert torch.allclose(got, expected, rtol=1e-12)
    assert new["cluster"]["mask"][1:].sum() == 0  # nobody has the other classes
    assert not new["cluster"]["mean"][1:].any()


def test_unbiased_prototype_counts_each_cluster_once():
    new = aggregate(FPL(), [{0: row} for row in PLANE])
    U = torch.stack([torch.stack([PLANE[i] for i in c]).mean(0) for c in COARSE]).mean(0)
    over_clients = torch.stack(PLANE).mean(0)
    assert not torch.allclose(U, over_clients, atol=0.05)  # 5 and 4 members: they do differ
    z = numbers(3, 2, D)
    client, _, batch = scene(FPL(), [0, 0], {"cluster": new["cluster"]}, z=z)
    got = FPL().loss(client, batch)["upcr"].item()
    expected = sum(float(z[i, v] - U[v]) ** 2 for i in range(2) for v in range(D)) / 2 / D
    assert got == pytest.approx(expected, rel=1e-12)


def test_global_prototypes_are_the_mean_over_owners():
    method = FPL(cpcl_prototypes="global", upcr_prototypes="global")
    new = aggregate(method, [{0: row} for row in PLANE])
    assert set(new) == {"model", "global"}
    assert new["global"]["mean"].shape == (K, 1, D)
    assert torch.allclose(held(new["global"], 0)[0], torch.stack(PLANE).mean(0), rtol=1e-12)
    assert new["global"]["mask"].tolist() == [[1], [0], [0]]


@pytest.mark.parametrize("contrast", ["cluster", "global"])
@pytest.mark.parametrize("target", ["unbiased", "global"])
def test_only_the_needed_slots_travel(contrast, target):
    method = FPL(cpcl_prototypes=contrast, upcr_prototypes=target)
    needed = {contrast, "cluster" if target == "unbiased" else "global"}
    assert set(method.init_server({}, SIZES)) == needed
    state = aggregate(method, [{0: row} for row in PLANE])
    assert set(state) == {"model", *needed}
    view = ServerView(state, 1, 3, ("m0",), SIZES)
    assert set(method.broadcast(view)) == {"model", *needed}


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"cpcl": 0, "upcr_prototypes": "global"}, {"global"}),
        ({"upcr": 0, "cpcl_prototypes": "global"}, {"global"}),
        ({"cpcl": 0}, {"cluster"}),
        ({"upcr": 0}, {"cluster"}),
    ],
)
def test_a_term_that_is_off_makes_nothing_travel(options, needed):
    method = FPL(**options)
    assert set(method.init_server({}, SIZES)) == needed
    assert set(aggregate(method, [{0: row} for row in PLANE])) == {"model", *needed}


def test_one_contributor_and_missing_classes():
    rows = numbers(8, 3, D)
    new = aggregate(FPL(cpcl_prototypes="global"), [{0: rows[0]}, {0: rows[1]}, {1: rows[2]}, {}])
    for slot in ("cluster", "global"):
        assert torch.allclose(held(new[slot], 1), rows[2:], rtol=1e-12)  # exactly one client
        assert torch.allclose(held(new[slot], 0)[0], (rows[0] + rows[1]) / 2, rtol=1e-12)
        assert len(held(new[slot], 0)) == 1
        assert len(held(new[slot], 2)) == 0  # nobody
        assert new[slot]["mean"].isfinite().all()


def test_nobody_has_anything():
    new = aggregate(FPL(), [{}, {}])
    assert new["cluster"]["mask"].sum() == 0
    client, _, batch = scene(FPL(), [0, 1], {"cluster": new["cluster"]})
    terms = FPL().loss(client, batch)
    assert terms["cpcl"].item() == 0
    assert terms["upcr"].item() == 0


def test_prototypes_of_earlier_rounds_are_forgotten():
    old = aggregate(FPL(), [{1: row} for row in PLANE])
    new = aggregate(FPL(), [{0: PLANE[0]}], old)
    assert new["cluster"]["mask"].sum(1).tolist() == [1, 0, 0]


# ---- whole runs ---------------------------------------------------------------------------------


def same_model(a, b):
    return all(torch.equal(a.model[n], b.model[n]) for n in a.model)


def test_weights_0_is_fedavg_bit_for_bit():
    plain = run(tiny_task(), FedAvg(), **FAST)
    off = run(tiny_task(), FPL(cpcl=0, upcr=0), **FAST)
    assert same_model(plain, off)
    assert off.rounds["average"] == plain.rounds["average"]
    assert not same_model(plain, run(tiny_task(), FPL(cpcl=0), **FAST))


def test_upcr_alone_with_global_prototypes_is_fedproto():
    ours = run(tiny_task(), FPL(cpcl=0, upcr_prototypes="global"), **FAST)
    theirs = run(tiny_task(), FedProto(weight=1), **FAST)
    assert same_model(ours, theirs)
    assert ours.rounds["loss.upcr"] == theirs.rounds["loss.proto"]
    assert not same_model(ours, run(tiny_task(), FedProto(weight=2), **FAST))


def test_round_0_trains_like_fedavg_and_later_rounds_do_not():
    ours = run(tiny_task(), FPL(), **FAST).rounds
    plain = run(tiny_task(), FedAvg(), **FAST).rounds
    assert ours[0]["loss"] == {"ce": plain[0]["loss"]["ce"], "cpcl": 0, "upcr": 0}
    assert ours[1]["loss"]["cpcl"] > 0
    assert ours[1]["loss"]["upcr"] > 0
    assert ours[2]["loss"]["ce"] != plain[2]["loss"]["ce"]


def test_tau_0_001_trains():
    result = run(tiny_task(), FPL(tau=0.001), **FAST)
    assert all(t.isfinite().all() for t in result.model.values())
    assert all(math.isfinite(v) for v in result.rounds["loss.cpcl"])


def test_partial_participation_uses_only_the_clients_of_the_round():
    task = tiny_task({"left": [0, 1], "right": [2, 3]}, clients=1)
    own = {"left-0": [1, 1, 0, 0], "right-0": [0, 0, 1, 1]}
    config = make_config(task, FPL(), **{**TINY, "participation": 0.5, "rounds": 6})
    federation = Federation(config, task)
    seen = set()
    for _ in range(6):
        (name,) = federation.server.sample()
        federation.run_round()
        seen.add(name)
        assert federation.server.state["cluster"]["mask"].sum(1).tolist() == own[name]
    assert seen == set(own)


def test_last_epoch_prototypes_are_the_features_of_its_training_steps():
    kept = []

    class Recording(FPL):
        def forward(self, client, x):
            out = super().forward(client, x)
            if client.network.training:
                kept.append(out.feature.detach().clone())
            return out

        def loss(self, client, batch):
            terms = super().loss(client, batch)
            kept.append(batch.y)
            return terms

    means = {}
    for way in ("last_epoch", "post"):
        kept.clear()
        config = make_config(tiny_task(), Recording(proto_pass=way), **TINY)
        federation = Federation(config, tiny_task())
        site = federation.clients["left-0"]
        received = federation.server.broadcast()
        reply = train_client(
            federation.setup, federation.engine.networks["cnn2"], site, received, {}, 0
        )
        means[way] = reply.message["prototypes"]["mean"]
        steps = len(kept) // 2
        assert steps == 2 * 3  # 2 epochs of 22 samples in batches of 8
        z, y = torch.cat(kept[0::2][3:]), torch.cat(kept[1::2][3:])  # the second epoch
        assert torch.equal(y.bincount(minlength=4), site.images.y.bincount(minlength=4))
        expected = torch.stack([z[y == k].mean(0) for k in range(4)])
        assert torch.allclose(means[way], expected, atol=1e-5) == (way == "last_epoch")
    assert not torch.allclose(means["post"], means["last_epoch"], atol=1e-3)
