"""The Triton kernels of prototypes and of losses that pull features toward them.

Shapes: B batch, d features (D, padded), K classes, J prototypes of a class, N = K · J. Program b of
a loss works on sample b: it writes the sample's loss and, with GRADIENT, the feature's gradient of
the batch mean. All is computed in float32, and sums have a fixed order: runs repeat bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

# y_ and gamma_ may be slices of longer tensors: if kernels depended on their alignment, some would
# be compiled for the first time while a graph is recorded.


@triton.jit(do_not_specialize=["N", "J"], do_not_specialize_on_alignment=["y_"])
def contrast(
    z_, y_, mean_, mask_, loss_, dz_, d, N, J, scale,
    POWER: tl.constexpr, NO_LENGTH: tl.constexpr, ABSENT: tl.constexpr, GRADIENT: tl.constexpr,
    ROWS: tl.constexpr, OWN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """-log(Σ_own exp(cos · scale) / Σ_all exp(cos · scale)); 0 if there is no own prototype."""
    b, c = tl.program_id(0), tl.arange(0, D)
    y = tl.load(y_ + b).to(tl.int32)
    z = tl.load(z_ + b * d + c, mask=c < d, other=0).to(tl.float32)
    length = _inverse_length(tl.sum(z * z, 0), NO_LENGTH)
    unit = z * length
    every, toward_every, _ = _compared(
        unit, mean_, mask_, 0, N, d, scale, POWER, NO_LENGTH, ABSENT, GRADIENT, ROWS, D
    )
    own, toward_own, count = _compared(
        unit, mean_, mask_, y * J, y * J + J, d, scale, POWER, NO_LENGTH, ABSENT, GRADIENT, OWN, D
    )
    tl.store(loss_ + b, tl.where(count > 0, every - own, 0))
    if GRADIENT:
        v = toward_every - toward_own
        dz = (v - unit * tl.sum(unit * v, 0)) * length
        dz *= tl.where(count > 0, scale, 0) / tl.num_programs(0)
        tl.store(dz_ + b * d + c, dz, mask=c < d)


@triton.jit
def _compared(
    unit, mean_, mask_, first, last, d, scale,
    POWER: tl.constexpr, NO_LENGTH: tl.constexpr, ABSENT: tl.constexpr, GRADIENT: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """log Σ exp(cos · scale) over some prototypes, its gradient by unit / scale, and their number.

    One pass takes ROWS of them at a time. Each row of the accumulators has the largest logit that
    it has seen, and sums relative to that: exp(cos · scale) would overflow.
    """
    c = tl.arange(0, D)
    top = tl.full((ROWS,), ABSENT, tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    count = tl.zeros((ROWS,), tl.int32)
    if GRADIENT:
        rows = tl.zeros((ROWS, D), tl.float32)
    for start in range(first, last, ROWS):
        n = start + tl.arange(0, ROWS)
        there = tl.load(mask_ + n, mask=n < last, other=0) > 0
        if tl.max(there.to(tl.int32), 0) > 0:  # not only padding
            at = mean_ + n[:, None] * d + c[None, :]
            p = tl.load(at, mask=there[:, None] & (c < d)[None, :], other=0).to(tl.float32)
            p *= _inverse_length(tl.sum(p * p, 1), NO_LENGTH)[:, None]
            logit = tl.sum(p * unit[None, :], 1)
            slope = tl.full((ROWS,), 1, tl.float32)
            if POWER != 1:
                base = tl.where(logit < 1e-6, 1e-6, tl.where(logit > 1, 1.0, logit))
                power = tl.exp(tl.log(base) * POWER)
                slope = tl.where(base == logit, POWER * power / base, 0)
                logit = power
            logit = tl.where(there, logit * scale, ABSENT)
            new = tl.where(logit > top, logit, top)
            weight = tl.where(there, tl.exp(logit - new), 0)
            keep = tl.exp(top - new)
            top = new
            sums = sums * keep + weight
            count += there.to(tl.int32)
            if GRADIENT:
                rows = rows * keep[:, None] + (weight * slope)[:, None] * p
    largest = tl.max(top, 0)
    factor = tl.exp(top - largest)
    total = tl.sum(sums * factor, 0)
    total = tl.where(total == 0, 1, total)  # of no prototype; its logarithm is not used
    toward = unit
    if GRADIENT:
        toward = tl.sum(rows * (factor / total)[:, None], 0)
    return largest + tl.log(total), toward, tl.sum(count, 0)


@triton.jit
def _inverse_length(square, NO_LENGTH: tl.constexpr):
    """As in ``losses._unit``: 0 for a row without a direction."""
    none = square <= NO_LENGTH
    return tl.where(none, 0, tl.rsqrt(tl.where(none, 1, square)))


@triton.jit(do_not_specialize_on_alignment=["y_"])
def consistency(
    z_, y_, mean_, mask_, loss_, dz_, d, scale, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The squared distance to the own class's prototype, times ``scale``; 0 if it has none."""
    b = tl.program_id(0)
    y = tl.load(y_ + b)
    compared = tl.where(tl.load(mask_ + y) > 0, d, 0)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, d, BLOCK):
        c = first + tl.arange(0, BLOCK)
        away = tl.load(z_ + b * d + c, mask=c < compared, other=0).to(tl.float32)
        away -= tl.load(mean_ + y * d + c, mask=c < compared, other=0).to(tl.float32)
        squares += away * away
        if GRADIENT:
            dz = away * (2 * scale / tl.num_programs(0))
            tl.store(dz_ + b * d + c, dz, mask=c < d)
    tl.store(loss_ + b, tl.sum(squares, 0) * scale)


