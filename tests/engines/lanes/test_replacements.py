"""Kernels of draws, styles and prototypes against the tensor expressions that they replace.

Needs Triton, and a GPU or ``TRITON_INTERPRET=1`` (which runs kernels on a CPU, slowly).
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from protofed import keys  # noqa: E402
from protofed.engines.lanes import replacements  # noqa: E402
from protofed.engines.lanes.replacements import KERNELS, MANY  # noqa: E402
from protofed.errors import NoSecondDerivative  # noqa: E402
from protofed.fused import using  # noqa: E402
from protofed.prototypes import (  # noqa: E402
    Prototypes,
    consistency,
    contrast,
    mixed_class_means,
)
from protofed.styles import restyle, style_of  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPES = [(3, 3, 5, 7), (2, 40, 9, 8), (2, 16, 1, 1), (1, 64, 24, 24)]


def both(function: Any, *args: Any) -> tuple[Any, Any]:
    """What the expressions give, and the kernels."""
    plain = function(*args)
    with using(KERNELS):
        return plain, function(*args)


@pytest.mark.parametrize("number", [0, 11, keys.key(1, "client", 3), (1 << 63) - 1])
@pytest.mark.parametrize("draw", [1, 2, 300])
def test_draws(number: int, draw: int) -> None:
    key = torch.tensor(number, device=DEVICE)
    plain, kernel = both(keys.uniform, key, draw, (7, 100))
    assert torch.equal(plain, kernel)
    for way in (keys.normal, lambda *a: keys.beta(*a, 0.1), lambda *a: keys.beta(*a, 2.0)):
        plain, kernel = both(way, key, draw, (3, 200))
        torch.testing.assert_close(kernel, plain, rtol=1e-6, atol=1e-7)
        assert kernel.dtype == torch.float32 and kernel.shape == (3, 200)


def maps(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * 3 + 2).to(DEVICE, dtype)


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: tuple[int, ...], detached: bool) -> None:
    x = maps(shape, torch.float64).requires_grad_()
    new = maps((shape[0], 2, shape[1]), torch.float64, 1).abs().requires_grad_(not detached)
    weight = maps(shape, torch.float64, 2)

    def step() -> list[Tensor]:
        own = style_of(x)
        own = own.detach() if detached else own
        y = restyle(x, own, new)
        return [own, y, *torch.autograd.grad((y * weight).sum(), [x] if detached else [x, new])]

    for plain, kernel in zip(*both(step), strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-10, atol=1e-9)


def test_bfloat16_and_equal_styles() -> None:
    x = maps(SHAPES[1], torch.bfloat16).contiguous(memory_format=torch.channels_last)
    plain, kernel = both(style_of, x)
    torch.testing.assert_close(kernel, plain)
    assert kernel.dtype == torch.float32
    new = plain.flip(0)
    ours, theirs = (restyled.float() for restyled in both(restyle, x, plain, new))
    torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.01)
    with using(KERNELS):
        same = restyle(x, kernel, kernel)
    assert torch.equal(same, x) and same.dtype == torch.bfloat16
    assert same.is_contiguous(memory_format=torch.channels_last)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    x = maps((2, 4, 16, 16), torch.float32) + 1000
    with using(KERNELS):
        style = style_of(x)
    torch.testing.assert_close(style.double(), style_of(x.double()), rtol=1e-5, atol=1e-4)


def test_a_second_derivative_is_refused() -> None:
    """The kernels have none; without an error it would silently be 0."""
    x = maps((2, 3, 2, 2), torch.float32).requires_grad_()
    with using(KERNELS):
        y = restyle(x, style_of(x), style_of(x) * 2)
    with pytest.raises(NoSecondDerivative):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_one_style_for_all_maps() -> None:
    x = maps((3, 5, 4, 4), torch.float32)
    own = style_of(x)
    plain, kernel = both(restyle, x, own, own[:1] + 0.5)
    torch.testing.assert_close(kernel, plain)


# ---- prototypes ----------------------------------------------------------------------------------

# batch, classes, prototypes of a class, features
SIZES = [(1, 2, 1, 1), (3, 5, 3, 6), (32, 10, 16, 100), (70, 7, 1, 512), (4, 3, 64, 130)]
ONE_SIZE = SIZES[1]


def scene(
    size: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Prototypes]:
    """Features, labels and prototypes; class 1 has none, and NaN stands for those that lack."""
    batch, classes, each, features = size
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(batch, features, generator=generator, dtype=torch.float64) + 0.3
    mean = torch.randn(classes, each, features, generator=generator, dtype=torch.float64)
    mask = (torch.rand(classes, each, generator=generator) < 0.6).float()
    mask[:, 0], mask[1] = 1, 0
    y = torch.randint(classes, (batch,), generator=generator)
    y[0] = 0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mean = mean.masked_fill(mask[..., None] == 0, torch.nan)
    prototypes = Prototypes(mean.to(DEVICE, wide), mask.to(DEVICE))
    return z.to(DEVICE, dtype).requires_grad_(), y.to(DEVICE), prototypes


def exact_contrast(
    z: Tensor, y: Tensor, prototypes: Prototypes, tau: float, power: float = 1.0
) -> Tensor:
    """In float64, sample by sample, from the prototypes that are there."""
    losses = []
    rows = [F.normalize(r.double(), dim=1) for r in prototypes.rows()]
    for z_i, k in zip(F.normalize(z.double(), dim=1), y.tolist(), strict=True):
        logits = [r @ z_i for r in rows]
        if power != 1:
            logits = [v.clamp(1e-6, 1) ** power for v in logits]
        own, every = ((v / tau).logsumexp(0) for v in (logits[k], torch.cat(logits)))
        losses.append(every - own if len(rows[k]) else 0 * z_i.sum())
    return torch.stack(losses).mean()


def exact_consistency(z: Tensor, y: Tensor, prototypes: Prototypes, reduction: str) -> Tensor:
    losses = []
    for z_i, k in zip(z.double(), y.tolist(), strict=True):
        square = (z_i - prototypes.mean[k].double()).square()
        square = square.mean() if reduction == "mean" else square.sum()
        losses.append(square if prototypes.mask[k] > 0 else 0 * z_i.sum())
    return torch.stack(losses).mean()


def with_gradient(z: Tensor, term: Any, weight: float = 2.5) -> list[Tensor]:
    """The term, and its gradient under a weight."""
    loss = term()
    return [loss.detach(), *torch.autograd.grad(weight * loss, z)]


def first_of_each(prototypes: Prototypes) -> Prototypes:
    return Prototypes(prototypes.mean[:, 0], prototypes.mask[:, 0])


@pytest.mark.parametrize("power", [1.0, 0.25])
@pytest.mark.parametrize("tau", [0.07, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_contrast(size: tuple[int, int, int, int], tau: float, power: float) -> None:
    z, y, P = scene(size)
    exact = with_gradient(z, lambda: exact_contrast(z, y, P, tau, power))
    clean = Prototypes(P.mean.nan_to_num(), P.mask)  # the expression's gradient has 0 · NaN
    plain = with_gradient(z, lambda: contrast(z, y, clean, tau, power))
    with using(KERNELS):
        kernel = with_gradient(z, lambda: contrast(z, y, P, tau, power))
    for k, p, e in zip(kernel, plain, exact, strict=True):
        assert k.dtype == p.dtype and k.shape == p.shape
        torch.testing.assert_close(k, p, rtol=2e-5, atol=1e-5)
        torch.testing.assert_close(k, e.to(k.dtype), rtol=2e-5, atol=1e-5)
    unknown = y == 1
    assert not kernel[1][unknown].any()


def test_one_prototype_per_class_and_other_kinds_of_masks() -> None:
    z, y, table = scene(ONE_SIZE)
    mean, mask = first_of_each(table)
    for kind in (torch.bool, torch.float64, torch.int64):
        one = Prototypes(mean.nan_to_num(), mask.to(kind))
        for term in (lambda: contrast(z, y, one, 0.1), lambda: consistency(z, y, one)):  # noqa: B023
            for plain, kernel in zip(*both(lambda: with_gradient(z, term)), strict=True):  # noqa: B023
                torch.testing.assert_close(kernel, plain)


def test_a_tiny_temperature() -> None:
    z, y, P = scene((32, 10, 16, 100))
    exact = with_gradient(z, lambda: exact_contrast(z, y, P, 0.001))
    with using(KERNELS):
        kernel = with_gradient(z, lambda: contrast(z, y, P, 0.001))
    assert kernel[0] > 10 and kernel[1].isfinite().all()
    torch.testing.assert_close(kernel[0], exact[0].float(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(kernel[1], exact[1].float(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", [*SIZES, (2, 2, 1, 1500)])
def test_consistency(size: tuple[int, int, int, int], reduction: str) -> None:
    z, y, table = scene(size)
    P = first_of_each(table)
    exact = with_gradient(z, lambda: exact_consistency(z, y, P, reduction))
    plain, kernel = both(lambda: with_gradient(z, lambda: consistency(z, y, P, reduction)))
    for k, p, e in zip(kernel, plain, exact, strict=True):
        assert k.dtype == p.dtype and k.shape == p.shape
        torch.testing.assert_close(k, p)
        torch.testing.assert_close(k, e.to(k.dtype))
    assert not kernel[1][y == 1].any()


@pytest.mark.parametrize("size", SIZES)
def test_the_mean_of_a_class(size: tuple[int, int, int, int]) -> None:
    _, _, P = scene(size)
    plain, kernel = both(P.per_class_mean)
    torch.testing.assert_close(kernel.mean, plain.mean)
    assert torch.equal(kernel.mask, plain.mask) and kernel.mask.dtype == torch.float32


@pytest.mark.parametrize("classes", [1, 7])
@pytest.mark.parametrize("batch", [1, 3, 32, 70])
def test_mixed_class_means(batch: int, classes: int) -> None:
    z, _, _ = scene((batch, 2, 1, 100))
    y = torch.randint(classes, (batch,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    score = keys.uniform(torch.tensor(5, device=DEVICE), 1, (batch, batch))
    gamma = torch.tensor(0.3, device=DEVICE)
    plain, kernel = both(mixed_class_means, z.detach(), y, gamma, score, classes)
    torch.testing.assert_close(kernel.mean, plain.mean)
    assert torch.equal(kernel.mask, plain.mask) and kernel.mask.dtype == torch.bool
    assert plain.mask.any() == (len(y.unique()) > 1)
    # a partner that is another one would show: with gamma 0 the means are of partners alone
    plain, kernel = both(mixed_class_means, z.detach(), y, gamma * 0, score, classes)
    torch.testing.assert_close(kernel.mean, plain.mean)


def test_of_equal_scores_the_first_is_the_partner() -> None:
    h = torch.arange(12.0, device=DEVICE).view(6, 2)
    y = torch.tensor([0, 1, 1, 0, 2, 2], device=DEVICE)
    score = torch.full((6, 6), 0.5, device=DEVICE)
    gamma = torch.tensor(0.0, device=DEVICE)
    with using(KERNELS):
        mean, _ = mixed_class_means(h, y, gamma, score, 3)
    assert torch.equal(mean, h[[1, 0, 0]])


def terms(z: Tensor, y: Tensor, P: Prototypes) -> dict[str, Any]:
    return {
        "contrast": lambda: contrast(z, y, P, 0.02),
        "consistency": lambda: consistency(z, y, P.per_class_mean()),
    }


@pytest.mark.parametrize("term", ["contrast", "consistency"])
def test_without_any_prototype_a_term_is_exactly_zero(term: str) -> None:
    z, y, (mean, mask) = scene((3, 5, 16, 40))
    for none in (Prototypes(mean, mask * 0), Prototypes(mean * 0, mask * 0)):
        with using(KERNELS):
            loss, dz = with_gradient(z, terms(z, y, none)[term])
        assert loss.item() == 0 and not dz.any() and dz.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("term", ["contrast", "consistency"])
def test_what_is_not_finite_is_not_hidden(term: str, value: float) -> None:
    z, y, P = scene(ONE_SIZE)
    with torch.no_grad():
        z[0, 0] = value
    with using(KERNELS):
        loss, dz = with_gradient(z, terms(z, y, P)[term])
    assert not loss.isfinite() and not dz[0].isfinite().all()
    z, y, (mean, mask) = scene(ONE_SIZE)
    mean[0, 0, 0] = value
    with using(KERNELS):
        loss, _ = with_gradient(z, terms(z, y, Prototypes(mean, mask))[term])
    assert not loss.isfinite()


def test_contrast_of_rows_without_a_direction() -> None:
    z, y, P = scene(ONE_SIZE)
    P.mean[0, 0] = 0
    for length in (0.0, 1e-20, 1e-13, 1e-6, 1e10):
        short = (z.detach() * length).requires_grad_()
        clean = Prototypes(P.mean.nan_to_num(), P.mask)
        plain = with_gradient(short, lambda: contrast(short, y, clean, 0.1))  # noqa: B023
        with using(KERNELS):
            kernel = with_gradient(short, lambda: contrast(short, y, P, 0.1))  # noqa: B023
        assert kernel[1].isfinite().all()
        torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("term", ["contrast", "consistency"])
def test_bfloat16_features(term: str) -> None:
    z, y, P = scene((32, 10, 16, 100), torch.bfloat16)
    clean = Prototypes(P.mean.nan_to_num(), P.mask)
    plain = with_gradient(z, terms(z, y, clean)[term])
    with using(KERNELS), torch.autocast(DEVICE, dtype=torch.bfloat16):
        kernel = with_gradient(z, terms(z, y, P)[term])
    assert kernel[0].dtype == torch.float32 and kernel[1].dtype == torch.bfloat16
    torch.testing.assert_close(kernel[0], plain[0])
    torch.testing.assert_close(kernel[1], plain[1], rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("term", ["contrast", "consistency"])
def test_the_bits_of_a_term_repeat(term: str) -> None:
    z, y, P = scene((70, 4, 3, 130))
    with using(KERNELS):
        first, *others = (with_gradient(z, terms(z, y, P)[term]) for _ in range(2))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("term", ["contrast", "consistency"])
def test_a_term_has_no_second_derivative(term: str) -> None:
    z, y, P = scene(ONE_SIZE)
    with using(KERNELS):
        loss = terms(z, y, P)[term]()
    with pytest.raises(NoSecondDerivative):
        torch.autograd.grad(loss.square(), z, create_graph=True)


def test_what_kernels_are_not_made_for_is_left_to_the_expressions() -> None:
    """Each gives the expression's bits, its type and its gradients."""
    z, y, P = scene(ONE_SIZE, torch.float64)
    mean = P.mean.nan_to_num().requires_grad_()
    P, one = Prototypes(mean, P.mask), first_of_each(Prototypes(mean, P.mask))
    narrow, tau = z.detach().float().requires_grad_(), torch.tensor(0.1, device=DEVICE)
    narrow_one = Prototypes(one.mean.float(), one.mask)
    score, gamma = maps((len(y), len(y)), torch.float32), torch.tensor(0.3, device=DEVICE)
    several = MANY // P.mask.numel() + 1  # times as many prototypes
    crowd = Prototypes(mean.detach().float().repeat(1, several, 1), P.mask.repeat(1, several))
    cases: list[tuple[Any, list[Tensor]]] = [
        (lambda: contrast(z, y, P, 0.1), [z]),
        (lambda: contrast(narrow, y, P, tau), [narrow]),
        (lambda: contrast(z_Bd=z, y_B=y, prototypes=one, tau=0.1), [z]),
        (lambda: contrast(narrow, y, crowd, 0.1), [narrow]),
        (lambda: consistency(z, y, one), [z]),
        (lambda: consistency(narrow, y, narrow_one, detach=False), [narrow, mean]),
        (lambda: P.per_class_mean().mean.square().sum(), [mean]),
        (lambda: mixed_class_means(narrow, y, gamma, score, 5).mean.square().sum(), [narrow]),
    ]
    for function, inputs in cases:

        def step() -> list[Tensor]:
            value = function()  # noqa: B023
            return [value.detach(), *torch.autograd.grad(value, inputs, retain_graph=True)]  # noqa: B023

        for plain, kernel in zip(*both(step), strict=True):
            assert torch.equal(kernel, plain) and kernel.dtype == plain.dtype


