"""COPA: its loss in plain numpy, whose heads are whose, and the ensemble that is tested."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from protofed import keys, tree
from protofed.config import make_config
from protofed.federation.client_round import train_client
from protofed.federation.model_state import load_model
from protofed.federation.simulation import Federation, initial_network
from protofed.federation.spool import Spool
from protofed.method import Batch, Client, Entry, ServerView, Sizes, Update
from protofed.methods import COPA, FedAvg
from protofed.models import Network
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

K, D = 3, 4
SIZES = Sizes(K, D, 8)
NAMES = ("left-0", "left-1", "right-0")
Y = [0, 1, 2, 2, 0, 0]
SHORT = {**TINY, "rounds": 2}
HEAD = {"head.weight", "head.bias"}
pytestmark = pytest.mark.usefixtures("single_thread")


def numbers(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def heads(mask=(1, 1, 1), names=NAMES):
    return {
        "weight": numbers(1, 3, K, D),
        "bias": numbers(2, 3, K),
        "mask": torch.tensor(mask, dtype=torch.float32),
        "id": torch.tensor([keys.key(n) for n in names]),
    }


def scene(name="left-1", received=None):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, D), nn.Tanh())
    net = COPA().network(Network(encoder, D, K), SIZES).double()
    received = {"heads": received or heads()}
    client = Client(COPA(), net, SIZES, received=received, mine={}, name=name)
    client.begin_step(1)
    x = numbers(5, len(Y), 3, 8, 8)
    return client, net, Batch(x, torch.tensor(Y), torch.arange(len(Y)))


def array(t):
    return t.detach().numpy()


def feature(net, x):
    layer = net.encoder[1]
    return np.tanh(x.reshape(len(x), -1) @ array(layer.weight).T + array(layer.bias))


def softmax(row):
    e = np.exp(row - row.max())
    return e / e.sum()


def ce(z, y, weight, bias):
    rows = [weight @ v + bias for v in z]
    return -sum(math.log(softmax(r)[k]) for r, k in zip(rows, y, strict=True)) / len(y)


def others(net, x, y, table, own):
    z = feature(net, x)
    W, b = array(table["weight"]), array(table["bias"])
    return sum(ce(z, y, W[j], b[j]) for j in range(len(W)) if j != own)


# ---- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "own"), [("left-0", 0), ("left-1", 1), ("right-0", 2)])
def test_the_loss_by_hand_without_the_own_frozen_head(name, own):
    client, net, batch = scene(name)
    terms = COPA().loss(client, batch)
    assert list(terms) == ["ce", "others"]
    x = batch.x.numpy()
    expected = ce(feature(net, x), Y, array(net.head.weight), array(net.head.bias))
    assert terms["ce"].item() == pytest.approx(expected, rel=1e-10)
    assert terms["others"].item() == pytest.approx(others(net, x, Y, heads(), own), rel=1e-10)


def test_a_client_the_server_does_not_know_hears_all_heads():
    client, net, batch = scene("stranger")
    expected = others(net, batch.x.numpy(), Y, heads(), None)
    assert COPA().loss(client, batch)["others"].item() == pytest.approx(expected, rel=1e-10)


def test_heads_not_sent_yet_count_in_the_loss():
    client, net, batch = scene("left-0", heads(mask=(0, 0, 1)))
    expected = others(net, batch.x.numpy(), Y, heads(), 0)
    assert COPA().loss(client, batch)["others"].item() == pytest.approx(expected, rel=1e-10)


def test_the_others_heads_get_no_gradient_and_the_extractor_does():
    table = heads()
    for name in ("weight", "bias"):
        table[name].requires_grad_()
    client, net, batch = scene(received=table)
    COPA().loss(client, batch)["others"].backward()
    assert table["weight"].grad is None and table["bias"].grad is None
    assert net.head.weight.grad is None and net.head.bias.grad is None
    x = batch.x.numpy()
    for p in net.encoder.parameters():
        flat = p.data.view(-1)
        for i in range(0, len(flat), max(1, len(flat) // 9)):
            kept, ends = flat[i].item(), []
            for sign in (1, -1):
                flat[i] = kept + sign * 1e-6
                ends.append(others(net, x, Y, table, 1))
            flat[i] = kept
            slope = (ends[0] - ends[1]) / 2e-6
            assert p.grad.flatten()[i].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_the_own_head_learns_from_its_own_ce_alone():
    client, net, batch = scene()
    torch.stack(list(COPA().loss(client, batch).values())).sum().backward()
    z, W, b = feature(net, batch.x.numpy()), array(net.head.weight), array(net.head.bias)
    expected = np.zeros((K, D))
    for v, k in zip(z, Y, strict=True):
        expected += np.outer(softmax(W @ v + b) - np.eye(K)[k], v) / len(Y)
    assert np.allclose(net.head.weight.grad.numpy(), expected, atol=1e-12)


# ---- the server ---------------------------------------------------------------------------------


def initial():
    model = {"head.weight": numbers(8, K, D), "head.bias": numbers(9, K), "w": numbers(3, 2)}
    return COPA().init_server(model, SIZES), model


def updated(state, sent, round=0):
    spool, updates = Spool(), []
    for name, seed in sent.items():
        head = {"weight": numbers(seed, K, D), "bias": numbers(seed + 1, K)}
        spool.put(name, {"head": head})
        updates.append(Update(name, 5, 1, 0.1, spool))
    server = ServerView(state, round, 3, NAMES, SIZES)
    return COPA().aggregate(server, {"w": torch.ones(2)}, updates)


def test_before_round_0_every_head_is_the_common_one():
    state, model = initial()
    server = ServerView({**state, "model": {"w": model["w"]}}, 0, 3, NAMES, SIZES)
    sent = COPA().broadcast(server)
    assert set(sent) == {"model", "heads"}
    assert set(sent["model"]) == {"w"}
    table = sent["heads"]
    assert table["weight"].shape == (3, K, D) and table["bias"].shape == (3, K)
    for m in range(3):
        assert torch.equal(table["weight"][m], model["head.weight"])
        assert torch.equal(table["bias"][m], model["head.bias"])
    assert table["mask"].tolist() == [0, 0, 0]
    assert table["id"].tolist() == [keys.key(n) for n in NAMES]


def test_heads_are_put_in_their_clients_places_and_stay_there():
    state, model = initial()
    first = updated(state, {"right-0": 20, "left-0": 30})
    assert set(first) == {"model", "heads"}
    assert first["model"]["w"].tolist() == [1, 1]
    weight, bias = first["heads"]["weight"], first["heads"]["bias"]
    assert torch.equal(weight[0], numbers(30, K, D)) and torch.equal(bias[0], numbers(31, K))
    assert torch.equal(weight[1], model["head.weight"]) and torch.equal(bias[1], model["head.bias"])
    assert torch.equal(weight[2], numbers(20, K, D)) and torch.equal(bias[2], numbers(21, K))
    assert first["heads"]["mask"].tolist() == [1, 0, 1]
    kept = weight.clone()
    second = updated(first, {"left-1": 40}, 1)
    assert torch.equal(second["heads"]["weight"][1], numbers(40, K, D))
    assert torch.equal(second["heads"]["weight"][[0, 2]], kept[[0, 2]])
    assert second["heads"]["mask"].tolist() == [1, 1, 1]
    assert torch.equal(weight, kept)  # the older state is as it was


# ---- the ensemble -------------------------------------------------------------------------------


def ensemble(z, W, b, members):
    """Class by class, the mean of the members' softmax."""
    return np.array([np.mean([softmax(W[m] @ v + b[m]) for m in members], 0) for v in z])


