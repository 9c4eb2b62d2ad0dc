"""FedFA: one stage by hand, the running styles, the server's variance."""

import pytest
import torch
from tests.methods.helpers import numbers

from protofed import keys
from protofed.method import Client, ServerView, Sizes, Update
from protofed.methods import FedFA
from protofed.models import build


def a_network(method):
    backbone = build("cnn2", 4, 8, width=4, norm="batch")
    return method.network(backbone, Sizes.of(backbone, 4, 8)).double()


def a_client(method, variance):
    network = a_network(method)
    sizes = Sizes.of(network, 4, 8)
    client = Client(method, network, sizes, received={"variance": variance}, mine={})
    client.begin_step(17)
    return client


def test_a_stage_by_hand():
    method, x = FedFA(p=1.0), numbers(1, 5, 4, 3, 3)
    S = numbers(2, 2, 4).abs()
    client = a_client(method, {"stage1": S})
    y = method.between(client, "stage1", x)
    noise = keys.normal(torch.tensor(17), 2, (5, 2, 4))
    g = S / (1 + S)  # is 1/(1 + 1/S)
    means, deviations = x.mean((2, 3)), x.std((2, 3))
    for c in range(4):
        of_mean = 4 * g[0, c] / g[0].sum() + 1
        of_deviation = 4 * g[1, c] / g[1].sum() + 1
        for i in range(5):
            mean = means[i, c] + noise[i, 0, c] * (of_mean * means[:, c].var()).sqrt()
            width = (of_deviation * deviations[:, c].var()).sqrt()
            deviation = deviations[i, c] + noise[i, 1, c] * width
            by_hand = deviation * (x[i, c] - means[i, c]) / deviations[i, c] + mean
            torch.testing.assert_close(y[i, c], by_hand, rtol=1e-4, atol=1e-4)
    running = client.network.running.stage1
    torch.testing.assert_close(running[0], 0.01 * means.mean(0))
    torch.testing.assert_close(running[1], 0.99 + 0.01 * deviations.mean(0), rtol=1e-5, atol=1e-5)
    first = running.clone()
    client.begin_step(17)
    method.between(client, "stage1", x)
    torch.testing.assert_close(
        client.network.running.stage1[0], 0.99 * first[0] + 0.01 * means.mean(0)
    )


def test_without_noise_nothing_moves():
    x = numbers(1, 5, 4, 3, 3)
    coin = float(keys.uniform(torch.tensor(17), 1, (1,)))
    for batch, p in ((x, coin - 1e-4), (x[:1], 1.0)):
        client = a_client(FedFA(p=p), {"stage1": torch.ones(2, 4)})
        before = client.network.running.stage1.clone()
        assert torch.equal(client.method.between(client, "stage1", batch), batch)
        assert torch.equal(client.network.running.stage1, before)


class Sent:
    """Messages that hold a model's running styles alone."""

    def __init__(self, running):
        self.running = running

    def get(self, name, slot):
        return {"running.stage1": self.running[name], "head.bias": torch.zeros(3)}


@pytest.mark.parametrize("server_var", ["per_channel", "scalar"])
def test_the_servers_variance(server_var):
    method, running = FedFA(server_var=server_var), numbers(3, 3, 2, 4)
    sent = Sent(dict(zip("abc", running, strict=True)))
    updates = [Update(name, 1, 1, 0.1, sent) for name in "abc"]
    state = {"model": {}, "variance": {"stage1": torch.ones(2, 4)}}
    server = ServerView(state, 0, 2, tuple("abc"), Sizes(4, 512, 8))
    found = method.aggregate(server, {}, updates)["variance"]["stage1"]
    for row in range(2):
        for c in range(4):
            of = running[:, row, c] if server_var == "per_channel" else running[:, row]
            torch.testing.assert_close(found[row, c], of.var())
    alone = method.aggregate(server, {}, updates[:1])["variance"]["stage1"]
    assert torch.equal(alone, torch.ones(2, 4))


def test_its_buffers_travel_and_updates_count_the_same():
    method = FedFA()
    assert method.restyles(("pixels", "stage1", "stage2")) == ("stage1", "stage2")
    network = a_network(method)
    assert network.running.stage1.tolist() == [[0.0] * 4, [1.0] * 4]
    assert {n for n in network.state_dict() if n.startswith("running")} == {
        "running.stage1",
        "running.stage2",
    }
    assert method.weighting == "uniform"
