"""FedSR: its terms in plain numpy, its samples, and what never leaves a client."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

from protofed import keys, tree
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.client_round import train_client
from protofed.federation.evaluation import evaluate
from protofed.federation.model_state import load_model
from protofed.federation.simulation import Federation
from protofed.method import Batch, Client, Entry, Sizes
from protofed.methods import FedAvg, FedSR
from protofed.methods.fedsr import cmi
from protofed.models import Network, build
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

K, D = 3, 4
SIZES = Sizes(K, D, 8)
Y = [0, 1, 2, 2, 0, 0]
KEY = 7
SHORT = {**TINY, "rounds": 2}
PRIVATE = {"reference.r", "reference.rho", "reference.C"}
pytestmark = pytest.mark.usefixtures("single_thread")


def numbers(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def toy():
    """A linear encoder under the method's modules, all weights moved off where they begin."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, D), nn.Tanh())
    net = FedSR().network(Network(encoder, D, K), SIZES).double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.add_(numbers(100 + i, *p.shape), alpha=0.3)
    return net


def scene(method=None, y=Y, net=None):
    method, net = method or FedSR(c1=1, c2=1), net or toy()
    client = Client(method, net, SIZES, received={}, mine={}, round=1, rounds=3)
    client.begin_step(KEY)
    x = numbers(5, len(y), 3, 8, 8)
    return client, net, Batch(x, torch.tensor(y), torch.arange(len(y)))


# ---- the equations in numpy ---------------------------------------------------------------------


def array(t):
    return t.detach().numpy()


def linear(layer, x):
    return x @ array(layer.weight).T + array(layer.bias)


def softplus(v):
    return np.log1p(np.exp(-abs(v))) + np.maximum(v, 0)


def softmax(row):
    e = np.exp(row - row.max())
    return e / e.sum()


def gaussian(net, x):
    """μ and σ."""
    both = linear(net.gaussian, np.tanh(linear(net.encoder[1], x.reshape(len(x), -1))))
    return both[:, :D], softplus(both[:, D:]) + 1e-6


def epsilon(*shape, key=KEY):
    """The first draw of a step."""
    return keys.normal(torch.tensor(key), 1, shape).double().numpy()


def sample(net, x):
    mu, sigma = gaussian(net, x)
    return mu + sigma * epsilon(*mu.shape)


def ce(net, x, y):
    rows = linear(net.head, sample(net, x))
    return -np.mean([math.log(softmax(r)[k]) for r, k in zip(rows, y, strict=True)])


def l2r(net, x, y):
    return np.mean([math.sqrt(sum(v * v for v in z)) for z in sample(net, x)])


def divergence(m, s, r, rho):
    """KL of N(m, s²) to N(r, ρ²), in one dimension."""
    return math.log(rho / s) + (s * s + (m - r) ** 2) / (2 * rho * rho) - 0.5


def cmi_by_hand(net, x, y):
    own = net.reference
    mu, sigma = gaussian(net, x)
    C, r, rho = float(array(own.C)), array(own.r), softplus(array(own.rho))
    total = 0.0
    for i, k in enumerate(y):
        for d in range(D):
            total += divergence(C * mu[i, d], abs(C) * sigma[i, d], r[k, d], rho[k, d])
    return total / len(y)


TERMS = {"ce": ce, "l2r": l2r, "cmi": cmi_by_hand}


# ---- the terms ----------------------------------------------------------------------------------


def test_the_terms_by_hand():
    client, net, batch = scene()
    terms = client.method.loss(client, batch)
    assert list(terms) == ["ce", "l2r", "cmi"]
    for name, expected in TERMS.items():
        assert terms[name].item() == pytest.approx(expected(net, batch.x.numpy(), Y), rel=1e-9)
    assert float(net.reference.C.detach()) != pytest.approx(1, abs=0.01)  # C does count