@pytest.mark.parametrize(
    ("mask", "members"), [((1, 1, 1), (0, 1, 2)), ((1, 0, 1), (0, 2)), ((0, 0, 0), (0, 1, 2))]
)
def test_a_prediction_is_the_mean_softmax_of_the_heads_sent(mask, members):
    table = heads(mask)
    client, net, batch = scene("server", table)
    got = []
    for poison in (0.0, math.nan):
        with torch.no_grad():
            net.head.weight.fill_(poison)
            got.append(array(COPA().predict(client, batch.x).softmax(1)))
    z = feature(net, batch.x.numpy())
    W, b = array(table["weight"]), array(table["bias"])
    assert np.allclose(got[0], ensemble(z, W, b, members), rtol=1e-12)
    assert np.array_equal(*got)  # the network's own head plays no part
    logits = np.array([softmax(np.mean([W[m] @ v + b[m] for m in members], 0)) for v in z])
    assert not np.allclose(got[0], logits, atol=1e-3)  # of softmax, not of logits


def federation(method=None, task=None, **settings):
    task = task or tiny_task()
    return Federation(make_config(task, method or COPA(), **{**SHORT, **settings}), task)


def test_a_run_is_evaluated_as_the_ensemble():
    fed = federation(epochs=3)
    record = [fed.run_round() for _ in range(2)][-1]
    state, network = fed.server.state, fed.make_network()
    never = {n: torch.zeros_like(t) for n, t in network.state_dict().items() if n in HEAD}
    load_model(network, state["model"] | never)
    network.eval()
    W, b = (state["heads"][n].double().numpy() for n in ("weight", "bias"))
    assert W.shape == (4, 4, 512)
    augment = fed.task.augment
    mean, std = (torch.tensor(v)[:, None, None] for v in (augment.mean, augment.std))
    single = []
    for domain, images in fed.tests.items():
        with torch.no_grad():
            z = network.encoder((images.x / 255 - mean) / std).double().numpy()
        y = images.y.numpy()
        scores = ensemble(z, W, b, range(4))
        assert record["accuracy"][domain] == pytest.approx(100 * (scores.argmax(1) == y).mean())
        single.append([100 * ((z @ W[m].T + b[m]).argmax(1) == y).mean() for m in range(4)])
    assert any(s != a for r, a in zip(single, record["accuracy"].values(), strict=True) for s in r)


