"""Kernels of color jitter and AugMix against the tensor expressions that they replace.

Needs Triton, and a GPU or ``TRITON_INTERPRET=1`` (which runs kernels on a CPU, slowly).
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from protofed.augmix import COLORS, GEOMETRY, Draws, augmix  # noqa: E402
from protofed.data.augment import AUGMENTS, Choices, cropped, jittered  # noqa: E402
from protofed.engines.lanes.replacements import IMAGE, KERNELS  # noqa: E402
from protofed.fused import using  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
MANY = 40 if INTERPRETED else 4000
OPERATIONS = [*GEOMETRY, *(f.__name__ for f in COLORS)]


def images(n: int, height: int = 8, width: int = 8, seed: int = 0) -> Tensor:
    """Images in [0, 1] of whole 8-bit values, some of one color, some of few."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (n, 3, height, width))
    x[1::5] = x[1::5, :, :1, :1]
    x[2::5] //= 100
    x[3::5] = x[3::5, :1]  # gray
    return torch.from_numpy(x).to(DEVICE, torch.float32) / 255


# ---- color jitter --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["color", "large"])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (5, 7), (33, 32)])
def test_jitter_has_the_same_bits(kind: str, height: int, width: int) -> None:
    n = MANY if height == 8 else 20
    choices = Choices.draw(np.random.default_rng(0), n, AUGMENTS[kind](True), side=height)
    assert choices.jitter is not None and choices.order is not None
    x, factor, order = images(n, height, width), choices.jitter.to(DEVICE), choices.order.to(DEVICE)
    plain = jittered(x, factor, order)
    with using(KERNELS):
        kernel = jittered(x, factor, order)
    assert torch.equal(kernel, plain)
    assert not torch.equal(plain, x)


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("operation", range(4))
def test_one_change_alone(operation: int, turn: int) -> None:
    """The others change nothing, wherever they come."""
    n = 10
    factor = torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(n, 1)
    low, high = (-0.5, 0.5) if operation == 3 else (0.2, 1.8)
    factor[:, operation] = torch.linspace(low, high, n)
    order = torch.tensor([i for i in range(4) if i != operation])
    order = torch.cat([order[:turn], torch.tensor([operation]), order[turn:]]).repeat(n, 1)
    x = images(n)
    plain = jittered(x, factor.to(DEVICE), order.to(DEVICE))
    with using(KERNELS):
        assert torch.equal(jittered(x, factor.to(DEVICE), order.to(DEVICE)), plain)


def test_an_augmented_epoch_has_the_same_pixels() -> None:
    augment = AUGMENTS["color"](True)
    choices = Choices.draw(np.random.default_rng(1), MANY, augment)
    choices = choices.rows(torch.arange(MANY), torch.device(DEVICE))
    x = (images(MANY) * 255).round().to(torch.uint8)
    plain = cropped(x, choices, augment)
    with using(KERNELS):
        assert torch.equal(cropped(x, choices, augment), plain)


def test_other_images_are_left_to_expressions() -> None:
    factor, order = torch.ones(2, 4, device=DEVICE), torch.arange(4, device=DEVICE).repeat(2, 1)
    assert KERNELS["jittered"](images(2).double(), factor, order) is None
    assert KERNELS["jittered"](images(2)[:, :1], factor, order) is None
    draws = drawn(2, 1, 1)
    assert KERNELS["augmix"](images(2).double(), draws, 3.0) is None
    assert KERNELS["augmix"](images(2)[:, :1], draws, 3.0) is None
    assert KERNELS["augmix"](images(2).requires_grad_(), draws, 3.0) is None
    assert KERNELS["augmix"](images(2, 1, IMAGE + 1), draws, 3.0) is None


# ---- AugMix --------------------------------------------------------------------------------------


def drawn(n: int, chains: int, depth: int, seed: int = 0) -> Draws:
    generator = torch.Generator().manual_seed(seed)
    shapes = (chains * n,), (depth, 3, chains * n), (chains, n), (n,)
    numbers = [torch.rand(shape, generator=generator).clamp(1e-3) for shape in shapes]
    return Draws(*(t.to(DEVICE) for t in numbers))


def both(x: Tensor, draws: Draws, severity: float) -> tuple[Tensor, Tensor]:
    plain = augmix(x, draws, severity)
    with using(KERNELS):
        return plain, augmix(x, draws, severity)


@pytest.mark.parametrize("severity", [0.1, 3.0, 10.0])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (17, 19)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_operation(operation: str, height: int, width: int, severity: float) -> None:
    n = 10
    draws = drawn(n, 1, 1)
    which = (OPERATIONS.index(operation) + 0.5) / len(OPERATIONS)
    draws.operation[:, 0] = which
    draws.share.zero_()
    x = images(n, height, width)
    plain, kernel = both(x, draws, severity)
    torch.testing.assert_close(kernel, plain, rtol=0, atol=1e-5)
    assert not torch.equal(plain, x) or severity == 0.1


@pytest.mark.parametrize(("chains", "depth"), [(1, 1), (3, 3), (2, 4)])
def test_chains(chains: int, depth: int) -> None:
    """Rounding may carry a pixel across a step of equalize, posterize or solarize, now and then."""
    x, draws = images(MANY, 16, 17, seed=1), drawn(MANY, chains, depth)
    before = [t.clone() for t in (x, *draws)]
    plain, kernel = both(x, draws, 3.0)
    near = ((kernel - plain).abs() < 1e-5).float().mean()
    assert near > 0.99 and (kernel - plain).abs().mean() < 1e-4
    assert all(torch.equal(a, b) for a, b in zip(before, (x, *draws), strict=True))


def test_augmix_of_one_image_does_not_depend_on_the_others() -> None:
    x, draws = images(6, 9, 9), drawn(6, 3, 3)
    with using(KERNELS):
        every = augmix(x, draws, 3.0)
        again = augmix(x, draws, 3.0)
        length, operation = draws.length.view(3, 6), draws.operation.view(3, 3, 3, 6)
        first = Draws(
            length[:, :2].reshape(-1), operation[..., :2].reshape(3, 3, -1),
            draws.weight[:, :2], draws.share[:2],
        )  # fmt: skip
        assert torch.equal(augmix(x[:2], first, 3.0), every[:2])
    assert torch.equal(every, again)


@pytest.mark.skipif(INTERPRETED, reason="an interpreter has no order of threads")
def test_augmix_repeats_to_the_bit() -> None:
    x, draws = images(192, 32, 32), drawn(192, 3, 3)
    with using(KERNELS):
        first = augmix(x, draws, 3.0)
        assert all(torch.equal(augmix(x, draws, 3.0), first) for _ in range(100))
