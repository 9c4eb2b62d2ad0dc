from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from protofed.errors import ProtofedError
from protofed.prototypes import (
    Prototypes,
    class_means,
    class_sums,
    consistency,
    contrast,
    cosine,
    nearest,
)

pytestmark = pytest.mark.usefixtures("single_thread")

B, K, J, D = 9, 5, 3, 6

# Class 0 has three prototypes, class 1 one, class 2 two with a gap, class 3 none, class 4 one.
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 1], [0, 0, 0], [0, 1, 0]], dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 3, 4, 0, 3, 2, 1])


def table(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features [B, d] and prototypes [K, J, d], also where the mask says there is none."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(B, D, generator=generator, dtype=torch.float64)
    return z, torch.randn(K, J, D, generator=generator, dtype=torch.float64)


def naive_cosine(a: np.ndarray, b: np.ndarray) -> float:
    length = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * w for x, w in zip(a, b, strict=True)) / length if length > 0 else 0.0


def naive_contrast(z: Tensor, y: Tensor, mean: Tensor, mask: Tensor, tau: float) -> float:
    total = 0.0
    for i in range(len(z)):
        own = everything = 0.0
        for k in range(mean.shape[0]):
            for j in range(mean.shape[1]):
                if mask[k, j]:
                    e = math.exp(naive_cosine(z[i].numpy(), mean[k, j].numpy()) / tau)
                    everything += e
                    own += e if k == y[i] else 0.0
        if own > 0:
            total -= math.log(own / everything)
    return total / len(z)


def naive_consistency(z: Tensor, y: Tensor, target: Tensor, mask: Tensor, mean: bool) -> float:
    total = 0.0
    for i in range(len(z)):
        if mask[y[i]]:
            squares = [(float(a) - float(b)) ** 2 for a, b in zip(z[i], target[y[i]], strict=True)]
            total += sum(squares) / (len(squares) if mean else 1)
    return total / len(z)


def test_cosine() -> None:
    z, mean = table()
    rows = mean[0]
    expected = [[naive_cosine(a, b) for b in rows.numpy()] for a in z.numpy()]
    np.testing.assert_allclose(cosine(z, rows), expected, atol=1e-12)
    # Short rows have a direction too.
    np.testing.assert_allclose(cosine(z * 1e-6, rows * 1e6), expected, atol=1e-12)


def test_cosine_by_hand() -> None:
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert cosine(a, torch.tensor([[1.0, 0.0], [0.0, -2.0], [0.0, 0.0]])).tolist() == [
        pytest.approx([0.6, -0.8, 0.0]),
        [0.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-21, 1e-13, 1e-11, 1e-6, 1e10])
def test_cosine_of_short_and_long_rows_has_a_finite_gradient(length: float) -> None:
    a = (torch.tensor([[0.6, 0.8]]) * length).requires_grad_()
    b = (torch.tensor([[1.0, 0.0]]) * length).requires_grad_()
    result = cosine(a, b)
    result.sum().backward()
    assert a.grad is not None and b.grad is not None
    assert a.grad.isfinite().all() and b.grad.isfinite().all()
    assert result.item() == pytest.approx(0.6 if length > 1e-12 else 0.0)
    assert bool(a.grad.any()) == bool(b.grad.any()) == (length > 1e-12)


@pytest.mark.parametrize("tau", [0.05, 0.5, 2.0])
def test_contrast_against_a_loop(tau: float) -> None:
    z, mean = table()
    expected = naive_contrast(z, Y, mean, MASK, tau)
    assert contrast(z, Y, Prototypes(mean, MASK), tau).item() == pytest.approx(expected, rel=1e-10)
    as_tensor = contrast(z, Y, Prototypes(mean, MASK), torch.tensor(tau, dtype=torch.float64))
    assert as_tensor.item() == pytest.approx(expected, rel=1e-10)
    assert contrast(z, Y, Prototypes(mean, MASK.float()), tau=tau).item() == pytest.approx(
        expected, rel=1e-10
    )
    # What stands where there is no prototype does not matter.
    other = torch.where(MASK[..., None] > 0, mean, torch.full_like(mean, 7))
    assert contrast(z, Y, Prototypes(other, MASK), tau).item() == pytest.approx(expected, rel=1e-10)


