"""A loss with the weights' halves is what autocast computes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.engines.lanes.bf16 import Halves
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


def fresh(net: Network) -> Halves:
    halves = Halves(net)
    halves.refresh()
    return halves


def test_values_and_gradients_are_those_of_autocast() -> None:
    net = network()
    halves = fresh(net)
    trained = [p for p in net.parameters() if p.requires_grad]
    leaves = [p if (h := halves.of(p)) is None else h for p in trained]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain, cast = loss(net), halves.using(lambda: loss(net))
    assert torch.equal(plain, cast)
    theirs = torch.autograd.grad(plain, trained)
    ours = torch.autograd.grad(cast, leaves)
    for a, b, parameter in zip(theirs, ours, trained, strict=True):
        assert b.dtype == (torch.float32 if halves.of(parameter) is None else torch.bfloat16)
        assert torch.equal(a, b.float())


def test_inside_the_weights_are_halves_and_afterwards_the_old_ones() -> None:
    net = network()
    before = dict(net.named_parameters())
    kinds = fresh(net).using(lambda: {n: p.dtype for n, p in net.named_parameters()})
    norms = {n for n, kind in kinds.items() if kind == torch.float32}
    assert norms and all("weight" in n or "bias" in n for n in norms)
    assert kinds["head.weight"] == kinds["head.bias"] == torch.bfloat16
    assert all(p is before[n] for n, p in net.named_parameters())


def test_a_half_takes_a_gradient_where_its_weight_does() -> None:
    net = network()
    halves = fresh(net)
    value = halves.using(lambda: net.head.weight.sum() + net.head.bias.sum())
    assert not halves.halves["head.bias"].requires_grad
    head = halves.halves["head.weight"]
    other = next(h for n, h in halves.halves.items() if n.startswith("encoder"))
    grad, none = torch.autograd.grad(value, [head, other], allow_unused=True)
    assert none is None and torch.equal(grad, torch.ones_like(head))


def test_refreshed_halves_are_the_weights_casts() -> None:
    net = network()
    halves = fresh(net)
    with torch.no_grad():
        net.head.weight.mul_(3)
    assert not torch.equal(halves.halves["head.weight"], net.head.weight.bfloat16())
    halves.refresh()
    for name, weight in halves.weights.items():
        assert torch.equal(halves.halves[name], weight.bfloat16())
        assert halves.halves[name].stride() == weight.stride()


def test_a_weight_that_two_layers_have_in_common_has_one_half() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    halves = Halves(net)
    halves.refresh()
    half = halves.of(net[0].weight)
    assert half is not None
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain, cast = (use(lambda: net(torch.ones(2, 4)).sum()) for use in (_call, halves.using))
    (theirs,), (ours,) = (
        torch.autograd.grad(y, w) for y, w in ((plain, net[0].weight), (cast, half))
    )
    torch.testing.assert_close(ours.float(), theirs, rtol=0.02, atol=0.02)


def _call(function: Any) -> Any:
    return function()
