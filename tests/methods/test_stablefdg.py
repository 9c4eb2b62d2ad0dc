"""StableFDG: who gets whose style, the clusters of a batch, the pairs, the highlighter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protofed import keys, tree
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation
from protofed.method import Batch, Client, Sizes
from protofed.methods import FedAvg, StableFDG
from protofed.methods.stablefdg import (
    CHANNELS,
    HighlightingNetwork,
    attended,
    centers,
    next_of_class,
    partners,
    unit,
)
from protofed.models import build
from protofed.runs.run import run
from protofed.styles import style_of
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")


def numbers(*shape: int) -> Tensor:
    return torch.from_numpy(keys.generator("stablefdg", *shape).standard_normal(shape))


# ---- sharing -------------------------------------------------------------------------------------


def test_partners_are_a_random_derangement() -> None:
    there = np.array([True, True, False, True, True])
    known = [0, 1, 3, 4]
    seen: Counter[tuple[int, ...]] = Counter()
    strangers = set()
    for i in range(900):
        found = partners(np.random.default_rng(i), there)
        seen[tuple(found[known])] += 1
        strangers.add(int(found[2]))
    assert all(sorted(order) == known for order in seen)
    assert all(a != b for order in seen for a, b in zip(order, known, strict=True))
    assert len(seen) == 9  # of four, all there are
    assert min(seen.values()) > 60 and max(seen.values()) < 140  # each 100 of 900
    assert strangers == {*known}


def test_who_has_nobody_else_has_no_partner() -> None:
    rng = np.random.default_rng(0)
    assert partners(rng, np.zeros(3, bool)).tolist() == [-1, -1, -1]
    assert partners(rng, np.array([False, True, False])).tolist() == [1, -1, 1]


def federation(method: StableFDG | None = None, **settings: Any) -> Federation:
    config = make_config(tiny_task(), method or StableFDG(), **{**SHORT, **settings})
    return Federation(config, tiny_task())


def test_each_client_gets_anothers_style_in_its_own_place() -> None:
    fed = federation()
    first = fed.server.broadcast()["styles"]
    assert first["mask"].tolist() == [0] * 4
    fed.run_round()
    sent = fed.server.state["styles"]["style"]
    assert sent.shape == (4, 2, 2, 4) and bool((sent[:, 0, 1] > 0).all())
    received = fed.server.broadcast()["styles"]
    assert received["mask"].tolist() == [1] * 4
    assert received["id"].tolist() == [keys.key(name) for name in fed.clients]
    whose = [[torch.equal(got, s) for s in sent].index(True) for got in received["style"]]
    assert sorted(whose) == [0, 1, 2, 3]
    assert all(i != j for i, j in enumerate(whose))
    orders = set()
    for _ in range(6):  # another one in each round
        fed.server.round += 1
        styles = fed.server.broadcast()["styles"]["style"]
        orders.add(tuple([torch.equal(got, s) for s in sent].index(True) for got in styles))
    assert len(orders) > 1


def test_a_client_with_too_few_images_shares_nothing() -> None:
    fed = federation(samples={"left": 22, "right": 5}, min_class_count=6)
    fed.run_round()
    assert fed.server.state["styles"]["mask"].tolist() == [1, 1, 0, 0]
    mask, style = (fed.server.broadcast()["styles"][n] for n in ("mask", "style"))
    assert mask.tolist() == [1] * 4
    assert all(bool(s.any()) for s in style)


# ---- shifting ------------------------------------------------------------------------------------


def test_centers_are_means_of_the_samples_nearest_to_a_seed() -> None:
    """Of three far clusters and three seeds, each has one, whatever is drawn."""
    middle = torch.tensor([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0]], dtype=torch.float64)
    s = (middle[:, None] + numbers(3, 5, 2)).flatten(0, 1)[torch.randperm(15)]
    expected = sorted(s[((s - c).norm(dim=1) < 50)].mean(0).tolist() for c in middle)
    for i in range(20):
        u = keys.uniform(torch.tensor(i), 1, (3, 15))
        np.testing.assert_allclose(sorted(centers(s, u).tolist()), expected)


def test_seeds_are_drawn_by_squared_distance() -> None:
    s = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    first: Counter[float] = Counter()
    second: Counter[float] = Counter()
    for i in range(900):
        u = keys.uniform(torch.tensor(i), 1, (2, 3))
        seed = float(s[int((1 / -u[0].log()).argmax())])
        first[seed] += 1
        if seed == 0:
            # the center of the other seed's cluster tells which it was: 1 and 3 go with either
            found = centers(s, u)
            second[float(found[1])] += 1
    assert all(abs(n - 300) < 70 for n in first.values())
    assert {*second} == {2.0, 3.0}  # seed 1 takes 3 along; seed 3 leaves 1 with 0
    assert abs(second[3.0] / sum(second.values()) - 0.9) < 0.07  # 9 : 1


def test_equal_samples_are_their_own_centers() -> None:
    s = torch.ones(4, 3, dtype=torch.float64)
    assert torch.equal(centers(s, keys.uniform(torch.tensor(1), 1, (2, 4))), s[:2])
    assert centers(s[:1], torch.empty(0, 1)).shape == (0, 3)


def a_client(p: float, partner: bool = True, highlighter: bool = False) -> Client:
    method = StableFDG(p=p, highlighter=highlighter)
    backbone = build("cnn2", 4, 8, 4, "batch")
    network = method.network(backbone, Sizes.of(backbone, 4, 8)).double().train()
    style = numbers(3, 2, 2, 4).abs() + 0.1
    received = {
        "styles": {
            "style": style,
            "mask": torch.tensor([1.0, float(partner), 1.0]),
            "id": torch.tensor([keys.key(n) for n in ("a", "me", "b")]),
        }
    }
    sizes = Sizes.of(network, 4, 8)
    client = Client(method, network, sizes, received=received, mine={}, name="me")
    client.begin_step(3)
    return client


def test_the_second_half_takes_the_partners_styles_and_the_first_the_centers() -> None:
    client, x = a_client(p=1.0), numbers(600, 4, 5, 5)
    got = style_of(client.method.between(client, "stage1", x))
    m, v = client.received["styles"]["style"][1]
    drawn = got[300:]
    np.testing.assert_allclose(drawn[:, 0].mean(0), m[0], atol=0.25)
    np.testing.assert_allclose(drawn[:, 0].std(0), v[0], rtol=0.15)
    assert bool((drawn[:, 1] >= 0).all())
    own, spread = style_of(x), got[:300]
    assert float((spread - own[:300]).abs().max()) > 0.1
    np.testing.assert_allclose(spread.mean(0), own.mean(0), atol=0.05)


def test_a_negative_deviation_becomes_0() -> None:
    client, x = a_client(p=1.0), numbers(6, 4, 5, 5)
    client.received["styles"]["style"][1, 0, 1] = -9.0
    client.received["styles"]["style"][1, 1] = 0.0
    out = client.method.between(client, "stage1", x)
    assert float(out[3:].var((2, 3)).max()) < 1e-20


@pytest.mark.parametrize("client", [a_client(0.0), a_client(1.0, partner=False)])
def test_nothing_is_shifted_with_p_0_or_without_a_partner(client: Client) -> None:
    x = numbers(6, 4, 5, 5)
    assert torch.equal(client.method.between(client, "stage1", x), x)


def test_half_of_the_batches_are_shifted() -> None:
    client, x, count = a_client(p=0.5), numbers(4, 4, 5, 5), 0
    for step in range(200):
        client.begin_step(step)
        count += not torch.equal(client.method.between(client, "stage1", x), x)
    assert 75 < count < 125


def test_without_highlighter_and_shifting_it_is_fedavg() -> None:
    ours, plain = (
        run(tiny_task(), m, **SHORT) for m in (StableFDG(p=0.0, highlighter=False), FedAvg())
    )
    assert tree.equal({"model": ours.model}, {"model": plain.model})


# ---- the highlighter -----------------------------------------------------------------------------


def test_the_next_of_its_class() -> None:
    y = torch.tensor([0, 1, 0, 2, 1, 0])
    assert next_of_class(y).tolist() == [2, 4, 5, 3, 1, 0]
    assert next_of_class(y[:1]).tolist() == [0]


def test_attention_is_the_mean_over_queries() -> None:
    x, q, k = numbers(2, 3, 4), unit(numbers(2, 5, 4)), unit(numbers(2, 5, 4) + 1)
    assert torch.allclose(q.norm(dim=1), torch.ones(2, 4).double())
    for i in range(2):
        scores = [
            sum(sum(q[i, c, a] * k[i, c, b] for c in range(5)) for a in range(4)) / 4
            for b in range(4)
        ]
        e = np.exp([float(s) for s in scores])
        expected = (x[i].numpy() * (e / e.sum())).sum(1)
        np.testing.assert_allclose(attended(x, q.mean(2), k)[i], expected)


@pytest.mark.parametrize(("model", "d"), [("cnn2", 512 + 16), ("resnet10", 2 * 64)])
def test_network_for_all_models(model: str, d: int) -> None:
    backbone = build(model, 4, 16, 8, None)
    network = StableFDG().network(backbone, Sizes.of(backbone, 4, 16))
    assert isinstance(network, HighlightingNetwork)
    assert network.features == d and network.head.weight.shape == (4, d)
    assert network.attention.weight.shape[0] == 2 * CHANNELS
    x = torch.rand(3, 3, 16, 16)
    out = network.eval()(x)
    assert out.feature.shape == (3, d) and out.logits.shape == (3, 4)
    if model == "resnet10":
        torch.testing.assert_close(out.map.mean(2), out.feature[:, :64])  # (5)
    torch.testing.assert_close(network(x[:1]).logits, out.logits[:1])  # at test, itself
    assert StableFDG(highlighter=False).network(backbone, Sizes.of(backbone, 4, 16)) is backbone


def test_training_pairs_samples_of_a_class() -> None:
    client, x = a_client(p=0.0, highlighter=True), numbers(4, 3, 8, 8)
    y = torch.tensor([0, 1, 0, 1])
    loss = client.method.loss(client, Batch(x, y, torch.arange(4)))["ce"]
    client.begin_step(3)
    alone = client.cross_entropy(client.forward(x).logits, y)
    assert not torch.equal(loss, alone)
    client.begin_step(3)
    apart = torch.arange(4)  # of four classes: every sample is its own pair
    loss = client.method.loss(client, Batch(x, apart, apart))["ce"]
    client.begin_step(3)
    assert torch.equal(loss, client.cross_entropy(client.forward(x).logits, apart))


# ---- the rounds ----------------------------------------------------------------------------------


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ProtofedError, match=r"stage 'body'.*pixels, stage1, stage2"):
        federation(StableFDG(stage="body"))
