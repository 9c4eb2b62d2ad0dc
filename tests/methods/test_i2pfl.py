"""I²PFL: each equation, through the method's own hooks, against plain numpy."""

import math
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import pytest
import scipy.stats
import torch
from tests.methods.helpers import D, Given, K, numbers
from torch import nn

from protofed import tree
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.client_round import train_client
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.keys import generator
from protofed.method import Batch, Client, ServerView, Sizes, Update
from protofed.methods import I2PFL, FedAvg
from protofed.models import Network, Output
from protofed.runs.records import without_times
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

SIZES = Sizes(K, D, 8)
Y = [0, 1, 2, 2, 0, 0]
SHORT = {**TINY, "rounds": 2}
pytestmark = pytest.mark.usefixtures("single_thread")


def slot(rows, mask=(1, 1, 1)):
    """Prototypes with a mask; what lies under a 0 must not matter."""
    mask = torch.tensor(mask, dtype=torch.float32)
    return {"mean": rows.masked_fill(mask[:, None] == 0, 77.0), "mask": mask}


NONE = I2PFL().init_server({}, SIZES)
G = {"prototypes": slot(numbers(11, K, D))}


def view(method, net, received, gamma=0.3, key=1, dtype=torch.float64):
    client = Client(method, net, SIZES, received=received, mine={}, round=1, rounds=3)
    client.begin_step(key)
    client.drawn = {"gamma": torch.tensor(gamma, dtype=dtype)}
    return client


def scene(method, y=Y, received=G, gamma=0.3, key=1, h=None, dtype=torch.float64):
    h = numbers(1, len(y), D) if h is None else h
    net = Given(h.to(dtype), numbers(2, len(y), K).to(dtype))
    rows = torch.arange(len(y))
    return view(method, net, received, gamma, key, dtype), net, Batch(rows, torch.tensor(y), rows)


# ---- the equations in numpy ---------------------------------------------------------------------


def gpcl(h, y, G, mask, tau):
    """(6); a sample whose class has no prototype adds 0 and counts."""
    total = 0.0
    for i, k in enumerate(y):
        if mask[k]:
            e = {
                c: math.exp(h[i] @ G[c] / np.linalg.norm(h[i]) / np.linalg.norm(G[c]) / tau)
                for c in range(len(G))
                if mask[c]
            }
            total -= math.log(e[k] / sum(e.values()))
    return total / len(y)


def mixed_means(h, y, j, gamma):
    """(7) and (8): p̃ of each class, with partner j[i] for sample i."""
    mixed = [gamma * h[i] + (1 - gamma) * h[j[i]] for i in range(len(y))]
    return {k: np.mean([mixed[i] for i in range(len(y)) if y[i] == k], 0) for k in set(y)}


def apa(h, y, p, reduction="mean"):
    """(9): each sample against its class's p̃; as printed, each class's mean."""
    if reduction == "class_means":
        own = {k: np.mean([h[i] for i in range(len(y)) if y[i] == k], 0) for k in set(y)}
        return sum(((own[k] - p[k]) ** 2).sum() for k in own)
    total = sum(((h[i] - p[k]) ** 2).sum() for i, k in enumerate(y)) / len(y)
    return total / (h.shape[1] if reduction == "mean" else 1)


def partner_choices(y):
    """Every way to give each sample a partner of another class."""
    return product(*([j for j in range(len(y)) if y[j] != y[i]] for i in range(len(y))))


def p_of(method, net, term, y):
    """p̃ of every sample's class, from the gradient of (9) with p̃ constant: 2λ(h − p̃)/(B d)."""
    (grad,) = torch.autograd.grad(term, net.z)
    return (net.z - grad * len(y) * net.z.shape[1] / (2 * method.lambda_intra)).detach().numpy()


# ---- (6) and (10) -------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.02, 0.07, 1.0])
def test_gpcl_is_eq_6(tau):
    method = I2PFL(tau=tau)
    client, net, batch = scene(method)
    terms = method.loss(client, batch)
    assert list(terms) == ["ce", "apa", "gpcl"]
    expected = gpcl(net.z.detach().numpy(), Y, G["prototypes"]["mean"].numpy(), [1, 1, 1], tau)
    assert terms["gpcl"].item() == pytest.approx(expected, rel=1e-9)