@pytest.mark.parametrize(
    ("m", "s", "r", "rho"), [(0.3, 0.5, -0.2, 1.3), (1.0, 2.0, 0.0, 0.7), (0.0, 1.0, 0.0, 1.0)]
)
def test_the_divergence_is_the_integral(m, s, r, rho):
    x = np.linspace(m - 12 * s, m + 12 * s, 200_001)
    p = np.exp(-((x - m) ** 2) / (2 * s * s)) / (s * math.sqrt(2 * math.pi))
    log_p = -((x - m) ** 2) / (2 * s * s) - math.log(s)
    log_q = -((x - r) ** 2) / (2 * rho * rho) - math.log(rho)
    integral = float((p * (log_p - log_q)).sum() * (x[1] - x[0]))
    assert divergence(m, s, r, rho) == pytest.approx(integral, abs=1e-9)
    raw = math.log(math.expm1(rho))
    row = [torch.tensor([[v]], dtype=torch.float64) for v in (m, s)]
    reference = [torch.tensor([[v]], dtype=torch.float64) for v in (r, raw)]
    got = cmi(*row, torch.tensor([0]), *reference, torch.tensor(1.0).double())
    assert got.item() == pytest.approx(integral, abs=1e-9)


@pytest.mark.parametrize("term", list(TERMS))
def test_gradients_by_finite_differences(term):
    client, net, batch = scene()
    value = client.method.loss(client, batch)[term]
    names = [n for n, _ in net.named_parameters()]
    grads = torch.autograd.grad(value, list(net.parameters()), allow_unused=True)
    reached = {n for n, g in zip(names, grads, strict=True) if g is not None}
    expected = {"ce": set(names) - PRIVATE, "l2r": set(names) - PRIVATE, "cmi": set(names)}[term]
    assert reached == expected - ({"head.weight", "head.bias"} if term != "ce" else set())
    x = batch.x.numpy()
    for p, g in zip(net.parameters(), grads, strict=True):
        if g is None:
            continue
        flat = p.data.view(-1)
        for i in range(0, len(flat), max(1, len(flat) // 7)):
            kept, ends = flat[i].item(), []
            for sign in (1, -1):
                flat[i] = kept + sign * 1e-6
                ends.append(TERMS[term](net, x, Y))
            flat[i] = kept
            slope = (ends[0] - ends[1]) / 2e-6
            assert g.flatten()[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_l2r_is_the_norm_not_its_square():
    net = toy()
    with torch.no_grad():
        for p in net.gaussian.parameters():
            p.zero_()
        net.gaussian.bias[:2] = torch.tensor([3.0, 4.0])
        net.gaussian.bias[D:] = -1e4  # σ = 1e-6
    client, _, batch = scene(net=net)
    assert client.method.loss(client, batch)["l2r"].item() == pytest.approx(5, abs=1e-4)


def test_a_vanishing_deviation_and_a_negative_scale_are_finite():
    net = toy()
    with torch.no_grad():
        net.gaussian.weight[D:] = 0
        net.gaussian.bias[D:] = -1e4
        net.reference.C.fill_(-0.7)
    client, _, batch = scene(net=net)
    terms = client.method.loss(client, batch)
    x = batch.x.numpy()
    assert terms["cmi"].item() == pytest.approx(cmi_by_hand(net, x, Y), rel=1e-9)
    torch.stack(list(terms.values())).sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_weights_scale_their_own_term_and_0_removes_it():
    one = scene()
    full = one[0].method.loss(one[0], one[2])
    for c1, c2 in ((0.25, 1), (1, 0.25), (0, 1), (1, 0), (0, 0)):
        client, _, batch = scene(FedSR(c1=c1, c2=c2))
        got = client.method.loss(client, batch)
        weight = {"ce": 1, "l2r": c1, "cmi": c2}
        assert set(got) == {n for n, w in weight.items() if w}
        for name, value in got.items():
            assert value.item() == pytest.approx(weight[name] * full[name].item(), rel=1e-12)


def test_a_class_that_is_not_there_has_no_gradient_in_its_row():
    client, net, batch = scene(y=[0, 0, 2])
    client.method.loss(client, batch)["cmi"].backward()
    for p in (net.reference.r, net.reference.rho):
        assert p.grad[[0, 2]].abs().min() > 0
        assert not p.grad[1].any()


# ---- the sample ---------------------------------------------------------------------------------


def test_a_step_has_one_sample_and_the_next_step_another():
    client, net, batch = scene()
    first = client.forward(batch.x)
    assert np.allclose(array(first.feature), sample(net, batch.x.numpy()), rtol=1e-12)
    assert np.allclose(array(first.logits), linear(net.head, array(first.feature)), rtol=1e-12)
    mu, sigma = gaussian(net, batch.x.numpy())
    assert np.allclose(array(first.mu), mu) and np.allclose(array(first.sigma), sigma)
    client.begin_step(KEY + 1)
    assert not torch.allclose(client.forward(batch.x).feature, first.feature)
    client.begin_step(KEY)
    assert torch.equal(client.forward(batch.x).feature, first.feature)
    rows = []
    for key in range(400):
        client.begin_step(key)
        rows.append(array(client.forward(batch.x).feature))
    assert np.abs((np.mean(rows, 0) - mu) / sigma).max() < 0.25  # five standard errors
    assert np.abs(np.std(rows, 0) / sigma - 1).max() < 0.18


def by_hand(net, x, samples=20, key=KEY):
    mu, sigma = gaussian(net, x)
    noise = epsilon(samples, 1, D, key=key)[:, 0]
    return np.array(
        [
            np.mean([softmax(linear(net.head, m + s * e)) for e in noise], 0)
            for m, s in zip(mu, sigma, strict=True)
        ]
    )


@pytest.mark.parametrize("samples", [1, 20])
def test_a_prediction_is_the_mean_softmax_of_samples(samples):
    method = FedSR(z_samples=samples)
    client, net, batch = scene(method)
    x = batch.x.numpy()
    got = array(method.predict(client, batch.x).softmax(1))
    assert np.allclose(got, by_hand(net, x, samples), rtol=1e-6)
    mean = np.array([softmax(r) for r in linear(net.head, gaussian(net, x)[0])])
    assert not np.allclose(got, mean, atol=1e-3)  # of samples, not of μ
    assert not np.allclose(got, by_hand(net, x, 19), atol=1e-5)


@dataclass(frozen=True)
class Noting(FedSR):
    """Keeps the scores of its predictions."""

    seen: list = field(default_factory=list, hash=False)

    def predict(self, client, x):
        self.seen.append(super().predict(client, x).numpy())
        return torch.from_numpy(self.seen[-1])


def scores(fed, tests, batch, round=0, seed=None):
    fed.method.seen.clear()
    setup = fed.setup if seed is None else replace(fed.setup, seed=seed)
    evaluate(setup, fed.make_network(), fed.server.broadcast(), {}, tests, round, batch)
    return np.concatenate(fed.method.seen)


def test_scores_do_not_depend_on_how_the_images_are_cut():
    fed = Federation(make_config(tiny_task(), Noting(), **SHORT), tiny_task())
    fed.run_round()
    whole = scores(fed, fed.tests, 256)
    assert np.allclose(scores(fed, fed.tests, 7), whole, atol=1e-6)
    alone = [scores(fed, {n: t}, 256) for n, t in fed.tests.items()]  # as workers have it
    assert np.array_equal(np.concatenate(alone), whole)
    assert np.array_equal(scores(fed, fed.tests, 256), whole)
    # another round and another seed draw anew
    assert not np.allclose(scores(fed, fed.tests, 256, round=1), whole, atol=1e-5)
    assert not np.allclose(scores(fed, fed.tests, 256, seed=5), whole, atol=1e-5)


def test_loop_and_workers_agree_to_the_bit():
    loop = run(tiny_task(), FedSR(), **SHORT)
    workers = run(tiny_task(), FedSR(), **{**SHORT, "engine": "workers", "workers": 2})
    assert tree.equal({"model": loop.model}, {"model": workers.model})
    assert [r["accuracy"] for r in loop.rounds] == [r["accuracy"] for r in workers.rounds]


# ---- what stays with the client -----------------------------------------------------------------


def federation(method=None, **settings):
    config = make_config(tiny_task(), method or FedSR(), **{**SHORT, **settings})
    return Federation(config, tiny_task())


def test_only_the_reference_stays():
    for name in federation().make_network().state_dict():
        assert (FedSR().shared(Entry(name, "weight")) == "no") == (name in PRIVATE)


def contained(needle, tree_, path):
    """Whether the bytes of a tensor are anywhere in the file or message of a Tree."""
    tree.save(tree_, path)
    return needle.detach().cpu().contiguous().numpy().tobytes() in path.read_bytes()


def test_r_rho_and_c_are_in_no_message_by_name_and_by_bytes(tmp_path):
    fed = federation()
    network = fed.make_network()
    shared = network.state_dict().keys() - PRIVATE
    for round in range(2):
        received = fed.server.broadcast()
        for name, site in fed.clients.items():
            reply = train_client(fed.setup, network, site, received, fed.store.get(name), round)
            assert set(reply.message) == {"model"}
            assert reply.message["model"].keys() == shared
            assert reply.mine["model"].keys() == PRIVATE
            path = tmp_path / "message"
            assert contained(reply.message["model"]["gaussian.weight"], reply.message, path)
            for t in reply.mine["model"].values():
                assert not contained(t, reply.message, path)
        fed.run_round()
        for content in (fed.server.state, fed.server.broadcast()):
            assert set(content) == {"model"}
            assert content["model"].keys() == shared
            for name in fed.clients:
                for t in fed.store.get(name)["model"].values():
                    assert not contained(t, content, tmp_path / "server")


def test_bytes_are_those_of_the_shared_part():
    fed = federation()
    state = fed.make_network().state_dict()
    shared = sum(t.nbytes for n, t in state.items() if n not in PRIVATE)
    record = fed.run_round()
    assert record["bytes_up"] == record["bytes_down"] == 4 * shared
    for name in fed.clients:
        assert tree.nbytes(fed.store.get(name)) == 4 * (2 * 4 * 512 + 1)


def test_the_reference_is_each_clients_own_and_waits_for_those_who_sit_out():
    fed = federation(participation=0.5, rounds=4)
    ever = set()
    for _ in range(4):
        before = {n: fed.store.get(n)["model"] for n in fed.clients}
        present = fed.server.sample()
        ever |= set(present)
        fed.run_round()
        for name in fed.clients:
            after = fed.store.get(name)["model"]
            for entry in PRIVATE:
                assert torch.equal(before[name][entry], after[entry]) == (name not in present)
    assert len({fed.store.get(n)["model"]["reference.r"].numpy().tobytes() for n in ever}) >= 3


def test_the_next_round_starts_from_the_own_reference():
    fed = federation()
    fed.run_round()
    site = next(iter(fed.clients.values()))
    mine, args = fed.store.get(site.name), (fed.setup, fed.make_network(), site)
    received = fed.server.broadcast()
    one = train_client(*args, received, mine, 1)
    other = train_client(
        *args, received, {"model": {n: t + 0.1 for n, t in mine["model"].items()}}, 1
    )
    assert not torch.equal(*(r.mine["model"]["reference.r"] for r in (one, other)))
    assert not torch.equal(*(r.message["model"]["gaussian.weight"] for r in (one, other)))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e9])
def test_the_server_predicts_without_the_reference(poison):
    fed = federation()
    fed.run_round()
    network, server = fed.make_network(), fed.server.state["model"]
    private = {n: t for n, t in network.state_dict().items() if n in PRIVATE}
    x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    got = []
    for value in (poison, 0.5):
        load_model(network, server | {n: torch.full_like(t, value) for n, t in private.items()})
        network.eval()
        client = Client(fed.method, network, fed.sizes, received=fed.server.broadcast(), mine={})
        client.begin_step(3)
        with torch.no_grad():
            got.append(fed.method.predict(client, x))
    assert torch.equal(*got)
    assert got[0].isfinite().all()
    assert torch.allclose(got[0].exp().sum(1), torch.ones(5))


# ---- the network and the rounds -----------------------------------------------------------------


@pytest.mark.parametrize("model", ["cnn2", "cnn3", "resnet10"])
def test_network_for_all_models(model):
    torch.manual_seed(1)
    backbone = build(model, 4, 32, 8, None)
    d = backbone.features
    net = FedSR().network(backbone, Sizes(4, d, 32))
    assert net.gaussian.weight.shape == (2 * d, d)
    assert net.features == d
    assert net.head is backbone.head
    own = net.reference
    assert own.r.shape == own.rho.shape == (4, d)
    assert not own.r.any() and (own.rho == 1).all() and own.C.item() == 1
    client = Client(FedSR(), net.train(), Sizes(4, d, 32), received={}, mine={})
    client.begin_step(1)
    batch = Batch(torch.randn(3, 3, 32, 32), torch.tensor([0, 1, 3]), torch.arange(3))
    torch.stack(list(FedSR().loss(client, batch).values())).sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_encoder_and_head_begin_as_fedavgs():
    ours, plain = (
        Federation(make_config(tiny_task(), m, **TINY), tiny_task()).make_network().state_dict()
        for m in (FedSR(), FedAvg())
    )
    assert set(ours) - set(plain) == {"gaussian.weight", "gaussian.bias", *PRIVATE}
    assert all(torch.equal(ours[n], t) for n, t in plain.items())


def test_averaging_is_by_sample_counts():
    fed = federation(samples={"left": 22, "right": 10})
    received = fed.server.broadcast()
    replies = [
        train_client(fed.setup, fed.make_network(), site, received, fed.store.get(n), 0)
        for n, site in fed.clients.items()
    ]
    fed.run_round()
    samples = [r.samples for r in replies]
    assert samples == [22, 22, 10, 10]
    for name in ("gaussian.weight", "head.weight"):
        sent = [array(r.message["model"][name]).astype(float) for r in replies]
        expected = np.average(sent, 0, samples)
        assert np.allclose(array(fed.server.state["model"][name]), expected, atol=1e-7)
        assert not np.allclose(np.mean(sent, 0), expected, atol=1e-6)


def test_missing_classes_keep_their_rows_and_one_client_is_enough():
    task = tiny_task({"left": [0, 1, 2], "right": [0, 1]})
    fed = Federation(make_config(task, FedSR(), **SHORT, weight_decay=0.0), task)
    fed.run_round()
    fed.run_round()
    for name in fed.clients:
        own = fed.store.get(name)["model"]
        held = 3 if name.startswith("left") else 2
        assert not own["reference.r"][held:].any()
        assert (own["reference.rho"][held:] == 1).all()
        assert own["reference.r"][:held].any(1).all()
    alone = run(tiny_task(), FedSR(), **{**SHORT, "clients": {"left": 1}})
    assert all(t.isfinite().all() for t in alone.model.values())
    assert {"ce", "l2r", "cmi"} == alone.rounds[0]["loss"].keys()  # round 0 has them all


@pytest.mark.parametrize(
    "wrong", [{"c1": -1}, {"c2": -0.1}, {"z_samples": 0}, {"z_samples": 1.5}, {"c1": math.nan}]
)
def test_impossible_values_are_refused_by_name(wrong):
    with pytest.raises(ProtofedError, match=next(iter(wrong))):
        FedSR(**wrong)
