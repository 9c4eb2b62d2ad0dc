"""The Triton kernels of ``stem``: a 3×3 convolution of images with few channels, before BatchNorm.

Rows are the R pixels of the images (N × H × W), columns the CO output channels, and the sum is over
the K = 9 · CI weights of an output channel in the order they have in memory: by tap, then by input
channel if LAST (channels last), otherwise the other way around. A pixel's patch is what the taps
read around it. It is gathered from the images, filled up with zeros to DEPTH and rounded to the
weights' type. ``sn``, ``sc``, ``sh`` and ``sw`` are the images' strides.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R"])
def convolve(
    x_, w_, y_, part_, R, sn, sc, sh, sw,
    CI: tl.constexpr, CO: tl.constexpr, H: tl.constexpr, W: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of the output, and its rows' mean and squared deviations for BatchNorm."""
    tile, c = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    K: tl.constexpr = 9 * CI
    r, k = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    w = tl.load(w_ + c[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0)
    x = _patches(x_, r, R, sn, sc, sh, sw, CI, H, W, LAST, DEPTH).to(w.dtype)
    # Channels × pixels: a channel's sum over the pixels is then almost all within a thread.
    y = tl.dot(w, x.T).to(y_.dtype.element_ty)
    tl.store(y_ + r[:, None] * CO + c[None, :], y.T, mask=(r < R)[:, None])
    # BatchNorm needs the statistics of what it reads: of rounded values.
    y = y.to(tl.float32)
    count = tl.minimum(ROWS, R - tile * ROWS).to(tl.float32)
    mean = tl.sum(y, 1) / count  # outside, y is 0
    d = tl.where((r < R)[None, :], y - mean[:, None], 0)
    part = part_ + tile * 2 * CO + c
    tl.store(part, mean)
    tl.store(part + CO, tl.sum(d * d, 1))


@triton.jit(do_not_specialize=["R", "EACH"])
def weight_gradient(
    x_, y_, mean_, scale_, weight_, bias_, dy_, dbias_, dweight_, dw_, R, EACH, sn, sc, sh, sw,
    CI: tl.constexpr, CO: tl.constexpr, H: tl.constexpr, W: tl.constexpr, LAST: tl.constexpr,
    PIXELS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The weight's gradient over this program's rows: EACH tiles of PIXELS.

    The gradient of BatchNorm and ReLU, as ``kernels.gradient`` has it, exists in registers only.
    """
    part, c = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    K: tl.constexpr = 9 * CI
    mean, scale = tl.load(mean_ + c), tl.load(scale_ + c)
    weight, bias = tl.load(weight_ + c), tl.load(bias_ + c)
    rows = tl.full((), R, tl.float32)
    dbias, dweight = tl.load(dbias_ + c) / rows, tl.load(dweight_ + c) / rows
    factor = weight * scale
    acc = tl.zeros((DEPTH, COLUMNS), tl.float32)
    for tile in range(EACH):
        r = (part * EACH + tile) * PIXELS + tl.arange(0, PIXELS)
        inside = (r < R)[:, None]
        at = r[:, None] * CO + c[None, :]
        g = tl.load(dy_ + at, mask=inside, other=0).to(tl.float32)
        y = tl.load(y_ + at, mask=inside, other=0).to(tl.float32)
        y = (y - mean[None, :]) * scale[None, :]
        g = tl.where(y * weight[None, :] + bias[None, :] > 0, g, 0)
        g = factor[None, :] * (g - dbias[None, :] - y * dweight[None, :])
        # Rows that are not there have a gradient here, but zeros as patches.
        x = _patches(x_, r, R, sn, sc, sh, sw, CI, H, W, LAST, DEPTH).to(DTYPE)
        acc = tl.dot(x.T, g.to(DTYPE), acc)
    k = tl.arange(0, DEPTH)
    at = (part * CO + c)[None, :] * K + k[:, None]
    tl.store(dw_ + at, acc, mask=(k < K)[:, None])


@triton.jit
def _patches(
    x_, r, R, sn, sc, sh, sw,
    CI: tl.constexpr, H: tl.constexpr, W: tl.constexpr, LAST: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The patches of pixels r: [pixels, DEPTH]. Outside of an image they are 0."""
    k = tl.arange(0, DEPTH)
    tap, c = (k // CI, k % CI) if LAST else (k % 9, k // 9)
    down, right = tap // 3 - 1, tap % 3 - 1
    n, h, w = r // (H * W), r // W % H, r % W
    row, column = h[:, None] + down[None, :], w[:, None] + right[None, :]
    inside = (r < R)[:, None] & (k < 9 * CI)[None, :]
    inside &= (row >= 0) & (row < H) & (column >= 0) & (column < W)
    at = (n * sn + h * sh + w * sw)[:, None] + (c * sc + down * sh + right * sw)[None, :]
    return tl.load(x_ + at, mask=inside, other=0)
