"""The Triton kernels of ``convolution``: 3×3 with padding 1 or 1×1, stride 1 or 2, channels last.

A convolution is a matrix product that is never laid out: rows are output pixels, columns output
channels, and the sum is over taps × input channels. A tile of rows is NB images × BH rows of WO
pixels. The tensor memory accelerator (TMA) fetches it for one tap as a box of the input, moved by a
pixel, and fills in zeros outside of the image: that is the padding.

Products are computed transposed, [columns, rows], so that a box is the second operand. Tensor cores
read that one from shared memory. A box that is the first operand has to be reshaped, and Triton 3.6
loads it into registers: more work, and a race, since it loads the next one while the last is still
being read. ``test_convolution_code.py`` checks what is compiled.

With stride 2, the input [N, H, W, C] is read as [N, H/2, 2, W/2, 2·C], where the pixels that a tap
reads are a box again: tap 0 is the odd pixel before, tap 1 the even one, tap 2 the odd one. ``_d``
marks a descriptor of such boxes, ``_`` a pointer.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R"])
def convolve(
    x_d, w_d, y_d, part_, R,
    CI: tl.constexpr, CO: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, NB: tl.constexpr, BH: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of the output, and its rows' mean and squared deviations for BatchNorm."""
    tile, co = tl.program_id(0), tl.program_id(1) * COLUMNS
    ROWS: tl.constexpr = NB * BH * WO
    n, h = _place(tile, HO, NB, BH)
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    CHUNKS: tl.constexpr = CI // DEPTH
    for i in range(TAPS * CHUNKS):
        tap, c = i // CHUNKS, (i % CHUNKS) * DEPTH
        x = _input(x_d, n, h, tap, c, CI, STRIDE, TAPS)
        w = w_d.load([co, tap * CI + c])
        acc = tl.dot(w, x.reshape(ROWS, DEPTH).T, acc)
    y = acc.to(y_d.dtype)
    y_d.store([tile * ROWS, co], y.T)
    # BatchNorm needs the statistics of what it reads: of rounded values.
    y = y.to(tl.float32)
    inside = (tile * ROWS + tl.arange(0, ROWS) < R)[None, :]
    count = tl.minimum(ROWS, R - tile * ROWS).to(tl.float32)
    mean = tl.sum(y, 1) / count  # outside, y is 0
    d = tl.where(inside, y - mean[:, None], 0)
    part = part_ + tile * 2 * CO + co + tl.arange(0, COLUMNS)
    tl.store(part, mean)
    tl.store(part + CO, tl.sum(d * d, 1))