def test_evaluation_before_the_first_round_is_that_of_the_common_head():
    fed = federation()
    plain = Federation(make_config(tiny_task(), FedAvg(), **SHORT), tiny_task())
    assert fed.evaluate() == plain.evaluate()


# ---- runs ---------------------------------------------------------------------------------------


def test_the_head_is_kept_sent_and_never_averaged():
    fed = federation()
    for name in fed.make_network().state_dict():
        assert (COPA().shared(Entry(name, "weight")) == "no") == (name in HEAD)
    start = initial_network(fed.config, fed.task).state_dict()["head.weight"]
    for _ in range(2):
        fed.run_round()
        assert not HEAD & set(fed.server.state["model"])
        table = fed.server.broadcast()["heads"]
        for m, name in enumerate(fed.clients):
            own = fed.store.get(name)["model"]
            assert set(own) == HEAD
            assert torch.equal(own["head.weight"], table["weight"][m])
            assert torch.equal(own["head.bias"], table["bias"][m])
            assert not torch.equal(own["head.weight"], start)
    assert len({row.numpy().tobytes() for row in table["weight"]}) == 4
    assert table["id"].tolist() == [keys.key(n) for n in fed.clients]


def test_the_next_round_starts_from_the_own_head():
    fed = federation(epochs=1, lr=1e-9)
    fed.run_round()
    site = next(iter(fed.clients.values()))
    mine = {"model": {n: t + 1 for n, t in fed.store.get(site.name)["model"].items()}}
    reply = train_client(fed.setup, fed.make_network(), site, fed.server.broadcast(), mine, 1)
    for name in ("weight", "bias"):
        assert torch.allclose(reply.message["head"][name], mine["model"][f"head.{name}"], atol=1e-5)


def test_the_extractor_is_averaged_by_sample_counts():
    fed = federation(samples={"left": 22, "right": 10})
    received, network = fed.server.broadcast(), fed.make_network()
    replies = [
        train_client(fed.setup, network, s, received, fed.store.get(n), 0)
        for n, s in fed.clients.items()
    ]
    assert [r.samples for r in replies] == [22, 22, 10, 10]
    fed.run_round()
    entries = [n for n, t in fed.server.state["model"].items() if t.is_floating_point()]
    assert len(entries) > 5
    for name in entries:
        sent = [array(r.message["model"][name]).astype(float) for r in replies]
        expected = np.average(sent, 0, [22, 22, 10, 10])
        assert np.allclose(array(fed.server.state["model"][name]), expected, atol=1e-6)


@dataclass(frozen=True)
class Watching(COPA):
    """Keeps which heads each client skipped."""

    skipped: dict = field(default_factory=dict, hash=False)

    def loss(self, client, batch):
        ids = client.received["heads"]["id"]
        self.skipped.setdefault(client.name, []).append((ids == client.id).tolist())
        return super().loss(client, batch)


def test_in_a_run_every_client_skips_its_own_head():
    fed = federation(Watching())
    fed.run_round()
    for m, name in enumerate(fed.clients):
        seen = fed.method.skipped[name]
        assert len(seen) == 6
        assert all(row == [j == m for j in range(4)] for row in seen)


def test_round_0_is_the_common_head_once_for_every_other_client():
    fed = federation(lr=1e-12, epochs=1)
    record = fed.run_round()
    assert record["loss"]["others"] == pytest.approx(3 * record["loss"]["ce"], rel=1e-4)


def test_who_sits_out_keeps_a_head_at_home_and_at_the_server():
    fed = federation(participation=0.5, rounds=4)
    seen = set()
    for _ in range(4):
        present = fed.server.sample()
        before = fed.server.broadcast()["heads"]["weight"].clone()
        fed.run_round()
        seen |= set(present)
        table = fed.server.state["heads"]
        for m, name in enumerate(fed.clients):
            assert torch.equal(before[m], table["weight"][m]) == (name not in present)
            assert table["mask"][m] == (name in seen)
            own = fed.store.get(name)["model"]["head.weight"]
            assert torch.equal(own, table["weight"][m])
        assert all(t.isfinite().all() for t in fed.server.state["model"].values())


def test_one_client_is_fedavg():
    alone = {**SHORT, "clients": {"left": 1}}
    ours, plain = (run(tiny_task(), m, **alone) for m in (COPA(), FedAvg()))
    assert set(plain.model) - set(ours.model) == HEAD
    assert all(torch.equal(t, plain.model[n]) for n, t in ours.model.items())
    assert [r["accuracy"] for r in ours.rounds] == [r["accuracy"] for r in plain.rounds]
    assert all(r["loss"]["others"] == 0 for r in ours.rounds)


def test_bytes_are_the_extractor_and_the_heads():
    fed = federation()
    state = fed.make_network().state_dict()
    extractor = sum(t.nbytes for n, t in state.items() if n not in HEAD)
    head = 4 * (4 * 512 + 4)
    record = fed.run_round()
    assert record["bytes_up"] == 4 * (extractor + head)
    assert record["bytes_down"] == 4 * (extractor + 4 * (head + 4 + 8))  # + mask and id
    assert all(tree.nbytes(fed.store.get(n)) == head for n in fed.clients)
