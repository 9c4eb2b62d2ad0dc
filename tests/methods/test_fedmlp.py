"""FedMLP-style: its equations in plain numpy, and the groups of classes."""

import math

import numpy as np
import pytest
import torch
from tests.methods.helpers import numbers
from torch import nn

from protofed import methods
from protofed.errors import ProtofedError
from protofed.federation.spool import Spool
from protofed.method import Batch, Client, ServerView, Sizes, Update
from protofed.methods import FedMLP
from protofed.methods.fedmlp import semantic
from protofed.models import Network
from protofed.prototypes import Prototypes
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

K, D = 5, 4
SIZES = Sizes(K, D, 8)
Y = [0, 1, 2, 2, 0, 4, 3]
TAU = 0.5
SHORT = {**TINY, "rounds": 2}
pytestmark = pytest.mark.usefixtures("single_thread")


def array(t):
    return t.detach().numpy()


# ---- the groups ---------------------------------------------------------------------------------


def cosine(a, b):
    return a @ b / math.sqrt((a @ a) * (b @ b))


def groups_by_hand(C, mask):
    """Sets of classes: each class with its first neighbor, joined until nothing changes."""
    known = [k for k in range(len(C)) if mask[k]]
    sets = [{k} for k in known]
    for k in known:
        rest = [j for j in known if j != k]
        if rest:
            nearest = max(rest, key=lambda j: cosine(C[k], C[j]))
            touched = [s for s in sets if k in s or nearest in s]
            sets = [s for s in sets if s not in touched] + [set().union(*touched)]
    return sorted(sets, key=min)


@pytest.mark.parametrize("classes", [1, 2, 3, 5, 10, 23])
@pytest.mark.parametrize("seed", range(4))
def test_groups_are_finchs_first_partition(classes, seed):
    C = numbers(seed, classes, D)
    mask = (torch.arange(classes) % 4 != seed).float() if classes > 3 else torch.ones(classes)
    S = semantic(Prototypes(C, mask))
    expected = groups_by_hand(C.numpy(), mask.tolist())
    assert int(S["mask"].sum()) == len(expected)
    assert S["mask"].tolist() == [1.0] * len(expected) + [0.0] * (classes - len(expected))
    for s, members in enumerate(expected):
        assert all(S["group"][k] == s for k in members)
        mean = sum(C[k] for k in members) / len(members)
        assert torch.allclose(S["mean"][s], mean, rtol=1e-12)
    for k in range(classes):
        if not mask[k]:
            assert not S["mask"][S["group"][k]]  # a group that is not there


def test_two_pairs_of_directions_are_two_groups():
    C = torch.tensor([[1, 0, 0], [0, 1, 0], [2, 0.1, 0], [0, 3, 0.1]])
    S = semantic(Prototypes(C, torch.ones(4)))
    assert S["group"].tolist() == [0, 1, 0, 1]
    assert torch.allclose(S["mean"][:2], torch.tensor([[1.5, 0.05, 0], [0, 2, 0.05]]))
    assert S["mask"].tolist() == [1, 1, 0, 0]


def test_it_is_the_first_partition_and_not_the_last():
    # four pairs; the pairs themselves lie in two halves
    angles = np.radians([0, 1, 20, 21, 180, 181, 200, 201])
    C = torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], 1))
    assert semantic(Prototypes(C, torch.ones(8)))["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_before_round_0_there_is_nothing():
    state = FedMLP().init_server({}, SIZES)
    assert set(state) == {"prototypes", "semantic"}
    assert not state["prototypes"]["mask"].any() and not state["semantic"]["mask"].any()
    assert state["semantic"]["mean"].shape == (K, D)
    assert state["semantic"]["group"].dtype == torch.int64


# ---- the loss -----------------------------------------------------------------------------------


def received(mask=(1, 1, 1, 1, 1)):
    """What lies under a 0 must not matter."""
    C, mask = numbers(11, K, D), torch.tensor(mask, dtype=torch.float32)
    S = semantic(Prototypes(C, mask))
    S["mean"] = S["mean"].masked_fill(S["mask"][:, None] == 0, 55.0)
    C = C.masked_fill(mask[:, None] == 0, 77.0)
    return {"prototypes": {"mean": C, "mask": mask}, "semantic": S}


def scene(method=None, y=Y, sent=None):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, D), nn.Tanh())
    net = Network(encoder, D, K).double()
    method = method or FedMLP()
    sent = received() if sent is None else sent
    client = Client(method, net, SIZES, received=sent, mine={}, round=1, rounds=3)
    client.begin_step(1)
    x = numbers(5, len(y), 3, 8, 8)
    return client, net, Batch(x, torch.tensor(y), torch.arange(len(y)))


