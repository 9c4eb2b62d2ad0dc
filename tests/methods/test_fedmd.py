"""FedMD: the consensus, the digest, and the public images it is about."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from protofed.config import make_config
from protofed.data.augment import normalized
from protofed.errors import ProtofedError
from protofed.federation.batches import ClientBatches
from protofed.federation.client_round import train_client
from protofed.federation.model_state import load_model
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.method import Batch, Client, ServerView, Sizes, Update
from protofed.methods import FedMD
from protofed.models import Output
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")
K, N = 3, 5
SIZES = Sizes(K, 4, 8)
SPARE = 12


def numbers(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def federation(method=None, task=None, **settings):
    task = task or tiny_task(spare=SPARE)
    return Federation(make_config(task, method or FedMD(), **{**TINY, **settings}), task)


class Given(nn.Module):
    """Says the given logits of 'image' i: x is a vector of row numbers."""

    stages: ClassVar = {}

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x):
        return Output(self.logits[x], self.logits[x])


def digested(round=1, of=1):
    consensus = {"logits": numbers(2, N, K), "round": torch.tensor(of)}
    method, net = FedMD(), Given(numbers(1, N, K))
    received = {"consensus": consensus}
    client = Client(method, net, SIZES, received=received, mine={}, round=round, rounds=3)
    client.begin_step(1)
    rows = torch.tensor([4, 0, 2])
    return method.digest(client, Batch(rows, rows * 0, rows))["digest"], net, consensus, rows


def test_the_digest_is_the_mean_absolute_error_over_batch_and_classes():
    term, net, consensus, rows = digested()
    away = [
        abs(float(net.logits[i, k].detach()) - float(consensus["logits"][i, k]))
        for i in rows.tolist()
        for k in range(K)
    ]
    assert term.item() == pytest.approx(sum(away) / (3 * K), rel=1e-12)
    term.backward()
    sign = (net.logits - consensus["logits"]).sign()[rows] / (3 * K)
    assert torch.allclose(net.logits.grad[rows], sign)
    assert not net.logits.grad[[1, 3]].any()


def test_a_consensus_on_other_images_is_not_digested():
    term, net, *_ = digested(round=3, of=2)
    assert term.item() == 0
    term.backward()
    assert not net.logits.grad.any()


def test_a_federation_without_a_consensus_has_nothing_to_digest():
    """Nobody may have replied to the first round, e.g. since its only sites were left out."""
    one = federation(FedMD())
    one.server.finish()
    record = one.run_round()
    assert record["loss"]["digest"] == 0 < record["loss"]["ce"]
    assert one.run_round()["loss"]["digest"] > 0


def test_the_consensus_is_the_plain_mean_of_who_took_part():
    spool, names = Spool(), ["a", "b", "c"]
    for i, name in enumerate(names):
        spool.put(name, {"logits": {"public": numbers(i, N, K)}})
    updates = [Update(n, 10**i, 1, 0.1, spool) for i, n in enumerate(names)]  # samples: no matter
    view = ServerView({}, 4, 9, tuple(names), SIZES)
    new = FedMD().aggregate(view, {}, updates)
    expected = np.mean([numbers(i, N, K).numpy() for i in range(3)], axis=0)
    assert np.allclose(new["consensus"]["logits"].numpy(), expected, rtol=1e-14)
    assert int(new["consensus"]["round"]) == 5
    assert set(new) == {"consensus"}


def test_round_0_has_no_digest_and_later_ones_begin_with_it():
    method = FedMD(digest_epochs=3, digest_batch=7, digest_lr=0.5)
    (revisit,) = method.phases(0, 10)
    digest, second = method.phases(1, 10)
    assert (revisit.data, second.data, digest.data) == ("own", "own", "public")
    assert revisit.loss == second.loss == method.loss
    settings = (digest.epochs, digest.batch, digest.lr, digest.optimizer)
    assert settings == (3, 7, 0.5, "adam")
    assert [len(FedMD(warm_up=3).phases(t, 10)) for t in range(5)] == [1, 1, 1, 2, 2]
    result = run(tiny_task(spare=SPARE), FedMD(), **TINY)
    assert set(result.rounds[0]["loss"]) == {"ce"}
    assert set(result.rounds[1]["loss"]) == {"digest", "ce"}
    assert result.rounds[1]["loss"]["digest"] > 0


# ---- public images ------------------------------------------------------------------------------


def rows_of(images, pool):
    """Where each image lies in a pool."""
    found = [(pool == image).flatten(1).all(1).nonzero() for image in images]
    return [int(f[0, 0]) if len(f) else None for f in found]


def test_public_images_are_unused_ones_equally_of_each_domain_and_new_each_round():
    one = federation(FedMD(images=9), samples={"left": 10, "right": 20})
    public = one.setup.public
    assert public.counts == {"left": 5, "right": 4}
    train = {d: one.task.domains[d].train.x for d in ("left", "right")}
    used = {d: {int(r) for s in one.shares if s.domain == d for r in s.rows} for d in train}
    draws = []
    for round in range(3):
        images = public.draw(round)
        assert len(images) == 9
        assert not images.y.any()  # no labels
        own = {"left": rows_of(images.x[:5], train["left"])}
        own["right"] = rows_of(images.x[5:], train["right"])
        for d, rows in own.items():
            assert None not in rows
            assert len(set(rows)) == len(rows)
            assert not set(rows) & used[d]
        draws.append(own)
        tests = torch.cat([t.x for t in one.tests.values()])
        assert rows_of(images.x, tests) == [None] * 9  # no test image, ever
    assert draws[0] != draws[1] != draws[2]
    again = federation(FedMD(images=9), samples={"left": 10, "right": 20}).setup.public
    assert torch.equal(again.draw(2).x, public.draw(2).x)  # keyed: not a matter of what came before


def test_a_domain_that_is_left_out_gives_no_public_images():
    one = federation(leave_out="right", clients="one")
    assert set(one.setup.public.counts) == {"left"}


@pytest.mark.parametrize(
    ("public", "counts"),
    [("right", {"right": 12}), ("left", {"left": 12}), ("unused", {"left": 12, "right": 12})],
)
def test_the_public_set_is_a_parameter(public, counts):
    one = federation(FedMD(public=public))
    assert one.setup.public.counts == counts
    result = run(tiny_task(spare=SPARE), FedMD(public=public), **{**TINY, "rounds": 1})
    assert result.summary["public"] == counts
    assert result.summary["hyper_parameters"]["public"] == public


def test_what_cannot_be_public_is_said():
    with pytest.raises(ProtofedError, match="clients hold every training image") as error:
        federation(task=tiny_task())
    assert "public=glyphs" in str(error.value)
    with pytest.raises(ProtofedError, match="unknown source of public images 'lefty'") as error:
        federation(FedMD(public="lefty"))
    assert "did you mean left" in str(error.value)
    with pytest.raises(ProtofedError, match="32 pixels, but those of tiny have 8"):
        federation(FedMD(public="glyphs"))


def test_a_method_without_public_images_is_told_so():
    one = federation()
    bare = one.setup.__class__(**{**one.setup.__dict__, "public": None})
    with pytest.raises(ProtofedError, match="needs public images"):
        one.clients["left-0"].with_public_images(bare, 0)


def test_uploaded_logits_are_those_of_the_next_rounds_images_in_evaluation_mode():
    one = federation(FedMD(images=10))
    site, network = one.clients["left-0"], one.make_network()
    mine = one.store.get("left-0")
    reply = train_client(one.setup, network, site, one.server.broadcast(), mine, 0)
    assert set(reply.message) == {"logits"}
    load_model(network, reply.mine["model"])
    network.eval()
    with torch.no_grad():
        x = normalized(one.setup.public.draw(1).x, one.setup.augment, torch.float32)
        expected = network(x).logits
    assert torch.allclose(reply.message["logits"]["public"], expected, atol=1e-6)


def test_the_digest_sees_the_rounds_images_as_they_are():
    one = federation(FedMD(images=10))
    data = ClientBatches(one.setup, one.clients["left-0"].with_public_images(one.setup, 3))
    images = one.setup.public.draw(3)
    batches = list(data.epoch((0, 3, "left-0", 0, 0), 4))
    assert sorted(int(r) for b in batches for r in b.rows) == list(range(10))
    for batch in batches:
        expected = normalized(images.x[batch.rows], one.setup.augment, torch.float32)
        assert torch.equal(batch.x, expected)  # neither cropped nor mirrored


@pytest.mark.slow
def test_clients_come_to_agree():
    """With nothing but digests to do, logits on public images come closer."""
    lone, agreeing = (
        run(
            tiny_task(spare=24),
            FedMD(digest_lr=lr, digest_epochs=20),
            **{**TINY, "rounds": 4, "epochs": 1, "model": "cnn3,cnn2"},
        ).rounds["loss"][-1]["digest"]
        for lr in (1e-9, 0.003)
    )
    assert agreeing < lone / 2


def test_bytes_are_logits():
    result = run(tiny_task(spare=SPARE), FedMD(), **{**TINY, "model": "cnn3,cnn2"})
    logits = 4 * 24 * 4  # 24 images, 4 classes, float32
    assert [r["bytes_up"] for r in result.rounds] == [4 * logits] * 3
    # the first round has no consensus; then it comes with the number of its round
    assert [r["bytes_down"] for r in result.rounds] == [0, 4 * (logits + 8), 4 * (logits + 8)]
