"""The Triton kernels of ``batchnorm``, ``step`` (of SGD) and ``replacements`` (draws, styles).

Batch normalization has R rows (batch × height × width, channels last) and C channels. Forward and
backward, sums over the rows come first, per part of them: [P, 2, C]. Program (p, b) of such a
kernel works on the rows of part p, EACH tiles of TILE rows, and on a block of BLOCK channels; a
convolution may write the same sums (``convolution_kernels``). A second, small kernel joins the
parts in their order, so that a sum has the same bits in every run. A third goes over the rows
again. Sums have the type of the parts: float32 or float64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R", "EACH"])
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


@triton.jit(do_not_specialize=["R", "ROWS", "P"])
def join_statistics(
    part_, mean_, scale_, running_mean_, running_var_, R, C, ROWS, P,
    MOMENTUM: tl.constexpr, EPS: tl.constexpr, TRACK: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the statistics of P parts of ROWS rows each; update the running ones."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dtype = part_.dtype.element_ty
    rows = tl.full((), R, dtype)
    total = tl.zeros((PARTS, BLOCK), dtype)
    for first in range(0, P, PARTS):
        _, count, means, _ = _part(part_, first, c, R, C, ROWS, P, PARTS)
        total += count * means
    mean = tl.sum(total, 0) / rows
    total = tl.zeros((PARTS, BLOCK), dtype)
    for first in range(0, P, PARTS):
        there, count, means, deviations = _part(part_, first, c, R, C, ROWS, P, PARTS)
        away = tl.where(there, means - mean[None, :], 0)
        total += deviations + count * away * away
    variance = tl.sum(total, 0) / rows
    tl.store(mean_ + c, mean, mask=c < C)
    tl.store(scale_ + c, 1 / tl.sqrt(variance + EPS).to(dtype), mask=c < C)
    if TRACK:
        old = tl.load(running_mean_ + c, mask=c < C)
        tl.store(running_mean_ + c, old + MOMENTUM * (mean - old), mask=c < C)
        unbiased = variance * (rows / (rows - 1))
        old = tl.load(running_var_ + c, mask=c < C)
        tl.store(running_var_ + c, old + MOMENTUM * (unbiased - old), mask=c < C)


@triton.jit
def _part(part_, first, c, R, C, ROWS, P, PARTS: tl.constexpr):
    """Which of PARTS parts there are, their rows, means and squared deviations."""
    q = first + tl.arange(0, PARTS)
    there = (q < P)[:, None] & (c < C)[None, :]
    count = tl.where(q < P, tl.minimum(ROWS, R - q * ROWS), 0).to(part_.dtype.element_ty)
    at = part_ + q[:, None] * 2 * C + c[None, :]
    means = tl.load(at, mask=there, other=0)
    return there, count[:, None], means, tl.load(at + C, mask=there, other=0)


@triton.jit(do_not_specialize=["R"])
def normalize(
    x_, mean_, scale_, weight_, bias_, add_, mean2_, scale2_, weight2_, bias2_, y_, R, C,
    ADD: tl.constexpr, RELU: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize TILE rows; add nothing, a map, or another map that is normalized too."""
    r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = mean_.dtype.element_ty
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = r[:, None] * C + c[None, :]
    y = _normalized(x_, at, inside, mean_, scale_, weight_, bias_, c, C)
    if ADD == "map":
        y += tl.load(add_ + at, mask=inside, other=0).to(dtype)
    if ADD == "normalized":
        y += _normalized(add_, at, inside, mean2_, scale2_, weight2_, bias2_, c, C)
    if RELU:
        y = tl.where(y < 0, 0, y)  # a maximum would turn NaN into 0 and hide divergence
    tl.store(y_ + at, y, mask=inside)


@triton.jit
def _normalized(x_, at, inside, mean_, scale_, weight_, bias_, c, C):
    mean = tl.load(mean_ + c, mask=c < C, other=0)
    factor = tl.load(scale_ + c, mask=c < C, other=0) * tl.load(weight_ + c, mask=c < C, other=0)
    offset = tl.load(bias_ + c, mask=c < C, other=0)
    x = tl.load(x_ + at, mask=inside, other=0).to(mean.dtype)
    return (x - mean[None, :]) * factor[None, :] + offset[None, :]


