"""Weights cast together give what autocast gives one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.engines.casts import in_bfloat16
from protofed.models import Network, build


def network() -> Network:
    torch.manual_seed(0)
    net = build("resnet10", 5, 8, 8).to(memory_format=torch.channels_last)
    net.head.bias.requires_grad_(False)
    return net.eval()


def loss(net: Network) -> Tensor:
    torch.manual_seed(1)
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 5
    return F.cross_entropy(net(x).logits, y)


def test_values_and_gradients_are_those_of_autocast() -> None:
    net = network()
    trained = [p for p in net.parameters() if p.requires_grad]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain, cast = loss(net), in_bfloat16(net, lambda: loss(net))
    assert torch.equal(plain, cast)
    grads = [torch.autograd.grad(value, trained) for value in (plain, cast)]
    for a, b, parameter in zip(*grads, trained, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert b.shape == parameter.shape
        assert torch.equal(a, b)


def test_inside_the_weights_are_bfloat16_and_afterwards_the_old_ones() -> None:
    net = network()
    before = dict(net.named_parameters())
    kinds = in_bfloat16(net, lambda: {n: p.dtype for n, p in net.named_parameters()})
    norms = {n for n, kind in kinds.items() if kind == torch.float32}
    assert norms and all("weight" in n or "bias" in n for n in norms)
    assert kinds["head.weight"] == kinds["head.bias"] == torch.bfloat16
    assert all(p is before[n] for n, p in net.named_parameters())


def test_a_weight_without_part_in_the_loss_has_no_gradient() -> None:
    net = network()
    value = in_bfloat16(net, lambda: net.head.weight.sum())
    head, stem = net.head.weight, next(net.encoder.parameters())
    grad, none = torch.autograd.grad(value, [head, stem], allow_unused=True)
    assert none is None and torch.equal(grad, torch.ones_like(head))
