"""Triton kernels of ``vectors``: each is one pass over (N, K) float32 arrays in C order.

A program handles a tile of rows by columns; column sums leave as one partial row a tile and are added by torch, in a fixed
order, so that the same input gives the same bits. Triton launches on the process's current device, wherever the tensors are:
each launch stands within ``torch.cuda.device`` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_ROWS, _COLS, _LINE = 64, 64, 128


@triton.jit
def _tile(n, k, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    return rows.to(tl.int64) * stride + cols, (rows < n) & (cols < k), rows, cols


@triton.jit
def _curvature(p_ptr, q_ptr, out_ptr, n, k, ROWS: tl.constexpr, COLS: tl.constexpr):
    at, inside, _, cols = _tile(n, k, k, ROWS, COLS)
    p = tl.load(p_ptr + at, inside, 0.0)
    q = tl.load(q_ptr + at, inside, 0.0)
    tl.store(out_ptr + tl.program_id(0) * k + cols, tl.sum(p * q, 0)[None, :], cols < k)


@triton.jit
def _advance(x_ptr, r_ptr, p_ptr, q_ptr, mask_ptr, alpha_ptr, n, k, ROWS: tl.constexpr, COLS: tl.constexpr):
    at, inside, _, cols = _tile(n, k, k, ROWS, COLS)
    alpha = tl.load(alpha_ptr + cols, cols < k, 0.0)
    kept = tl.load(mask_ptr + at, inside, 0) != 0
    p = tl.load(p_ptr + at, inside, 0.0)
    tl.store(x_ptr + at, tl.load(x_ptr + at, inside, 0.0) + alpha * p, inside)
    # a frozen column may hold an infinite q: 0·inf must not reach r
    step = tl.where(kept & (alpha != 0.0), alpha * tl.load(q_ptr + at, inside, 0.0), 0.0)
    tl.store(r_ptr + at, tl.load(r_ptr + at, inside, 0.0) - step, inside)


@triton.jit
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


@triton.jit
def _beta(partial_ptr, rz_ptr, active_ptr, beta_ptr, parts, k, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = cols < k
    fresh = tl.zeros((COLS,), tl.float32)
    for part in range(parts):
        fresh += tl.load(partial_ptr + part * k + cols, inside, 0.0)
    rz = tl.load(rz_ptr + cols, inside, 0.0)
    active = tl.load(active_ptr + cols, inside, 0) != 0
    tl.store(beta_ptr + cols, tl.where(active, fresh / tl.where(active, rz, 1.0), 0.0), inside)
    tl.store(rz_ptr + cols, fresh, inside)
    tl.store(active_ptr + cols, active & (fresh > 0.0), inside)


@triton.jit
def _dot_z(
    r_ptr, w_ptr, mask_ptr, inverse_ptr, out_ptr, n, k, HAS_W: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    z, r = _z(r_ptr, w_ptr, mask_ptr, inverse_ptr, at, inside, rows, n, HAS_W)
    tl.store(out_ptr + tl.program_id(0) * k + cols, tl.sum(r * z, 0)[None, :], cols < k)


@triton.jit
def _turn(
    p_ptr, r_ptr, w_ptr, mask_ptr, inverse_ptr, low_ptr, beta_ptr, n, k,
    HAS_W: tl.constexpr, HAS_P: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    p, _ = _z(r_ptr, w_ptr, mask_ptr, inverse_ptr, at, inside, rows, n, HAS_W)
    if HAS_P:
        p += tl.load(beta_ptr + cols, cols < k, 0.0) * tl.load(p_ptr + at, inside, 0.0)
    tl.store(p_ptr + at, p, inside)
    tl.store(low_ptr + at, p.to(tl.bfloat16), inside)


@triton.jit
def _z(r_ptr, w_ptr, mask_ptr, inverse_ptr, at, inside, rows, n, HAS_W: tl.constexpr):
    # z is made twice, for its product with r and for p, rather than written and read: w and r are in memory anyway
    r = tl.load(r_ptr + at, inside, 0.0)
    z = r * tl.load(inverse_ptr + rows, rows < n, 0.0)
    if HAS_W:
        z = tl.where(tl.load(mask_ptr + at, inside, 0) != 0, z - tl.load(w_ptr + at, inside, 0.0), 0.0)
    return z, r


@triton.jit
def _pieces(x_ptr, out_ptr, n, k, ROWS: tl.constexpr, COLS: tl.constexpr):
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    to = rows.to(tl.int64) * (3 * k) + cols
    x = tl.load(x_ptr + at, inside, 0.0)
    for piece in tl.static_range(3):
        part = x.to(tl.bfloat16)
        tl.store(out_ptr + to + piece * k, part, inside)
        x = x - part.to(tl.float32)


def pieces(x_NK: torch.Tensor) -> torch.Tensor:
    """The three bfloat16 pieces of float32 numbers side by side, (N, 3K)."""
    n, k = x_NK.shape
    out = torch.empty(n, 3 * k, dtype=torch.bfloat16, device=x_NK.device)
    with torch.cuda.device(x_NK.device):
        _pieces[(triton.cdiv(n, _ROWS), triton.cdiv(k, _COLS))](x_NK.contiguous(), out, n, k, _ROWS, _COLS)
    return out


@dataclass(eq=False)
class Fused:
    """The operations of ``_vectors.Plain`` as kernels; ``mask_NK`` is bool."""

    mask_NK: torch.Tensor
    tail: int = 0
    _low_MK: torch.Tensor | None = None

    def begin(self, r_NK, w_NK, inverse_N1, scalars):
        (n, k), p_NK = r_NK.shape, torch.empty_like(r_NK)
        self._low_MK = torch.empty(n + self.tail, k, dtype=torch.bfloat16, device=r_NK.device)
        scalars.active_K.fill_(True)
        with torch.cuda.device(r_NK.device):
            beta_K = self._rz(r_NK, w_NK, inverse_N1, scalars)
            self._direct(p_NK, r_NK, w_NK, inverse_N1, beta_K, False)
        return p_NK

    def advance(self, x_NK, r_NK, p_NK, q_NK, scalars):
        out, alpha_K, (n, k) = self._partial(p_NK), torch.empty_like(scalars.rz_K), p_NK.shape
        with torch.cuda.device(p_NK.device):
            _curvature[self._grid(p_NK)](p_NK, q_NK, out, n, k, _ROWS, _COLS)
            _alpha[self._line(k)](
                out, scalars.rz_K, scalars.gain_K, scalars.active_K, scalars.iterations_K, alpha_K, len(out), k, _LINE
            )
            _advance[self._grid(p_NK)](x_NK, r_NK, p_NK, q_NK, self.mask_NK, alpha_K, n, k, _ROWS, _COLS)

    def turn(self, p_NK, r_NK, w_NK, inverse_N1, scalars):
        with torch.cuda.device(r_NK.device):
            beta_K = self._rz(r_NK, w_NK, inverse_N1, scalars)
            self._direct(p_NK, r_NK, w_NK, inverse_N1, beta_K, True)

    def low(self, p_NK):
        """p in bfloat16, which ``begin`` and ``turn`` have written, and ``tail`` rows below it."""
        return self._low_MK

    def _rz(self, r_NK, w_NK, inverse_N1, scalars):
        out, beta_K, (n, k) = self._partial(r_NK), torch.empty_like(scalars.rz_K), r_NK.shape
        w_NK, has_w = (r_NK, False) if w_NK is None else (w_NK, True)
        _dot_z[self._grid(r_NK)](r_NK, w_NK, self.mask_NK, inverse_N1, out, n, k, has_w, _ROWS, _COLS)
        _beta[self._line(k)](out, scalars.rz_K, scalars.active_K, beta_K, len(out), k, _LINE)
        return beta_K

    def _direct(self, p_NK, r_NK, w_NK, inverse_N1, beta_K, has_p):
        n, k = r_NK.shape
        w_NK, has_w = (r_NK, False) if w_NK is None else (w_NK, True)
        _turn[self._grid(r_NK)](
            p_NK, r_NK, w_NK, self.mask_NK, inverse_N1, self._low_MK, beta_K, n, k, has_w, has_p, _ROWS, _COLS
        )

    def _partial(self, like_NK):
        return like_NK.new_empty((triton.cdiv(like_NK.shape[0], _ROWS), like_NK.shape[1]))

    def _grid(self, like_NK):
        return (triton.cdiv(like_NK.shape[0], _ROWS), triton.cdiv(like_NK.shape[1], _COLS))

    def _line(self, k):
        return (triton.cdiv(k, _LINE),)
