"""The Triton kernels of ``batchnorm`` (batch normalization) and ``step`` (a step of SGD).

Batch normalization has R rows (batch × height × width, channels last), C channels, P parts.
Program (p, b) works on the rows of part p, EACH tiles of TILE rows, and on a block of BLOCK
channels. The first kernel of a pass writes its sums per part, [P, 2, C]; every program of the
second joins all parts itself, which is cheaper than a third kernel. Sums have the type of the
parts: float32 or float64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R", "P", "EACH"])
def statistics(x_, part_, R, C, EACH, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Mean and sum of squared deviations of each channel over this program's rows."""
    p, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = part_.dtype.element_ty
    first = p * EACH * TILE
    # Sums are of differences from the part's first row: squares of large means would cancel.
    shift = tl.load(x_ + first * C + c, mask=c < C, other=0).to(dtype)
    sums = tl.zeros((TILE, BLOCK), dtype)
    squares = tl.zeros((TILE, BLOCK), dtype)
    for tile in range(EACH):
        r = first + tile * TILE + tl.arange(0, TILE)
        inside = (r < R)[:, None] & (c < C)[None, :]
        x = tl.load(x_ + r[:, None] * C + c[None, :], mask=inside, other=0).to(dtype)
        d = tl.where(inside, x - shift[None, :], 0)
        sums += d
        squares += d * d
    count = tl.minimum(EACH * TILE, R - first).to(dtype)
    total = tl.sum(sums, 0)
    part = part_ + p * 2 * C + c
    tl.store(part, shift + total / count, mask=c < C)
    tl.store(part + C, tl.sum(squares, 0) - total * total / count, mask=c < C)