def test_objective_is_eq_10():
    one = I2PFL(lambda_intra=1, lambda_inter=1)
    client, _, batch = scene(one)
    plain = {n: t.item() for n, t in one.loss(client, batch).items()}
    other = I2PFL(lambda_intra=3, lambda_inter=0.25)
    client, net, batch = scene(other)
    terms = other.loss(client, batch)
    assert terms["apa"].item() == pytest.approx(3 * plain["apa"], rel=1e-12)
    assert terms["gpcl"].item() == pytest.approx(plain["gpcl"] / 4, rel=1e-12)
    logits = net.logits.detach().numpy()
    ce = -np.mean([row[k] - np.log(np.exp(row).sum()) for row, k in zip(logits, Y, strict=True)])
    assert terms["ce"].item() == plain["ce"] == pytest.approx(ce, rel=1e-12)


def test_round_0_has_no_gpcl_but_apa():
    client, net, batch = scene(I2PFL(), received=NONE)
    terms = I2PFL().loss(client, batch)
    assert terms["gpcl"].item() == 0
    (grad,) = torch.autograd.grad(terms["gpcl"], net.z, retain_graph=True)
    assert not grad.any()
    assert terms["apa"].item() > 0


def test_gpcl_of_a_missing_class_adds_zero_and_stays_in_the_mean():
    received = {"prototypes": slot(numbers(11, K, D), (1, 1, 0))}
    method = I2PFL(tau=0.5)
    client, net, batch = scene(method, received=received)
    term = method.loss(client, batch)["gpcl"]
    mean = received["prototypes"]["mean"].numpy()
    expected = gpcl(net.z.detach().numpy(), Y, mean, [1, 1, 0], 0.5)
    assert term.item() == pytest.approx(expected, rel=1e-9)
    (grad,) = torch.autograd.grad(term, net.z)
    absent = torch.tensor(Y) == 2
    assert not grad[absent].any()
    assert grad[~absent].abs().sum(1).min() > 0


def test_small_tau_is_finite_in_float32():
    client, net, batch = scene(I2PFL(tau=0.001), dtype=torch.float32)
    terms = I2PFL(tau=0.001).loss(client, batch)
    torch.stack(list(terms.values())).sum().backward()
    assert math.isfinite(terms["gpcl"].item())
    assert net.z.grad.isfinite().all()


# ---- (7) to (9) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "class_means"])
def test_apa_is_eq_9_with_some_partners_of_other_classes(gamma, reduction):
    y = [0, 1, 2, 0]
    method = I2PFL(apa_reduction=reduction, lambda_intra=1)
    client, net, batch = scene(method, y, gamma=gamma)
    value = method.loss(client, batch)["apa"].item()
    h = net.z.detach().numpy()
    values = {j: apa(h, y, mixed_means(h, y, j, gamma), reduction) for j in partner_choices(y)}
    fitting = [j for j, v in values.items() if v == pytest.approx(value, rel=1e-10)]
    assert len(values) == 36
    # whom a sample is mixed with shows in the value, unless γ = 1 keeps only itself; the two
    # samples of class 0 may exchange their partners
    assert len(fitting) in ((36,) if gamma == 1 else (1, 2))


def test_every_sample_is_drawn_to_the_p_of_its_own_class():
    y = [0, 1, 2, 0]
    client, net, batch = scene(I2PFL(), y)
    p = p_of(I2PFL(), net, I2PFL().loss(client, batch)["apa"], y)
    h = net.z.detach().numpy()
    assert np.allclose(p[0], p[3], rtol=1e-9)  # one p̃ for the class
    tables = [mixed_means(h, y, j, 0.3) for j in partner_choices(y)]
    assert any(all(np.allclose(p[i], t[k], rtol=1e-9) for i, k in enumerate(y)) for t in tables)


