"""A loss with bfloat16 copies of the weights is what autocast computes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.engines.lanes.bf16 import Bf16Weights
from protofed.models import Network, build


def network() -> Network:
    torch.manual_seed(0)
    net = build("cnn2", 5, 8, 4, "batch").to(memory_format=torch.channels_last)
    net.head.bias.requires_grad_(False)
    return net.eval()


def loss(net: Network) -> Tensor:
    torch.manual_seed(1)
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 5
    return F.cross_entropy(net(x).logits, y)


def fresh(net: nn.Module) -> Bf16Weights:
    bf16 = Bf16Weights(net)
    bf16.refresh()
    return bf16


def test_values_and_gradients_are_those_of_autocast() -> None:
    net = network()
    bf16 = fresh(net)
    trained = [p for p in net.parameters() if p.requires_grad]
    leaves = [p if (c := bf16.copy_of(p)) is None else c for p in trained]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain, cast = loss(net), bf16.call(lambda: loss(net))
    assert torch.equal(plain, cast)
    theirs = torch.autograd.grad(plain, trained)
    ours = torch.autograd.grad(cast, leaves)
    for a, b, parameter in zip(theirs, ours, trained, strict=True):
        assert b.dtype == (torch.float32 if bf16.copy_of(parameter) is None else torch.bfloat16)
        assert torch.equal(a, b.float())


def test_copies_replace_the_weights_during_the_call_only() -> None:
    net = network()
    before = dict(net.named_parameters())
    kinds = fresh(net).call(lambda: {n: p.dtype for n, p in net.named_parameters()})
    norms = {n for n, kind in kinds.items() if kind == torch.float32}
    assert norms and all("weight" in n or "bias" in n for n in norms)
    assert kinds["head.weight"] == kinds["head.bias"] == torch.bfloat16
    assert all(p is before[n] for n, p in net.named_parameters())


def test_a_copy_requires_a_gradient_if_its_weight_does() -> None:
    net = network()
    bf16 = fresh(net)
    value = bf16.call(lambda: net.head.weight.sum() + net.head.bias.sum())
    assert not bf16.copies["head.bias"].requires_grad
    head = bf16.copies["head.weight"]
    other = next(c for n, c in bf16.copies.items() if n.startswith("encoder"))
    grad, none = torch.autograd.grad(value, [head, other], allow_unused=True)
    assert none is None and torch.equal(grad, torch.ones_like(head))


def test_refreshed_copies_are_the_weights_cast() -> None:
    net = network()
    bf16 = fresh(net)
    with torch.no_grad():
        net.head.weight.mul_(3)
    assert not torch.equal(bf16.copies["head.weight"], net.head.weight.bfloat16())
    bf16.refresh()
    for name, weight in bf16.weights.items():
        assert torch.equal(bf16.copies[name], weight.bfloat16())
        assert bf16.copies[name].stride() == weight.stride()


def test_a_weight_shared_by_two_layers_has_one_copy() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    bf16 = fresh(net)
    copy = bf16.copy_of(net[0].weight)
    assert copy is not None
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain, cast = (use(lambda: net(torch.ones(2, 4)).sum()) for use in (_call, bf16.call))
    (theirs,), (ours,) = (
        torch.autograd.grad(y, w) for y, w in ((plain, net[0].weight), (cast, copy))
    )
    torch.testing.assert_close(ours.float(), theirs, rtol=0.02, atol=0.02)


def _call(function: Any) -> Any:
    return function()
