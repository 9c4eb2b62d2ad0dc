"""FedTGP: the margin and the server's training by hand, the client's term, what travels."""

import math

import pytest
import torch
from tests.methods.helpers import D, Given, K, cross_entropy, numbers
from torch.utils._python_dispatch import TorchDispatchMode

from protofed.federation.spool import Spool
from protofed.method import Batch, Client, ServerView, Sizes, Update
from protofed.methods import FedTGP
from protofed.methods.fedtgp import generated, margin, server_loss
from protofed.prototypes import Prototypes
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

SIZES = Sizes(K, D, 8)
QUICK = {"server_epochs": 2}
pytestmark = pytest.mark.usefixtures("single_thread")


def updates_of(counts, seed=10):
    spool = Spool()
    for i, count in enumerate(counts):
        slot = {"mean": numbers(seed + i, K, D), "count": torch.tensor(count).double()}
        spool.put(f"m{i}", {"prototypes": slot})
    return [Update(f"m{i}", 1, 1, 0.1, spool) for i in range(len(counts))]


def aggregate(method, updates, state=None, round=0, seed=5):
    state = state or method.init_server({}, SIZES)
    view = ServerView(state, round, 9, tuple(u.name for u in updates), SIZES, seed)
    return method.aggregate(view, {}, updates)


def generator(seed=0):
    shapes = {"embedding": (K, D), "weight1": (D, D), "bias1": (D,), "weight2": (D, D)}
    return {n: numbers(seed, *shape) for n, shape in {**shapes, "bias2": (D,)}.items()}


# ---- the margin ----------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.size = max(self.size, found.numel())
        return found


def test_the_margin_of_many_classes_makes_no_table_of_all_pairs_and_features():
    classes, features = 100, 20
    with LargestTensor() as largest:
        margin(Prototypes(numbers(0, classes, 1, features), torch.ones(classes, 1)), 100.0)
    assert largest.size == classes**2


def means(*rows):
    """A client's prototypes at these places of a line."""
    line = torch.tensor([[x, 0.0] for x in rows])
    return Prototypes(line[:, None], torch.ones(len(rows), 1))


def test_the_margin_is_the_farthest_neighbor_of_a_class_and_has_a_limit():
    # nearest neighbors: 1, 1 and 4
    assert margin(means(0.0, 1.0, 5.0), 100.0) == 4
    assert margin(means(0.0, 1.0, 5.0), 3.0) == 3
    assert margin(means(2.0), 7.0) == 7


def test_the_margin_is_between_means_over_the_owners():
    mean = torch.tensor([[[0.0], [2.0]], [[5.0], [99.0]], [[7.0], [88.0]]])
    there = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])  # nobody has the last class
    assert margin(Prototypes(mean, there), 100.0) == 4


# ---- the server ----------------------------------------------------------------------------------


def test_a_prototype_is_an_embedding_through_two_layers():
    G = {n: t.tolist() for n, t in generator().items()}
    for k, found in enumerate(generated(generator()).tolist()):
        hidden = [
            max(0.0, sum(w * e for w, e in zip(row, G["embedding"][k], strict=True)) + b)
            for row, b in zip(G["weight1"], G["bias1"], strict=True)
        ]
        out = [
            sum(w * h for w, h in zip(row, hidden, strict=True)) + b
            for row, b in zip(G["weight2"], G["bias2"], strict=True)
        ]
        assert found == pytest.approx(out, rel=1e-12)


@pytest.mark.parametrize("known", [(1, 1, 1), (1, 0, 1)])
def test_the_servers_loss_is_a_cross_entropy_with_a_margin(known):
    C, y, delta = numbers(3, 4, D), [0, 2, 2, 0], 0.7
    P = generated(generator()).tolist()
    rows = [
        [-math.dist(c, P[k]) - delta * (k == label) if known[k] else -1e9 for k in range(K)]
        for c, label in zip(C.tolist(), y, strict=True)
    ]
    found = server_loss(generator(), C, torch.tensor(y), torch.tensor(known), delta)
    expected = cross_entropy(torch.tensor(rows, dtype=torch.float64), y)
    assert float(found) == pytest.approx(expected, rel=1e-9)


def test_a_prototype_that_meets_a_clients_has_a_finite_gradient():
    G = {n: t.requires_grad_() for n, t in generator().items()}
    C = generated(G).detach()  # every distance to the own prototype is 0
    server_loss(G, C, torch.arange(K), torch.ones(K), 1.0).backward()
    assert all(t.grad.isfinite().all() for t in G.values())


