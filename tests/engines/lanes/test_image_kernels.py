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
    assert torch.equal(KERNELS["jittered"](x, factor, order), plain)
    assert not torch.equal(plain, x)
    strided = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, factor, order))
    assert torch.equal(KERNELS["jittered"](*strided), plain)


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
    assert torch.equal(KERNELS["jittered"](x, factor.to(DEVICE), order.to(DEVICE)), plain)


def test_an_augmented_epoch_has_the_same_pixels() -> None:
    augment = AUGMENTS["color"](True)
    choices = Choices.draw(np.random.default_rng(1), MANY, augment)
    choices = choices.rows(torch.arange(MANY), torch.device(DEVICE))
    x = (images(MANY) * 255).round().to(torch.uint8)
    plain, called = cropped(x, choices, augment), []

    def kernel(*args: Tensor) -> Tensor:
        called.append(args)
        return KERNELS["jittered"](*args)  # type: ignore[no-any-return]

    with using({"jittered": kernel}):
        assert torch.equal(cropped(x, choices, augment), plain)
    assert len(called) == 1


def test_other_images_are_left_to_expressions() -> None:
    factor, order = torch.ones(2, 4, device=DEVICE), torch.arange(4, device=DEVICE).repeat(2, 1)
    assert KERNELS["jittered"](images(2).double(), factor, order) is None
    assert KERNELS["jittered"](images(2)[:, :1], factor, order) is None
    assert KERNELS["jittered"](images(2)[:0], factor[:0], order[:0]) is None
    draws = drawn(2, 1, 1)
    assert KERNELS["augmix"](images(2).double(), draws, 3.0) is None
    assert KERNELS["augmix"](images(2)[:, :1], draws, 3.0) is None
    assert KERNELS["augmix"](images(2).requires_grad_(), draws, 3.0) is None
    assert KERNELS["augmix"](images(2, 1, IMAGE + 1), draws, 3.0) is None
    assert KERNELS["augmix"](images(2)[:0], drawn(0, 1, 1), 3.0) is None


# ---- AugMix --------------------------------------------------------------------------------------


def drawn(n: int, chains: int, depth: int, seed: int = 0) -> Draws:
    generator = torch.Generator().manual_seed(seed)
    shapes = (chains * n,), (depth, 3, chains * n), (chains, n), (n,)
    numbers = [torch.rand(shape, generator=generator).clamp(1e-3) for shape in shapes]
    return Draws(*(t.to(DEVICE) for t in numbers))


def both(x: Tensor, draws: Draws, severity: float) -> tuple[Tensor, Tensor]:
    """What the expression gives, and the kernel."""
    return augmix(x, draws, severity), KERNELS["augmix"](x, draws, severity)


def test_the_kernel_comes_in_place_of_the_expression() -> None:
    x, draws = images(3), drawn(3, 2, 2)
    with using({"augmix": lambda *args: args}):
        assert augmix(x, draws, 3.0) == (x, draws, 3.0)


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


@pytest.mark.parametrize(("height", "width"), [(9, 7), (8, 8), (3, 3), (2, 1)])
def test_every_operation_after_every_other(height: int, width: int) -> None:
    """What an operation leaves where there is no pixel must not reach the next one."""
    count = len(OPERATIONS)
    first, second = (t.flatten() for t in torch.meshgrid(*[torch.arange(count)] * 2, indexing="ij"))
    n = len(first)
    draws = drawn(n, 1, 2)
    draws.operation[:, 0] = (torch.stack([first, second]).to(DEVICE) + 0.5) / count
    draws.length.fill_(0.75)
    draws.share.zero_()
    plain, kernel = both(images(n, height, width), draws, 3.0)
    # rounding may carry a pixel across a step of the second operation, but not most of an image
    far = ((kernel - plain).abs() > 1e-5).flatten(1).float().mean(1)
    wrong = [(OPERATIONS[first[i]], OPERATIONS[second[i]]) for i in (far > 0.2).nonzero()[:, 0]]
    assert not wrong and far.mean() < 5e-3


def test_halves_of_eight_bits_go_up() -> None:
    """As in the expression, where rounding left them below: autocontrast makes many of them."""
    x = ((torch.arange(255, device=DEVICE) + 0.4995) / 255).expand(1, 3, 1, 255).contiguous()
    draws = drawn(1, 1, 1)
    draws.operation[0, 0] = (OPERATIONS.index("posterize") + 0.5) / len(OPERATIONS)
    draws.share.zero_()
    plain, kernel = both(x, draws, 3.0)
    torch.testing.assert_close(kernel, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_images_of_other_layouts_and_types(dtype: torch.dtype) -> None:
    x, draws = images(5, 9, 8).to(dtype), drawn(5, 2, 2)
    plain, kernel = both(x, draws, 3.0)
    assert kernel.dtype == plain.dtype == torch.float32
    for same in (x.contiguous(memory_format=torch.channels_last), x.repeat(1, 1, 1, 2)[..., :8]):
        assert torch.equal(KERNELS["augmix"](same, draws, 3.0), kernel)
    doubles = Draws(*(t.double() for t in draws))
    assert torch.equal(KERNELS["augmix"](x, doubles, 3.0), kernel)
    near = ((kernel - plain).abs() < 1e-5).float().mean()
    assert near > 0.99


@pytest.mark.parametrize("number", [2.0**-24, 0.5, 1 - 2.0**-24])
@pytest.mark.parametrize("field", Draws._fields)
def test_the_least_and_the_most_that_is_drawn(field: str, number: float) -> None:
    x, draws = images(4, 9, 7), drawn(4, 2, 3)
    getattr(draws, field).fill_(number)
    plain, kernel = both(x, draws, 3.0)
    near = ((kernel - plain).abs() < 1e-5).float().mean()
    assert kernel.isfinite().all() and near > 0.99


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
    every = KERNELS["augmix"](x, draws, 3.0)
    again = KERNELS["augmix"](x, draws, 3.0)
    length, operation = draws.length.view(3, 6), draws.operation.view(3, 3, 3, 6)
    first = Draws(
        length[:, :2].reshape(-1), operation[..., :2].reshape(3, 3, -1),
        draws.weight[:, :2], draws.share[:2],
    )  # fmt: skip
    assert torch.equal(KERNELS["augmix"](x[:2], first, 3.0), every[:2])
    assert torch.equal(every, again)


@pytest.mark.skipif(INTERPRETED, reason="an interpreter has no order of threads")
def test_augmix_repeats_to_the_bit() -> None:
    x, draws = images(192, 32, 32), drawn(192, 3, 3)
    first = KERNELS["augmix"](x, draws, 3.0)
    assert all(torch.equal(KERNELS["augmix"](x, draws, 3.0), first) for _ in range(100))