def feature(net, x):
    layer = net.encoder[1]
    return np.tanh(x.reshape(len(x), -1) @ array(layer.weight).T + array(layer.bias))


def ce(net, x, y, C, mask):
    total = 0.0
    for z, k in zip(feature(net, x), y, strict=True):
        row = array(net.head.weight) @ z + array(net.head.bias)
        total += math.log(np.exp(row - row[k]).sum())
    return total / len(y)


def proto(net, x, y, C, mask):
    pairs = zip(feature(net, x), y, strict=True)
    return sum(((z - C[k]) ** 2).mean() for z, k in pairs if mask[k]) / len(y)


def contrast(net, x, y, C, mask, tau=TAU):
    groups = groups_by_hand(C, mask)
    centres = [np.mean([C[k] for k in g], 0) for g in groups]
    total = 0.0
    for z, k in zip(feature(net, x), y, strict=True):
        if mask[k]:
            e = [math.exp(cosine(z, S) / tau) for S in centres]
            own = next(s for s, g in enumerate(groups) if k in g)
            total -= math.log(e[own] / sum(e))
    return total / len(y)


TERMS = {"ce": ce, "proto": proto, "semantic": contrast}


@pytest.mark.parametrize(
    "mask", [(1, 1, 1, 1, 1), (1, 0, 1, 1, 1), (0, 1, 1, 0, 1), (0, 0, 1, 0, 0)]
)
def test_the_terms_by_hand(mask):
    sent = received(mask)
    client, net, batch = scene(sent=sent)
    terms = FedMLP().loss(client, batch)
    assert list(terms) == ["ce", "proto", "semantic"]
    for name, expected in TERMS.items():
        value = expected(net, batch.x.numpy(), Y, numbers(11, K, D).numpy(), mask)
        assert terms[name].item() == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert (terms["semantic"].item() > 0) == (sum(sent["semantic"]["mask"]) > 1)


def test_the_groups_of_these_tests_are_more_than_one():
    assert len(groups_by_hand(numbers(11, K, D).numpy(), [1] * K)) == 2


