"""FedGH: the header's training against autograd, and what travels."""

import numpy as np
import pytest
import torch
from torch import nn

from protofed import keys, tree
from protofed.config import make_config
from protofed.federation.client_round import train_client
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.method import ServerView, Sizes, Update
from protofed.methods import FedGH
from protofed.methods.fedgh import step
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")
K, D = 3, 4
SIZES = Sizes(K, D, 8)


def numbers(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def header(seed=1):
    return {"head.weight": numbers(seed, K, D), "head.bias": numbers(seed + 1, K)}


def updates_of(counts):
    spool = Spool()
    names = [f"m{i}" for i in range(len(counts))]
    for i, (name, count) in enumerate(zip(names, counts, strict=True)):
        slot = {"mean": numbers(10 + i, K, D), "count": torch.tensor(count).double()}
        spool.put(name, {"prototypes": slot})
    return [Update(n, 1, 1, 0.1, spool) for n in names]


def aggregate(method, updates, start, round=2, seed=5):
    view = ServerView({"model": start}, round, 9, tuple(u.name for u in updates), SIZES, seed)
    return method.aggregate(view, start, updates)


def by_autograd(method, updates, start, round=2, seed=5):
    """Equation 3 with torch's own layer, loss and optimizer."""
    pairs = [
        (u["prototypes"]["mean"][k], k)
        for u in updates
        for k in range(K)
        if u["prototypes"]["count"][k] > 0
    ]
    layer = nn.Linear(D, K).double()
    with torch.no_grad():
        layer.weight.copy_(start["head.weight"])
        layer.bias.copy_(start["head.bias"])
    optimizer = torch.optim.SGD(layer.parameters(), lr=method.eta)
    for epoch in range(method.header_epochs):
        order = keys.generator(seed, round, epoch, "header").permutation(len(pairs))
        for begin in range(0, len(order), method.header_batch):
            chosen = [pairs[i] for i in order[begin : begin + method.header_batch]]
            z, y = torch.stack([z for z, _ in chosen]), torch.tensor([k for _, k in chosen])
            optimizer.zero_grad()
            nn.functional.cross_entropy(layer(z), y).backward()
            optimizer.step()
    return layer.weight.detach(), layer.bias.detach()


@pytest.mark.parametrize(
    "method", [FedGH(), FedGH(eta=0.3, header_epochs=2, header_batch=4), FedGH(header_batch=100)]
)
def test_the_server_trains_the_header_on_the_means_that_are_there(method):
    updates = updates_of([[3, 1, 0], [9, 0, 0], [1, 1, 1]])  # six pairs
    new = aggregate(method, updates, header())
    weight, bias = by_autograd(method, updates, header())
    assert set(new) == {"model"}
    assert torch.allclose(new["model"]["head.weight"], weight, rtol=1e-10, atol=1e-12)
    assert torch.allclose(new["model"]["head.bias"], bias, rtol=1e-10, atol=1e-12)


def test_a_step_by_hand():
    weight, bias = torch.zeros(2, 1), torch.zeros(2)
    z, y = torch.tensor([[2.0]]), torch.tensor([1])
    new_weight, new_bias = step(weight, bias, z, y, eta=0.1)
    # p = (½, ½), error = (½, −½); the step is −0.1 · error · z
    assert new_weight.flatten().tolist() == pytest.approx([-0.1, 0.1])
    assert new_bias.tolist() == pytest.approx([-0.05, 0.05])


def test_other_rounds_and_seeds_take_another_order():
    updates = updates_of([[1, 1, 1], [1, 1, 1], [1, 1, 1]])
    method = FedGH(header_batch=1, eta=0.5)
    first, again, round, seed = (
        aggregate(method, updates, header(), *at)["model"]["head.weight"]
        for at in ((2, 5), (2, 5), (3, 5), (2, 6))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, round)
    assert not torch.equal(first, seed)


def test_without_any_mean_the_header_stays():
    new = aggregate(FedGH(), updates_of([[0, 0, 0]]), header())
    assert all(torch.equal(new["model"][n], t) for n, t in header().items())


def test_clients_start_from_the_servers_header_and_keep_their_extractors():
    task = tiny_task()
    settings = {**SHORT, "model": "cnn3,cnn2"}
    one = Federation(make_config(task, FedGH(), **settings), task)
    begin = one.server.broadcast()["model"]
    assert set(begin) == {"head.weight", "head.bias"}
    for _ in range(2):
        before = tree.copy(one.server.broadcast())
        one.run_round()
        after = one.server.broadcast()
        assert not tree.equal(before, after)  # the header does train
        for name in one.clients:
            mine = one.store.get(name)["model"]
            assert mine
            assert not any(n.startswith("head.") for n in mine)


def test_the_means_are_of_a_clean_pass_after_training():
    task = tiny_task()
    fed = Federation(make_config(task, FedGH(), **SHORT), task)
    site = next(iter(fed.clients.values()))
    received, mine = fed.server.broadcast(), fed.store.get(site.name)
    network = fed.make_network()
    sent = train_client(fed.setup, network, site, received, mine, 0).message["prototypes"]
    mean, std = (torch.tensor(v)[:, None, None] for v in (task.augment.mean, task.augment.std))
    network.eval()
    with torch.no_grad():
        z = network((site.images.x / 255 - mean) / std).feature
    for k in range(4):
        assert torch.allclose(sent["mean"][k], z[site.images.y == k].mean(0), atol=1e-5)


def test_bytes_are_the_means_and_the_header():
    record = run(tiny_task(), FedGH(), **{**SHORT, "model": "cnn3,cnn2"}).rounds[1]
    assert record["bytes_up"] == 4 * 4 * (4 * 512 + 4)  # four clients, K × d means and K counts
    assert record["bytes_down"] == 4 * 4 * (4 * 512 + 4)  # the header: K × d weights, K biases


def test_accuracy_is_that_of_the_new_header():
    task = tiny_task()
    one = Federation(make_config(task, FedGH(), **SHORT), task)
    record = one.run_round()
    header, network = one.server.state["model"], one.make_network()
    right = []
    for name in one.clients:
        network.load_state_dict({**one.store.get(name)["model"], **header})
        network.eval()
        images = one.tests["left"]
        mean, std = (torch.tensor(v)[:, None, None] for v in (task.augment.mean, task.augment.std))
        with torch.no_grad():
            said = network((images.x / 255 - mean) / std).logits.argmax(1)
        right.append(100 * float((said == images.y).double().mean()))
    assert record["accuracy"]["left"] == pytest.approx(sum(right) / len(right), abs=1e-3)
