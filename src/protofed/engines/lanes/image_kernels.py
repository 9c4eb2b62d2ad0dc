"""The Triton kernels of images [N, 3, H, W] in float32, pixels in [0, 1]: color jitter and AugMix.

As tensor expressions, every operation is computed for all images and kept for those that drew it,
since a recorded graph cannot select rows. A kernel's program has one image, or a part of one, and
computes only what that image drew.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def jitter(
    x_, mean_, factor_, order_, y_, HW, TURN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """What comes at place TURN of an image's order of changes, of BLOCK pixels.

    ``mean_`` has the mean of the gray image. Launch it without fused multiply-adds: it then has
    the bits of ``data.augment.jittered``.
    """
    n = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = p < HW
    at = n * 3 * HW + p
    r = tl.load(x_ + at, mask=inside, other=0)
    g = tl.load(x_ + at + HW, mask=inside, other=0)
    b = tl.load(x_ + at + 2 * HW, mask=inside, other=0)
    change = tl.load(order_ + n * 4 + TURN)
    factor = tl.load(factor_ + n * 4 + change)
    if change == 3:
        r, g, b = _hue(r, g, b, factor)
    else:
        origin = tl.zeros((BLOCK,), tl.float32)
        if change == 1:
            origin += tl.load(mean_ + n)
        elif change == 2:
            origin = r * 0.2989 + g * 0.587 + b * 0.114
        r, g, b = _mixed(r, origin, factor), _mixed(g, origin, factor), _mixed(b, origin, factor)
    tl.store(y_ + at, r, mask=inside)
    tl.store(y_ + at + HW, g, mask=inside)
    tl.store(y_ + at + 2 * HW, b, mask=inside)


@triton.jit
def _mixed(x, origin, factor):
    return _unit(x * factor + origin * (1 - factor))


@triton.jit
def _unit(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _hue(r, g, b, shift):
    high = tl.maximum(tl.maximum(r, g), b)
    span = high - tl.minimum(tl.minimum(r, g), b)
    divisor = tl.where(span <= 0, 1.0, span)
    hue = tl.where(
        high == r,
        tl.div_rn(g - b, divisor),
        tl.where(high == g, 2 + tl.div_rn(b - r, divisor), 4 + tl.div_rn(r - g, divisor)),
    )
    hue += 6 * shift
    return (
        _trapezoid(high, span, hue + 5),
        _trapezoid(high, span, hue + 3),
        _trapezoid(high, span, hue + 1),
    )


@triton.jit
def _trapezoid(high, span, k):
    # k % 6, exactly: k is between -4 and 18, and these differences have no rounding
    k = tl.where(k >= 12, k - 12, tl.where(k >= 6, k - 6, tl.where(k < 0, k + 6, k)))
    return high - span * tl.maximum(tl.minimum(tl.minimum(k, 4 - k), 1.0), 0.0)


# ---- AugMix --------------------------------------------------------------------------------------

# Operations, by their number: 0 to 4 move pixels, 5 to 12 are ``augmix.COLORS``.
_MOVES = tl.constexpr(5)
_AUTOCONTRAST = tl.constexpr(5)
_EQUALIZE = tl.constexpr(6)
_POSTERIZE = tl.constexpr(7)
_SOLARIZE = tl.constexpr(8)
_BRIGHTNESS = tl.constexpr(9)
_CONTRAST = tl.constexpr(10)
_COLOR = tl.constexpr(11)
_SHARPNESS = tl.constexpr(12)
_OPERATIONS = tl.constexpr(13)


@triton.jit(do_not_specialize=["N", "severity"])
def augmix(
    x_, length_, operation_, weight_, share_, work_, y_, N, severity,
    CHAINS: tl.constexpr, DEPTH: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """An image mixed with chains of operations on it; BLOCK is at least its number of pixels.

    ``work_`` has room for all images: an operation that reads other pixels finds them there.
    """
    n = tl.program_id(0)
    p = tl.arange(0, BLOCK)
    HW: tl.constexpr = H * W
    inside = p < HW
    at = n.to(tl.int64) * 3 * HW + p
    r0 = tl.load(x_ + at, mask=inside, other=0)
    g0 = tl.load(x_ + at + HW, mask=inside, other=0)
    b0 = tl.load(x_ + at + 2 * HW, mask=inside, other=0)
    weights = 0.0
    for chain in range(CHAINS):
        weights -= tl.log(tl.load(weight_ + chain * N + n))
    share = tl.load(share_ + n)
    r_sum, g_sum, b_sum = share * r0, share * g0, share * b0
    for chain in range(CHAINS):
        own = chain * N + n
        r, g, b = r0, g0, b0
        length = 1 + tl.floor(tl.load(length_ + own) * DEPTH).to(tl.int32)
        for number in range(tl.minimum(length, DEPTH)):
            drawn = operation_ + number * 3 * CHAINS * N + own
            operation = (tl.load(drawn) * _OPERATIONS).to(tl.int32)
            level = 0.1 + (severity - 0.1) * tl.load(drawn + CHAINS * N)
            sign = tl.load(drawn + 2 * CHAINS * N) - 0.5
            signed = tl.where(sign < 0, -level, tl.where(sign > 0, level, 0.0))
            factor = 1 + 0.09 * signed
            if (operation < _MOVES) | (operation == _SHARPNESS):
                tl.debug_barrier()  # all have read what an operation before left here
                tl.store(work_ + at, r, mask=inside)
                tl.store(work_ + at + HW, g, mask=inside)
                tl.store(work_ + at + 2 * HW, b, mask=inside)
                tl.debug_barrier()
                image_ = work_ + n.to(tl.int64) * 3 * HW
                if operation == _SHARPNESS:
                    r = _sharpened(image_, r, p, factor, H, W)
                    g = _sharpened(image_ + HW, g, p, factor, H, W)
                    b = _sharpened(image_ + 2 * HW, b, p, factor, H, W)
                else:
                    row, column = _source(p, operation, signed, H, W)
                    r = _sampled(image_, row, column, inside, H, W)
                    g = _sampled(image_ + HW, row, column, inside, H, W)
                    b = _sampled(image_ + 2 * HW, row, column, inside, H, W)
            elif operation == _AUTOCONTRAST:
                r, g, b = _stretched(r, inside), _stretched(g, inside), _stretched(b, inside)
            elif operation == _EQUALIZE:
                r, g = _equalized(r, inside, HW), _equalized(g, inside, HW)
                b = _equalized(b, inside, HW)
            elif operation == _POSTERIZE:
                bits = 4 + tl.floor(0.4 * level).to(tl.int32)
                r, g, b = _posterized(r, bits), _posterized(g, bits), _posterized(b, bits)
            elif operation == _SOLARIZE:
                limit = 1 - level / 10
                r, g, b = _solarized(r, limit), _solarized(g, limit), _solarized(b, limit)
            else:
                origin = tl.zeros((BLOCK,), tl.float32)
                if operation != _BRIGHTNESS:
                    origin = 0.299 * r + 0.587 * g + 0.114 * b
                    if operation == _CONTRAST:
                        mean = tl.sum(tl.where(inside, origin, 0)) / HW
                        origin = tl.zeros((BLOCK,), tl.float32) + mean
                r, g = _away(r, origin, factor), _away(g, origin, factor)
                b = _away(b, origin, factor)
        weight = (1 - share) * (-tl.log(tl.load(weight_ + own)) / weights)
        r_sum += weight * r
        g_sum += weight * g
        b_sum += weight * b
    tl.store(y_ + at, r_sum, mask=inside)
    tl.store(y_ + at + HW, g_sum, mask=inside)
    tl.store(y_ + at + 2 * HW, b_sum, mask=inside)


@triton.jit
def _away(x, origin, factor):
    return _unit(origin + factor * (x - origin))


@triton.jit
def _stretched(x, inside):
    low = tl.min(tl.where(inside, x, float("inf")))
    high = tl.max(tl.where(inside, x, float("-inf")))
    flat = high - low < 1e-5
    return tl.where(flat, x, (x - low) / tl.where(flat, 1.0, high - low))


@triton.jit
def _eight_bits(x):
    return tl.floor(x * 255 + 0.501)


@triton.jit
def _equalized(x, inside, HW: tl.constexpr):
    value = tl.where(inside, _eight_bits(x), 0).to(tl.int32)
    bins = tl.arange(0, 256)
    count = tl.histogram(value, 256) - tl.where(bins == 0, value.shape[0] - HW, 0)
    step = (HW - tl.sum(tl.where(bins == tl.max(value), count, 0))) // 255
    below = tl.cumsum(count, 0) - count
    table = tl.minimum((below + step // 2) // tl.maximum(step, 1), 255)
    table = tl.where(step > 0, table, bins)
    return tl.gather(table, value, 0).to(tl.float32) / 255


@triton.jit
def _posterized(x, bits):
    return ((_eight_bits(x).to(tl.int32) >> bits) << bits).to(tl.float32) / 255


@triton.jit
def _solarized(x, limit):
    return tl.where(x >= limit, 1 - x, x)


@triton.jit
def _sharpened(x_, x, p, factor, H: tl.constexpr, W: tl.constexpr):
    row, column = p // W, p % W
    middle = (row > 0) & (row < H - 1) & (column > 0) & (column < W - 1)
    total = 4 * x
    for tap in tl.static_range(9):
        total += tl.load(x_ + p + (tap // 3 - 1) * W + tap % 3 - 1, mask=middle, other=0)
    return _away(x, tl.where(middle, total / 13, x), factor)


@triton.jit
def _source(p, operation, signed, H: tl.constexpr, W: tl.constexpr):
    """Where the pixels come from: row and column."""
    columns = (2 * (p % W).to(tl.float32) + 1) / W - 1
    rows = (2 * (p // W).to(tl.float32) + 1) / H - 1
    angle = tl.where(operation == 0, signed, 0.0) * 0.05235987755982988  # π/60
    cos, sin = tl.cos(angle), tl.sin(angle)
    shear_x = tl.where(operation == 1, 0.03 * signed, 0.0)
    shear_y = tl.where(operation == 2, 0.03 * signed, 0.0)
    right = tl.where(operation == 3, signed / 15, 0.0)
    down = tl.where(operation == 4, signed / 15, 0.0)
    column = cos * columns + (shear_x - sin) * rows + right
    row = (sin + shear_y) * columns + cos * rows + down
    return ((row + 1) * H - 1) / 2, ((column + 1) * W - 1) / 2


@triton.jit
def _sampled(x_, row, column, inside, H: tl.constexpr, W: tl.constexpr):
    """Bilinear, with 0 outside of the image."""
    top, left = tl.floor(row), tl.floor(column)
    down, right = row - top, column - left
    top, left = top.to(tl.int32), left.to(tl.int32)
    return (
        _pixel(x_, top, left, inside, H, W) * (1 - down) * (1 - right)
        + _pixel(x_, top, left + 1, inside, H, W) * (1 - down) * right
        + _pixel(x_, top + 1, left, inside, H, W) * down * (1 - right)
        + _pixel(x_, top + 1, left + 1, inside, H, W) * down * right
    )


@triton.jit
def _pixel(x_, row, column, inside, H: tl.constexpr, W: tl.constexpr):
    there = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    return tl.load(x_ + row * W + column, mask=there, other=0)