def test_without_mixup_p_is_the_plain_class_mean():
    method = I2PFL(mixup="none", lambda_intra=1)
    client, net, batch = scene(method)
    client.drawn = {}  # nothing is drawn for it
    h = net.z.detach().numpy()
    p = {k: np.mean([h[i] for i in range(len(Y)) if Y[i] == k], 0) for k in set(Y)}
    assert method.loss(client, batch)["apa"].item() == pytest.approx(apa(h, Y, p), rel=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "class_means"])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("mixup", ["feature", "input"])
def test_a_batch_of_one_class_has_no_apa(mixup, detach, reduction):
    method = I2PFL(mixup=mixup, detach=detach, apa_reduction=reduction)
    torch.manual_seed(0)
    net = Network(nn.Sequential(nn.Linear(5, D), nn.Tanh()), D, K).double()
    for y in ([1, 1, 1, 1], [2]):
        client = view(method, net, G)
        rows = torch.arange(len(y))
        terms = method.loss(client, Batch(numbers(5, len(y), 5), torch.tensor(y), rows))
        assert terms["apa"].item() == 0
        grads = torch.autograd.grad(terms["apa"], list(net.encoder.parameters()))
        assert not any(g.any() for g in grads)
        assert terms["gpcl"].item() > 0


def test_partners_are_of_another_class_uniform_independent_and_keyed():
    # h = unit vectors and γ = 0: p̃ of a class of one sample shows its partner, p̃ of two both
    y, n = [0, 1, 2, 3, 4, 4], 500
    sizes = Sizes(5, 6, 8)
    method = I2PFL(lambda_intra=1, lambda_inter=0)
    net = Given(torch.eye(6, dtype=torch.float64), numbers(2, 6, 5))
    rows = torch.arange(6)
    client = Client(method, net, sizes, received={}, mine={})
    client.drawn = {"gamma": torch.tensor(0.0, dtype=torch.float64)}

    def shown(key):
        client.begin_step(key)
        return p_of(method, net, method.loss(client, Batch(rows, torch.tensor(y), rows))["apa"], y)

    tables = np.stack([shown(key) for key in range(n)])  # [n, 6, 6]: rows of weights on partners
    assert np.array_equal(tables[3], shown(3))
    assert not np.array_equal(tables[3], tables[4])
    assert np.allclose(tables.sum(2), 1)
    assert np.allclose(tables[:, range(4), range(4)], 0)  # never oneself
    assert np.allclose(tables[:, 4, 4:], 0)  # never the own class
    counts = tables.sum(0)
    for i in range(4):
        others = [j for j in range(6) if j != i]
        assert scipy.stats.chisquare(counts[i, others]).pvalue > 1e-4
    # two draws for the class of two: n of 2n halves, so the variance is halved too
    expected = n / 4
    assert np.abs(counts[4, :4] - expected).max() < 5 * math.sqrt(n * 3 / 16 / 2)
    joint = np.zeros((6, 6))
    for t in tables:
        joint[t[0].argmax(), t[1].argmax()] += 1
    assert scipy.stats.chi2_contingency(joint[2:, 2:]).pvalue > 1e-4


def small_network(norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(5, D), *([nn.BatchNorm1d(D)] if norm else []), nn.Tanh()]
    return Network(nn.Sequential(*layers), D, K).double()


def test_input_mixup_makes_p_from_mixed_images():
    y = [0, 1, 2, 0]
    method = I2PFL(mixup="input", lambda_intra=1)
    net, x = small_network(norm=True), numbers(5, len(y), 5)
    batch = Batch(x, torch.tensor(y), torch.arange(len(y)))
    value = method.loss(view(method, net, G), batch)["apa"].item()
    linear, norm, _ = net.encoder
    W, b = linear.weight.detach().numpy(), linear.bias.detach().numpy()

    def f(x):  # training mode: the batch's own statistics
        a = x @ W.T + b
        return np.tanh((a - a.mean(0)) / np.sqrt(a.var(0) + norm.eps))

    images = x.numpy()
    h, values = f(images), []
    for j in partner_choices(y):
        mixed = f(0.3 * images + 0.7 * images[list(j)])
        p = {k: np.mean([mixed[i] for i in range(len(y)) if y[i] == k], 0) for k in set(y)}
        values.append(apa(h, y, p))
    assert sum(v == pytest.approx(value, rel=1e-9) for v in values) in (1, 2)
    in_features = I2PFL(lambda_intra=1).loss(view(method, net, G), batch)["apa"].item()
    assert value != pytest.approx(in_features, rel=1e-3)


