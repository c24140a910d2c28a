"""Triton kernels of ``_vectors``: each is one pass over (N, K) float32 arrays in C order.

A program handles a tile of rows by columns; column sums leave as one partial row a tile and are added by torch, in a fixed
order, so that the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

_ROWS, _COLS = 64, 64


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
def _precondition(
    r_ptr, w_ptr, z_ptr, mask_ptr, inverse_ptr, out_ptr, n, k, HAS_W: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    at, inside, rows, cols = _tile(n, k, k, ROWS, COLS)
    r = tl.load(r_ptr + at, inside, 0.0)
    z = r * tl.load(inverse_ptr + rows, rows < n, 0.0)
    if HAS_W:
        kept = tl.load(mask_ptr + at, inside, 0) != 0
        z = tl.where(kept, z - tl.load(w_ptr + at, inside, 0.0), 0.0)
    tl.store(z_ptr + at, z, inside)
    tl.store(out_ptr + tl.program_id(0) * k + cols, tl.sum(r * z, 0)[None, :], cols < k)


@triton.jit
def _turn(p_ptr, z_ptr, low_ptr, beta_ptr, n, k, ROWS: tl.constexpr, COLS: tl.constexpr):
    at, inside, _, cols = _tile(n, k, k, ROWS, COLS)
    beta = tl.load(beta_ptr + cols, cols < k, 0.0)
    p = tl.load(z_ptr + at, inside, 0.0) + beta * tl.load(p_ptr + at, inside, 0.0)
    tl.store(p_ptr + at, p, inside)
    tl.store(low_ptr + at, p.to(tl.bfloat16), inside)


@dataclass(eq=False)
class Fused:
    """The operations of ``_vectors.Plain`` as kernels; ``mask_NK`` is bool. Temporaries are kept between iterations."""

    mask_NK: torch.Tensor
    _z_NK: torch.Tensor | None = None
    _low_NK: torch.Tensor | None = None
    _size: dict = field(default_factory=lambda: {"ROWS": _ROWS, "COLS": _COLS})

    def curvature(self, p_NK, q_NK):
        out = self._partial(p_NK)
        _curvature[self._grid(p_NK)](p_NK, q_NK, out, *p_NK.shape, **self._size)
        return out.sum(0)

    def advance(self, x_NK, r_NK, p_NK, q_NK, alpha_K):
        _advance[self._grid(p_NK)](x_NK, r_NK, p_NK, q_NK, self.mask_NK, alpha_K.contiguous(), *p_NK.shape, **self._size)

    def precondition(self, r_NK, w_NK, inverse_N1):
        if self._z_NK is None:
            self._z_NK = torch.empty_like(r_NK)
        out, has_w = self._partial(r_NK), w_NK is not None
        _precondition[self._grid(r_NK)](
            r_NK, w_NK if has_w else r_NK, self._z_NK, self.mask_NK, inverse_N1.contiguous(), out, *r_NK.shape, has_w, **self._size
        )
        return self._z_NK, out.sum(0)

    def turn(self, p_NK, z_NK, beta_K):
        _turn[self._grid(p_NK)](p_NK, z_NK, self._low(p_NK), beta_K.contiguous(), *p_NK.shape, **self._size)

    def low(self, p_NK):
        """p in bfloat16: ``turn`` has written it already."""
        return self._low_NK if self._low_NK is not None else self._low(p_NK).copy_(p_NK)

    def _low(self, p_NK):
        if self._low_NK is None:
            self._low_NK = torch.empty_like(p_NK, dtype=torch.bfloat16)
        return self._low_NK

    def _partial(self, like_NK):
        return torch.empty((triton.cdiv(like_NK.shape[0], _ROWS), like_NK.shape[1]), device=like_NK.device)

    def _grid(self, like_NK):
        return (triton.cdiv(like_NK.shape[0], _ROWS), triton.cdiv(like_NK.shape[1], _COLS))