def test_a_constant_prototype_that_wants_a_gradient_gets_none() -> None:
    z, y, P = scene(ONE_SIZE)
    mean = P.mean.nan_to_num().requires_grad_()
    with using(KERNELS):
        loss = contrast(z, y, Prototypes(mean, P.mask), 0.1)
        loss = loss + consistency(z, y, first_of_each(Prototypes(mean, P.mask)))
    dz, dmean = torch.autograd.grad(loss, [z, mean], allow_unused=True)
    assert dz.any() and dmean is None


class Launches(TorchDispatchMode):
    """Counts the operations that are kernels on a GPU: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        nothing = ("empty", "empty_like", "promote_types")
        self.count += not (func.is_view or func.overloadpacket.__name__ in nothing)
        return func(*args, **(kwargs or {}))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:  # in place of a kernel of Triton
        return self._launch

    def _launch(self, *args: object, **sizes: object) -> None:
        self.count += 1


def test_a_term_is_three_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, mean, and the backward pass; one more for the target of ``consistency``."""
    z, y, P = scene((32, 10, 16, 100), torch.bfloat16)
    key, gamma = torch.tensor(1, device=DEVICE), torch.tensor(0.3, device=DEVICE)
    launches = Launches()
    names = ("contrast", "consistency", "per_class_mean", "mixed_class_means")
    fake = SimpleNamespace(**dict.fromkeys(names, launches))
    monkeypatch.setattr(replacements, "prototype_kernels", fake)
    monkeypatch.setattr(replacements, "kernels", SimpleNamespace(draw=launches))

    def apa() -> Tensor:
        p = mixed_class_means(z.detach(), y, gamma, keys.uniform(key, 1, (32, 32)), 10)
        return consistency(z, y, p)

    counted = {}
    for name, term in {**terms(z, y, P), "apa": apa}.items():
        with using(KERNELS):
            loss = term()
        launches.count = 0
        one = torch.ones_like(loss)
        with using(KERNELS), launches:
            torch.autograd.grad(term(), z, one)
        counted[name] = launches.count
    assert counted == {"contrast": 3, "consistency": 4, "apa": 5}