def test_nearest_is_the_smallest_distance_to_a_prototype_that_is_there() -> None:
    rng = np.random.default_rng(0)
    z, mean = rng.normal(size=(20, 5)), rng.normal(size=(4, 5))
    mean[2] = z[0]  # nearest of all, but not there
    scores = nearest(
        torch.from_numpy(z), Prototypes(torch.from_numpy(mean), torch.tensor([1.0, 1, 0, 1]))
    )
    for i in range(20):
        square = {k: float(((z[i] - mean[k]) ** 2).sum()) for k in (0, 1, 3)}
        assert int(scores[i].argmax()) == min(square, key=square.__getitem__)
        assert all(float(scores[i, k]) == pytest.approx(-d) for k, d in square.items())
    assert nearest(torch.ones(1, 5), Prototypes(torch.zeros(4, 5), torch.zeros(4))).isfinite().all()


def test_contrast_by_hand() -> None:
    # Own prototypes at cosine 1 and 0, another class's at cosine 0: (e + 1) / (e + 2).
    mean = torch.tensor([[[2.0, 0.0], [0.0, 5.0]], [[0.0, 1.0], [0.0, 0.0]]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss = contrast(torch.tensor([[3.0, 0.0]]), torch.tensor([0]), Prototypes(mean, mask), 1.0)
    assert loss.item() == pytest.approx(math.log((math.e + 2) / (math.e + 1)), rel=1e-6)
    # With one more sample of a class that has none, the sum is divided by 2 all the same.
    mean, mask = torch.cat([mean, mean[:1]]), torch.cat([mask, torch.zeros(1, 2)])
    z = torch.tensor([[3.0, 0.0], [1.0, 1.0]])
    half = contrast(z, torch.tensor([0, 2]), Prototypes(mean, mask), 1.0)
    assert half.item() == pytest.approx(loss.item() / 2, rel=1e-6)


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_contrast_gradient(tau: float) -> None:
    z, mean = table(1)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: contrast(z, Y, Prototypes(mean, MASK), tau), z)


def test_contrast_moves_no_prototype() -> None:
    z, mean = table()
    z.requires_grad_()
    mean.requires_grad_()
    contrast(z, Y, Prototypes(mean, MASK), 0.1).backward()
    assert mean.grad is None
    assert z.grad is not None
    # Classes without a prototype (samples 3 and 6) get nothing, every other sample something.
    assert z.grad.any(1).tolist() == (Y != 3).tolist()


@pytest.mark.parametrize("filled", [True, False])
def test_contrast_without_any_prototype_is_exactly_zero(filled: bool) -> None:
    z, mean = (t.float() for t in table())
    z.requires_grad_()
    loss = contrast(z, Y, Prototypes(mean if filled else mean * 0, torch.zeros(K, J)), 0.02)
    loss.backward()
    assert loss.item() == 0.0
    assert z.grad is not None and not z.grad.any() and z.grad.isfinite().all()


def test_contrast_of_a_batch_whose_classes_have_no_prototype() -> None:
    z, mean = (t.float() for t in table())
    z.requires_grad_()
    loss = contrast(z, torch.full((B,), 3), Prototypes(mean, MASK.float()), 0.02)
    loss.backward()
    assert loss.item() == 0.0
    assert z.grad is not None and not z.grad.any() and z.grad.isfinite().all()


def test_contrast_at_a_tiny_temperature() -> None:
    # exp(1 / 0.001) is no float32, nor a float64.
    mean = torch.nn.functional.normalize(
        torch.randn(3, 2, 8, generator=torch.manual_seed(0)), dim=2
    )
    z = (mean[[0, 1, 2], 0] * 5 + 1e-3).requires_grad_()
    loss = contrast(z, torch.tensor([0, 1, 0]), Prototypes(mean, torch.ones(3, 2)), 0.001)
    loss.backward()
    # The third lies at another class's prototype: (1 - its nearest own cosine) / 0.001, over 3.
    nearest = cosine(z.detach(), mean.flatten(0, 1))[2]
    expected = (nearest.max() - nearest[:2].max()) / 0.001 / 3
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4) and loss.item() > 10
    assert z.grad is not None and z.grad.isfinite().all() and z.grad[2].any()


def test_contrast_of_a_dead_feature() -> None:
    z, mean = (t.float() for t in table())
    z[0] = 0
    z.requires_grad_()
    loss = contrast(z, Y, Prototypes(mean, MASK.float()), 0.02)
    loss.backward()
    assert loss.isfinite()
    assert z.grad is not None and z.grad.isfinite().all()
    assert not z.grad[0].any() and z.grad[1].any()
    # All cosines 0: three own prototypes of seven.
    alone = contrast(z[:1].detach(), Y[:1], Prototypes(mean, MASK.float()), 0.02)
    assert alone.item() == pytest.approx(math.log(7 / 3), rel=1e-6)