def test_input_mixup_moves_no_batchnorm_buffer_and_makes_no_prototypes():
    y = torch.tensor([0, 1, 2, 0])
    batch = Batch(numbers(5, 4, 5), y, torch.arange(4))
    buffers, means = [], []
    for mixup in ("none", "input"):
        net, method = small_network(norm=True), I2PFL(mixup=mixup)
        client = view(method, net, G)
        client.begin_prototypes()
        method.loss(client, batch)
        client.collect(y)
        buffers.append({n: t.clone() for n, t in net.named_buffers()})
        means.append(method.upload(client)[0])
    fresh = dict(small_network(norm=True).named_buffers())
    assert not torch.equal(buffers[0]["encoder.1.running_mean"], fresh["encoder.1.running_mean"])
    assert buffers[1]["encoder.1.num_batches_tracked"] == 1
    assert tree.equal({"b": buffers[0]}, {"b": buffers[1]})
    assert tree.equal(*means)
    assert net.encoder[1].track_running_stats  # and it is as before


# ---- gradients ----------------------------------------------------------------------------------


def slopes(net, value, step=1e-6):
    """Finite differences of ``value()`` in every weight of the encoder."""
    for p in net.encoder.parameters():
        for index in np.ndindex(*p.shape):
            kept = p.data[index].item()
            p.data[index] = kept + step
            up = value()
            p.data[index] = kept - step
            down = value()
            p.data[index] = kept
            yield p.grad[index].item(), (up - down) / (2 * step)


@pytest.mark.parametrize("reduction", ["mean", "sum", "class_means"])
@pytest.mark.parametrize("mixup", ["feature", "input", "none"])
@pytest.mark.parametrize("detach", [True, False])
def test_gradient_of_apa_in_the_weights(detach, mixup, reduction):
    method = I2PFL(detach=detach, mixup=mixup, apa_reduction=reduction, lambda_intra=1)
    net = small_network()
    batch = Batch(numbers(5, len(Y), 5), torch.tensor(Y), torch.arange(len(Y)))
    method.loss(view(method, net, G), batch)["apa"].backward()

    def features():
        return net(batch.x).feature.detach().numpy()

    # p̃ where it stands now: the gradient in h at fixed p̃ gives it away
    fixed = I2PFL(mixup=mixup, lambda_intra=1)
    given = net(batch.x).feature.detach().requires_grad_()
    seen = view(fixed, net, G)
    later = seen.forward

    def forward(x):  # the main pass gives a leaf, a second pass is the network's
        seen.forward = later
        return Output(given, torch.zeros(len(Y), K, dtype=torch.float64))

    seen.forward = forward
    (grad,) = torch.autograd.grad(fixed.loss(seen, batch)["apa"], given)
    p_B = (given - grad * len(Y) * D / 2).detach().numpy()
    p = {k: p_B[i] for i, k in enumerate(Y)}

    def value():
        if detach:
            return apa(features(), Y, p, reduction)
        with torch.no_grad():
            return method.loss(view(method, net, G), batch)["apa"].item()

    pairs = list(slopes(net, value))
    # the class means of plain features are p̃ itself
    nothing = (mixup, reduction) == ("none", "class_means")
    assert (max(abs(got) for got, _ in pairs) > 1e-3) != nothing
    for got, slope in pairs:
        assert got == pytest.approx(slope, abs=1e-7)
    if not detach:  # and that is another gradient than with p̃ constant
        net.zero_grad()
        held = I2PFL(mixup=mixup, apa_reduction=reduction, lambda_intra=1)
        held.loss(view(held, net, G), batch)["apa"].backward()
        # without MixUp Σ(h − p̃) = 0 in each class, and the part through p̃ is 0 anyhow
        same = np.allclose([g for g, _ in pairs], [g for g, _ in slopes(net, lambda: 0.0)])
        assert same == (mixup == "none")


