"""FedCCRL: both alignments by hand, whose colors are drawn, what travels."""

import math

import numpy as np
import pytest
import torch
from tests.methods.helpers import D, K, cosine, numbers

from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.method import Client, ServerView, Sizes, Update
from protofed.methods import FedCCRL, fedccrl
from protofed.models import Network
from protofed.runs.run import run
from protofed.styles import style_of
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")
SIZES = Sizes(K, D, 8, channels={"pixels": 3})


def pixels(n=4, side=24, seed=0):
    """Images in [0, 1] of whole 8-bit values, each of another brightness."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (n, 3, side, side)) * np.linspace(0.4, 1, n)[:, None, None, None]
    return torch.from_numpy(x.round() / 255)


def client_of(received, name="m0", key=1):
    net = Network(torch.nn.Flatten(), D, K).double()
    client = Client(FedCCRL(), net, SIZES, received=received, mine={}, name=name)
    client.begin_step(key)
    return client


def test_copies_are_keyed_and_differ_between_images():
    x, received = pixels(n=1).repeat(6, 1, 1, 1), FedCCRL().init_server({}, SIZES)
    copies = {k: FedCCRL()._copies(client_of(received, key=k), x) for k in (1, 2)}
    again = FedCCRL()._copies(client_of(received, key=1), x)
    assert torch.equal(copies[1], again) and not torch.equal(copies[1], copies[2])
    assert len({tuple(image.flatten().tolist()) for image in copies[1]}) == 12


# ---- the alignments ------------------------------------------------------------------------------


def test_jensen_shannon_of_three_views():
    logits = numbers(1, 3, 4, K)
    total = 0.0
    for i in range(4):
        p = [[math.exp(v) / sum(map(math.exp, row)) for v in row] for row in logits[:, i].tolist()]
        M = [sum(column) / 3 for column in zip(*p, strict=True)]
        total += sum(a * math.log(a / b) for row in p for a, b in zip(row, M, strict=True)) / 3
    assert float(fedccrl.jensen_shannon(logits)) == pytest.approx(total / 4, rel=1e-12)
    assert float(fedccrl.jensen_shannon(logits[:1].repeat(3, 1, 1))) == pytest.approx(0, abs=1e-15)


def test_the_contrast_counts_a_sample_among_its_own_positives():
    a, b, y, tau = numbers(1, 3, D), numbers(2, 3, D), [0, 1, 0], 0.3
    z, labels = [*a.tolist(), *b.tolist()], [*y, *y]
    total = 0.0
    for i, k in enumerate(labels):
        s = [cosine(z[i], other) / tau for other in z]
        own = [v for v, j in zip(s, labels, strict=True) if j == k]
        total += math.log(sum(math.exp(v) for j, v in enumerate(s) if j != i)) - sum(own) / len(own)
    found = fedccrl.supervised_contrast(a, b, torch.tensor(y), tau)
    assert float(found) == pytest.approx(total / 6, rel=1e-9)


# ---- colors --------------------------------------------------------------------------------------


def aggregate(sent, state, clients=("m0", "m1", "m2")):
    spool = Spool()
    for name, styles in sent.items():
        spool.put(name, {"styles": {"pixels": styles}})
    updates = [Update(name, 1, 1, 0.1, spool) for name in sent]
    view = ServerView(state, 0, 3, clients, SIZES)
    return FedCCRL().aggregate(view, {}, updates)


def test_the_pool_keeps_the_last_colors_of_those_who_do_not_take_part():
    a, b, c = numbers(1, 2, 2, 3), numbers(2, 1, 2, 3), numbers(3, 3, 2, 3)
    state = aggregate({"m0": a, "m2": b}, FedCCRL().init_server({}, SIZES))
    assert state["pool"]["there"].tolist() == [[1, 1], [0, 0], [1, 0]]
    pool = aggregate({"m2": c}, state)["pool"]
    assert pool["there"].tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert torch.equal(pool["style"][0, :2], a) and torch.equal(pool["style"][2], c)
    pool = aggregate({"m1": b}, FedCCRL().init_server({}, SIZES))["pool"]  # m0 has sent nothing yet
    assert torch.equal(pool["style"][1], b)  # in double precision, like all others


def test_colors_are_drawn_evenly_from_the_images_of_others():
    a, b, c = numbers(1, 2, 2, 3), numbers(2, 1, 2, 3), numbers(3, 3, 2, 3)
    pool = aggregate({"m0": a, "m1": b, "m2": c}, FedCCRL().init_server({}, SIZES))
    own = torch.zeros(4000, 2, 3, dtype=torch.float64)
    drawn = fedccrl._others(client_of(pool, "m0"), own)
    found = {tuple(s.flatten().tolist()): 0 for s in (*b, *c)}
    for style in drawn:
        found[tuple(style.flatten().tolist())] += 1  # those of m0 would be an error here
    assert all(800 < n < 1200 for n in found.values())


def test_without_others_an_image_keeps_its_colors():
    own = style_of(pixels())
    none = FedCCRL().init_server({}, SIZES)
    alone = aggregate({"m0": numbers(1, 2, 2, 3)}, none, ("m0",))
    for received in (none, alone):
        assert torch.equal(fedccrl._others(client_of(received), own), own)


def test_a_tenth_of_the_images_is_sent_another_one_each_round():
    task = tiny_task(samples=22)
    federation = Federation(make_config(task, FedCCRL(), **SHORT), task)
    pools = []
    for _ in range(2):
        record = federation.run_round()
        pools.append(federation.server.state["pool"]["style"])
    assert pools[0].shape == (4, 2, 2, 3)  # two of 22 images, μ and σ, three channels
    assert not torch.equal(*pools)
    plain = run(task, "fedavg", **SHORT).rounds[1]
    assert record["bytes_up"] - plain["bytes_up"] == 4 * 2 * 6 * 4
    x = federation.clients["left-0"].images.x
    augment = task.augment
    mean, std = (torch.tensor(v)[:, None, None] for v in (augment.mean, augment.std))
    own = style_of((x / 255 - mean) / std)
    for style in pools[1][0]:
        assert ((own - style).abs().amax((1, 2)) < 1e-5).any()


def test_colors_of_single_images_need_permission():
    task = tiny_task()
    federation = Federation(make_config(task, FedCCRL(), min_class_count=2, **SHORT), task)
    with pytest.raises(ProtofedError, match="single images"):
        federation.run_round()
