"""FedPLVM: both losses against plain numbers, both FINCH levels on cases made by hand."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from tests.methods.helpers import (
    D,
    Given,
    K,
    check_gradients,
    cosine,
    numbers,
    rows_of,
    same,
    table,
)
from torch import nn

from protofed.config import make_config
from protofed.data.augment import normalized
from protofed.federation.client_round import train_client
from protofed.federation.model_state import load_model
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.method import Batch, Client, ServerView, Sizes, Update
from protofed.methods import FedAvg, FedPLVM
from protofed.models import Network
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

SIZES = Sizes(K, D, 8)
Y = [0, 1, 2, 2, 0, 0]


def positive(seed, *shape):
    """Like features behind a ReLU: cosines above 0, where cos^α is smooth."""
    return numbers(seed, *shape).abs() + 0.1


def scene(method, y, G, z=None, clean=None):
    z = positive(1, len(y), D) if z is None else z
    net = Given(z, numbers(2, len(y), K).to(z.dtype))
    client = Client(
        method, net, SIZES, received={"prototypes": G}, mine={}, round=1, rounds=3, clean=clean
    )
    client.begin_step(1)
    rows = torch.arange(len(y))
    return client, net, Batch(rows, torch.tensor(y), rows)


def con(z, y, G, alpha, tau):
    """(1/B) Σ_i −log Σ_{c∈G^y} e^{cos^α/τ} / Σ_c e^{cos^α/τ}, cosines cut to [1e-6, 1]."""
    total = 0.0
    for i, own in enumerate(y):
        if not rows_of(G, own):
            continue
        e = {
            k: sum(
                math.exp(min(1.0, max(1e-6, cosine(z[i].tolist(), c))) ** alpha / tau)
                for c in rows_of(G, k)
            )
            for k in range(K)
        }
        total -= math.log(e[own] / sum(e.values()))
    return total / len(y)


def cor(z, y, G):
    """2 (1/B) Σ_i (cos(z_i, Ḡ^y) − 1)², Ḡ the mean of the class's prototypes."""
    total = 0.0
    for i, own in enumerate(y):
        rows = rows_of(G, own)
        if rows:
            mean = [sum(r[v] for r in rows) / len(rows) for v in range(D)]
            total += 2 * (cosine(z[i].tolist(), mean) - 1) ** 2
    return total / len(y)


G = table(positive(11, 3, D), positive(12, 1, D), positive(13, 2, D))
PART = table(positive(11, 3, D), positive(12, 1, D), [])


# ---- the losses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "tau"), [(0.25, 0.07), (0.75, 0.02), (1, 0.5), (2, 0.5)])
def test_the_contrast_is_the_formula(alpha, tau):
    method = FedPLVM(alpha=alpha, tau=tau)
    client, net, batch = scene(method, Y, G)
    terms = method.loss(client, batch)
    assert list(terms) == ["ce", "con", "cor"]
    expected = con(net.z.detach(), Y, G, alpha, tau)
    assert terms["con"].item() == pytest.approx(expected, rel=1e-9)


def test_the_correction_is_twice_the_mean_over_the_batch():
    client, net, batch = scene(FedPLVM(), Y, G)
    z = net.z.detach()
    got = FedPLVM().loss(client, batch)["cor"].item()
    assert got == pytest.approx(cor(z, Y, G), rel=1e-10)
    means = [[sum(r[v] for r in rows_of(G, k)) / len(rows_of(G, k)) for v in range(D)] for k in Y]
    squares = [(cosine(z[i].tolist(), m) - 1) ** 2 for i, m in enumerate(means)]
    assert got == pytest.approx(2 * sum(squares) / len(Y), rel=1e-10)


@pytest.mark.parametrize("lam", [0.5, 100])
def test_lambda_scales_both_terms_and_not_ce(lam):
    client, _, batch = scene(FedPLVM(), Y, G)
    one = FedPLVM().loss(client, batch)
    client.begin_step(1)
    other = FedPLVM(lam=lam).loss(client, batch)
    assert other["ce"].item() == one["ce"].item()
    for term in ("con", "cor"):
        assert other[term].item() == pytest.approx(lam * one[term].item(), rel=1e-12)