@pytest.mark.parametrize("term", list(TERMS))
def test_gradients_by_finite_differences(term):
    sent = received((1, 0, 1, 1, 1))
    for slot in sent.values():
        slot["mean"].requires_grad_()
    client, net, batch = scene(sent=sent)
    FedMLP().loss(client, batch)[term].backward()
    assert all(slot["mean"].grad is None for slot in sent.values())
    x, C = batch.x.numpy(), numbers(11, K, D).numpy()
    for p in net.encoder.parameters():
        flat = p.data.view(-1)
        for i in range(0, len(flat), max(1, len(flat) // 9)):
            kept, ends = flat[i].item(), []
            for sign in (1, -1):
                flat[i] = kept + sign * 1e-6
                ends.append(TERMS[term](net, x, Y, C, (1, 0, 1, 1, 1)))
            flat[i] = kept
            slope = (ends[0] - ends[1]) / 2e-6
            assert p.grad.flatten()[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_round_0_is_ce_alone():
    client, net, batch = scene(sent=FedMLP().init_server({}, SIZES))
    terms = FedMLP().loss(client, batch)
    assert terms["proto"].item() == terms["semantic"].item() == 0
    (terms["proto"] + terms["semantic"]).backward()
    assert not any(p.grad.any() for p in net.encoder.parameters())


def test_a_batch_of_unknown_classes_adds_nothing():
    client, net, batch = scene(y=[1, 1, 3], sent=received((1, 0, 1, 0, 1)))
    terms = FedMLP().loss(client, batch)
    assert terms["proto"].item() == terms["semantic"].item() == 0
    torch.stack(list(terms.values())).sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_weights_scale_their_own_term_and_0_removes_it():
    client, _, batch = scene()
    one = FedMLP().loss(client, batch)
    for weight, term in (("lambda1", "proto"), ("lambda2", "semantic")):
        for value in (0.25, 0):
            client.begin_step(1)
            got = FedMLP(**{weight: value}).loss(client, batch)
            assert set(got) == set(one) - (set() if value else {term})
            for name, t in got.items():
                factor = value if name == term else 1
                assert t.item() == pytest.approx(factor * one[name].item(), rel=1e-12)


@pytest.mark.parametrize("tau", [0.1, 2.0])
def test_tau(tau):
    client, net, batch = scene(FedMLP(tau=tau))
    got = client.method.loss(client, batch)["semantic"].item()
    C = numbers(11, K, D).numpy()
    assert got == pytest.approx(contrast(net, batch.x.numpy(), Y, C, [1] * K, tau), rel=1e-9)


# ---- the server and runs ------------------------------------------------------------------------


def test_the_servers_step_by_hand():
    rows, owners = numbers(7, 3, K, D), {0: (0, 1, 2), 1: (2,), 2: (), 3: (0, 1), 4: (1,)}
    spool, updates = Spool(), []
    for m in range(3):
        count = torch.tensor([float((1 + 10 * m) * (m in owners[k])) for k in range(K)])
        spool.put(f"m{m}", {"prototypes": {"mean": rows[m], "count": count}})
        updates.append(Update(f"m{m}", int(count.sum()), 1, 0.1, spool))
    server = ServerView(FedMLP().init_server({}, SIZES), 0, 3, ("m0", "m1", "m2"), SIZES)
    new = FedMLP().aggregate(server, {"w": torch.ones(2)}, updates)
    assert set(new) == {"model", "prototypes", "semantic"}
    C, mask = new["prototypes"]["mean"], new["prototypes"]["mask"]
    for k, who in owners.items():  # every owner counts once
        if who:
            assert torch.allclose(C[k], sum(rows[m, k] for m in who) / len(who), rtol=1e-12)
    assert mask.tolist() == [1, 1, 0, 1, 1]
    expected = groups_by_hand(C.numpy(), mask.tolist())
    S = new["semantic"]
    assert S["mask"].tolist() == [1.0] * len(expected) + [0.0] * (K - len(expected))
    for s, members in enumerate(expected):
        assert all(S["group"][k] == s for k in members)
        mean = sum(C[k] for k in members) / len(members)
        assert torch.allclose(S["mean"][s], mean, rtol=1e-12)
    assert S["mask"][S["group"][2]] == 0


def test_class_means_travel():
    client, net, batch = scene()
    client.begin_prototypes()
    FedMLP().loss(client, batch)
    client.collect(batch.y)
    message, private = FedMLP().upload(client)
    assert private == {} and set(message) == {"prototypes"}
    z = feature(net, batch.x.numpy())
    for k in range(K):
        own = [v for v, c in zip(z, Y, strict=True) if c == k]
        assert np.allclose(message["prototypes"]["mean"][k], np.mean(own, 0), rtol=1e-10)


def test_runs_with_missing_classes_one_client_and_partial_participation():
    task = tiny_task({"left": [0, 1, 2], "right": [0, 1]})
    result = run(task, FedMLP(), **SHORT)
    assert result.rounds[0]["loss"]["proto"] == result.rounds[0]["loss"]["semantic"] == 0
    assert result.rounds[1]["loss"]["proto"] > 0
    for settings in ({"clients": {"left": 1}}, {"participation": 0.25, "rounds": 4}):
        result = run(tiny_task(), FedMLP(proto_pass="post"), **{**SHORT, **settings})
        assert all(t.isfinite().all() for t in result.model.values())
        assert result.rounds[-1]["loss"]["proto"] > 0


def test_it_says_that_it_is_a_reconstruction():
    assert "reconstruction from the abstract" in methods.fedmlp.__doc__.replace("\n", " ")
    assert "reconstruction" in FedMLP.__doc__


@pytest.mark.parametrize(
    "wrong", [{"lambda1": -1}, {"lambda2": -1}, {"tau": 0}, {"proto_pass": "none"}]
)
def test_impossible_values_are_refused_by_name(wrong):
    with pytest.raises(ProtofedError, match=next(iter(wrong))):
        FedMLP(**wrong)
