"""Triton kernels of ``fused``: each is one pass over (N, K) float32 arrays in C order.

A program handles a tile of rows by columns; column sums leave as one partial row a tile and are added by torch, in a fixed
order, so that the same input gives the same bits. Triton launches on the process's current device, wherever the tensors are:
each launch stands within ``torch.cuda.device`` of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLS, LINE = 64, 64, 128
_VARIED = {"do_not_specialize": ["n", "parts", "rank"]}
"""Triton compiles a kernel anew, for half a second, where numbers are 1 or divisible by 16. K is a multiple of 64 always."""
THIN = 32  # rows and columns of a tile of the thin arrays


@triton.jit
def _tile(n, k, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    return rows.to(tl.int64) * stride + cols, (rows < n) & (cols < k), rows, cols


@triton.jit(**_VARIED)
def _curvature(p_ptr, q_ptr, out_ptr, n, k, ROWS: tl.constexpr, COLS: tl.constexpr):
    at, inside, _, cols = _tile(n, k, k, ROWS, COLS)
    p = tl.load(p_ptr + at, inside, 0.0)
    q = tl.load(q_ptr + at, inside, 0.0)
    tl.store(out_ptr + tl.program_id(0) * k + cols, tl.sum(p * q, 0)[None, :], cols < k)


@triton.jit(**_VARIED)
def _advance(
    x_ptr, r_ptr, p_ptr, q_ptr, mask_ptr, alpha_ptr, pieces_ptr, n, k, PIECES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    alpha = tl.load(alpha_ptr + cols, cols < k, 0.0)
    kept = tl.load(mask_ptr + at, inside, 0) != 0
    p = tl.load(p_ptr + at, inside, 0.0)
    tl.store(x_ptr + at, tl.load(x_ptr + at, inside, 0.0) + alpha * p, inside)
    # a frozen column may hold an infinite q: 0·inf must not reach r
    step = tl.where(kept & (alpha != 0.0), alpha * tl.load(q_ptr + at, inside, 0.0), 0.0)
    r = tl.load(r_ptr + at, inside, 0.0) - step
    tl.store(r_ptr + at, r, inside)
    if PIECES:
        _store_pieces(pieces_ptr, r, rows, cols, inside, k)


@triton.jit
def _store_pieces(out_ptr, x, rows, cols, inside, k):
    to = out_ptr + rows.to(tl.int64) * (3 * k) + cols
    for piece in tl.static_range(3):
        part = x.to(tl.bfloat16)
        tl.store(to + piece * k, part, inside)
        x = x - part.to(tl.float32)


@triton.jit(**_VARIED)
def _alpha(partial_ptr, rz_ptr, gain_ptr, active_ptr, iterations_ptr, alpha_ptr, parts, k, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = cols < k
    curvature = tl.zeros((COLS,), tl.float32)
    for part in range(parts):
        curvature += tl.load(partial_ptr + part * k + cols, inside, 0.0)
    rz = tl.load(rz_ptr + cols, inside, 0.0)
    active = (tl.load(active_ptr + cols, inside, 0) != 0) & (curvature > 0.0)
    alpha = tl.where(active, rz / tl.where(active, curvature, 1.0), 0.0)
    tl.store(alpha_ptr + cols, alpha, inside)
    tl.store(active_ptr + cols, active, inside)
    tl.store(gain_ptr + cols, tl.load(gain_ptr + cols, inside, 0.0) + alpha * rz, inside)
    tl.store(iterations_ptr + cols, tl.load(iterations_ptr + cols, inside, 0) + active.to(tl.int32), inside)


@triton.jit(**_VARIED)
def _beta(
    partial_ptr, rz_ptr, active_ptr, beta_ptr, gain_ptr, finished_ptr, iterations_ptr, base_ptr, limits_ptr, far_ptr, parts, k,
    EVERY: tl.constexpr, IS_GAIN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """β, and after every so many iterations ``scalars.Goal.look`` of the columns that go on; how far they are from their goal."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = cols < k
    fresh = tl.zeros((COLS,), tl.float32)
    for part in range(parts):
        fresh += tl.load(partial_ptr + part * k + cols, inside, 0.0)
    rz = tl.load(rz_ptr + cols, inside, 0.0)
    active = tl.load(active_ptr + cols, inside, 0) != 0
    tl.store(beta_ptr + cols, tl.where(active, fresh / tl.where(active, rz, 1.0), 0.0), inside)
    tl.store(rz_ptr + cols, fresh, inside)
    active = active & (fresh > 0.0)
    iteration = tl.load(iterations_ptr + cols, inside, 0)
    gap = tl.load(limits_ptr) * fresh.to(tl.float64)
    total, gain = tl.load(base_ptr + cols, inside, 1.0), tl.load(gain_ptr + cols, inside, 0.0).to(tl.float64)
    total = total + gain if IS_GAIN else total - gain - gap
    enough = tl.load(limits_ptr + 1) * tl.maximum(total, tl.load(limits_ptr + 2))
    looked = active & (iteration > 0) & (iteration % EVERY == 0)
    done = looked & (gap <= enough)
    tl.store(finished_ptr + cols, done, inside & done)
    tl.store(active_ptr + cols, active & (done == 0), inside)
    far = gap / enough
    far = tl.where(far == far, far, float("inf"))
    before = tl.load(far_ptr + cols, inside, 0.0)
    far = tl.where(active & (done == 0), tl.where(looked, far, before.to(tl.float64)), 0.0)
    tl.store(far_ptr + cols, far.to(tl.float32), inside)