def test_value_is_the_same_with_and_without_detach():
    values = []
    for detach in (True, False):
        method = I2PFL(detach=detach)
        client, _, batch = scene(method)
        values.append(method.loss(client, batch)["apa"].item())
        assert ("apa" in method.detached_terms) == detach
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_gradient_of_gpcl_in_the_features():
    method = I2PFL(tau=0.3)
    received = {"prototypes": slot(numbers(11, K, D).requires_grad_())}
    received["prototypes"]["mean"].retain_grad()
    client, net, batch = scene(method, received=received)
    method.loss(client, batch)["gpcl"].backward()
    assert received["prototypes"]["mean"].grad is None
    h, mean = net.z.detach().numpy(), received["prototypes"]["mean"].detach().numpy()
    for index in np.ndindex(*h.shape):
        step = np.zeros_like(h)
        step[index] = 1e-5
        up, down = (gpcl(h + s * step, Y, mean, [1, 1, 1], 0.3) for s in (1, -1))
        assert net.z.grad[index].item() == pytest.approx((up - down) / 2e-5, abs=1e-7)


# ---- γ ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.2, 0.4, 3.0])
def test_gamma_is_beta_alpha_alpha(alpha):
    gamma = I2PFL(alpha=alpha).draws(generator("γ", 1), 4000)["gamma"]
    assert gamma.shape == (4000,)  # one a step
    assert gamma.mean() == pytest.approx(0.5, abs=0.03)
    assert gamma.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.06)
    assert scipy.stats.kstest(gamma, scipy.stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_gamma_max_stays_nearer_to_the_own_class():
    plain = I2PFL().draws(generator("γ", 2), 500)["gamma"]
    largest = I2PFL(gamma_max=True).draws(generator("γ", 2), 500)["gamma"]
    assert np.array_equal(largest, np.where(plain < 0.5, 1 - plain, plain))
    assert largest.min() >= 0.5
    assert plain.min() < 0.1


@dataclass(frozen=True)
class Watched(I2PFL):
    """Notes the γ of every step of every client."""

    seen: dict = field(default_factory=dict)

    def loss(self, client, batch):
        self.seen.setdefault((client.name, int(client.round)), []).append(client.drawn["gamma"])
        return super().loss(client, batch)

    def __post_init__(self):
        """The note is no hyper-parameter: nothing to check."""


def test_gamma_of_a_run_is_one_number_a_batch_and_keyed():
    seen = []
    for _ in range(2):
        method = Watched()
        federation = Federation(make_config(tiny_task(), I2PFL(), **SHORT), tiny_task())
        setup = replace(federation.setup, method=method)
        for round in (0, 1):
            for site in federation.clients.values():
                received = federation.server.broadcast()
                train_client(setup, federation.engine.networks["cnn2"], site, received, {}, round)
        seen.append({k: torch.stack(v) for k, v in method.seen.items()})
    first, again = seen
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert {len(v) for v in first.values()} == {6}  # 2 epochs of ⌈22/8⌉ steps
    assert all(v.shape == (6,) for v in first.values())  # a scalar each
    together = torch.cat(list(first.values()))
    assert len(together) == 4 * 2 * 6
    assert len(set(together.tolist())) == len(together)  # no step, epoch, client, round repeats


# ---- the server: (2) to (5) ---------------------------------------------------------------------


def updates_of(prototypes):
    """``prototypes``: per client a dict class -> vector; counts are unequal on purpose."""
    spool, updates = Spool(), []
    for m, own in enumerate(prototypes):
        # what a client says of a class it does not have must not matter
        mean, count = torch.full((K, D), 55.0, dtype=torch.float64), torch.zeros(K)
        for k, row in own.items():
            mean[k], count[k] = torch.as_tensor(row), 1 + 10 * m
        spool.put(f"m{m}", {"prototypes": {"mean": mean, "count": count}})
        updates.append(Update(f"m{m}", int(count.sum()), 1, 0.1, spool))
    return updates


def aggregate(method, prototypes, state=NONE):
    updates = updates_of(prototypes)
    server = ServerView(state, 0, 3, tuple(u.name for u in updates), SIZES)
    return method.aggregate(server, {"w": torch.ones(2)}, updates)


def reweighted(rows):
    """(3), d and (4)."""
    mu = sum(rows) / len(rows)
    d = [((p - mu) ** 2).sum() for p in rows]
    return sum(w / sum(d) * p for w, p in zip(d, rows, strict=True))


def test_upload_is_eq_2():
    client, net, batch = scene(I2PFL(), [0, 1, 1, 0, 1])
    client.begin_prototypes()
    for rows in ([0, 1], [2, 3, 4]):
        client.begin_step(1)
        part = Batch(*(t[rows] for t in batch))
        I2PFL().loss(client, part)
        client.collect(part.y)
    message, private = I2PFL().upload(client)
    assert private == {}
    assert list(message) == ["prototypes"]
    assert set(message["prototypes"]) == {"mean", "count"}  # and no p̃
    h = net.z.detach()
    expected = torch.stack([(h[0] + h[3]) / 2, (h[1] + h[2] + h[4]) / 3, torch.zeros(D)])
    assert torch.allclose(message["prototypes"]["mean"], expected, rtol=1e-12)
    assert message["prototypes"]["count"].tolist() == [2, 3, 0]


def test_reweighting_by_hand():
    # means 0, 0, 6 on a line: μ = 2, d = 4, 4, 16, weights 1/6, 1/6, 4/6, g = 4
    line = [{0: [0.0] * D}, {0: [0.0] * D}, {0: [6.0, 0, 0, 0]}]
    new = aggregate(I2PFL(), line)
    assert new["model"]["w"].tolist() == [1, 1]
    assert set(new) == {"model", "prototypes"}
    assert new["prototypes"]["mean"][0].tolist() == pytest.approx([4, 0, 0, 0], rel=1e-12)
    assert new["prototypes"]["mask"].tolist() == [1, 0, 0]
    assert new["prototypes"]["mask"].dtype == torch.float32


def test_reweighting_is_eq_4_with_unequal_distances_and_missing_owners():
    rows = numbers(7, 5, K, D).numpy()
    owned = {0: (0, 1, 2, 3, 4), 1: (1, 3, 4), 2: ()}
    clients = [{k: rows[m, k] for k, own in owned.items() if m in own} for m in range(5)]
    new = aggregate(I2PFL(), clients)["prototypes"]
    for k in (0, 1):
        expected = reweighted([rows[m, k] for m in owned[k]])
        assert np.allclose(new["mean"][k], expected, rtol=1e-12)
        assert not np.allclose(expected, np.mean([rows[m, k] for m in owned[k]], 0), atol=0.01)
    assert new["mask"].tolist() == [1, 1, 0]
    assert new["mean"].isfinite().all()


def test_one_owner_two_owners_and_equal_prototypes_give_the_plain_mean():
    a, b = numbers(8, 2, D)
    new = aggregate(I2PFL(), [{0: a, 1: a, 2: b}, {1: b, 2: b}, {2: b}])["prototypes"]
    assert torch.equal(new["mean"][0], a)
    assert torch.allclose(new["mean"][1], (a + b) / 2, rtol=1e-12)
    assert torch.allclose(new["mean"][2], b, rtol=1e-12)
    assert new["mask"].tolist() == [1, 1, 1]
    assert new["mean"].isfinite().all()


SQUARE = [[10.0, 0, 0, 0], [9, 1, 0, 0], [11, 0, 0, 0], [0, 10, 0, 0], [1, 20, 0, 0]]


@pytest.mark.parametrize("inter", ["reweight", "average", "cluster"])
def test_inter_decides_how_the_clients_are_joined(inter):
    rows = np.array(SQUARE)
    clusters = [rows[:3].mean(0), rows[3:].mean(0)]  # FINCH on directions: 3 and 2 of them
    expected = {
        "reweight": reweighted(list(rows)),
        "average": rows.mean(0),
        "cluster": np.mean(clusters, 0),
    }
    got = aggregate(I2PFL(inter=inter), [{1: r} for r in SQUARE])["prototypes"]
    assert got["mask"].tolist() == [0, 1, 0]
    for name, value in expected.items():
        assert np.allclose(got["mean"][1], value, rtol=1e-9) == (name == inter)
    assert not got["mean"][[0, 2]].any()


@pytest.mark.parametrize(
    ("ema", "new_share"), [("as_written", 0.9), ("as_text", 0.1), ("off", 1.0)]
)
@pytest.mark.parametrize("inter", ["reweight", "average", "cluster"])
def test_ema_over_three_rounds(ema, new_share, inter):
    method = I2PFL(ema=ema, beta=0.9, inter=inter)
    p = numbers(9, 3, K, D).numpy()
    # one owner each, so that all joinings agree; class 1 is absent in round 1, class 2 comes late
    rounds = [{0: p[0, 0], 1: p[0, 1]}, {0: p[1, 0], 2: p[1, 2]}, {0: p[2, 0], 1: p[2, 1]}]
    state, hand = NONE, {}
    for own in rounds:
        state = aggregate(method, [own], state)
        for k, g in own.items():
            hand[k] = new_share * g + (1 - new_share) * hand[k] if k in hand else g
        G = state["prototypes"]
        assert G["mask"].tolist() == [float(k in hand) for k in range(K)]
        for k, value in hand.items():
            assert np.allclose(G["mean"][k], value, rtol=1e-6)
    after_two = new_share * p[1, 0] + (1 - new_share) * p[0, 0]
    assert np.allclose(hand[0], new_share * p[2, 0] + (1 - new_share) * after_two)


def test_beta_is_099_and_on_the_new_prototypes_unless_told():
    old = aggregate(I2PFL(), [{0: [0.0] * D}])
    assert aggregate(I2PFL(), [{0: [1.0] * D}], old)["prototypes"]["mean"][0, 0] == pytest.approx(
        0.99
    )
    as_text = aggregate(I2PFL(ema="as_text"), [{0: [1.0] * D}], old)
    assert as_text["prototypes"]["mean"][0, 0] == pytest.approx(0.01)


# ---- hyper-parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "tau", "alpha", "intra"),
    [
        ("digits", 0.07, 0.4, 10),
        ("office_caltech", 0.02, 0.4, 10),
        ("pacs", 0.04, 0.2, 2),
        ("glyphs", 0.07, 0.4, 10),
        ("", 0.07, 0.4, 10),
    ],
)
def test_defaults_per_task_are_the_papers(task, tau, alpha, intra):
    method = I2PFL.create({}, task)
    assert (method.tau, method.alpha, method.lambda_intra) == (tau, alpha, intra)
    assert (method.lambda_inter, method.beta) == (1, 0.99)
    assert (method.ema, method.inter, method.mixup) == ("as_written", "reweight", "feature")
    assert (method.gamma_max, method.detach) == (False, True)
    assert (method.apa_reduction, method.proto_pass) == ("mean", "last_epoch")
    assert I2PFL.create({"tau": 0.5}, task).tau == 0.5  # what is typed wins


