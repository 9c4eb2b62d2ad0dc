"""GA: gaps, weights and averages by hand; it never sees a test set."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from protofed import tree
from protofed.config import make_config
from protofed.data.task import Domain, Images
from protofed.errors import ProtofedError
from protofed.federation.batches import ClientBatches
from protofed.federation.client_round import train_client
from protofed.federation.model_state import load_model
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.method import Client, ServerView, Sizes, Update
from protofed.methods import FedAvg, FedAvgGA, FedGA, FedProx
from protofed.methods.ga import adjusted
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

NAMES = ("a", "b", "c")
SIZES = Sizes(4, 8, 8)
BOTH = [FedAvgGA(), FedGA()]
pytestmark = pytest.mark.usefixtures("single_thread")


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def updates(scores):
    """Messages of a round: name → (score of the received model, score of its own)."""
    spool, sent = Spool(), []
    for name in sorted(scores):
        received, own = scores[name]
        spool.put(name, {"scores": {"received": vector(received)[0], "own": vector(own)[0]}})
        sent.append(Update(name, 10, 1, 0.1, spool))
    return sent


def rounds(method, history, T, clients=NAMES):
    """The weights that each round is averaged with, and the server's state at the end."""
    state, used = {"model": {}}, []
    for t, scores in enumerate(history):
        server, sent = ServerView(state, t, T, clients, SIZES), updates(scores)
        used.append(dict(zip(sorted(scores), method.weights(server, sent), strict=True)))
        state = method.aggregate(server, {"w": torch.ones(1)}, sent)
    return used, state


# ---- the rule -----------------------------------------------------------------------------------


def test_the_rule_by_hand():
    # 0.25 + 0.2/4 · (1, −0.5, 0, 0.25) = .3, .225, .25, .2625; sum 1.0375
    got = adjusted(vector(0.25, 0.25, 0.25, 0.25), vector(0.4, -0.2, 0, 0.1), 0.2)
    assert got.tolist() == pytest.approx([v / 1.0375 for v in (0.3, 0.225, 0.25, 0.2625)])
    # the size of the gaps does not count, only their ratio to the largest
    again = adjusted(vector(0.25, 0.25, 0.25, 0.25), vector(4, -2, 0, 1), 0.2)
    assert torch.allclose(again, got, rtol=1e-14)


def test_weights_are_cut_to_0_and_1():
    got = adjusted(vector(0.05, 0.95), vector(-1, 1), 0.2)  # −0.05 → 0, 1.05 → 1
    assert got.tolist() == [0, 1]
    assert adjusted(vector(1), vector(0.3), 0.2).tolist() == [1]
    assert adjusted(vector(1), vector(-0.3), 0.2).tolist() == [1]


def test_gaps_of_0_change_nothing():
    a = vector(0.2, 0.5, 0.3)
    assert torch.equal(adjusted(a, vector(0, 0, 0), 0.2), a)
    assert torch.equal(adjusted(vector(0.5, 0.5), vector(-1, -1), 1.0), vector(0.5, 0.5))


@pytest.mark.parametrize("method", BOTH, ids=lambda m: m.name)
def test_three_rounds_by_hand(method):
    history = [
        {"a": (0.1, 0.8), "b": (0.1, 0.7), "c": (0.1, 0.6)},
        {"a": (0.6, 0.9), "b": (0.8, 0.8), "c": (0.6, 0.7)},
        {"a": (0.9, 0.9), "b": (0.6, 0.9), "c": (0.8, 0.8)},
    ]
    T = 5
    used, state = rounds(method, history, T)
    assert used[0] == pytest.approx(dict.fromkeys(NAMES, 1 / 3))
    # round 1: gaps of round 0 are .8−.6 = .2, .7−.8 = −.1, .6−.6 = 0; s = 0.2 · (1 − 0/5)
    a = np.array([1 / 3, 1 / 3, 1 / 3]) + 0.2 / 3 * np.array([1, -0.5, 0])
    a /= a.sum()
    assert list(used[1].values()) == pytest.approx(a, rel=1e-12)
    # round 2: .9−.9 = 0, .8−.6 = .2, .7−.8 = −.1; s = 0.2 · (1 − 1/5)
    a = a + 0.16 / 3 * np.array([0, 1, -0.5])
    a /= a.sum()
    assert list(used[2].values()) == pytest.approx(a, rel=1e-12)
    assert state["ga"]["weight"].tolist() == pytest.approx(a, rel=1e-12)
    assert state["ga"]["own"].tolist() == [0.9, 0.9, 0.8]
    assert set(state) == {"model", "ga"}
    assert state["model"]["w"].tolist() == [1]


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_who_is_hurt_by_the_aggregation_gets_more_weight(metric):
    method = FedAvgGA(metric=metric)
    good, bad = (0.9, 0.3) if metric == "accuracy" else (0.1, 2.5)
    history = [
        {"a": (0, good), "b": (0, bad), "c": (0, bad)},
        # the aggregate is bad for a, which was good alone, and good for b
        {"a": (bad, good), "b": (good, bad), "c": (bad, bad)},
    ]
    used, _ = rounds(method, history, 10)
    assert used[1]["a"] > used[1]["c"] > used[1]["b"]
    assert used[1]["a"] > 1 / 3 > used[1]["b"]
    other = FedAvgGA(metric="loss" if metric == "accuracy" else "accuracy")
    wrong, _ = rounds(other, history, 10)
    assert wrong[1]["a"] < wrong[1]["b"]