@triton.jit(do_not_specialize=["R", "P", "EACH"])
def normalize(
    x_, add_, y_, part_, mean_, scale_, weight_, bias_, running_mean_, running_var_,
    R, C, EACH, P,
    MOMENTUM: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
    TRACK: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the parts' statistics, update the running ones, normalize this program's rows."""
    p, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = part_.dtype.element_ty
    parts = tl.arange(0, PARTS)
    there = (parts < P)[:, None] & (c < C)[None, :]
    part = part_ + parts[:, None] * 2 * C + c[None, :]
    means = tl.load(part, mask=there, other=0)
    deviations = tl.load(part + C, mask=there, other=0)
    count = tl.minimum(EACH * TILE, R - parts * EACH * TILE)
    count = tl.where(parts < P, count, 0).to(dtype)[:, None]
    rows = tl.full((), R, dtype)
    mean = tl.sum(count * means, 0) / rows
    away = tl.where(there, means - mean[None, :], 0)
    variance = tl.sum(deviations + count * away * away, 0) / rows
    scale = 1 / tl.sqrt(variance + EPS).to(dtype)
    if p == 0:
        tl.store(mean_ + c, mean, mask=c < C)
        tl.store(scale_ + c, scale, mask=c < C)
        if TRACK:
            old = tl.load(running_mean_ + c, mask=c < C)
            tl.store(running_mean_ + c, old + MOMENTUM * (mean - old), mask=c < C)
            unbiased = variance * (rows / (rows - 1))
            old = tl.load(running_var_ + c, mask=c < C)
            tl.store(running_var_ + c, old + MOMENTUM * (unbiased - old), mask=c < C)
    factor = scale * tl.load(weight_ + c, mask=c < C, other=0)
    offset = tl.load(bias_ + c, mask=c < C, other=0)
    for tile in range(EACH):
        r = (p * EACH + tile) * TILE + tl.arange(0, TILE)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        x = tl.load(x_ + at, mask=inside, other=0).to(dtype)
        y = (x - mean[None, :]) * factor[None, :] + offset[None, :]
        if ADD:
            y += tl.load(add_ + at, mask=inside, other=0).to(dtype)
        if RELU:
            y = tl.where(y < 0, 0, y)  # a maximum would turn NaN into 0 and hide divergence
        tl.store(y_ + at, y, mask=inside)


@triton.jit(do_not_specialize=["R", "P", "EACH"])
def gradient_sums(
    x_, mean_, scale_, weight_, bias_, dy_, y_, dadd_, part_, R, C, EACH,
    MASKS: tl.constexpr, RELU: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of g and of g · x̂ over this program's rows, where g is dy masked by ReLU."""
    p, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = part_.dtype.element_ty
    mean = tl.load(mean_ + c, mask=c < C, other=0)
    scale = tl.load(scale_ + c, mask=c < C, other=0)
    weight = tl.load(weight_ + c, mask=c < C, other=0)
    bias = tl.load(bias_ + c, mask=c < C, other=0)
    sums = tl.zeros((TILE, BLOCK), dtype)
    products = tl.zeros((TILE, BLOCK), dtype)
    for tile in range(EACH):
        r = (p * EACH + tile) * TILE + tl.arange(0, TILE)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        g = tl.load(dy_ + at, mask=inside, other=0).to(dtype)
        if MASKS:
            g = tl.where(tl.load(y_ + at, mask=inside, other=0) > 0, g, 0)
            tl.store(dadd_ + at, g, mask=inside)
        x = tl.load(x_ + at, mask=inside, other=0).to(dtype)
        x = (x - mean[None, :]) * scale[None, :]
        if RELU:
            g = tl.where(x * weight[None, :] + bias[None, :] > 0, g, 0)
        sums += g
        products += g * x
    part = part_ + p * 2 * C + c
    tl.store(part, tl.sum(sums, 0), mask=c < C)
    tl.store(part + C, tl.sum(products, 0), mask=c < C)


@triton.jit(do_not_specialize=["R", "P", "EACH"])
def gradient(
    x_, mean_, scale_, weight_, bias_, dy_, dx_, dweight_, dbias_, part_, R, C, EACH, P,
    RELU: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the sums; from them, the gradients of weight, bias and this program's rows."""
    p, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = part_.dtype.element_ty
    parts = tl.arange(0, PARTS)
    there = (parts < P)[:, None] & (c < C)[None, :]
    part = part_ + parts[:, None] * 2 * C + c[None, :]
    dbias = tl.sum(tl.load(part, mask=there, other=0), 0)
    dweight = tl.sum(tl.load(part + C, mask=there, other=0), 0)
    if p == 0:
        tl.store(dbias_ + c, dbias, mask=c < C)
        tl.store(dweight_ + c, dweight, mask=c < C)
    mean = tl.load(mean_ + c, mask=c < C, other=0)
    scale = tl.load(scale_ + c, mask=c < C, other=0)
    weight = tl.load(weight_ + c, mask=c < C, other=0)
    bias = tl.load(bias_ + c, mask=c < C, other=0)
    rows = tl.full((), R, dtype)
    for tile in range(EACH):
        r = (p * EACH + tile) * TILE + tl.arange(0, TILE)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        g = tl.load(dy_ + at, mask=inside, other=0).to(dtype)
        x = tl.load(x_ + at, mask=inside, other=0).to(dtype)
        x = (x - mean[None, :]) * scale[None, :]
        if RELU:
            g = tl.where(x * weight[None, :] + bias[None, :] > 0, g, 0)
        rest = (dbias[None, :] + x * dweight[None, :]) / rows
        tl.store(dx_ + at, (weight * scale)[None, :] * (g - rest), mask=inside)


@triton.jit(do_not_specialize=["START"])
def sgd_step(
    address_, which_, first_, size_, START, lr_, momentum, decay,
    MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of SGD on BLOCK entries of one float32 parameter and of its bfloat16 copy.

    A parameter has a row of addresses (the first one's is row START): weight, velocity, copy,
    gradient of the copy, gradient of the weight; 0 for none. With both gradients the step is down
    their sum; with neither, nothing changes. Addresses are multiples of 16.
    """
    b = tl.program_id(0)
    which, first = tl.load(which_ + b), tl.multiple_of(tl.load(first_ + b), BLOCK)
    size, lr = tl.load(size_ + which), tl.load(lr_)
    row = address_ + (START + which) * 5
    at = first + tl.arange(0, BLOCK)
    if first + BLOCK <= size:  # no mask, so that loads and stores are wide
        _update(row, at, None, lr, momentum, decay, MOMENTUM)
    else:
        _update(row, at, at < size, lr, momentum, decay, MOMENTUM)


@triton.jit
def _update(row, at, inside, lr, momentum, decay, MOMENTUM: tl.constexpr):
    copy, narrow, wide = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    if (narrow != 0) | (wide != 0):
        weight_ = _pointers(tl.load(row), at, tl.float32)
        w = tl.load(weight_, mask=inside)
        g = decay * w
        if narrow != 0:
            g += tl.load(_pointers(narrow, at, tl.bfloat16), mask=inside).to(tl.float32)
        if wide != 0:
            g += tl.load(_pointers(wide, at, tl.float32), mask=inside)
        if MOMENTUM:
            velocity_ = _pointers(tl.load(row + 1), at, tl.float32)
            g += momentum * tl.load(velocity_, mask=inside)
            tl.store(velocity_, g, mask=inside)
        w -= lr * g
        tl.store(weight_, w, mask=inside)
        if copy != 0:
            tl.store(_pointers(copy, at, tl.bfloat16), w.to(tl.bfloat16), mask=inside)


@triton.jit
def _pointers(address, at, dtype: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16) + at
