from __future__ import annotations

import pytest
import torch
from torch import nn

from protofed.errors import ProtofedError
from protofed.models import MODELS, Network, Output, build, entries


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def block(a: int, b: int, shortcut: bool) -> int:
    """Parameters of a ResidualBlock: two 3x3 convolutions and a 1x1, each with a norm's 2b."""
    return 9 * a * b + 2 * b + 9 * b * b + 2 * b + (a * b + 2 * b if shortcut else 0)


STEM = 9 * 3 * 64 + 2 * 64
FIRST = block(64, 64, False) + block(64, 128, True) + block(128, 256, True) + block(256, 512, True)
SECOND = sum(block(w, w, False) for w in (64, 128, 256, 512))
HEAD = 512 * 10 + 10


def test_resnet_parameter_counts() -> None:
    assert count(build("resnet10", 10, 32)) == STEM + FIRST + HEAD
    assert count(build("resnet18", 10, 32)) == STEM + FIRST + SECOND + HEAD
    assert round((STEM + FIRST + HEAD) / 1e6, 2) == 4.90
    assert round((STEM + FIRST + SECOND + HEAD) / 1e6, 2) == 11.17
    # A norm of either kind has as many parameters; without one each convolution gets a bias.
    assert count(build("resnet10", 10, 32, norm="group")) == STEM + FIRST + HEAD
    channels = 64 + 2 * (64 + 128 + 256 + 512) + (128 + 256 + 512)
    assert count(build("resnet10", 10, 32, norm="none")) == STEM + FIRST + HEAD - channels


def test_cnn_parameter_counts() -> None:
    convs = (9 * 3 * 32 + 32) + (9 * 32 * 64 + 64)
    third = 9 * 64 * 128 + 128
    head = 512 * 7 + 7
    assert count(build("cnn2", 7, 32)) == convs + (4096 * 512 + 512) + head
    assert count(build("cnn3", 7, 32)) == convs + third + (2048 * 512 + 512) + head
    # With a norm: its 2 per channel instead of the bias's 1.
    more = 32 + 64 + 128
    for norm in ("batch", "group"):
        expected = convs + third + more + (2048 * 512 + 512) + head
        assert count(build("cnn3", 7, 32, norm=norm)) == expected


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_feature_is_512_and_non_negative(name: str, norm: str, size: int) -> None:
    torch.manual_seed(0)
    # a bottleneck has four times the features: they need a quarter of the width to be as many
    network = build(name, 5, size, width=16 if name == "resnet50_imagenet" else None, norm=norm)
    with torch.no_grad():
        out = network(torch.randn(2, 3, size, size))
    assert isinstance(out, Output)
    assert out.feature.shape == (2, 512) and network.features == 512
    assert out.logits.shape == (2, 5)
    assert (out.feature >= 0).all() and out.feature.std() > 0
    torch.testing.assert_close(out.logits, out.feature @ network.head.weight.T + network.head.bias)


def test_own_width_and_norm() -> None:
    def types(network: Network) -> set[type]:
        return {type(m) for m in network.modules()}

    assert nn.BatchNorm2d in types(build("resnet10", 10, 32))
    assert types(build("cnn3", 10, 32)).isdisjoint({nn.BatchNorm2d, nn.GroupNorm})
    for name, width in (("resnet10", 64), ("resnet18", 64), ("cnn3", 32), ("cnn2", 32)):
        first = next(m for m in build(name, 10, 32).modules() if isinstance(m, nn.Conv2d))
        assert first.out_channels == width