@pytest.mark.parametrize(
    "wrong",
    [
        {"tau": 0},
        {"alpha": 0},
        {"lambda_intra": -1},
        {"lambda_inter": -1},
        {"beta": 1.1},
        {"beta": -0.1},
        {"ema": "on"},
        {"inter": "median"},
        {"mixup": "label"},
        {"apa_reduction": "max"},
        {"proto_pass": "none"},
        {"detach": 1},
    ],
)
def test_impossible_values_are_refused_by_name(wrong):
    with pytest.raises(ProtofedError, match=next(iter(wrong))):
        I2PFL(**wrong)


# ---- whole runs ---------------------------------------------------------------------------------


def test_weights_0_are_fedavg_bit_for_bit():
    ours = run(tiny_task(), I2PFL(lambda_intra=0, lambda_inter=0), **SHORT)
    fedavg = run(tiny_task(), FedAvg(), **SHORT)
    assert tree.equal({"model": ours.model}, {"model": fedavg.model})
    assert [set(r["loss"]) for r in ours.rounds] == [{"ce"}] * 2
    assert without_times(ours.rounds) == without_times(fedavg.rounds), "the bytes too"
    for one in ({"lambda_intra": 0.0}, {"lambda_inter": 0.0}):
        other = run(tiny_task(), I2PFL(**one), **SHORT)
        assert not tree.equal({"model": other.model}, {"model": fedavg.model})
        assert len(other.rounds[0]["loss"]) == 2
        # prototypes are for GPCL alone
        sent = [r["bytes_up"] + r["bytes_down"] for r in other.rounds]
        plain = [r["bytes_up"] + r["bytes_down"] for r in fedavg.rounds]
        assert (sent == plain) == ("lambda_inter" in one)