def test_defaults():
    assert FedPLVM().options() == {"alpha": 0.25, "tau": 0.07, "lam": 1.0}
    assert FedPLVM().proto_pass == "none"  # its own clean pass, in upload


@pytest.mark.parametrize("term", ["con", "cor"])
@pytest.mark.parametrize("received", ["G", "PART"])
def test_gradients_in_the_features_by_finite_differences(term, received):
    # a reference of plain loops, so that a wrong loss with its own right gradient fails too
    C = {"G": G, "PART": PART}[received]
    method = FedPLVM(alpha=0.5, tau=0.3, lam=3)
    client, net, batch = scene(method, Y, C)
    method.loss(client, batch)[term].backward()
    z = net.z.detach()

    def value(z):
        return 3 * (con(z, Y, C, 0.5, 0.3) if term == "con" else cor(z, Y, C))

    for i, v in product(range(len(Y)), range(D)):
        step = torch.zeros_like(z)
        step[i, v] = 1e-5
        slope = (value(z + step) - value(z - step)) / 2e-5
        assert net.z.grad[i, v].item() == pytest.approx(slope, abs=1e-6)
    assert net.z.grad.any()


@pytest.mark.parametrize("term", ["ce", "con", "cor"])
def test_gradients_in_the_weights_by_finite_differences(term):
    torch.manual_seed(0)
    net = Network(nn.Sequential(nn.Linear(5, D), nn.Sigmoid()), D, K).double()
    method = FedPLVM()
    client = Client(method, net, SIZES, received={"prototypes": G}, mine={}, round=1, rounds=3)
    batch = Batch(numbers(5, len(Y), 5), torch.tensor(Y), torch.arange(len(Y)))

    def value():
        client.begin_step(1)
        return method.loss(client, batch)[term]

    head = {"head.weight", "head.bias"}  # prototype terms do not reach it
    assert check_gradients(net, value) == (set() if term == "ce" else head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_negative_and_zero_cosines_are_clamped_and_finite(dtype):
    z = positive(1, len(Y), D)
    z[0] = -z[0]  # cosine below 0 with every prototype: no fractional power
    z[1] = 0  # a dead feature
    z[2] = torch.tensor(rows_of(G, 2)[0])  # cosine 1, rounded perhaps above it
    ours = {"mean": G["mean"].to(dtype), "mask": G["mask"]}
    client, net, batch = scene(FedPLVM(), Y, ours, z=z.to(dtype))
    terms = FedPLVM().loss(client, batch)
    torch.stack(list(terms.values())).sum().backward()
    assert all(t.isfinite() for t in terms.values())
    assert net.z.grad.isfinite().all()
    z = z.clone()
    z[1] = torch.tensor([1.0, 0, 0, 0])  # the loop knows no zero vector: leave that sample out
    keep = [i for i in range(len(Y)) if i != 1]
    client, net, batch = scene(FedPLVM(), [Y[i] for i in keep], ours, z=z[keep].to(dtype))
    got = FedPLVM().loss(client, batch)["con"].item()
    expected = con(z[keep], [Y[i] for i in keep], G, 0.25, 0.07)
    assert got == pytest.approx(expected, rel=1e-4 if dtype == torch.float32 else 1e-9)


def test_prototypes_are_constants():
    ours = {"mean": G["mean"].clone(), "mask": G["mask"]}
    kept = ours["mean"].clone()
    client, net, batch = scene(FedPLVM(), Y, ours)
    torch.stack(list(FedPLVM().loss(client, batch).values())).sum().backward()
    assert torch.equal(ours["mean"], kept)
    assert net.z.grad.any()


def test_a_missing_class_adds_0_and_stays_in_the_mean():
    client, net, batch = scene(FedPLVM(), Y, PART)
    terms = FedPLVM().loss(client, batch)
    z = net.z.detach()
    assert terms["con"].item() == pytest.approx(con(z, Y, PART, 0.25, 0.07), rel=1e-9)
    assert terms["cor"].item() == pytest.approx(cor(z, Y, PART), rel=1e-10)
    (terms["con"] + terms["cor"]).backward()
    absent = torch.tensor(Y) == 2
    assert not net.z.grad[absent].any()
    assert net.z.grad[~absent].abs().sum(1).min() > 0


def test_round_0_is_fedavgs_loss():
    none = FedPLVM().init_server({}, SIZES)["prototypes"]
    assert not none["mask"].any()
    client, net, batch = scene(FedPLVM(), Y, none)
    terms = FedPLVM().loss(client, batch)
    assert terms["con"].item() == 0
    assert terms["cor"].item() == 0
    torch.stack(list(terms.values())).sum().backward()
    assert torch.equal(net.z.grad, torch.zeros_like(net.z))
    plain, other, same = scene(FedAvg(), Y, none)
    FedAvg().loss(plain, same)["ce"].backward()
    assert torch.equal(net.logits.grad, other.logits.grad)


# ---- FINCH twice --------------------------------------------------------------------------------


def at(degrees, length=1.0):
    """A feature in the plane of the first two dimensions."""
    a = math.radians(degrees)
    return torch.tensor([length * math.cos(a), length * math.sin(a), 0, 0], dtype=torch.float64)


# First neighbors: (0, 2, 4.5), (10, 12) | (60, 62), (75, 77). The means join once more, into two
# clusters; a third time would give one, which is not kept.
ANGLES = (0, 60, 2, 75, 10, 62, 4.5, 77, 12)
PLANE = torch.stack([at(d, 1 + 0.3 * i) for i, d in enumerate(ANGLES)])
COARSE = [(0, 2, 4, 6, 8), (1, 3, 5, 7)]


def uploaded(z, y):
    """The upload of a client with these features, given in two batches."""
    half = len(y) // 2

    def clean(part):
        assert part == "train"
        for rows in (range(half), range(half, len(y))):
            index = torch.tensor(list(rows), dtype=torch.int64)
            yield index, torch.tensor(y)[index]

    client, _, _ = scene(FedPLVM(), y, G, z=z, clean=clean)
    message, private = FedPLVM().upload(client)
    assert private == {}
    assert list(message) == ["prototypes"]
    return message["prototypes"]


def held(slot, k):
    return slot["mean"][k][slot["mask"][k] > 0]


def test_local_clusters_by_hand_with_ragged_counts_and_a_single_sample():
    single = positive(3, 1, D)
    order = np.random.default_rng(0).permutation(10)  # classes come mixed
    z = torch.cat([PLANE, single])[order]
    sent = uploaded(z, torch.tensor([0] * 9 + [2])[order].tolist())
    assert sent["mean"].shape == (K, 2, D)
    assert sent["mask"].tolist() == [[1, 1], [0, 0], [1, 0]]
    expected = [PLANE[list(c)].mean(0) for c in COARSE]
    got = held(sent, 0)
    for row in expected:  # in whatever order the samples made
        assert min(float((row - g).abs().max()) for g in got) < 1e-12
    assert torch.allclose(held(sent, 2), single, rtol=1e-12)  # one sample is its own cluster
    assert not sent["mean"][1].any()
    assert not sent["mean"][2, 1].any()  # padding


def aggregate(clients, state=None):
    """``clients``: per client a table; clients differ in the number of clusters."""
    spool, updates = Spool(), []
    for m, sent in enumerate(clients):
        spool.put(f"m{m}", {"prototypes": sent})
        updates.append(Update(f"m{m}", 1 + 10 * m, 1, 0.1, spool))
    view = ServerView(state or {}, 1, 3, tuple(u.name for u in updates), SIZES)
    return FedPLVM().aggregate(view, {"w": torch.ones(2)}, updates)


def test_global_clusters_by_hand_from_ragged_uploads():
    only = positive(4, 1, D)
    clients = [
        table(PLANE[:4], [], only),  # 4 clusters of class 0, none of 1, one of 2
        table(PLANE[4:5], [], []),
        table(PLANE[5:], [], []),
    ]
    new = aggregate(clients)
    assert set(new) == {"model", "prototypes"}
    assert new["model"]["w"].tolist() == [1, 1]
    made = new["prototypes"]
    expected = torch.stack([PLANE[list(c)].mean(0) for c in COARSE])  # every cluster counts once
    assert torch.allclose(held(made, 0), expected, rtol=1e-12)
    assert torch.allclose(held(made, 2), only, rtol=1e-12)
    assert made["mask"].tolist() == [[1, 1], [0, 0], [1, 0]]
    assert made["mean"].isfinite().all()


def test_nobody_has_anything_and_old_prototypes_are_forgotten():
    new = aggregate([table([], [], []), table([], [], [])], {"prototypes": G, "model": {}})
    assert new["prototypes"]["mask"].sum() == 0
    client, _, batch = scene(FedPLVM(), Y, new["prototypes"])
    terms = FedPLVM().loss(client, batch)
    assert terms["con"].item() == terms["cor"].item() == 0


# ---- whole runs ---------------------------------------------------------------------------------


def federation(task=None, **settings):
    task = task or tiny_task()
    return Federation(make_config(task, FedPLVM(), **{**TINY, **settings}), task)


def test_lambda_0_is_fedavg_bit_for_bit_and_round_0_always_is():
    plain = run(tiny_task(), FedAvg(), **TINY)
    off = run(tiny_task(), FedPLVM(lam=0), **TINY)
    on = run(tiny_task(), FedPLVM(), **TINY)
    assert same(plain.model, off.model)
    assert not same(plain.model, on.model)
    assert on.rounds[0]["loss"] == {"ce": plain.rounds[0]["loss"]["ce"], "con": 0, "cor": 0}
    assert on.rounds[1]["loss"]["con"] > 0
    assert on.rounds[1]["loss"]["cor"] > 0


def test_the_features_are_a_clean_pass_with_the_final_weights():
    one = federation()
    net, site = one.make_network(), one.clients["left-0"]
    reply = train_client(one.setup, net, site, one.server.broadcast(), {}, 0)
    load_model(net, reply.message["model"])
    net.eval()
    with torch.no_grad():
        z = net(normalized(site.images.x, one.task.augment, torch.float32)).feature
    sent = reply.message["prototypes"]
    for k in range(4):
        own = z[site.images.y == k]
        rows = held(sent, k)
        # every feature belongs to one cluster, so the clusters span the class's mean
        assert 1 <= len(rows) <= len(own) // 2
        weights = torch.linalg.lstsq(rows.T.double(), own.mean(0).double()[:, None]).solution
        assert torch.allclose(rows.T.double() @ weights, own.mean(0).double()[:, None], atol=1e-4)
        assert weights.sum().item() == pytest.approx(1, abs=1e-3)


def test_partial_participation_uses_only_the_clients_of_the_round():
    task = tiny_task({"left": [0, 1], "right": [2, 3]}, clients=1)
    own = {"left-0": [0, 1], "right-0": [2, 3]}
    half = federation(task, participation=0.5, rounds=6)
    seen = set()
    for _ in range(6):
        (name,) = half.server.sample()
        half.run_round()
        seen.add(name)
        mask = half.server.state["prototypes"]["mask"]
        assert mask.any(1).nonzero().flatten().tolist() == own[name]
    assert seen == set(own)
    assert half.store.accept() == {}  # no client keeps anything


def test_missing_class_one_client_and_a_class_of_one_sample_are_finite():
    missing = tiny_task({"left": [0, 1, 2], "right": [0, 1]})
    few = tiny_task(samples=5, clients=1)  # classes of one and two samples
    for task, settings in ((missing, {}), (few, {}), (tiny_task(), {"clients": {"left": 1}})):
        result = run(task, FedPLVM(), **{**TINY, **settings})
        assert all(t.isfinite().all() for t in result.model.values())
        assert result.rounds[2]["loss"]["con"] > 0
