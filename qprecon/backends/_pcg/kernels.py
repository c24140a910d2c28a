"""Triton kernels of ``fused``: each is one pass over (N, K) float32 arrays in C order.

A program handles a tile of rows by columns; column sums leave as one partial row a tile and are added by torch, in a fixed
order, so that the same input gives the same bits. Triton launches on the process's current device, wherever the tensors are:
each launch stands within ``torch.cuda.device`` of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLS, LINE = 64, 64, 32
_VARIED = {"do_not_specialize": ["n", "parts", "rank"]}
"""Triton compiles a kernel anew, for half a second, where numbers are 1 or divisible by 16. K is a multiple of 64 always."""
THIN = 32  # rows and columns of a tile of the thin arrays
_PARTS = tl.constexpr(32)  # partial sums that are added at a time
INNER = 64  # rows and columns of a tile of K_j


@triton.jit
def _tile(n, k, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    return rows.to(tl.int64) * stride + cols, (rows < n) & (cols < k), rows, cols


@triton.jit
def _read(x_ptr, row, scale, at, inside, rows, cols, k, HALVES: tl.constexpr):
    """x, as it is or from what ``_store_halves`` made of row · x · scale."""
    if HALVES:
        at = rows.to(tl.int64) * (2 * k) + cols
        x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32) + tl.load(x_ptr + at + k, inside, 0.0).to(tl.float32)
        x = x * (1.0 / row) * (1.0 / scale)
    else:
        x = tl.load(x_ptr + at, inside, 0.0)
    return x


@triton.jit
def _write(x_ptr, x, row, scale, at, inside, rows, cols, k, HALVES: tl.constexpr):
    if HALVES:
        _store_halves(x_ptr, x * row * scale, rows, cols, inside, k)
    else:
        tl.store(x_ptr + at, x, inside)


@triton.jit
def _store_halves(out_ptr, x, rows, cols, inside, k):
    to = out_ptr + rows.to(tl.int64) * (2 * k) + cols
    high = x.to(tl.float16)
    tl.store(to, high, inside)
    tl.store(to + k, (x - high.to(tl.float32)).to(tl.float16), inside)


@triton.jit(**_VARIED)
def _curvature(
    p_ptr, q_ptr, q_row_ptr, p_row_ptr, p_scale_ptr, out_ptr, n, k, HALVES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    row, scale = tl.load(p_row_ptr + rows, rows < n, 1.0), tl.load(p_scale_ptr + cols, cols < k, 1.0)
    p = _read(p_ptr, row, scale, at, inside, rows, cols, k, HALVES)
    q = tl.load(q_ptr + at, inside, 0.0) * tl.load(q_row_ptr + rows, rows < n, 0.0)
    tl.store(out_ptr + tl.program_id(0) * k + cols, tl.sum(p * q, 0)[None, :], cols < k)


@triton.jit(**_VARIED)
def _advance(
    r_ptr, q_ptr, mask_ptr, q_row_ptr, root_ptr, alpha_ptr, p_scale_ptr, r_was_ptr, r_scale_ptr, out_ptr, n, k,
    HALVES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """r, and rᵀD⁻¹r. x takes its step in ``_turn``, which reads p anyway."""
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    alpha, kept = tl.load(alpha_ptr + cols, cols < k, 0.0), tl.load(mask_ptr + at, inside, 0) != 0
    unit = 1.0 / tl.load(p_scale_ptr + cols, cols < k, 1.0)  # a power of two: no quotient for every number
    q = tl.load(q_ptr + at, inside, 0.0) * (tl.load(q_row_ptr + rows, rows < n, 0.0) * unit)
    root = tl.load(root_ptr + rows, rows < n, 1.0)
    r = _read(r_ptr, root, tl.load(r_was_ptr + cols, cols < k, 1.0), at, inside, rows, cols, k, HALVES)
    # a frozen column may hold an infinite q: 0·inf must not reach r
    r = r - tl.where(kept & (alpha != 0.0), alpha * q, 0.0)
    _write(r_ptr, r, root, tl.load(r_scale_ptr + cols, cols < k, 1.0), at, inside, rows, cols, k, HALVES)
    even = r * root
    tl.store(out_ptr + tl.program_id(0) * k + cols, tl.sum(even * even, 0)[None, :], cols < k)


@triton.jit(**_VARIED)
def _alpha(
    partial_ptr, product_ptr, rz_ptr, gain_ptr, active_ptr, iterations_ptr, alpha_ptr, p_scale_ptr, r_was_ptr, r_scale_ptr, parts,
    k, HALVES: tl.constexpr, SIZE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """rᵀz of the z that p is made of, α, and by what the next D^-½r is scaled, and the last was."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = cols < k
    curvature = _total(partial_ptr, cols, parts, k, COLS).to(tl.float32) / tl.load(p_scale_ptr + cols, inside, 1.0)
    rz = _total(product_ptr, cols, parts, k, COLS).to(tl.float32)
    tl.store(rz_ptr + cols, rz, inside)
    if HALVES:
        tl.store(r_was_ptr + cols, tl.load(r_scale_ptr + cols, inside, 1.0), inside)
        tl.store(r_scale_ptr + cols, _scale(rz, SIZE), inside)
    active = (tl.load(active_ptr + cols, inside, 0) != 0) & (curvature > 0.0) & (rz > 0.0)
    alpha = tl.where(active, rz / tl.where(active, curvature, 1.0), 0.0)
    tl.store(alpha_ptr + cols, alpha, inside)
    tl.store(active_ptr + cols, active, inside)
    tl.store(gain_ptr + cols, tl.load(gain_ptr + cols, inside, 0.0) + alpha * rz, inside)
    tl.store(iterations_ptr + cols, tl.load(iterations_ptr + cols, inside, 0) + active.to(tl.int32), inside)


