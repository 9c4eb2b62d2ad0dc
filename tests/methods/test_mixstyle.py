"""MixStyle: one stage by hand, where it works, and when it does nothing."""

import pytest
import torch
from tests.methods.helpers import numbers

from protofed import keys
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation
from protofed.method import Client, Sizes
from protofed.methods import MixStyle
from protofed.models import build
from protofed.styles import style_of
from protofed.testing.checks import SHORT, tiny_task


def a_client(method):
    network = build("cnn2", 4, 8, width=4, norm="batch").double()
    client = Client(method, network, Sizes.of(network, 4, 8), received={}, mine={})
    client.begin_step(17)
    return client


def drawn(*shape_and_draw, a=None):
    *shape, draw = shape_and_draw
    key = torch.tensor(17)
    if a is None:
        return keys.uniform(key, draw, tuple(shape))
    return keys.beta(key, draw, tuple(shape), a)


def test_a_stage_by_hand():
    method, x = MixStyle(p=1.0, alpha=0.4), numbers(1, 5, 4, 3, 3)
    y = method.between(a_client(method), "stage1", x)
    weight, partner = drawn(5, 2, a=0.4), drawn(5, 3).argsort().tolist()
    assert sorted(partner) == [0, 1, 2, 3, 4] and weight.min() > 0 and weight.max() < 1
    for i, j in enumerate(partner):
        for c in range(4):
            w, own, other = float(weight[i]), x[i, c], x[j, c]
            mean = w * own.mean() + (1 - w) * other.mean()
            deviation = w * own.std() + (1 - w) * other.std()
            by_hand = deviation * (own - own.mean()) / own.std() + mean
            torch.testing.assert_close(y[i, c], by_hand, rtol=1e-5, atol=1e-5)


def test_probability_is_of_a_batch():
    x = numbers(1, 5, 4, 3, 3)
    coin = float(drawn(1, 1))
    for p, changes in ((coin - 1e-4, False), (coin + 1e-4, True)):
        method = MixStyle(p=p)
        y = method.between(a_client(method), "stage1", x)
        assert torch.equal(x, y) is not changes


def test_no_gradient_through_the_statistics():
    method, x = MixStyle(p=1.0, alpha=2.0), numbers(1, 5, 4, 3, 3).requires_grad_()
    y = method.between(a_client(method), "stage1", x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    scale = (style_of(y)[:, 1] / style_of(x)[:, 1])[:, :, None, None]
    torch.testing.assert_close(grad, scale.expand_as(x).detach(), rtol=1e-4, atol=1e-4)


def test_a_batch_of_one_stays():
    method, x = MixStyle(p=1.0), numbers(1, 1, 4, 3, 3)
    torch.testing.assert_close(method.between(a_client(method), "stage1", x), x)


@pytest.mark.parametrize(
    ("model", "where"),
    [
        ("resnet10", ("stage1", "stage2", "stage3")),
        ("cnn3", ("stage1", "stage2")),
        ("cnn2", ("stage1",)),
    ],
)
def test_where_it_works(model, where):
    stages = tuple(build(model, 4, 8, width=4).stages)
    assert MixStyle().restyles(stages) == where
    assert MixStyle(stages="pixels, stage1,pixels").restyles(stages) == ("pixels", "stage1")
    assert MixStyle(p=0.0).restyles(stages) == ()


def test_a_model_without_stages_is_an_error():
    with pytest.raises(ProtofedError, match=r"no stages for the method.*encoder.stages"):
        MixStyle().restyles(("pixels",))
    task = tiny_task()
    with pytest.raises(ProtofedError, match=r"asks for stage 'stage7'.*are pixels, stage1, stage2"):
        Federation(make_config(task, MixStyle(stages="stage7"), **SHORT), task)
