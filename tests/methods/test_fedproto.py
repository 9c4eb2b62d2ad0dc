"""FedProto: each equation, through the method's own hooks, against loops over plain numbers."""

import pytest
import torch
from tests.methods.helpers import D, Given, K, cross_entropy, numbers

from protofed.federation.client_round import train_client
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.method import Batch, Client, ServerView, Sizes, Update
from protofed.methods import FedAvg, FedProto
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

SIZES = Sizes(K, D, 8)
pytestmark = pytest.mark.usefixtures("single_thread")


def prototypes(mask=(1, 1, 1), seed=7):
    return {"mean": numbers(seed, K, D), "mask": torch.tensor(mask, dtype=torch.float32)}


def scene(method, y, received, dtype=torch.float64):
    net = Given(numbers(1, len(y), D).to(dtype), numbers(2, len(y), K).to(dtype))
    client = Client(method, net, SIZES, received=received, mine={}, round=1, rounds=3)
    client.begin_step(1)
    rows = torch.arange(len(y))
    return client, net, Batch(rows, torch.tensor(y), rows)


def pull(z, y, proto):
    """(1/B) Σ_i (1/d) Σ_v (z_iv − C_yv)², classes without prototype adding 0."""
    total = 0.0
    for i, k in enumerate(y):
        if proto["mask"][k] > 0:
            total += sum(float((z[i, v] - proto["mean"][k, v]).detach()) ** 2 for v in range(D)) / D
    return total / len(y)


def updates_of(means, counts, samples=None):
    spool = Spool()
    names = [f"m{i}" for i in range(len(means))]
    for name, mean, count in zip(names, means, counts, strict=True):
        spool.put(name, {"prototypes": {"mean": mean, "count": torch.tensor(count).float()}})
    sizes = samples or [int(sum(c)) for c in counts]
    return [Update(n, s, 1, 0.1, spool) for n, s in zip(names, sizes, strict=True)]


def aggregate(updates, state=None):
    view = ServerView(state or {}, 0, 3, tuple(u.name for u in updates), SIZES)
    return FedProto().aggregate(view, {"w": torch.ones(2)}, updates)


@pytest.mark.parametrize("weight", [0.5, 1.0, 3])
def test_loss_is_cross_entropy_plus_weighted_mean_over_batch_and_dimensions(weight):
    y = [0, 1, 1, 2, 0]
    C = prototypes()
    method = FedProto(weight=weight)
    client, net, batch = scene(method, y, {"prototypes": C})
    terms = method.loss(client, batch)
    assert list(terms) == ["ce", "proto"]
    assert terms["ce"].item() == pytest.approx(cross_entropy(net.logits, y), rel=1e-12)
    assert terms["proto"].item() == pytest.approx(weight * pull(net.z, y, C), rel=1e-12)


def test_a_class_without_prototype_adds_zero_but_counts_in_the_mean():
    y = [0, 1, 2, 2]
    C = prototypes(mask=(1, 1, 0))
    client, net, batch = scene(FedProto(), y, {"prototypes": C})
    got = FedProto().loss(client, batch)["proto"]
    known = pull(net.z[:2], y[:2], C)
    assert got.item() == pytest.approx(pull(net.z, y, C), rel=1e-12)
    assert got.item() == pytest.approx(known / 2, rel=1e-12)  # 2 of 4 samples, divided by 4
    got.backward()
    assert torch.equal(net.z.grad[2:], torch.zeros(2, D, dtype=torch.float64))
    assert (net.z.grad[:2] != 0).all()


def test_round_0_and_a_batch_of_unknown_classes_are_fedavg():
    y = [2, 2, 1]
    method = FedProto(weight=5.0)
    for received in (method.init_server({}, SIZES), {"prototypes": prototypes(mask=(1, 0, 0))}):
        client, net, batch = scene(method, y, received)
        terms = method.loss(client, batch)
        assert terms["proto"].item() == 0
        sum(terms.values()).backward()
        plain, other, batch = scene(FedAvg(), y, {})
        FedAvg().loss(plain, batch)["ce"].backward()
        assert torch.equal(net.logits.grad, other.logits.grad)
        assert not net.z.grad.any()


def test_gradient_by_finite_differences_and_prototypes_detached():
    y = [0, 1, 2, 1]
    C = prototypes(mask=(1, 1, 0))
    C["mean"].requires_grad_()
    method = FedProto(weight=2.0)
    client, net, batch = scene(method, y, {"prototypes": C})
    method.loss(client, batch)["proto"].backward()
    assert C["mean"].grad is None
    z = net.z.detach().clone()
    for i in range(len(y)):
        for v in range(D):
            up, down = z.clone(), z.clone()
            up[i, v] += 1e-5
            down[i, v] -= 1e-5
            slope = 2.0 * (pull(up, y, C) - pull(down, y, C)) / 2e-5
            assert net.z.grad[i, v].item() == pytest.approx(slope, abs=1e-8)