@triton.jit
def _total(partial_ptr, cols, parts, k, COLS: tl.constexpr):
    """The sums of columns from the partial ones, (COLS,) float64."""
    total = tl.zeros((_PARTS, COLS), tl.float64)
    for first in range(0, parts, _PARTS):
        rows = first + tl.arange(0, _PARTS)[:, None]
        total += tl.load(partial_ptr + rows * k + cols[None, :], (rows < parts) & (cols[None, :] < k), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _scale(rz, SIZE: tl.constexpr):
    """A power of two near 2^SIZE / √|rz|, from the exponent of the float32 number."""
    exponent = (tl.abs(rz).to(tl.int32, bitcast=True) >> 23) - 127
    exponent = SIZE - (tl.minimum(tl.maximum(exponent, -100), 100) >> 1)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(**_VARIED)
def _beta(
    partial_ptr, v_ptr, t_ptr, u_ptr, rz_ptr, beyond_ptr, active_ptr, beta_ptr, gain_ptr, finished_ptr, iterations_ptr, base_ptr,
    limits_ptr, seen_ptr, p_was_ptr, p_scale_ptr, r_scale_ptr, parts, k, rank, IS_GAIN: tl.constexpr, HALVES: tl.constexpr,
    SIZE: tl.constexpr, COLS: tl.constexpr, THIN: tl.constexpr,
):  # fmt: skip
    """rᵀz as rᵀD⁻¹r − vᵀKv, which is near enough for β, and what is seen of the columns: ``scalars.Seen``. And by what the next p
    is scaled, and the last was."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = cols < k
    inner = tl.zeros((COLS,), tl.float64)  # vᵀt
    beyond = tl.zeros((COLS,), tl.float32)  # vᵀ(t − u)
    for first in range(0, rank, THIN):
        rows = first + tl.arange(0, THIN)[None, :]
        at, here = cols.to(tl.int64)[:, None] * rank + rows, inside[:, None] & (rows < rank)
        v, t = tl.load(v_ptr + at, here, 0.0), tl.load(t_ptr + at, here, 0.0)
        inner += tl.sum(v.to(tl.float64) * t.to(tl.float64), 1)
        beyond += tl.sum(v * (t - tl.load(u_ptr + at, here, 0.0)), 1)
    unit = 1.0 / tl.load(r_scale_ptr + cols, inside, 1.0)  # of v, t and u
    beyond = tl.maximum(beyond * unit * unit, 0.0)
    tl.store(beyond_ptr + cols, beyond, inside)
    fresh = (_total(partial_ptr, cols, parts, k, COLS) - inner * unit.to(tl.float64) * unit.to(tl.float64)).to(tl.float32)
    rz = tl.load(rz_ptr + cols, inside, 0.0)
    active = tl.load(active_ptr + cols, inside, 0) != 0
    tl.store(beta_ptr + cols, tl.where(active & (fresh > 0.0), fresh / tl.where(active, rz, 1.0), 0.0), inside)
    if HALVES:
        tl.store(p_was_ptr + cols, tl.load(p_scale_ptr + cols, inside, 1.0), inside)
        tl.store(p_scale_ptr + cols, _scale(fresh, SIZE), inside)
    iteration = tl.load(iterations_ptr + cols, inside, 0)
    gap = tl.load(limits_ptr) * (fresh + beyond).to(tl.float64)
    total, gain = tl.load(base_ptr + cols, inside, 1.0), tl.load(gain_ptr + cols, inside, 0.0).to(tl.float64)
    total = total + gain if IS_GAIN else total - gain - gap
    enough = tl.load(limits_ptr + 1) * tl.maximum(total, tl.load(limits_ptr + 2))
    done = active & (iteration > 0) & (fresh >= 0.0) & (gap <= enough)
    active = active & (done == 0)
    tl.store(finished_ptr + cols, done, inside & done)
    tl.store(active_ptr + cols, active, inside)
    far = gap / enough
    far = tl.where((fresh >= 0.0) & (far == far), far, float("inf"))
    tl.store(seen_ptr + cols, tl.where(active, far, 0.0).to(tl.float32), inside)
    tl.store(seen_ptr + k + cols, active.to(tl.float32), inside)
    stopped = (active == 0) & (done == 0) & (tl.load(finished_ptr + cols, inside, 1) == 0)
    tl.store(seen_ptr + 2 * k + cols, (stopped & (rz != 0.0)).to(tl.float32), inside)
    tl.store(seen_ptr + 3 * k + cols, iteration.to(tl.float32), inside)


@triton.jit(**_VARIED)
def _turn(
    x_ptr, p_ptr, r_ptr, w_ptr, mask_ptr, root_ptr, w_row_ptr, p_row_ptr, alpha_ptr, beta_ptr, p_was_ptr, p_scale_ptr, r_scale_ptr,
    out_ptr, n, k, HAS_W: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """x takes its step along the old p; then p = z + βp with z = D⁻¹r − w, and rᵀz."""
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    alpha, p_row = tl.load(alpha_ptr + cols, cols < k, 0.0), tl.load(p_row_ptr + rows, rows < n, 1.0)
    p = _read(p_ptr, p_row, tl.load(p_was_ptr + cols, cols < k, 1.0), at, inside, rows, cols, k, HALVES)
    tl.store(x_ptr + at, tl.load(x_ptr + at, inside, 0.0) + tl.where(alpha != 0.0, alpha * p, 0.0), inside)
    root, r_scale = tl.load(root_ptr + rows, rows < n, 1.0), tl.load(r_scale_ptr + cols, cols < k, 1.0)
    r = _read(r_ptr, root, r_scale, at, inside, rows, cols, k, HALVES)
    z = r * root * root
    if HAS_W:
        w_row = tl.load(w_row_ptr + rows, rows < n, 0.0) * (1.0 / r_scale)
        z = tl.where(tl.load(mask_ptr + at, inside, 0) != 0, z - tl.load(w_ptr + at, inside, 0.0) * w_row, 0.0)
    tl.store(out_ptr + tl.program_id(0) * k + cols, tl.sum(r * z, 0)[None, :], cols < k)
    p = z + tl.load(beta_ptr + cols, cols < k, 0.0) * p
    _write(p_ptr, p, p_row, tl.load(p_scale_ptr + cols, cols < k, 1.0), at, inside, rows, cols, k, HALVES)


@triton.jit(**_VARIED)
def _halves(x_ptr, row_ptr, scale_ptr, out_ptr, n, k, ROWS: tl.constexpr, COLS: tl.constexpr):
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    x = tl.load(x_ptr + at, inside, 0.0) * tl.load(row_ptr + rows, rows < n, 0.0) * tl.load(scale_ptr + cols, cols < k, 1.0)
    _store_halves(out_ptr, x, rows, cols, inside, k)


@triton.jit(**_VARIED)
def _thin(
    t_ptr, out_ptr, factor_ptr, rank, k, stride, SUMMED: tl.constexpr, STACKED: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """t (rank, K) from the four products of its halves, times a factor (SUMMED), or from (K, rank), to the three halves that
    ``FactorInHalves.stacked`` has, or to (K, rank)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (rows < rank) & (cols < k)
    turned = cols.to(tl.int64) * rank + rows
    if SUMMED:
        t = tl.zeros((ROWS, COLS), tl.float32)
        for left in tl.static_range(2):
            for right in tl.static_range(2):
                t += tl.load(t_ptr + (left * rank + rows).to(tl.int64) * (2 * k) + right * k + cols, inside, 0.0)
        t = t * tl.load(factor_ptr)
    else:
        t = tl.load(t_ptr + turned, inside, 0.0)
    if STACKED:
        high = t.to(tl.float16)
        to, block = out_ptr + rows.to(tl.int64) * stride + cols, (rows * 0 + rank).to(tl.int64) * stride
        tl.store(to, high, inside)
        tl.store(to + block, (t - high.to(tl.float32)).to(tl.float16), inside)
        tl.store(to + 2 * block, high, inside)
    else:
        tl.store(out_ptr + turned, t, inside)


@triton.jit(do_not_specialize=["rank"])
def _inner(inner_ptr, v_ptr, t_ptr, rank, SIZE: tl.constexpr):
    """t = K_j v of one column, in float64: what C⁻¹r cancels is in these sums. K_j is symmetric, so that rows may be added up.
    For small matrices a library takes several times as long as reading them does."""
    column, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    t = tl.zeros((SIZE, SIZE), tl.float64)
    for first in range(0, rank, SIZE):
        rows = first + tl.arange(0, SIZE)
        at = (column * rank + rows[:, None]) * rank + cols[None, :]
        block = tl.load(inner_ptr + at, (rows[:, None] < rank) & (cols[None, :] < rank), 0.0)
        t += block.to(tl.float64) * tl.load(v_ptr + column * rank + rows, rows < rank, 0.0).to(tl.float64)[:, None]
    tl.store(t_ptr + column * rank + cols, tl.sum(t, 0).to(tl.float32), cols < rank)


@triton.jit(**_VARIED)
def _pairs(root_ptr, left_ptr, right_ptr, out_ptr, n, count, rank, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Products of two columns of root (n, rank), as float16 numbers above what these leave, (2n, count)."""
    at, inside, rows, cols = _tile(n, count, count, ROWS, COLS)
    left = tl.load(left_ptr + cols, cols < count, 0)
    right = tl.load(right_ptr + cols, cols < count, 0)
    row = root_ptr + rows.to(tl.int64) * rank
    x = tl.load(row + left, inside, 0.0) * tl.load(row + right, inside, 0.0)
    high = x.to(tl.float16)
    tl.store(out_ptr + at, high, inside)
    tl.store(out_ptr + n.to(tl.int64) * count + at, (x - high.to(tl.float32)).to(tl.float16), inside)


def pairs(root_Nr: torch.Tensor, left_R: torch.Tensor, right_R: torch.Tensor) -> torch.Tensor:
    """Row by row root_i,left · root_i,right as two float16 numbers, the first N rows and the last of (2N, R)."""
    (n, rank), count = root_Nr.shape, len(left_R)
    out_2NR = torch.empty(2 * n, count, dtype=torch.float16, device=root_Nr.device)
    with torch.cuda.device(root_Nr.device):
        grid = (triton.cdiv(n, ROWS), triton.cdiv(count, COLS))
        _pairs[grid](root_Nr.contiguous(), left_R, right_R, out_2NR, n, count, rank, ROWS, COLS)
    return out_2NR


def halves(x_NK: torch.Tensor, row_N: torch.Tensor, scale_K: torch.Tensor, out_N2K: torch.Tensor) -> None:
    """row · x · scale as two float16 numbers side by side, (N, 2K), into ``out_N2K``."""
    n, k = x_NK.shape
    with torch.cuda.device(x_NK.device):
        _halves[(triton.cdiv(n, ROWS), triton.cdiv(k, COLS))](x_NK.contiguous(), row_N, scale_K, out_N2K, n, k, ROWS, COLS)