def test_contrast_does_not_hide_a_feature_that_is_not_finite() -> None:
    z, mean = table()
    z[0, 0] = torch.nan
    assert contrast(z, Y, Prototypes(mean, MASK), 0.1).isnan()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_consistency_against_a_loop(reduction: str) -> None:
    z, mean = table()
    target, mask = mean[:, 0], torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    expected = naive_consistency(z, Y, target, mask, reduction == "mean")
    loss = consistency(z, Y, Prototypes(target, mask), reduction)
    assert loss.item() == pytest.approx(expected, rel=1e-12) and expected > 0
    target = target.masked_fill(mask[:, None] == 0, torch.nan)
    z.requires_grad_()
    target.requires_grad_()
    loss = consistency(z, Y, Prototypes(target, mask), reduction)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert z.grad is not None and z.grad.any(1).tolist() == (mask[Y] > 0).tolist()
    assert target.grad is None


def test_consistency_by_hand() -> None:
    z, target = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[9.0, 9.0], [4.0, 6.0]])
    y, mask = torch.tensor([1, 0]), torch.tensor([0.0, 1.0])
    assert consistency(z, y, Prototypes(target, mask), "sum").item() == (9 + 16) / 2
    assert consistency(z, y, Prototypes(target, mask), "mean").item() == (9 + 16) / 2 / 2
    assert consistency(z, y, Prototypes(target, mask)).item() == (9 + 16) / 2 / 2


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_consistency_gradient(reduction: str) -> None:
    z, mean = table(2)
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])
    z.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: consistency(z, Y, Prototypes(mean[:, 1], mask), reduction),
        z,
    )


def test_consistency_without_any_target_is_exactly_zero() -> None:
    z, mean = table()
    z.requires_grad_()
    loss = consistency(z, Y, Prototypes(mean[:, 0], torch.zeros(K)))
    loss.backward()
    assert loss.item() == 0.0
    assert z.grad is not None and not z.grad.any()


def test_consistency_knows_two_reductions() -> None:
    z, mean = table()
    with pytest.raises(ProtofedError, match=r"unknown reduction 'means'.*mean"):
        consistency(z, Y, Prototypes(mean[:, 0], MASK[:, 0]), "means")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_does_not_reach_the_losses(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(64, 512, generator=generator).to(dtype)
    mean = torch.rand(10, 3, 512, generator=generator)
    y, mask, tau = torch.arange(64) % 10, torch.ones(10, 3), 0.02
    exact = contrast(z.double(), y, Prototypes(mean.double(), mask), tau).item()
    exact_square = consistency(z.double(), y, Prototypes(mean[:, 0].double(), mask[:, 0])).item()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = contrast(z, y, Prototypes(mean, mask), tau)
        square = consistency(z, y, Prototypes(mean[:, 0], mask[:, 0]))
        unit = torch.nn.functional.normalize(mean.flatten(0, 1), dim=1)
        rough = (torch.nn.functional.normalize(z.float(), dim=1) @ unit.T) / tau
        assert rough.dtype == torch.bfloat16  # autocast is on
        assert cosine(z, mean[0]).dtype == torch.float32
    own = (torch.arange(30) // 3)[None] == y[:, None]
    rough = rough.float()
    rough_loss = (rough.logsumexp(1) - rough.masked_fill(~own, -1e30).logsumexp(1)).mean().item()

    assert ours.dtype == square.dtype == torch.float32
    assert ours.item() == pytest.approx(exact, rel=1e-5)
    assert square.item() == pytest.approx(exact_square, rel=1e-6)
    assert abs(rough_loss - exact) > 20 * abs(ours.item() - exact)


def test_a_bfloat16_feature_gets_a_bfloat16_gradient() -> None:
    z, mean = (t.float() for t in table())
    z = z.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = contrast(z, Y, Prototypes(mean, MASK.float()), 0.1)
    loss.backward()
    assert z.grad is not None and z.grad.dtype == torch.bfloat16 and z.grad.any()


class Operations(TorchDispatchMode):
    """Writes down the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device() -> None:
    # Each of these reads a value back or copies one from the host; a CUDA graph forbids both.
    waits = {"_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "scalar_tensor"}
    waits |= {"is_nonzero", "equal", "_unique2", "where", "bincount"}
    z, mean = (t.float() for t in table())
    mask, tau = MASK.float(), torch.tensor(0.1)
    z.requires_grad_()
    with Operations() as seen:
        loss = contrast(z, Y, Prototypes(mean, mask), tau) + consistency(
            z, Y, Prototypes(mean[:, 0], mask[:, 0])
        )
        loss.backward()
        class_means(*class_sums(z.detach(), Y, K))
    assert "mm" in seen.names and "logsumexp" in seen.names
    assert not seen.names & waits