def test_a_clients_own_score_waits_until_it_is_seen_again():
    history = [
        {"a": (0, 0.8), "b": (0, 0.8)},
        {"b": (0.8, 0.5), "c": (0.1, 0.9)},  # b: gap 0; c is new: no gap
        {"a": (0.6, 0.1), "c": (0.8, 0.2)},  # a: .8 − .6 of round 0; c: .9 − .8
    ]
    used, state = rounds(FedAvgGA(), history, 4)
    third = pytest.approx(1 / 3)
    assert used[0] == {"a": third, "b": third}
    assert used[1] == {"b": third, "c": third}
    s = 0.2 * (1 - 1 / 4)
    a = np.array([1 / 3 + s / 3, 1 / 3, 1 / 3 + s / 3 / 2])
    a /= a.sum()
    assert state["ga"]["weight"].tolist() == pytest.approx(a, rel=1e-12)
    assert used[2] == pytest.approx({"a": a[0], "c": a[2]}, rel=1e-12)
    assert state["ga"]["own"].tolist() == [0.1, 0.5, 0.2]
    assert state["ga"]["seen"].tolist() == [1, 1, 1]


def test_a_score_of_0_is_a_score():
    history = [{"a": (0, 0), "b": (0, 0.5)}, {"a": (0.5, 0), "b": (0.5, 0.5)}]
    used, _ = rounds(FedAvgGA(), history, 4, ("a", "b"))
    assert used[1]["a"] < used[1]["b"]  # a went from 0 to 0.5: it gained


def test_a_round_of_clients_without_weight_counts_them_the_same():
    state = {"model": {}, "ga": {"weight": vector(0, 0, 1), "own": vector(0, 0, 0)}}
    state["ga"]["seen"] = vector(0, 0, 0)
    sent = updates({"a": (0.5, 0.5), "b": (0.5, 0.5)})
    assert FedAvgGA().weights(ServerView(state, 3, 9, NAMES, SIZES), sent) == [1, 1]


def test_s0_scales_the_step():
    history = [{"a": (0, 0.8), "b": (0, 0.8)}, {"a": (0.6, 0), "b": (0.8, 0)}]
    used, _ = rounds(FedAvgGA(s0=0.5), history, 3, ("a", "b"))
    assert used[1]["a"] == pytest.approx(0.75 / 1.25)


def test_the_weights_stay_at_the_server():
    server = ServerView(
        {"model": {"w": vector(1)}, "ga": {"weight": vector(1)}}, 1, 2, ("a",), SIZES
    )
    assert FedAvgGA().broadcast(server) == {"model": {"w": vector(1)}}


# ---- the scores ---------------------------------------------------------------------------------


def federation(method=None, task=None, **settings):
    task = task or tiny_task()
    return Federation(make_config(task, method or FedAvgGA(), **{**TINY, **settings}), task)


