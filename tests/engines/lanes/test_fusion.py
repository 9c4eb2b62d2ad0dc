"""Networks with replaced forward passes against the same networks without.

Needs Triton, and a GPU or ``TRITON_INTERPRET=1`` (which runs kernels on a CPU, slowly).
"""

from __future__ import annotations

import copy
import os
import statistics
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from protofed.engines.lanes import fusion as module  # noqa: E402
from protofed.errors import NoSecondDerivative  # noqa: E402
from protofed.models import build  # noqa: E402
from protofed.models.network import Network, Stage  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("training", [True, False])
def test_a_whole_network(training: bool) -> None:
    torch.manual_seed(0)
    network = build("resnet10", 5, 8, 8).double().to(DEVICE, memory_format=torch.channels_last)
    twin = copy.deepcopy(network)
    module.fuse(twin)
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64, device=DEVICE)
    assert network.state_dict().keys() == twin.state_dict().keys()
    grads = []
    for net in (network, twin):
        net.train()
        net(x)  # updates the running statistics
        net.train(training)
        out = net(x)
        loss = out.logits.square().sum() + out.feature.sum()
        grads.append([out.logits, *torch.autograd.grad(loss, list(net.parameters()))])
    for ours, theirs in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    for ours, theirs in zip(twin.buffers(), network.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_first_convolution_in_bfloat16() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 16, 3, 2, padding=1).to(DEVICE, torch.bfloat16)
    x = torch.randn(4, 3, 9, 9, device=DEVICE).bfloat16()
    ours, theirs = module._few_channels_conv(conv, x), conv(x)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    weight = torch.randn_like(theirs)
    grads = [torch.autograd.grad((y * weight).sum(), conv.weight)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=0.05, atol=0.1)


@pytest.mark.parametrize(("stride", "side"), [((2, 2), 8), ((3, 2), 7)])
def test_a_strided_convolution_of_single_pixels(stride: tuple[int, int], side: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 5, 1, stride).double().to(DEVICE, memory_format=torch.channels_last)
    found = []
    for way in (conv, partial(module._strided_1x1_conv, conv)):
        x = torch.linspace(-1, 2, 3 * 8 * side * side, dtype=torch.float64, device=DEVICE)
        x = x.reshape(3, 8, side, side).requires_grad_()
        y = way(x)
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        second = torch.autograd.grad(dx.square().sum(), [x, conv.weight], retain_graph=True)
        grads = torch.autograd.grad(y.square().sum(), [x, conv.weight, conv.bias])
        of_one = torch.func.grad(lambda x, way=way: way(x[None]).square().sum())
        found.append([y, dx, *second, *grads, torch.func.vmap(of_one)(x.detach())])
    for ours, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_strided_convolutions_of_a_resnet_are_subsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build("resnet10", 5, 8, 8).to(DEVICE, memory_format=torch.channels_last)
    module.fuse(network)
    subsampled: list[tuple[int, ...]] = []
    inner = module._Subsample.apply
    monkeypatch.setattr(
        module._Subsample,
        "apply",
        lambda x, *s: (subsampled.append(tuple(x.shape)), inner(x, *s))[1],
    )
    network(torch.randn(2, 3, 8, 8, device=DEVICE))
    assert subsampled == [(2, 8, 8, 8), (2, 16, 4, 4), (2, 32, 2, 2)]