def test_upload_is_the_mean_per_class_with_counts():
    y = [0, 1, 1, 0, 1]
    method = FedProto()
    client, net, batch = scene(method, y, method.init_server({}, SIZES))
    client.begin_prototypes()
    for rows in ([0, 1], [2, 3, 4]):  # two steps of the last epoch
        client.begin_step(1)
        part = Batch(*(t[rows] for t in batch))
        method.loss(client, part)
        client.collect(part.y)
    message, private = method.upload(client)
    assert private == {}
    assert list(message) == ["prototypes"]
    assert message["prototypes"]["count"].tolist() == [2, 3, 0]
    z = net.z.detach()
    expected = torch.stack([(z[0] + z[3]) / 2, (z[1] + z[2] + z[4]) / 3, torch.zeros(D)])
    assert torch.allclose(message["prototypes"]["mean"], expected, rtol=1e-12)
    assert not message["prototypes"]["mean"].requires_grad


def test_global_prototype_counts_every_owner_once():
    means = list(numbers(3, 3, K, D))
    counts = [[100, 1, 0], [1, 1, 0], [1, 0, 0]]  # unequal: a weighted mean would differ
    new = aggregate(updates_of(means, counts))
    assert set(new) == {"model", "prototypes"}
    assert new["model"]["w"].tolist() == [1, 1]
    C = new["prototypes"]
    assert torch.allclose(C["mean"][0], (means[0][0] + means[1][0] + means[2][0]) / 3)
    assert torch.allclose(C["mean"][1], (means[0][1] + means[1][1]) / 2)
    weighted = (100 * means[0][0] + means[1][0] + means[2][0]) / 102
    assert not torch.allclose(C["mean"][0], weighted, atol=1e-2)
    assert C["mask"].tolist() == [1, 1, 0]  # nobody has class 2
    assert not C["mean"][2].any()


def test_single_owner_is_its_own_prototype_and_old_prototypes_are_forgotten():
    means = list(numbers(4, 2, K, D))
    old = {"model": {}, "prototypes": {"mean": torch.full((K, D), 9.0), "mask": torch.ones(K)}}
    C = aggregate(updates_of(means, [[5, 0, 0], [0, 0, 0]]), old)["prototypes"]
    assert torch.equal(C["mean"][0], means[0][0])
    assert C["mask"].tolist() == [1, 0, 0]
    assert not C["mean"][1:].any()


def test_partial_participation_uses_only_the_clients_of_the_round():
    task = tiny_task({"left": [0, 1], "right": [2, 3]}, clients=1)
    own = {"left-0": [1, 1, 0, 0], "right-0": [0, 0, 1, 1]}
    from protofed.config import make_config

    config = make_config(task, FedProto(), **{**SHORT, "participation": 0.5, "rounds": 6})
    federation = Federation(config, task)
    seen = set()
    for _ in range(6):
        (name,) = federation.server.sample()
        federation.run_round()
        seen.add(name)
        assert federation.server.state["prototypes"]["mask"].tolist() == own[name]
    assert seen == set(own)  # otherwise this test shows nothing


def test_proto_pass_post_is_a_clean_pass_with_the_final_weights():
    from protofed.config import make_config
    from protofed.data.augment import normalized
    from protofed.federation.model_state import load_model

    replies = {}
    for way in ("post", "last_epoch"):
        config = make_config(tiny_task(), FedProto(proto_pass=way), **SHORT)
        federation = Federation(config, tiny_task())
        net, site = federation.engine.networks["cnn2"], federation.clients["left-0"]
        reply = train_client(federation.setup, net, site, federation.server.broadcast(), {}, 0)
        replies[way] = reply.message
    load_model(net, replies["post"]["model"])
    net.eval()
    with torch.no_grad():
        x = normalized(site.images.x, federation.task.augment, torch.float32)
        z = net(x).feature
    for k in range(4):
        expected = z[site.images.y == k].mean(0)
        assert torch.allclose(replies["post"]["prototypes"]["mean"][k], expected, atol=1e-5)
    same = [replies[w]["model"] for w in replies]
    assert all(torch.equal(same[0][n], same[1][n]) for n in same[0])  # only the means differ
    post, last = (replies[w]["prototypes"] for w in ("post", "last_epoch"))
    assert torch.equal(post["count"], last["count"])
    assert not torch.allclose(post["mean"], last["mean"], atol=1e-3)


def test_weight_changes_a_run_from_round_1_on_and_0_does_not():
    plain = run(tiny_task(), FedAvg(), **SHORT)
    off = run(tiny_task(), FedProto(weight=0), **SHORT)
    on = run(tiny_task(), FedProto(), **SHORT)
    assert all(torch.equal(plain.model[n], off.model[n]) for n in plain.model)
    assert not all(torch.equal(plain.model[n], on.model[n]) for n in plain.model)
    assert on.rounds[0]["loss"]["proto"] == 0
    assert on.rounds[1]["loss"]["proto"] > 0
    assert on.rounds[0]["loss"]["ce"] == plain.rounds[0]["loss"]["ce"]


def test_traffic_is_the_model_and_one_table_each_way():
    plain = run(tiny_task(), FedAvg(), **{**SHORT, "rounds": 1}).rounds[0]
    proto = run(tiny_task(), FedProto(), **{**SHORT, "rounds": 1}).rounds[0]
    table = 4 * (4 * 512 + 4)  # K × d means and K counts or masks, float32
    assert proto["bytes_up"] - plain["bytes_up"] == proto["clients"] * table
    assert proto["bytes_down"] - plain["bytes_down"] == proto["clients"] * table