@pytest.mark.parametrize("switch", [{}, {"mixup": "input"}, {"mixup": "none"}, {"detach": False}])
def test_runs_with_a_missing_class_and_gpcl_from_round_1(switch):
    result = run(tiny_task({"left": [0, 1, 2], "right": [0, 1]}), I2PFL(**switch), **SHORT)
    assert result.rounds[0]["loss"]["gpcl"] == 0
    assert result.rounds[0]["loss"]["apa"] > 0
    assert result.rounds[1]["loss"]["gpcl"] > 0
    assert all(t.isfinite().all() for t in result.model.values())


def federation(method, **settings):
    return Federation(make_config(tiny_task(), method, **{**SHORT, **settings}), tiny_task())


@pytest.mark.parametrize("proto_pass", ["last_epoch", "post"])
def test_one_client_has_its_own_means_as_g(proto_pass):
    one = federation(I2PFL(proto_pass=proto_pass), clients={"left": 1})
    (site,) = one.clients.values()
    network = one.engine.networks["cnn2"]
    reply = train_client(
        one.setup, network, site, one.server.broadcast(), one.store.get(site.name), 0
    )
    one.run_round()
    sent, G = reply.message["prototypes"], one.server.state["prototypes"]
    assert torch.equal(G["mean"], sent["mean"])
    assert torch.equal(G["mask"], (sent["count"] > 0).float())
    assert int(sent["count"].sum()) == 22