@triton.jit(do_not_specialize=["J"])
def per_class_mean(mean_, mask_, out_, there_, d, J, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The mean of a class's prototypes; program (k, b) works on class k and BLOCK features."""
    k, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    count = tl.zeros((ROWS,), tl.int32)
    for first in range(0, J, ROWS):
        j = first + tl.arange(0, ROWS)
        there = tl.load(mask_ + k * J + j, mask=j < J, other=0) > 0
        at = mean_ + (k * J + j)[:, None] * d + c[None, :]
        inside = there[:, None] & (c < d)[None, :]
        total += tl.load(at, mask=inside, other=0).to(tl.float32)
        count += there.to(tl.int32)
    n = tl.sum(count, 0)
    mean = tl.sum(total, 0) / tl.maximum(n, 1).to(tl.float32)
    tl.store(out_ + k * d + c, mean, mask=c < d)
    tl.store(there_ + k, tl.where(n > 0, 1.0, 0.0))


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=["y_", "gamma_"])
def mixed_class_means(
    z_, y_, gamma_, score_, mean_, there_, B, d,
    ROWS: tl.constexpr, OTHERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The class means of features mixed with a partner's: of another class, by the largest score.

    Program (k, b) works on class k and BLOCK features; it finds the partners of its own samples.
    """
    k, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gamma = tl.load(gamma_)
    rest = (1 - gamma).to(tl.float32)
    gamma = gamma.to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    count = tl.zeros((ROWS,), tl.int32)
    for first in range(0, B, ROWS):
        i = first + tl.arange(0, ROWS)
        own = tl.load(y_ + i, mask=i < B, other=-1) == k
        j = tl.zeros((ROWS,), tl.int32)
        best = tl.full((ROWS,), -1, tl.float32)
        for start in range(0, B, OTHERS):
            o = start + tl.arange(0, OTHERS)
            other = tl.load(y_ + o, mask=o < B, other=k) != k
            at = score_ + i[:, None] * B + o[None, :]
            score = tl.load(at, mask=own[:, None] & other[None, :], other=-1)
            top, place = tl.max(score, 1, return_indices=True)  # of equal ones, the first
            j = tl.where(top > best, start + place, j)
            best = tl.maximum(top, best)
        inside = own[:, None] & (c < d)[None, :]
        z = tl.load(z_ + i[:, None] * d + c[None, :], mask=inside, other=0).to(tl.float32)
        partner = tl.load(z_ + j[:, None] * d + c[None, :], mask=inside, other=0).to(tl.float32)
        total += gamma * z + rest * partner
        count += own.to(tl.int32)
    n = tl.sum(count, 0)
    mean = tl.sum(total, 0) / tl.maximum(n, 1).to(tl.float32)
    tl.store(mean_ + k * d + c, mean, mask=c < d)
    tl.store(there_ + k, (n > 0) & (n < B))  # all of one class: there is nothing to mix with