def test_training_lowers_the_servers_loss():
    updates = updates_of([[1, 1, 1], [1, 1, 1]])
    C, y = torch.cat([u["prototypes"]["mean"] for u in updates]), torch.arange(K).repeat(2)
    few, many = (
        aggregate(FedTGP(server_epochs=n, eta=0.1), updates)["generator"] for n in (1, 100)
    )
    losses = [float(server_loss(G, C, y, torch.ones(K), 1.0)) for G in (few, many)]
    assert losses[1] < 0.8 * losses[0]


def test_the_first_generator_is_keyed_and_the_next_round_starts_from_the_last():
    method, updates = FedTGP(**QUICK), updates_of([[1, 1, 0], [1, 1, 0]])
    first, again, other = (aggregate(method, updates, seed=s)["generator"] for s in (5, 5, 6))
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["embedding"], other["embedding"])
    assert first["weight1"].abs().max() < 0.6  # uniform within 1/√d, and a little training
    state = aggregate(method, updates)
    with_it = aggregate(method, updates, state, round=1)["generator"]
    without = aggregate(method, updates, round=1)["generator"]
    assert (with_it["weight1"] - first["weight1"]).abs().max() < 0.2
    assert (without["weight1"] - first["weight1"]).abs().max() > 0.2


def test_a_class_is_known_from_its_first_prototype_on():
    method = FedTGP(**QUICK)
    state = aggregate(method, updates_of([[1, 0, 0]]))
    assert state["prototypes"]["mask"].tolist() == [1, 0, 0]
    state = aggregate(method, updates_of([[0, 1, 0]]), state, round=1)
    assert state["prototypes"]["mask"].tolist() == [1, 1, 0]
    same = aggregate(method, updates_of([[0, 0, 0]]), state, round=2)
    assert torch.equal(same["prototypes"]["mean"], state["prototypes"]["mean"])


# ---- the client ----------------------------------------------------------------------------------


def scene(method, y, mask=(1, 1, 1)):
    net = Given(numbers(1, len(y), D), numbers(2, len(y), K))
    P = {"mean": numbers(7, K, D), "mask": torch.tensor(mask, dtype=torch.float32)}
    client = Client(method, net, SIZES, received={"prototypes": P}, mine={}, round=1, rounds=3)
    client.begin_step(1)
    rows = torch.arange(len(y))
    return client, net, P, Batch(rows, torch.tensor(y), rows)


def test_the_term_is_the_mean_square_to_the_own_prototype():
    y = [0, 1, 1, 2]
    client, net, P, batch = scene(FedTGP(lam=3.0), y, mask=(1, 1, 0))
    terms = FedTGP(lam=3.0).loss(client, batch)
    pull = sum(
        sum((a - b) ** 2 for a, b in zip(net.z[i].tolist(), P["mean"][k].tolist(), strict=True))
        for i, k in enumerate(y)
        if k != 2
    )
    assert terms["ce"].item() == pytest.approx(cross_entropy(net.logits, y), rel=1e-12)
    assert terms["proto"].item() == pytest.approx(3 * pull / (len(y) * D), rel=1e-12)


def test_inference_is_the_nearest_known_prototype_with_the_head_beside_it():
    client, net, P, batch = scene(FedTGP(), [0, 1, 2, 0, 1], mask=(1, 0, 1))
    found = FedTGP().rules(client, batch.x)
    near = [min((0, 2), key=lambda k: math.dist(z, P["mean"][k].tolist())) for z in net.z.tolist()]
    assert found["accuracy"].argmax(1).tolist() == near
    assert torch.equal(found["head"], net.logits)
    assert torch.equal(FedTGP().predict(client, batch.x), found["accuracy"])


def test_only_prototypes_travel_unless_the_model_is_shared():
    alone = run(tiny_task(), FedTGP(**QUICK), **SHORT).rounds[1]
    table = 4 * (4 * 512 + 4)  # K × d means and K counts or masks, float32
    assert (alone["bytes_up"], alone["bytes_down"]) == (4 * table, 4 * table)
    assert alone["beside"].keys() >= {"head"}
    shared = run(tiny_task(), FedTGP(**QUICK, share="model"), **SHORT)
    assert shared.rounds[1]["bytes_up"] > 4 * table
    assert shared.model