def test_what_travels_is_the_model_and_one_table_each_way():
    plain, ours = (federation(m).run_round() for m in (FedAvg(), I2PFL()))
    table = 4 * (4 * 512 + 4)  # K × d means and K counts or masks, float32
    assert ours["bytes_up"] - plain["bytes_up"] == ours["clients"] * table
    assert ours["bytes_down"] - plain["bytes_down"] == ours["clients"] * table


def test_a_class_absent_from_a_round_keeps_its_prototype():
    task = tiny_task({"left": [0, 1], "right": [2, 3]}, clients=1)
    config = make_config(task, I2PFL(), **{**TINY, "participation": 0.5, "rounds": 6, "epochs": 1})
    fed = Federation(config, task)
    known = torch.zeros(4)
    alone = 0
    for _ in range(6):
        before = fed.server.state["prototypes"]
        (name,) = fed.server.sample()
        fed.run_round()
        after = fed.server.state["prototypes"]
        here = [0, 1] if fed.clients[name].domain == "left" else [2, 3]
        away = [k for k in range(4) if k not in here]
        known[here] = 1
        assert torch.equal(after["mask"], known)
        assert torch.equal(after["mean"][away], before["mean"][away])
        assert not torch.equal(after["mean"][here], before["mean"][here])
        alone += bool(before["mask"][away].all())
    assert alone >= 2


@pytest.mark.parametrize("detach", [True, False])
def test_features_of_half_precision_are_mixed_in_full(detach):
    # bfloat16 keeps three digits: mixed in it, p̃ would be off by as much, times λ = 10
    method = I2PFL(detach=detach)
    h = numbers(1, len(Y), D).bfloat16()
    client, _, batch = scene(method, h=h, dtype=torch.bfloat16)
    client.drawn = {"gamma": torch.tensor(0.3)}
    wide, _, _ = scene(method, h=h.double())
    wide.drawn = {"gamma": torch.tensor(0.3).double()}
    got, expected = (method.loss(c, batch)["apa"].item() for c in (client, wide))
    assert got == pytest.approx(expected, rel=1e-5)
