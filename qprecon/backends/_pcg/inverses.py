"""(I + T)⁻¹ of one small symmetric matrix a column, in float64, by a Triton program each.

The sweep operator (Goodnight, A tutorial on the SWEEP operator, The American Statistician 33, 1979): once every index is swept, a
symmetric matrix has become minus its inverse. A step reads one row and adds one outer product, all in registers. I + T is positive
definite, with no eigenvalue below 1, so that nothing needs a pivot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = 128  # r: a program holds r² float64 numbers in registers


@triton.jit
def _inverse(half_ptr, place_ptr, out_ptr, pairs, RANK: tl.constexpr):
    column = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, RANK)[:, None]
    cols = tl.arange(0, RANK)[None, :]
    at = rows * RANK + cols
    a = tl.load(half_ptr + column * pairs + tl.load(place_ptr + at)).to(tl.float64)
    a = a + tl.where(rows == cols, 1.0, 0.0)
    for k in range(RANK):
        row = tl.sum(tl.where(rows == k, a, 0.0), 0)[None, :]
        col = tl.sum(tl.where(cols == k, a, 0.0), 1)[:, None]
        pivot = tl.sum(tl.where(cols == k, row, 0.0), 1)[:, None]
        swept = a - col * (row / pivot)
        swept = tl.where(rows == k, row / pivot, swept)
        swept = tl.where(cols == k, col / pivot, swept)
        a = tl.where((rows == k) & (cols == k), -1.0 / pivot, swept)
    tl.store(out_ptr + column * (RANK * RANK) + at, -a)


def inverses(half_KP: torch.Tensor, place_rr: torch.Tensor) -> torch.Tensor:
    """(I + T)⁻¹ of every column, (K, r, r) float32: entry (i, j) of a column's T is ``half_KP[column, place_rr[i, j]]``."""
    rank, k = len(place_rr), len(half_KP)
    out_Krr = half_KP.new_empty(k, rank, rank)
    if k:
        with torch.cuda.device(half_KP.device):
            _inverse[(k,)](half_KP, place_rr, out_Krr, half_KP.shape[1], rank, num_warps=16 if rank > 64 else 4)
    return out_Krr


def able(half_KP: torch.Tensor, rank: int) -> bool:
    """Whether ``inverses`` takes them: float32 on CUDA, r a power of two that fits."""
    return half_KP.is_cuda and half_KP.dtype == torch.float32 and rank & (rank - 1) == 0 and 2 <= rank <= LARGEST
