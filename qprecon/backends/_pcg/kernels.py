"""Triton kernels of ``vectors``: each is one pass over (N, K) float32 arrays in C order.

A program handles a tile of rows by columns; column sums leave as one partial row a tile and are added by torch, in a fixed
order, so that the same input gives the same bits. Triton launches on the process's current device, wherever the tensors are:
each launch stands within ``torch.cuda.device`` of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from .factor import FactorInPieces

_ROWS, _COLS, _LINE = 64, 64, 128
_STEPS, _BUSY = 8, 528  # tiles of a strip at most; programs from which on a GPU is busy


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
def _project(f_ptr, x, high, rest, rows, n, RANK: tl.constexpr):
    """Add Fᵀx of a tile of x to two sums: high pieces by high pieces, and the rest, which tensor cores would else cut off."""
    at = tl.arange(0, RANK)[:, None].to(tl.int64) * n + rows[None, :]
    inside = rows[None, :] < n
    f_high = tl.load(f_ptr + at, inside, 0.0)
    f_middle = tl.load(f_ptr + RANK * n + at, inside, 0.0)
    f_low = tl.load(f_ptr + 2 * RANK * n + at, inside, 0.0)
    x_high = x.to(tl.bfloat16)
    x = x - x_high.to(tl.float32)
    x_middle = x.to(tl.bfloat16)
    x_low = (x - x_middle.to(tl.float32)).to(tl.bfloat16)
    high = tl.dot(f_high, x_high, high)
    rest = tl.dot(f_high, x_middle, rest)
    rest = tl.dot(f_middle, x_high, rest)
    rest = tl.dot(f_middle, x_middle, rest)
    rest = tl.dot(f_low, x_high, rest)
    return high, tl.dot(f_high, x_low, rest)


@triton.jit
def _put_sums(out_ptr, sums, cols, k, RANK: tl.constexpr):
    to = (tl.program_id(0) * RANK + tl.arange(0, RANK)[:, None]).to(tl.int64) * k + cols[None, :]
    tl.store(out_ptr + to, sums, cols[None, :] < k)


@triton.jit
def _advance(
    r_ptr, q_ptr, mask_ptr, alpha_ptr, f_ptr, out_ptr, n, k, steps,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    if RANK:
        high = tl.zeros((RANK, COLS), tl.float32)
        rest = tl.zeros((RANK, COLS), tl.float32)
    for step in range(steps):
        rows = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        at = rows[:, None].to(tl.int64) * k + cols[None, :]
        inside = (rows < n)[:, None] & (cols < k)[None, :]
        r = tl.load(r_ptr + at, inside, 0.0)
        alpha = tl.load(alpha_ptr + cols, cols < k, 0.0)[None, :]
        kept = tl.load(mask_ptr + at, inside, 0) != 0
        # a frozen column may hold an infinite q: 0·inf must not reach r
        r -= tl.where(kept & (alpha != 0.0), alpha * tl.load(q_ptr + at, inside, 0.0), 0.0)
        tl.store(r_ptr + at, r, inside)
        if RANK:
            high, rest = _project(f_ptr, r, high, rest, rows, n, RANK)
    if RANK:
        _put_sums(out_ptr, high + rest, cols, k, RANK)


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
    x_ptr, p_ptr, r_ptr, w_ptr, mask_ptr, inverse_ptr, low_ptr, alpha_ptr, beta_ptr, f_ptr, out_ptr, n, k, steps,
    HAS_W: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    if RANK:
        high = tl.zeros((RANK, COLS), tl.float32)
        rest = tl.zeros((RANK, COLS), tl.float32)
    for step in range(steps):
        rows = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        at = rows[:, None].to(tl.int64) * k + cols[None, :]
        inside = (rows < n)[:, None] & (cols < k)[None, :]
        p, _ = _z(r_ptr, w_ptr, mask_ptr, inverse_ptr, at, inside, rows[:, None], n, HAS_W)
        alpha = tl.load(alpha_ptr + cols, cols < k, 0.0)[None, :]
        beta = tl.load(beta_ptr + cols, cols < k, 0.0)[None, :]
        before = tl.load(p_ptr + at, inside, 0.0)
        tl.store(x_ptr + at, tl.load(x_ptr + at, inside, 0.0) + alpha * before, inside)
        p += beta * before
        tl.store(p_ptr + at, p, inside)
        tl.store(low_ptr + at, p.to(tl.bfloat16), inside)
        if RANK:
            high, rest = _project(f_ptr, p, high, rest, rows, n, RANK)
    if RANK:
        _put_sums(out_ptr, high + rest, cols, k, RANK)


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


def fusible(factor):
    """The factor if its products can be made beside the vectors, or None."""
    rank = 0 if getattr(factor, "rows_3rN", None) is None else factor.factor_Nr.shape[1]
    return factor if rank in (16, 32, 64, 128) else None


@dataclass(eq=False)
class Fused:
    """The operations of ``vectors.Plain`` as kernels; ``mask_NK`` is bool.

    The factors whose products with r and with p are wanted are multiplied where r and p are made, from the pieces of
    ``factor.FactorInPieces``: neither is read again for it. x follows one step later than in ``Plain``, in ``turn``, which reads p.
    """

    in_place: ClassVar[bool] = True  # what outlives a step stays where it is
    mask_NK: torch.Tensor
    tail: int = 0
    of_r: FactorInPieces | None = None
    of_p: FactorInPieces | None = None
    _low_MK: torch.Tensor | None = None
    _alpha_K: torch.Tensor | None = None
    _sums: dict[int, torch.Tensor] = field(default_factory=dict)  # by the factor's id

    def project(self, factor, x_NK):
        """Fᵀx, (r, K); x is r or p as it is now. Before the first step r was made elsewhere."""
        if id(factor) in self._sums:
            return self._sums[id(factor)]
        return factor.project(x_NK)

    def begin(self, r_NK, w_NK, inverse_N1, scalars):
        (n, k), p_NK = r_NK.shape, torch.zeros_like(r_NK)
        self._low_MK = torch.empty(n + self.tail, k, dtype=torch.bfloat16, device=r_NK.device)
        scalars.active_K.fill_(True)
        self._rz(r_NK, w_NK, inverse_N1, scalars)
        zero_K = torch.zeros_like(scalars.rz_K)
        self._direct(torch.empty_like(p_NK), p_NK, r_NK, w_NK, inverse_N1, zero_K, zero_K)
        return p_NK

    def advance(self, x_NK, r_NK, p_NK, q_NK, scalars):
        out, self._alpha_K, (n, k) = self._partial(p_NK), torch.empty_like(scalars.rz_K), p_NK.shape
        with torch.cuda.device(p_NK.device):
            _curvature[self._grid(p_NK)](p_NK, q_NK, out, n, k, _ROWS, _COLS)
            _alpha[self._line(k)](
                out, scalars.rz_K, scalars.gain_K, scalars.active_K, scalars.iterations_K, self._alpha_K, len(out), k, _LINE
            )
        self._step_r(r_NK, q_NK, self._alpha_K)

    def turn(self, x_NK, p_NK, r_NK, w_NK, inverse_N1, scalars):
        beta_K = self._rz(r_NK, w_NK, inverse_N1, scalars)
        self._direct(x_NK, p_NK, r_NK, w_NK, inverse_N1, self._alpha_K, beta_K)

    def low(self, p_NK):
        """p in bfloat16, which ``begin`` and ``turn`` have written, and ``tail`` rows below it."""
        return self._low_MK

    def _rz(self, r_NK, w_NK, inverse_N1, scalars):
        out, beta_K, (n, k) = self._partial(r_NK), torch.empty_like(scalars.rz_K), r_NK.shape
        w_NK, has_w = (r_NK, False) if w_NK is None else (w_NK, True)
        with torch.cuda.device(r_NK.device):
            _dot_z[self._grid(r_NK)](r_NK, w_NK, self.mask_NK, inverse_N1, out, n, k, has_w, _ROWS, _COLS)
            _beta[self._line(k)](out, scalars.rz_K, scalars.active_K, beta_K, len(out), k, _LINE)
        return beta_K

    def _step_r(self, r_NK, q_NK, alpha_K):
        """r −= αq on kept entries, in place, and what ``project`` gives of r."""
        grid, steps, pieces_3rN, sums, rank = self._strips(r_NK, self.of_r)
        with torch.cuda.device(r_NK.device):
            _advance[grid](
                r_NK, q_NK, self.mask_NK, alpha_K, pieces_3rN, sums, *r_NK.shape, steps, rank, _ROWS, _COLS, num_warps=8
            )
        self._keep(self.of_r, sums)

    def _direct(self, x_NK, p_NK, r_NK, w_NK, inverse_N1, alpha_K, beta_K):
        grid, steps, pieces_3rN, sums, rank = self._strips(r_NK, self.of_p)
        w_NK, has_w = (r_NK, False) if w_NK is None else (w_NK, True)
        with torch.cuda.device(r_NK.device):
            _turn[grid](
                x_NK, p_NK, r_NK, w_NK, self.mask_NK, inverse_N1, self._low_MK, alpha_K, beta_K, pieces_3rN, sums,
                *r_NK.shape, steps, has_w, rank, _ROWS, _COLS, num_warps=8,
            )  # fmt: skip
        self._keep(self.of_p, sums)

    def _strips(self, like_NK, factor):
        """Grid and tiles a program, the pieces of F, and where programs leave their parts of Fᵀx."""
        n, k = like_NK.shape
        tiles, across = triton.cdiv(n, _ROWS), triton.cdiv(k, _COLS)
        steps = max(1, min(_STEPS, tiles * across // _BUSY))
        grid = (triton.cdiv(tiles, steps), across)
        if factor is None:
            return grid, steps, like_NK, like_NK, 0
        rank = factor.factor_Nr.shape[1]
        return grid, steps, factor.rows_3rN, like_NK.new_empty(grid[0], rank, k), rank

    def _keep(self, factor, sums):
        if factor is None:
            return
        if id(factor) in self._sums:
            torch.sum(sums, 0, out=self._sums[id(factor)])
        else:
            self._sums[id(factor)] = sums.sum(0)

    def _partial(self, like_NK):
        return like_NK.new_empty((triton.cdiv(like_NK.shape[0], _ROWS), like_NK.shape[1]))

    def _grid(self, like_NK):
        return (triton.cdiv(like_NK.shape[0], _ROWS), triton.cdiv(like_NK.shape[1], _COLS))

    def _line(self, k):
        return (triton.cdiv(k, _LINE),)