class Louder(nn.BatchNorm2d):
    """A module of a method's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def network_of_other_modules() -> nn.Sequential:
    torch.manual_seed(0)
    relu = nn.ReLU()
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, dilation=2, padding=2),
        nn.BatchNorm2d(6),
        relu,
        nn.Conv2d(6, 6, 3, groups=3, padding=1, padding_mode="circular"),
        relu,  # used again, and not after a norm
        nn.Conv2d(6, 4, 1),
        Louder(4),
        nn.ReLU(),
    ).to(DEVICE)


@pytest.mark.parametrize("bf16", [False, True])
def test_other_modules_are_left_alone(bf16: bool) -> None:
    """A method may bring modules of its own."""
    network, twin = network_of_other_modules(), network_of_other_modules()
    module.fuse(twin)
    x = torch.randn(4, 3, 6, 6, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
        ours, theirs = twin(x), network(x)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05 if bf16 else 1e-5)


def blocks() -> list[nn.Module]:
    """One with an identity as shortcut, one with stride 2: the only ones of these ResNets."""
    torch.manual_seed(0)
    network = build("resnet10", 5, 8, 64).to(DEVICE, memory_format=torch.channels_last)
    return [m for m in network.modules() if type(m) is module.ResidualBlock][:2]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("images", [1, 3, 9])  # 9: BatchNorm's sums come in several parts
def test_a_fused_block(which: int, images: int) -> None:
    """On a CPU in float32: the interpreter has no bfloat16. Else as near as PyTorch in bfloat16."""
    ratios: dict[str, list[float]] = {}
    for seed in range(1 if INTERPRETED else 15):
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(images, 64, 8, 8, generator=random).to(DEVICE)
        x = x.contiguous(memory_format=torch.channels_last)
        ours, theirs, exact = (blocks()[which] for _ in range(3))
        with torch.autocast(DEVICE, torch.bfloat16, enabled=not INTERPRETED):
            rounded = by_pytorch(theirs, x)
        found, wanted = by_kernels(ours, x), by_pytorch(exact.double(), x.double())
        for name, value in wanted.items():
            apart, allowed = (float((t[name] - value).double().norm()) for t in (found, rounded))
            ratios.setdefault(name, []).append(
                apart / (1.5 * allowed + 1e-5 * float(value.double().norm()))
            )
    # the median: with few images, a single ReLU that rounds the other way decides
    assert all(statistics.median(each) <= 1 for each in ratios.values()), ratios


def by_pytorch(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The block's output, buffers and all gradients, with a weighted sum as loss."""
    x = x.detach().requires_grad_()
    y = block(x)
    weight = torch.linspace(-1, 1, y.numel(), device=DEVICE).reshape(y.shape)
    named = {"x": x, **dict(block.named_parameters())}
    grads = torch.autograd.grad((y * weight).sum(), list(named.values()))
    return {"y": y.detach(), **dict(zip(named, grads, strict=True)), **dict(block.named_buffers())}


def by_kernels(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The same with the kernels."""
    layers = module._layers(block)
    assert layers is not None
    x = x.detach().to(DTYPE).requires_grad_()
    parameters = [p for conv, norm in layers for p in (conv.weight, norm.weight, norm.bias)]
    inputs = [x, *(rounded(p) for p in parameters)]
    y = module._FusedBlock.apply(x, layers, *inputs[1:])
    names = {id(p): name for name, p in block.named_parameters()}
    weight = torch.linspace(-1, 1, y.numel(), device=DEVICE).reshape(y.shape)
    grads = torch.autograd.grad((y * weight).sum(), inputs)
    named = dict(zip(["x", *(names[id(p)] for p in parameters)], grads, strict=True))
    return {"y": y.detach(), **named, **dict(block.named_buffers())}


DTYPE = torch.float32 if INTERPRETED else torch.bfloat16


def rounded(parameter: Tensor) -> Tensor:
    """A convolution's weight as the kernels take it; a norm's stays as it is."""
    kind = DTYPE if parameter.dim() == 4 else parameter.dtype
    return parameter.detach().to(kind).requires_grad_()


def test_a_second_derivative_of_a_block_is_refused() -> None:
    block = blocks()[0]
    layers = module._layers(block)
    assert layers is not None
    x = torch.randn(1, 64, 8, 8, device=DEVICE, dtype=DTYPE, requires_grad=True)
    x_last = x.contiguous(memory_format=torch.channels_last)
    parameters = [rounded(p) for c, n in layers for p in (c.weight, n.weight, n.bias)]
    y = module._FusedBlock.apply(x_last, layers, *parameters)
    with pytest.raises(NoSecondDerivative):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("change", "fused"),
    [
        (lambda b: b, True),
        (lambda b: b.eval(), False),
        (lambda b: b.body[1].eval(), False),
        (lambda b: b.body.__setitem__(2, nn.GELU()), False),
        (lambda b: b.body.__setitem__(1, nn.GroupNorm(8, 64)), False),
        (lambda b: setattr(b.body[0], "groups", 2), False),
        (lambda b: setattr(b.body[3], "padding_mode", "circular"), False),
        (lambda b: setattr(b, "shortcut", nn.ReLU()), False),
    ],
)
def test_which_blocks_are_fused(
    change: object, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the kernels compute; anything else has PyTorch's own layers."""
    monkeypatch.setattr(module.convolution, "_is_hopper", lambda device: True)
    block = blocks()[0]
    for conv in (block.body[0], block.body[3]):
        conv.to(torch.bfloat16)
    change(block)
    layers = module._layers(block)
    x = torch.empty(2, 64, 8, 8)
    assert (layers is not None and module._can_fuse(layers, x)) == fused


@pytest.mark.parametrize(
    ("shape", "channels", "dtype", "fused"),
    [
        ((2, 64, 8, 8), 64, torch.bfloat16, True),
        ((2, 64, 8, 8), 64, torch.float32, False),
        ((2, 64, 6, 6), 64, torch.bfloat16, False),
        ((2, 64, 128, 128), 64, torch.bfloat16, False),
        ((2, 32, 8, 8), 32, torch.bfloat16, False),
    ],
)
def test_which_sizes_are_fused(
    shape: tuple[int, ...],
    channels: int,
    dtype: torch.dtype,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.convolution, "_is_hopper", lambda device: True)
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False, dtype=dtype)
    conv = conv.to(memory_format=torch.channels_last)
    layers = [(conv, nn.BatchNorm2d(channels))] * 2
    assert module._can_fuse(layers, torch.empty(shape)) == fused


