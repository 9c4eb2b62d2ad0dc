"""FedDAP: each equation against loops over plain numbers, and who belongs to which domain."""

import math

import pytest
import torch
from tests.methods.helpers import D, Given, K, cosine, cross_entropy, numbers

from protofed.config import make_config
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.method import Batch, Client, ServerView, Sizes, Update
from protofed.methods import FedDAP
from protofed.testing.checks import SHORT, tiny_task

SIZES = Sizes(K, D, 8)
NAMES = ("sea", "sky", "land")
pytestmark = pytest.mark.usefixtures("single_thread")


def table(mask):
    """Prototypes of three domains; what lies where there is none must not matter."""
    view = ServerView({}, 0, 3, NAMES, SIZES, 0, NAMES)
    mask = torch.tensor(mask, dtype=torch.float32)
    mean = numbers(7, K, 3, D).masked_fill(mask[..., None] == 0, 77.0)
    return {"mean": mean, "mask": mask, "domain": view.domain_ids().expand(K, -1)}


def scene(method, y, received, domain="sky"):
    net = Given(numbers(1, len(y), D), numbers(2, len(y), K))
    client = Client(
        method, net, SIZES, received={"prototypes": received}, mine={}, round=1, domain=domain
    )
    client.begin_step(1)
    rows = torch.arange(len(y))
    return client, net, Batch(rows, torch.tensor(y), rows)


ALL = [[1, 1, 1]] * K
SOME = [[1, 0, 0], [0, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("mask", [ALL, SOME])
@pytest.mark.parametrize("domain", NAMES)
def test_the_own_domain_attracts_and_the_others_contrast(mask, domain):
    y, P, here = [0, 1, 2, 2, 1], table(mask), NAMES.index(domain)
    method = FedDAP(lambda1=3.0, lambda2=2.0, tau=0.4)
    client, net, batch = scene(method, y, P, domain)
    terms = method.loss(client, batch)
    own = others = 0.0
    for z, k in zip(net.z.tolist(), y, strict=True):
        if mask[k][here]:
            own += 1 - cosine(z, P["mean"][k, here].tolist())
        e = {
            (j, m): math.exp(cosine(z, P["mean"][j, m].tolist()) / 0.4)
            for j in range(K)
            for m in range(3)
            if mask[j][m] and m != here
        }
        mine = sum(v for (j, _), v in e.items() if j == k)
        others -= math.log(mine / sum(e.values())) if mine else 0
    assert terms["ce"].item() == pytest.approx(cross_entropy(net.logits, y), rel=1e-12)
    assert terms["own"].item() == pytest.approx(3 * own / len(y), rel=1e-6)
    assert terms["others"].item() == pytest.approx(2 * others / len(y), rel=1e-6)


def test_round_0_is_fedavg():
    method = FedDAP()
    client, _, batch = scene(method, [0, 1], method.init_server({}, SIZES)["prototypes"])
    terms = method.loss(client, batch)
    assert terms["own"] == 0 == terms["others"]


def updates_of(counts):
    spool = Spool()
    for i, count in enumerate(counts):
        slot = {"mean": numbers(10 + i, K, D), "count": torch.tensor(count).double()}
        spool.put(f"m{i}", {"prototypes": slot})
    return [Update(f"m{i}", 1, 1, 0.1, spool) for i in range(len(counts))]


def aggregate(method, updates, domains):
    names = tuple(f"m{i}" for i in range(len(domains)))
    view = ServerView({}, 0, 3, names, SIZES, 0, tuple(domains))
    return method.aggregate(view, {}, updates)["prototypes"], view


@pytest.mark.parametrize("temperature", [0.3, 0.001])
def test_clients_of_a_domain_are_weighed_by_how_central_they_are(temperature):
    counts = [[9, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]]
    updates = updates_of(counts)
    P, _ = aggregate(FedDAP(fusion=temperature), updates, ["sea", "sea", "sea", "sky"])
    assert P["mask"].tolist() == [[1, 1], [1, 1], [1, 0]]
    for k in range(K):
        p = [u["prototypes"]["mean"][k].tolist() for u, c in zip(updates, counts, strict=True)
             if c[k] and u.name != "m3"]  # fmt: skip
        s = [sum(cosine(a, b) for b in p) / temperature for a in p]
        e = [math.exp(v - max(s)) for v in s]
        expected = [sum(w * a[i] for w, a in zip(e, p, strict=True)) / sum(e) for i in range(D)]
        assert P["mean"][k, 0].tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(P["mean"][0, 1], updates[3]["prototypes"]["mean"][0])


def test_a_domain_keeps_its_place_where_its_clients_do_not_take_part():
    updates = updates_of([[1, 1, 1], [1, 1, 1], [1, 1, 1]])
    P, view = aggregate(FedDAP(), updates[1:], ["sea", "sky", "land"])
    assert P["mask"].tolist() == [[0, 1, 1]] * K
    assert torch.equal(P["domain"], view.domain_ids().expand(K, -1))


def test_a_client_finds_its_own_domain_in_what_the_server_sends():
    task = tiny_task()
    federation = Federation(make_config(task, FedDAP(), **SHORT), task)
    assert federation.server.domains == ("left", "left", "right", "right")
    federation.run_round()
    P = federation.server.broadcast()["prototypes"]
    assert P["mean"].shape[:2] == (4, 2)
    for column, domain in enumerate(("left", "right")):
        client = Client(
            FedDAP(), federation.make_network(), federation.sizes, received={}, mine={},
            domain=domain,
        )  # fmt: skip
        assert (P["domain"][0] == client.domain).nonzero().flatten().tolist() == [column]