@triton.jit
def input_gradient(
    g_d, w_d, dx_d, add_d, y_d, x_d, mean_, scale_, part_,
    CI: tl.constexpr, CO: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    NB: tl.constexpr, BH: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of a 3×3 convolution's input, with stride 1.

    ADD: another gradient of the same input is added. NORM: the input is y, the ReLU of normalized
    x; the gradient is masked by ReLU and summed as ``kernels.gradient_sums`` does.
    """
    tile, ci = tl.program_id(0), tl.program_id(1) * COLUMNS
    ROWS: tl.constexpr = NB * BH * W
    n, h = _place(tile, H, NB, BH)
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    CHUNKS: tl.constexpr = CO // DEPTH
    for i in range(9 * CHUNKS):
        tap, c = i // CHUNKS, (i % CHUNKS) * DEPTH
        g = g_d.load([n, h + 1 - tap // 3, 1 - tap % 3, c])
        w = w_d.load([c, tap * CI + ci])
        acc = tl.dot(w.T, g.reshape(ROWS, DEPTH).T, acc)
    if ADD:
        acc += add_d.load([tile * ROWS, ci]).T.to(tl.float32)
    if NORM:
        acc = tl.where(y_d.load([tile * ROWS, ci]).T > 0, acc, 0)
    dx = acc.to(dx_d.dtype)
    dx_d.store([tile * ROWS, ci], dx.T)
    if NORM:
        c = ci + tl.arange(0, COLUMNS)
        mean, scale = tl.load(mean_ + c), tl.load(scale_ + c)
        dx = dx.to(tl.float32)
        x = x_d.load([tile * ROWS, ci]).T.to(tl.float32)
        part = part_ + tile * 2 * CI + c
        tl.store(part, tl.sum(dx, 1))
        tl.store(part + CI, tl.sum(dx * (x - mean[:, None]) * scale[:, None], 1))


@triton.jit
def strided_input_gradient(
    g_d, w_d, g1_d, w1_d, dx_d, CI: tl.constexpr, CO: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, NB: tl.constexpr, BH: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The same with stride 2, of a 3×3 and a 1×1 convolution (g1, w1) of one input, added up.

    Pixels with an odd row and column were read by four taps of the 3×3 convolution, those with one
    of both odd by two, and the others by one, and by the 1×1 convolution: a program has one kind.
    """
    tile, ci = tl.program_id(0), tl.program_id(1) * COLUMNS
    odd_row, odd_column = 1 - tl.program_id(2) // 2, 1 - tl.program_id(2) % 2  # longest first
    ROWS: tl.constexpr = NB * BH * WO
    n, h = _place(tile, HO, NB, BH)
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    CHUNKS: tl.constexpr = CO // DEPTH
    for i in range((1 + odd_row) * (1 + odd_column) * CHUNKS):
        which, c = i // CHUNKS, (i % CHUNKS) * DEPTH
        i_row, i_column = which // (1 + odd_column), which % (1 + odd_column)
        # An odd pixel is tap 0 of the output pixel after it and tap 2 of the one before it.
        row, column = (
            tl.where(odd_row == 1, 2 * i_row, 1),
            tl.where(odd_column == 1, 2 * i_column, 1),
        )
        down, right = odd_row * (1 - i_row), odd_column * (1 - i_column)
        g = g_d.load([n, h + down, right, c])
        w = w_d.load([c, (3 * row + column) * CI + ci])
        acc = tl.dot(w.T, g.reshape(ROWS, DEPTH).T, acc)
    for i in range((1 - odd_row) * (1 - odd_column) * CHUNKS):
        g = g1_d.load([n, h, 0, i * DEPTH])
        w = w1_d.load([i * DEPTH, ci])
        acc = tl.dot(w.T, g.reshape(ROWS, DEPTH).T, acc)
    dx = acc.to(dx_d.dtype).T.reshape(NB, BH, 1, WO, COLUMNS)
    dx_d.store([n, h, odd_row, 0, odd_column * CI + ci], dx)


@triton.jit(do_not_specialize=["N"])
def weight_gradient(
    x_d, g_d, dw_, N,
    CI: tl.constexpr, CO: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, NB: tl.constexpr, BH: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gradient of one tap's weights, IN × OUT of them, over a part of the pixels."""
    tap, ci = tl.program_id(0) // (CI // IN), (tl.program_id(0) % (CI // IN)) * IN
    co, part = tl.program_id(1) * OUT, tl.program_id(2)
    PIXELS: tl.constexpr = NB * BH * WO
    tiles = tl.cdiv(N, NB) * (HO // BH)
    each = tl.cdiv(tiles, PARTS)
    acc = tl.zeros((OUT, IN), tl.float32)
    for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
        n, h = _place(tile, HO, NB, BH)
        x = _input(x_d, n, h, tap, ci, CI, STRIDE, TAPS)
        g = g_d.load([tile * PIXELS, co])
        acc = tl.dot(g.T, x.reshape(PIXELS, IN), acc)
    ci += tl.arange(0, IN)
    co += tl.arange(0, OUT)
    at = ((part * CO + co) * TAPS + tap)[:, None] * CI + ci[None, :]
    tl.store(dw_ + at, acc.to(dw_.dtype.element_ty))


@triton.jit(do_not_specialize=["SIZE"])
def add_parts(part_, sum_, SIZE, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the parts [PARTS, SIZE] of a weight's gradient, in their order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ + part * SIZE + i, mask=i < SIZE, other=0)
    tl.store(sum_ + i, total.to(sum_.dtype.element_ty), mask=i < SIZE)


@triton.jit
def _place(tile, HO: tl.constexpr, NB: tl.constexpr, BH: tl.constexpr):
    """The first image and the first row of a tile."""
    return tile // (HO // BH) * NB, tile % (HO // BH) * BH


@triton.jit
def _input(x_d, n, h, tap, c, CI: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr):
    """What a tap reads for the output pixels from row h of image n on."""
    if TAPS == 1:
        x = x_d.load([n, h, 0, 0, c])
    elif STRIDE == 1:
        x = x_d.load([n, h + tap // 3 - 1, 0, tap % 3 - 1, c])
    else:
        row, column = tap // 3 + 1, tap % 3 + 1
        x = x_d.load([n, h + row // 2 - 1, row % 2, column // 2 - 1, column % 2 * CI + c])
    return x