def test_width() -> None:
    network = build("resnet10", 3, 32, width=4)
    assert network.features == 32 and network.head.in_features == 32
    assert network(torch.randn(2, 3, 32, 32)).feature.shape == (2, 32)
    network = build("cnn3", 3, 32, width=6)
    assert network.features == 512
    assert network(torch.randn(2, 3, 32, 32)).feature.shape == (2, 512)
    convs = [m.out_channels for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert convs == [6, 12, 24]


def test_groups_divide_the_channels() -> None:
    network = build("cnn3", 3, 32, width=6, norm="group")
    groups = [m.num_groups for m in network.modules() if isinstance(m, nn.GroupNorm)]
    assert groups == [2, 4, 8]


def test_resnet_keeps_the_resolution_until_the_second_stage() -> None:
    sizes: list[int] = []
    network = build("resnet10", 3, 32, width=4)
    for module in network.modules():
        if type(module).__name__ == "ResidualBlock":
            module.register_forward_hook(lambda m, i, o: sizes.append(o.shape[-1]))
    network(torch.randn(2, 3, 32, 32))
    assert sizes == [32, 16, 8, 4]


def test_resnet_without_its_convolutions_is_its_shortcuts() -> None:
    # With the body's last norm set to nothing a block is ReLU of its shortcut: x itself here.
    network = build("resnet10", 3, 32, width=4)
    first = next(m for m in network.modules() if type(m).__name__ == "ResidualBlock")
    assert isinstance(first.body, nn.Sequential)
    nn.init.zeros_(first.body[-1].weight)
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(first(x), x.clamp(min=0))


@pytest.mark.parametrize("name,norms", [("resnet10", 12), ("resnet18", 20)])
def test_entries_find_every_batch_norm(name: str, norms: int) -> None:
    # resnet10: stem 1, two in each of 4 blocks, 3 shortcuts; resnet18: 4 blocks more.
    network = build(name, 10, 32, width=4)
    kinds = entries(network)
    assert list(kinds) == list(network.state_dict())
    # weight, bias, running mean, running variance, number of batches
    assert sum(k == "bn" for k in kinds.values()) == 5 * norms
    assert "buffer" not in kinds.values()
    shortcuts = {n for n, k in kinds.items() if ".shortcut." in n and k == "bn"}
    assert len(shortcuts) == 5 * 3
    for key, tensor in network.state_dict().items():
        assert (kinds[key] == "weight") == (tensor.ndim > 1 or key == "head.bias"), key


def test_entries_without_batch_norm_and_with_other_buffers() -> None:
    network = build("resnet10", 10, 32, width=4, norm="group")
    network.register_buffer("seen", torch.zeros(1))
    kinds = entries(network)
    assert kinds.pop("seen") == "buffer"
    assert set(kinds.values()) == {"weight"}
    assert entries(nn.Sequential(nn.BatchNorm1d(2)))["0.running_mean"] == "bn"


def test_errors() -> None:
    with pytest.raises(ProtofedError, match=r"unknown model 'resnet11'.*resnet10"):
        build("resnet11", 10, 32)
    with pytest.raises(ProtofedError, match=r"unknown norm 'groups'.*group"):
        build("cnn3", 10, 32, norm="groups")
    with pytest.raises(ProtofedError, match="too small"):
        build("cnn2", 10, 4)
    with pytest.raises(ProtofedError, match="multiple of 8"):
        build("cnn3", 10, 20)
    assert build("cnn2", 10, 20).features == 512
    with pytest.raises(ProtofedError, match="width is 0"):
        build("cnn3", 10, 32, width=0)
    with pytest.raises(ProtofedError, match="classes is 0"):
        build("cnn3", 0, 32)


STAGES = {
    "resnet10": {"pixels": 3, "stem": 8, "stage1": 8, "stage2": 16, "stage3": 32, "stage4": 64},
    "resnet18": {"pixels": 3, "stem": 8, "stage1": 8, "stage2": 16, "stage3": 32, "stage4": 64},
    "cnn3": {"pixels": 3, "stage1": 8, "stage2": 16, "stage3": 32},
    "cnn2": {"pixels": 3, "stage1": 8, "stage2": 16},
    "resnet50_imagenet": {
        "pixels": 3,
        "stem": 8,
        "stage1": 32,
        "stage2": 64,
        "stage3": 128,
        "stage4": 256,
    },
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_in_their_order_with_their_channels(name: str) -> None:
    network = build(name, 5, 32, width=8, norm="batch").eval()
    x = torch.randn(2, 3, 32, 32)
    seen: dict[str, torch.Size] = {}

    def look(stage: str, x: torch.Tensor) -> torch.Tensor:
        seen[stage] = x.shape
        return x

    plain = network(x).logits
    with network.between(network.stages, look):
        assert torch.equal(network(x).logits, plain)
    assert {n: s[1] for n, s in seen.items()} == STAGES[name]
    assert [*seen] == [*network.stages] and all(len(s) == 4 for s in seen.values())
    seen.clear()
    network(x)
    assert not seen
    # those of a ResNet's stages halve the image; the last block's output is the stage's
    if name == "resnet18":
        blocks = network.encoder[:5]  # type: ignore[index]
        with network.between(["stage1"], lambda stage, x: seen.update(x=x) or x):  # type: ignore[func-returns-value, arg-type]
            network(x)
        assert torch.equal(blocks(x), seen["x"])


def test_what_a_stage_becomes_is_what_the_next_one_gets() -> None:
    network = build("cnn2", 5, 8, width=4, norm="batch").eval()
    x = torch.randn(2, 3, 8, 8)
    with network.between(["pixels"], lambda stage, x: 2 * x):
        pixels = network(x)
    assert torch.equal(pixels.feature, network(2 * x).feature)
    with network.between(["stage1", "stage2"], lambda stage, x: x * (stage == "stage1")):
        later = network(x)
    zeros = torch.zeros(2, 8 * 2 * 2)
    assert torch.equal(later.feature, network.encoder[-2:](zeros))  # type: ignore[index]
