"""Triton kernels of ``halves``: float32 numbers scaled, halved and laid out for one product, in a pass over memory each.

Rounded where torch's own operations round: quotients are IEEE's (those of Triton's ``/`` are not), and no product is joined with
the difference that follows it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _COLS = 16, 128
_VARIED = {"do_not_specialize": ["n", "steps"]}
"""Else compiled anew where rows are 1, or divisible by 16. That columns are is worth knowing: then several are read at once."""
_STEPS, _BUSY = 8, 1056  # tiles of a strip at most; programs from which on a GPU is busy


@triton.jit
def _tile(first, n, k, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = (first * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    cols = (tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]).to(tl.int64)
    return rows, cols, (rows < n) & (cols < k)


@triton.jit(**_VARIED)
def _split_rows(
    x_ptr, root_ptr, scale_ptr, out_ptr, n, k, x_row, x_col, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    rows, cols, inside = _tile(tl.program_id(0), n, k, ROWS, COLS)
    x = tl.load(x_ptr + rows * x_row + cols * x_col, inside, 0.0)
    scaled = tl.div_rn(x, tl.load(root_ptr + rows, rows < n, 1.0)) * tl.load(scale_ptr + cols, cols < k, 0.0)
    high = scaled.to(tl.float16)
    to = out_ptr + rows * (3 * k) + cols
    tl.store(to, high, inside)
    tl.store(to + k, (scaled - high.to(tl.float32)).to(tl.float16), inside)
    tl.store(to + 2 * k, high, inside)


@triton.jit(**_VARIED)
def _largest(x_ptr, root_ptr, out_ptr, n, k, x_row, x_col, steps, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Of some columns, down a strip of rows. Infinite where one is no number: the unit is then none, as it is of one."""
    found = tl.zeros((ROWS, COLS), tl.float32)
    for step in range(steps):
        rows, cols, inside = _tile(tl.program_id(0) * steps + step, n, k, ROWS, COLS)
        wide = tl.load(x_ptr + rows * x_row + cols * x_col, inside, 0.0) * tl.load(root_ptr + rows, rows < n, 0.0)
        found = tl.maximum(found, tl.where(wide == wide, tl.abs(wide), float("inf")))
    _, cols, _ = _tile(0, n, k, ROWS, COLS)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * k + cols, tl.max(found, 0)[None, :], cols < k)


@triton.jit(**_VARIED)
def _split_columns(
    x_ptr, root_ptr, unit_ptr, out_ptr, n, k, x_row, x_col, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    rows, cols, inside = _tile(tl.program_id(0), n, k, ROWS, COLS)
    wide = tl.load(x_ptr + rows * x_row + cols * x_col, inside, 0.0) * tl.load(root_ptr + rows, rows < n, 0.0)
    scaled = tl.div_rn(wide, tl.load(unit_ptr + cols, cols < k, 1.0))
    high = scaled.to(tl.float16)
    to, block = out_ptr + rows * k + cols, n.to(tl.int64) * k
    tl.store(to, high, inside)
    tl.store(to + block, high, inside)
    tl.store(to + 2 * block, (scaled - high.to(tl.float32)).to(tl.float16), inside)


@triton.jit(**_VARIED)
def _rescale(
    x_ptr, root_ptr, unit_ptr, out_ptr, n, k, x_row, x_col, out_row, out_col, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    rows, cols, inside = _tile(tl.program_id(0), n, k, ROWS, COLS)
    x = tl.load(x_ptr + rows * x_row + cols * x_col, inside, 0.0)
    x = x * tl.load(root_ptr + rows, rows < n, 0.0) * tl.load(unit_ptr + cols, cols < k, 0.0)
    tl.store(out_ptr + rows * out_row + cols * out_col, x, inside)


def split_rows(x_NK: torch.Tensor, root_N: torch.Tensor, scale_K: torch.Tensor) -> torch.Tensor:
    """[high | low | high] of x_ij / root_i · scale_j, (N, 3K) float16. Vectors here are float32 and in C order."""
    n, k = x_NK.shape
    out_N3K = torch.empty(n, 3 * k, dtype=torch.float16, device=x_NK.device)
    with torch.cuda.device(x_NK.device):
        _split_rows[_grid(n, k)](
            x_NK, root_N, scale_K, out_N3K, n, k, *x_NK.stride(), _ROWS, _COLS, enable_fp_fusion=False
        )  # fmt: skip
    return out_N3K


def largest(x_NK: torch.Tensor, root_N: torch.Tensor) -> torch.Tensor:
    """The largest |x_ij · root_i| of each column, (1, K); infinite where one is no number."""
    (n, k), (tiles, across) = x_NK.shape, _grid(*x_NK.shape)
    steps = max(1, min(_STEPS, tiles * across // _BUSY))
    strips = triton.cdiv(tiles, steps)
    out_PK = x_NK.new_empty(strips, k)
    with torch.cuda.device(x_NK.device):
        _largest[strips, across](x_NK, root_N, out_PK, n, k, *x_NK.stride(), steps, _ROWS, _COLS)
    return out_PK.amax(0, keepdim=True)


def split_columns(x_NK: torch.Tensor, root_N: torch.Tensor, unit_K: torch.Tensor) -> torch.Tensor:
    """[high; high; low] of x_ij · root_i / unit_j, (3N, K) float16."""
    n, k = x_NK.shape
    out_3NK = torch.empty(3 * n, k, dtype=torch.float16, device=x_NK.device)
    with torch.cuda.device(x_NK.device):
        _split_columns[_grid(n, k)](
            x_NK, root_N, unit_K, out_3NK, n, k, *x_NK.stride(), _ROWS, _COLS, enable_fp_fusion=False
        )  # fmt: skip
    return out_3NK


def rescale(x_NK: torch.Tensor, root_N: torch.Tensor, unit_K: torch.Tensor, out_NK: torch.Tensor) -> None:
    """out_ij = (x_ij · root_i) · unit_j, whatever the layout of either."""
    with torch.cuda.device(x_NK.device):
        _rescale[_grid(*x_NK.shape)](x_NK, root_N, unit_K, out_NK, *x_NK.shape, *x_NK.stride(), *out_NK.stride(), _ROWS, _COLS)


def _grid(n: int, k: int) -> tuple[int, int]:
    return triton.cdiv(n, _ROWS), triton.cdiv(k, _COLS)