def stem(inputs: int = 3, outputs: int = 16, last: bool = True) -> nn.Sequential:
    """A convolution of images, BatchNorm and ReLU, with the convolution as it is in training."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )
    nn.init.uniform_(layers[1].weight, 0.5, 1.5)
    nn.init.normal_(layers[1].bias)
    layers[0].to(DTYPE)
    return layers.to(DEVICE, memory_format=torch.channels_last if last else None)


@pytest.fixture
def fused_stem(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The images that go through the fused stem; in the interpreter, in float32."""
    images: list[Tensor] = []
    inner = module._FusedStem.apply
    monkeypatch.setattr(
        module._FusedStem, "apply", lambda x, *more: (images.append(x), inner(x, *more))[1]
    )
    if INTERPRETED:
        monkeypatch.setattr(module.stem, "supports", lambda conv, x: True)
    return images


def of_stem(layers: nn.Sequential, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The output, all gradients and running statistics of a step."""
    y = layers(x)
    named = dict(layers.named_parameters())
    grads = torch.autograd.grad(y, list(named.values()), dy)
    return {"y": y.detach(), **dict(zip(named, grads, strict=True)), **dict(layers.named_buffers())}


def exactly(layers: nn.Sequential, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The same in float64, of numbers that are rounded where the kernels round them."""
    twin = copy.deepcopy(layers).double()
    y = F.conv2d(x.to(DTYPE).double(), twin[0].weight, padding=1)
    y = twin[1](y + (y.to(DTYPE) - y).detach()).relu()
    named = dict(twin.named_parameters())
    grads = torch.autograd.grad(y, list(named.values()), dy.double())
    return {"y": y.detach(), **dict(zip(named, grads, strict=True)), **dict(twin.named_buffers())}


# images, input and output channels, side
STEMS = [
    (1, 3, 16, 4),
    (3, 3, 64, 8),
    (32, 3, 16, 4),
    (1, 1, 32, 16),
    (3, 4, 16, 8),
    (1, 3, 16, 32),
]
LARGE_STEMS = [
    *((n, 3, 64, side) for n in (1, 3, 32, 33, 64) for side in (4, 8, 16, 32)),
    *((32, inputs, outputs, 32) for inputs in (1, 2, 4) for outputs in (16, 32, 128, 192)),
    (5, 3, 64, 64),
]


@pytest.mark.parametrize("shape", STEMS if INTERPRETED else [*STEMS, *LARGE_STEMS])
@pytest.mark.parametrize("last", [True, False])
def test_a_fused_stem(
    shape: tuple[int, int, int, int], last: bool, fused_stem: list[Tensor]
) -> None:
    n, inputs, outputs, side = shape
    layers = stem(inputs, outputs, last)
    before = copy.deepcopy(layers)
    module.fuse(layers)
    x = torch.randn(n, inputs, side, side, device=DEVICE)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    dy = torch.randn(n, outputs, side, side, device=DEVICE).to(DTYPE)
    found, wanted = of_stem(layers, x, dy), exactly(before, x, dy)
    assert len(fused_stem) == 1
    assert found["y"].dtype == DTYPE
    assert found["y"].is_contiguous(memory_format=torch.channels_last)
    assert found["0.weight"].dtype == DTYPE
    assert found["0.weight"].stride() == layers[0].weight.stride()
    for name, value in wanted.items():
        allowed = 1e-5 if INTERPRETED else 0.006 if found[name].dtype == DTYPE else 0.003
        apart = (found[name].double() - value).norm()
        assert apart <= allowed * value.double().norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
@pytest.mark.parametrize("layout", ["first", "last", "part", "expanded"])
def test_images_of_a_fused_stem_are_read_as_they_are(
    dtype: torch.dtype, layout: str, fused_stem: list[Tensor]
) -> None:
    """By their type and strides; and with the same bits as result in every run."""
    x = torch.randn(3, 3, 8, 8, device=DEVICE).to(DTYPE)
    if layout == "expanded":
        x = x[:, :1].expand(3, 3, 8, 8)
    plain = x.contiguous()
    x = x.to(dtype)
    if layout == "last":
        x = x.contiguous(memory_format=torch.channels_last)
    if layout == "part":
        x = torch.cat([x, x + 1], 3).contiguous(memory_format=torch.channels_last)[..., :8]
    dy = torch.randn(3, 16, 8, 8, device=DEVICE).to(DTYPE)
    found = []
    for images in (plain, x, x):
        layers = stem()
        module.fuse(layers)
        found.append(of_stem(layers, images, dy))
    assert len(fused_stem) == 3
    for name, value in found[0].items():
        first, again = (f[name] for f in found[1:])
        assert (first.double() - value.double()).norm() <= 0.001 * value.double().norm(), name
        assert torch.equal(first, again), name


def test_nan_stays_nan_in_a_fused_stem(fused_stem: list[Tensor]) -> None:
    x = torch.randn(2, 3, 8, 8, device=DEVICE)
    x[1, 2, 0, 3] = torch.nan
    y, parts = module.stem.convolve(x, stem()[0].weight)
    at = torch.zeros(2, 8, 8, dtype=torch.bool, device=DEVICE)
    at[1, :2, 2:5] = True
    assert torch.equal(y.isnan(), at[:, None].expand_as(y))
    assert parts.isnan().all()
    layers = stem()
    module.fuse(layers)
    found = of_stem(layers, x, torch.ones_like(y))
    assert len(fused_stem) == 1
    assert all(found[name].isnan().all() for name in ("y", "0.weight", "1.running_mean"))


def test_stages_around_a_fused_stem(fused_stem: list[Tensor]) -> None:
    """A method's ``between`` sees and changes the pixels, and the features after ReLU."""
    encoder = nn.Sequential(*stem(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = Network(encoder, 16, 5, {"stem": Stage("2", 16)}).to(DEVICE)
    module.fuse(network)
    seen = {}

    def between(stage: str, x: Tensor) -> Tensor:
        seen[stage] = x.detach()
        return 2 * x

    x = torch.randn(4, 3, 8, 8, device=DEVICE)
    with network.between(("pixels", "stem"), between):
        feature = network.encoder(x)
    torch.testing.assert_close(fused_stem[0], 2 * x)
    assert seen["stem"].shape == (4, 16, 8, 8) and bool((seen["stem"] >= 0).all())
    torch.testing.assert_close(feature, 2 * seen["stem"].mean((2, 3)), rtol=0.01, atol=1e-5)


def test_a_fused_stem_trains_what_is_trainable(fused_stem: list[Tensor]) -> None:
    layers = stem()
    module.fuse(layers)
    layers[0].weight.requires_grad_(False)
    layers(torch.randn(2, 3, 8, 8, device=DEVICE)).square().sum().backward()
    assert len(fused_stem) == 1
    assert layers[0].weight.grad is None and layers[1].weight.grad is not None
    with torch.no_grad():
        assert not layers(torch.randn(2, 3, 8, 8, device=DEVICE)).requires_grad


def test_a_second_derivative_of_a_stem_is_refused(fused_stem: list[Tensor]) -> None:
    layers = stem()
    module.fuse(layers)
    y = layers(torch.randn(2, 3, 8, 8, device=DEVICE))
    with pytest.raises(NoSecondDerivative):
        torch.autograd.grad(y.square().sum(), layers[0].weight, create_graph=True)


def hooked(layers: nn.Sequential) -> None:
    layers[0].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "fused"),
    [
        (lambda s: None, True),
        (lambda s: s.eval(), False),
        (lambda s: s[1].eval(), False),
        (lambda s: setattr(s[1], "momentum", None), False),
        (lambda s: s.__setitem__(1, nn.GroupNorm(8, 16).to(DEVICE)), False),
        (lambda s: s.__setitem__(2, nn.GELU()), False),
        (hooked, False),
    ],
)
def test_which_stems_are_fused(change: object, fused: bool, fused_stem: list[Tensor]) -> None:
    """In evaluation, with hooks in between or other layers, everything is as it was."""
    x = torch.randn(2, 3, 8, 8, device=DEVICE)
    layers, twin = stem(), stem()
    change(layers)
    change(twin)
    module.fuse(layers)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=not INTERPRETED):
        torch.testing.assert_close(layers(x).float(), twin(x).float(), rtol=0.03, atol=0.03)
    assert len(fused_stem) == fused