def by_hand(fed, site, model):
    """Accuracy and loss of a model on the samples that the client holds out."""
    network = fed.make_network()
    load_model(network, model)
    network.eval()
    rows = ClientBatches(fed.setup, site).parts["holdout"]
    augment = fed.task.augment
    mean, std = (torch.tensor(v)[:, None, None] for v in (augment.mean, augment.std))
    with torch.no_grad():
        logits = network((site.images.x[rows] / 255 - mean) / std).logits.double().numpy()
    right, loss = 0, 0.0
    for row, k in zip(logits, site.images.y[rows].tolist(), strict=True):
        right += int(row.argmax() == k)
        loss += math.log(np.exp(row - row[k]).sum())
    return {"accuracy": right / len(rows), "loss": loss / len(rows)}


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_scores_are_of_the_received_and_the_trained_model_on_the_holdout(metric):
    fed = federation(FedAvgGA(metric=metric, holdout=0.4))
    fed.run_round()
    received, some = fed.server.broadcast(), set()
    for site in fed.clients.values():
        reply = train_client(fed.setup, fed.make_network(), site, received, {}, 1)
        scores = reply.message["scores"]
        assert set(scores) == {"received", "own"}
        assert all(t.shape == () and t.dtype == torch.float64 for t in scores.values())
        for name, model in (("received", received["model"]), ("own", reply.message["model"])):
            expected = by_hand(fed, site, model)[metric]
            assert scores[name].item() == pytest.approx(expected, rel=1e-5)
        some |= {t.item() for t in scores.values()}
        assert reply.mine == {}
    assert len(some) > 2


@dataclass(frozen=True)
class Watching(FedAvgGA):
    """Keeps the rows it trains on."""

    rows: dict = field(default_factory=dict, hash=False)

    def loss(self, client, batch):
        self.rows.setdefault(client.name, set()).update(batch.rows.tolist())
        return super().loss(client, batch)


def test_a_tenth_is_held_out_and_never_trained_on():
    fed = federation(Watching())
    record = fed.run_round()
    for name, site in fed.clients.items():
        held = set(ClientBatches(fed.setup, site).parts["holdout"].tolist())
        assert len(held) == 2  # of 22
        assert fed.method.rows[name] == set(range(22)) - held
    assert record["steps"] == 4 * 2 * 3  # 20 samples in batches of 8


def test_scoring_moves_nothing(monkeypatch):
    whole = run(tiny_task(), FedAvgGA(), **{**TINY, "rounds": 1})
    monkeypatch.setattr(Client, "evaluate", lambda *_: {"accuracy": 0.5, "loss": 0.5})
    without = run(tiny_task(), FedAvgGA(), **{**TINY, "rounds": 1})
    assert tree.equal({"model": whole.model}, {"model": without.model})


# ---- runs ---------------------------------------------------------------------------------------


def recorded(method, task=None, **settings):
    """A run's messages of every round, and its models after every round."""
    fed = federation(method, task, **settings)
    sent, models, train = [], [], fed.engine.train

    def recording(*args):
        sent.append({})
        for name, reply in train(*args):
            sent[-1][name] = reply
            yield name, reply

    fed.engine.train = recording
    for _ in range(fed.config.rounds):
        fed.run_round()
        models.append(fed.server.state["model"])
    return fed, sent, models


@pytest.mark.parametrize(
    "method", [FedAvgGA(holdout=0.3), FedGA(metric="loss")], ids=lambda m: m.name
)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_from_its_messages_by_hand(method, participation):
    T = 4
    settings = {"rounds": T, "participation": participation, "samples": {"left": 22, "right": 12}}
    fed, sent, models = recorded(method, **settings)
    names, sign = list(fed.clients), 1 if method.metric == "accuracy" else -1
    a, own, moved = dict.fromkeys(names, 1 / 4), {}, 0
    for t, (replies, model) in enumerate(zip(sent, models, strict=True)):
        assert len(replies) == 4 * participation
        gaps = {}
        for name, reply in replies.items():
            if name in own:
                gaps[name] = sign * (own[name] - reply.message["scores"]["received"].item())
            own[name] = reply.message["scores"]["own"].item()
        if any(gaps.values()):
            s, largest = 0.2 * (1 - (t - 1) / T), max(map(abs, gaps.values()))
            a = {n: min(1, max(0, v + s / 4 * gaps.get(n, 0) / largest)) for n, v in a.items()}
            a = {n: v / sum(a.values()) for n, v in a.items()}
            moved += 1
        total = sum(a[n] for n in replies)
        for entry in ("head.weight", "encoder.0.weight"):
            if entry in model:
                mean = sum(
                    a[n] / total * r.message["model"][entry].double() for n, r in replies.items()
                )
                assert torch.allclose(model[entry].double(), mean, atol=1e-7)
    assert fed.server.state["ga"]["weight"].tolist() == pytest.approx(list(a.values()), rel=1e-9)
    assert moved
    assert max(a.values()) - min(a.values()) > 0.01