@triton.jit(**_VARIED)
def _dot_z(
    r_ptr, w_ptr, mask_ptr, inverse_ptr, out_ptr, n, k, HAS_W: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    z, r = _z(r_ptr, w_ptr, mask_ptr, inverse_ptr, at, inside, rows, n, HAS_W)
    tl.store(out_ptr + tl.program_id(0) * k + cols, tl.sum(r * z, 0)[None, :], cols < k)


@triton.jit(**_VARIED)
def _turn(
    p_ptr, r_ptr, w_ptr, mask_ptr, inverse_ptr, pieces_ptr, beta_ptr, n, k,
    HAS_W: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    p, _ = _z(r_ptr, w_ptr, mask_ptr, inverse_ptr, at, inside, rows, n, HAS_W)
    p += tl.load(beta_ptr + cols, cols < k, 0.0) * tl.load(p_ptr + at, inside, 0.0)
    tl.store(p_ptr + at, p, inside)
    if PIECES:
        _store_pieces(pieces_ptr, p, rows, cols, inside, k)


@triton.jit
def _z(r_ptr, w_ptr, mask_ptr, inverse_ptr, at, inside, rows, n, HAS_W: tl.constexpr):
    # z is made twice, for its product with r and for p, rather than written and read: w and r are in memory anyway
    r = tl.load(r_ptr + at, inside, 0.0)
    z = r * tl.load(inverse_ptr + rows, rows < n, 0.0)
    if HAS_W:
        z = tl.where(tl.load(mask_ptr + at, inside, 0) != 0, z - tl.load(w_ptr + at, inside, 0.0), 0.0)
    return z, r


@triton.jit(**_VARIED)
def _pieces(x_ptr, out_ptr, n, k, ROWS: tl.constexpr, COLS: tl.constexpr):
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    _store_pieces(out_ptr, tl.load(x_ptr + at, inside, 0.0), rows, cols, inside, k)


@triton.jit(**_VARIED)
def _thin(
    t_ptr, out_ptr, rank, k, stride, SUMMED: tl.constexpr, STACKED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """t (rank, K) from the nine products of its pieces (SUMMED) or from (K, rank), to ``Factor``'s six pieces or to (K, rank)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (rows < rank) & (cols < k)
    turned = cols.to(tl.int64) * rank + rows
    if SUMMED:
        t = tl.zeros((ROWS, COLS), tl.float32)
        for left in tl.static_range(3):
            for right in tl.static_range(3):
                t += tl.load(t_ptr + (left * rank + rows).to(tl.int64) * (3 * k) + right * k + cols, inside, 0.0)
    else:
        t = tl.load(t_ptr + turned, inside, 0.0)
    if STACKED:
        high = t.to(tl.bfloat16)
        t = t - high.to(tl.float32)
        middle = t.to(tl.bfloat16)
        low = (t - middle.to(tl.float32)).to(tl.bfloat16)
        to, block = out_ptr + rows.to(tl.int64) * stride + cols, (rows * 0 + rank).to(tl.int64) * stride
        tl.store(to, high, inside)
        tl.store(to + block, middle, inside)
        tl.store(to + 2 * block, low, inside)
        tl.store(to + 3 * block, high, inside)
        tl.store(to + 4 * block, middle, inside)
        tl.store(to + 5 * block, high, inside)
    else:
        tl.store(out_ptr + turned, t, inside)


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


def pieces(x_NK: torch.Tensor, out_N3K: torch.Tensor | None = None) -> torch.Tensor:
    """The three bfloat16 pieces of float32 numbers side by side, (N, 3K)."""
    n, k = x_NK.shape
    if out_N3K is None:
        out_N3K = torch.empty(n, 3 * k, dtype=torch.bfloat16, device=x_NK.device)
    with torch.cuda.device(x_NK.device):
        _pieces[(triton.cdiv(n, ROWS), triton.cdiv(k, COLS))](x_NK.contiguous(), out_N3K, n, k, ROWS, COLS)
    return out_N3K
