"""DSU: one stage by hand, where it works, and when it does nothing."""

import torch
from tests.methods.helpers import numbers

from protofed import keys
from protofed.method import Client, Sizes
from protofed.methods import DSU
from protofed.models import build


def a_client(method):
    network = build("cnn2", 4, 8, width=4, norm="batch").double()
    client = Client(method, network, Sizes.of(network, 4, 8), received={}, mine={})
    client.begin_step(17)
    return client


def test_a_stage_by_hand():
    method, x = DSU(p=1.0), numbers(1, 5, 4, 3, 3)
    y = method.between(a_client(method), "stage1", x)
    noise = keys.normal(torch.tensor(17), 2, (5, 2, 4))
    for c in range(4):
        means = torch.stack([x[i, c].mean() for i in range(5)])
        deviations = torch.stack([x[i, c].std() for i in range(5)])
        for i in range(5):
            mean = means[i] + noise[i, 0, c] * means.std()
            deviation = deviations[i] + noise[i, 1, c] * deviations.std()
            by_hand = deviation * (x[i, c] - means[i]) / deviations[i] + mean
            torch.testing.assert_close(y[i, c], by_hand, rtol=1e-4, atol=1e-4)


def test_probability_is_of_a_batch():
    x = numbers(1, 5, 4, 3, 3)
    coin = float(keys.uniform(torch.tensor(17), 1, (1,)))
    for p, changes in ((coin - 1e-4, False), (coin + 1e-4, True)):
        method = DSU(p=p)
        assert torch.equal(x, method.between(a_client(method), "stage1", x)) is not changes


def test_a_batch_of_one_stays():
    method, x = DSU(p=1.0), numbers(1, 1, 4, 3, 3)
    assert torch.equal(method.between(a_client(method), "stage1", x), x)


def test_where_it_works():
    stages = tuple(build("resnet10", 4, 8, width=4).stages)
    assert DSU().restyles(stages) == ("stem", "stage1", "stage2", "stage3", "stage4")
    assert DSU(stages="pixels").restyles(stages) == ("pixels",)
    assert DSU(p=0.0).restyles(stages) == ()