def test_round_0_is_a_plain_mean_whatever_the_sample_counts():
    settings = {"samples": {"left": 22, "right": 12}, "rounds": 1}
    _, sent, models = recorded(FedAvgGA(), **settings)
    assert {r.samples for r in sent[0].values()} == {20, 11}
    stack = torch.stack([r.message["model"]["head.weight"].double() for r in sent[0].values()])
    assert torch.allclose(models[0]["head.weight"].double(), stack.mean(0), atol=1e-7)


def garbled(part):
    """The tiny task with the images and labels of a part replaced by garbage."""
    task, domains = tiny_task(), {}
    for name, domain in task.domains.items():
        images = getattr(domain, part)
        noise = torch.randint(0, 256, images.x.shape, generator=torch.Generator().manual_seed(1))
        garbage = Images(noise.to(torch.uint8), (images.y + 1) % 4)
        parts = {"train": domain.train, "test": domain.test, part: garbage}
        domains[name] = Domain(parts["train"], parts["test"])
    return replace(task, domains=domains)


def test_test_data_is_never_seen():
    method = FedGA()
    clean = federation(method, epochs=4)
    poisoned = federation(method, garbled("test"), epochs=4)
    records = [[fed.run_round() for _ in range(3)] for fed in (clean, poisoned)]
    assert tree.equal(clean.server.state, poisoned.server.state)
    weight = clean.server.state["ga"]["weight"]
    assert weight.max() - weight.min() > 0.01  # there were gaps
    # the poison did reach the evaluation, and garbage in the training sets would be seen
    assert [r["accuracy"] for r in records[0]] != [r["accuracy"] for r in records[1]]
    trained = federation(method, garbled("train"), epochs=4)
    for _ in range(3):
        trained.run_round()
    assert not torch.equal(trained.server.state["ga"]["weight"], weight)


def test_the_holdout_alone_can_change_the_weights():
    fed = federation(epochs=4)
    other = federation(epochs=4)
    for share in other.shares:
        if share.domain == "left":
            held = share.rows[
                ClientBatches(other.setup, other.clients[share.name]).parts["holdout"]
            ]
            labels = other.task.domains["left"].train.y
            labels[held] = (labels[held] + 1) % 4
    for each in (fed, other):
        for _ in range(3):
            each.run_round()
    assert not torch.equal(*(f.server.state["ga"]["weight"] for f in (fed, other)))


def test_fedga_is_ga_on_fedprox():
    client = Client(
        FedGA(mu=0.3), federation().make_network(), federation().sizes, received={}, mine={}
    )
    client.start = {n: t + 0.1 for n, t in client.model().items()}
    site = next(iter(federation().clients.values()))
    batch = next(ClientBatches(federation().setup, site).epoch((1,), 8))
    terms = []
    for method in (FedGA(mu=0.3), FedProx(mu=0.3)):
        client.begin_step(1)
        terms.append(method.loss(client, batch))
    assert terms[0].keys() == terms[1].keys() == {"ce", "prox"}
    assert terms[0]["prox"].item() == terms[1]["prox"].item() > 0
    plain, off = (run(tiny_task(), m, **TINY) for m in (FedAvgGA(), FedGA(mu=0)))
    assert tree.equal({"model": plain.model}, {"model": off.model})
    pulled = run(tiny_task(), FedGA(mu=0.5), **TINY)
    assert not tree.equal({"model": plain.model}, {"model": pulled.model})


def test_one_client_and_missing_classes():
    fed = federation(clients={"left": 1})
    for _ in range(3):
        fed.run_round()
    assert fed.server.state["ga"]["weight"].tolist() == [1]
    task = tiny_task({"left": [0, 1, 2], "right": [0, 1]})
    result = run(task, FedGA(), **TINY)
    assert all(t.isfinite().all() for t in result.model.values())


def test_a_client_with_too_few_samples_to_hold_out_is_told():
    with pytest.raises(ProtofedError, match="too few to hold out"):
        run(tiny_task(samples=9), FedAvgGA(), **TINY)
    assert run(tiny_task(samples=9), FedAvg(), **TINY)


@pytest.mark.parametrize(
    "wrong",
    [{"s0": 0}, {"s0": 1.5}, {"metric": "auc"}, {"holdout": 0}, {"holdout": 1.0}, {"mu": -1}],
)
def test_impossible_values_are_refused_by_name(wrong):
    with pytest.raises(ProtofedError, match=next(iter(wrong))):
        FedGA(**wrong)