def test_images_with_a_gradient_are_not_fused(fused_stem: list[Tensor]) -> None:
    layers, twin = stem(), stem()
    module.fuse(layers)
    grads = []
    with torch.autocast(DEVICE, torch.bfloat16, enabled=not INTERPRETED):
        for each in (layers, twin):
            x = torch.linspace(-1, 2, 384, device=DEVICE).reshape(2, 3, 8, 8).requires_grad_()
            grads.append(torch.autograd.grad(each(x).square().sum(), x)[0])
    assert not fused_stem
    assert (grads[0] - grads[1]).norm() <= 0.05 * grads[1].norm()


def test_a_stem_under_a_transform_is_not_fused(fused_stem: list[Tensor]) -> None:
    layers = stem()
    x = torch.randn(2, 3, 8, 8, device=DEVICE)
    assert module._can_fuse_stem(layers[0], layers[1], x)
    active = []
    torch.func.vmap(
        lambda x: (active.append(module._can_fuse_stem(layers[0], layers[1], x)), x)[1]
    )(x[None])
    assert active == [False]


@pytest.mark.parametrize(
    ("sizes", "shape", "fused"),
    [
        ({}, (2, 3, 8, 8), True),
        ({"kernel_size": 7, "padding": 3}, (2, 3, 8, 8), False),
        ({"stride": 2}, (2, 3, 8, 8), False),
        ({"padding": 0}, (2, 3, 8, 8), False),
        ({"bias": True}, (2, 3, 8, 8), False),
        ({"padding_mode": "circular"}, (2, 3, 8, 8), False),
        ({"dtype": torch.float32}, (2, 3, 8, 8), False),
        ({"out_channels": 24}, (2, 3, 8, 8), False),
        ({"in_channels": 5}, (2, 5, 8, 8), False),
        ({"in_channels": 1}, (2, 1, 8, 8), True),
        ({}, (2, 3, 28, 28), False),
        ({}, (2, 3, 128, 128), False),
        ({}, (2, 3, 4, 64), True),
        ({}, (3, 8, 8), False),
    ],
)
def test_which_first_convolutions_have_kernels(
    sizes: dict[str, object],
    shape: tuple[int, ...],
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.stem, "_has_bfloat16", lambda device: True)
    usual = {"in_channels": 3, "out_channels": 64, "kernel_size": 3, "padding": 1, "bias": False}
    conv = nn.Conv2d(**{**usual, "dtype": torch.bfloat16, **sizes})
    for form in (torch.contiguous_format, torch.channels_last):
        assert module.stem.supports(conv.to(memory_format=form), torch.empty(shape)) == fused
    assert not module.stem.supports(conv, torch.empty(shape, dtype=torch.float64))