@triton.jit(do_not_specialize=["R", "EACH"])
def gradient_sums(
    x_, mean_, scale_, weight_, bias_, dy_, y_, g_, x2_, mean2_, scale2_, part_, R, C, EACH,
    MASKS: tl.constexpr, RELU: tl.constexpr, SECOND: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of g and of g · x̂ over this program's rows, where g is dy masked by ReLU.

    MASKS: ReLU's output is y, and g is written. SECOND: sums of g · x̂2 too.
    """
    p, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = part_.dtype.element_ty
    mean = tl.load(mean_ + c, mask=c < C, other=0)
    scale = tl.load(scale_ + c, mask=c < C, other=0)
    weight = tl.load(weight_ + c, mask=c < C, other=0)
    bias = tl.load(bias_ + c, mask=c < C, other=0)
    sums = tl.zeros((TILE, BLOCK), dtype)
    products = tl.zeros((TILE, BLOCK), dtype)
    if SECOND:
        mean2 = tl.load(mean2_ + c, mask=c < C, other=0)
        scale2 = tl.load(scale2_ + c, mask=c < C, other=0)
        products2 = tl.zeros((TILE, BLOCK), dtype)
    for tile in range(EACH):
        r = (p * EACH + tile) * TILE + tl.arange(0, TILE)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        g = tl.load(dy_ + at, mask=inside, other=0).to(dtype)
        if MASKS:
            g = tl.where(tl.load(y_ + at, mask=inside, other=0) > 0, g, 0)
            tl.store(g_ + at, g, mask=inside)
        x = tl.load(x_ + at, mask=inside, other=0).to(dtype)
        x = (x - mean[None, :]) * scale[None, :]
        if RELU:
            g = tl.where(x * weight[None, :] + bias[None, :] > 0, g, 0)
        sums += g
        products += g * x
        if SECOND:
            x = tl.load(x2_ + at, mask=inside, other=0).to(dtype)
            products2 += g * (x - mean2[None, :]) * scale2[None, :]
    part = part_ + p * (3 if SECOND else 2) * C + c
    tl.store(part, tl.sum(sums, 0), mask=c < C)
    tl.store(part + C, tl.sum(products, 0), mask=c < C)
    if SECOND:
        tl.store(part + 2 * C, tl.sum(products2, 0), mask=c < C)


@triton.jit(do_not_specialize=["P"])
def join_sums(part_, sum_, C, P, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Row s of the sums [S, C] over the parts [P, S, C]; s is the program's second number."""
    c, s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    total = tl.zeros((PARTS, BLOCK), part_.dtype.element_ty)
    for first in range(0, P, PARTS):
        q = first + tl.arange(0, PARTS)
        at = (q * tl.num_programs(1) + s)[:, None] * C + c[None, :]
        total += tl.load(part_ + at, mask=(q < P)[:, None] & (c < C)[None, :], other=0)
    tl.store(sum_ + s * C + c, tl.sum(total, 0), mask=c < C)


@triton.jit(do_not_specialize=["R"])
def gradient(
    x_, mean_, scale_, weight_, bias_, g_, dx_, dbias_, dweight_, R, C,
    RELU: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of TILE rows, from that of weight and bias."""
    r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = mean_.dtype.element_ty
    mean = tl.load(mean_ + c, mask=c < C, other=0)
    scale = tl.load(scale_ + c, mask=c < C, other=0)
    weight = tl.load(weight_ + c, mask=c < C, other=0)
    bias = tl.load(bias_ + c, mask=c < C, other=0)
    rows = tl.full((), R, dtype)
    dbias = tl.load(dbias_ + c, mask=c < C, other=0) / rows
    dweight = tl.load(dweight_ + c, mask=c < C, other=0) / rows
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = r[:, None] * C + c[None, :]
    g = tl.load(g_ + at, mask=inside, other=0).to(dtype)
    x = tl.load(x_ + at, mask=inside, other=0).to(dtype)
    x = (x - mean[None, :]) * scale[None, :]
    if RELU:
        g = tl.where(x * weight[None, :] + bias[None, :] > 0, g, 0)
    dx = (weight * scale)[None, :] * (g - dbias[None, :] - x * dweight[None, :])
    tl.store(dx_ + at, dx, mask=inside)


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


# Keys are elements of a table, so their alignment differs from step to step.
@triton.jit(do_not_specialize=["START", "N"], do_not_specialize_on_alignment=["key_"])
def draw(
    key_, out_, START, N, A: tl.constexpr, KIND: tl.constexpr, GAMMA: tl.constexpr,
    MIX_1: tl.constexpr, MIX_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """N numbers of ``keys.uniform``, ``keys.normal`` or ``keys.beta``, as KIND says."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_)
    u = _uniform(key, i.to(tl.int64) + START, GAMMA, MIX_1, MIX_2)
    if KIND != "uniform":
        v = _uniform(key, i.to(tl.int64) + N + START, GAMMA, MIX_1, MIX_2).to(tl.float64)
        log, cos = tl.log(u.to(tl.float64)), tl.cos(tl.full((), 6.283185307179586, tl.float64) * v)
        if KIND == "normal":
            u = (tl.sqrt(-2 * log) * cos).to(tl.float32)
        else:
            w = (tl.exp(-log / tl.full((), A, tl.float64)) - 1) * cos * cos
            u = (0.5 + tl.where(cos < 0, -0.5, 0.5) / tl.sqrt(1 + 1 / w)).to(tl.float32)
    tl.store(out_ + i, u, mask=i < N)


@triton.jit
def _uniform(key, i, GAMMA: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
    x = (key + i * GAMMA).to(tl.uint64)  # where a shift to the right is a logical one
    x = ((x ^ (x >> 30)).to(tl.int64) * MIX_1).to(tl.uint64)
    x = ((x ^ (x >> 27)).to(tl.int64) * MIX_2).to(tl.uint64)
    bits = (x ^ (x >> 31)) >> 41
    return (bits.to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2⁻²³


# Restyling has maps [B, N pixels, C channels], channels last, and styles [B, 2, C]. Program (b, k)
# works on map b and a block of BLOCK channels; where there is a third number, on TILE of its rows.


@triton.jit(do_not_specialize=["N"])
def style(x_, style_, N, C, EPS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The style of a map: mean and deviation of its channels."""
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = style_.dtype.element_ty
    x_ += b * N * C
    # Sums are of differences from the first row: squares of large means would cancel.
    shift = tl.load(x_ + c, mask=c < C, other=0).to(dtype)
    sums = tl.zeros((TILE, BLOCK), dtype)
    squares = tl.zeros((TILE, BLOCK), dtype)
    for first in range(0, N, TILE):
        r = first + tl.arange(0, TILE)
        inside = (r < N)[:, None] & (c < C)[None, :]
        x = tl.load(x_ + r[:, None] * C + c[None, :], mask=inside, other=0).to(dtype)
        d = tl.where(inside, x - shift[None, :], 0)
        sums += d
        squares += d * d
    total = tl.sum(sums, 0)
    rows, others = tl.full((), N, dtype), tl.maximum(N - 1, 1).to(dtype)
    variance = tl.maximum(tl.sum(squares, 0) - total * total / rows, 0) / others
    out = style_ + b * 2 * C + c
    tl.store(out, shift + total / rows, mask=c < C)
    tl.store(out + C, tl.sqrt(variance + EPS), mask=c < C)


@triton.jit(do_not_specialize=["N"])
def style_gradient(
    x_, style_, dstyle_, dx_, N, C, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The gradient of a map from that of its style."""
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = style_.dtype.element_ty
    mean, deviation = _style(style_, b, c, C)
    dmean, ddeviation = _style(dstyle_, b, c, C)
    rows, others = tl.full((), N, dtype), tl.maximum(N - 1, 1).to(dtype)
    each, factor = dmean / rows, ddeviation / (others * deviation)
    r = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = (r < N)[:, None] & (c < C)[None, :]
    at = b * N * C + r[:, None] * C + c[None, :]
    x = tl.load(x_ + at, mask=inside, other=0).to(dtype)
    dx = each[None, :] + factor[None, :] * (x - mean[None, :])
    tl.store(dx_ + at, dx, mask=inside)


@triton.jit(do_not_specialize=["N"])
def restyle(
    x_, old_, new_, y_, N, C, SHIFT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A map with another style; without SHIFT only scaled, which is the gradient's part of it."""
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mean, new_mean, scale = _change(old_, new_, b, c, C)
    r = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = (r < N)[:, None] & (c < C)[None, :]
    at = b * N * C + r[:, None] * C + c[None, :]
    y = tl.load(x_ + at, mask=inside, other=0).to(old_.dtype.element_ty) * scale[None, :]
    if SHIFT:
        y += (new_mean - mean * scale)[None, :]
    tl.store(y_ + at, y, mask=inside)


@triton.jit(do_not_specialize=["N"])
def restyle_gradient(
    x_, old_, new_, dy_, dx_, dold_, dnew_, N, C, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The gradients of a map and of both styles."""
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = old_.dtype.element_ty
    mean, _, scale = _change(old_, new_, b, c, C)
    sums = tl.zeros((TILE, BLOCK), dtype)
    products = tl.zeros((TILE, BLOCK), dtype)
    for first in range(0, N, TILE):
        r = first + tl.arange(0, TILE)
        inside = (r < N)[:, None] & (c < C)[None, :]
        at = b * N * C + r[:, None] * C + c[None, :]
        x = tl.load(x_ + at, mask=inside, other=0).to(dtype)
        g = tl.load(dy_ + at, mask=inside, other=0).to(dtype)
        tl.store(dx_ + at, g * scale[None, :], mask=inside)
        sums += g
        products += g * (x - mean[None, :])
    dshift, dscale = tl.sum(sums, 0), tl.sum(products, 0)
    deviation = tl.load(old_ + (2 * b + 1) * C + c, mask=c < C, other=1)
    out = b * 2 * C + c
    tl.store(dnew_ + out, dshift, mask=c < C)
    tl.store(dnew_ + out + C, dscale / deviation, mask=c < C)
    tl.store(dold_ + out, -scale * dshift, mask=c < C)
    tl.store(dold_ + out + C, -scale * dscale / deviation, mask=c < C)


@triton.jit
def _style(style_, b, c, C):
    at = style_ + b * 2 * C + c
    return tl.load(at, mask=c < C, other=0), tl.load(at + C, mask=c < C, other=1)


@triton.jit
def _change(old_, new_, b, c, C):
    mean, deviation = _style(old_, b, c, C)
    new_mean, new_deviation = _style(new_, b, c, C)
    # exactly 1 between equal styles, which a GPU's quotient may not be
    scale = tl.where(new_deviation == deviation, 1.0, new_deviation / deviation)
    return mean, new_mean, scale.to(deviation.dtype)
