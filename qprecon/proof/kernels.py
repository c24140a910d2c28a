"""The audit's passes over (N, K) arrays on a GPU as two Triton kernels, all sums in float64: see ``passes``.

A program goes down a strip of rows for some columns and leaves one partial sum, or largest number, a column; torch adds them up in
a fixed order, so that the same input gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLS = 16, 64  # a tile
_VARIED = {"do_not_specialize": ["n", "steps"]}  # else compiled anew where one is 1, or divisible by 16
_STEPS, _BUSY = 16, 1056  # tiles of a strip at most; programs from which on a GPU is busy


@triton.jit(**_VARIED)
def _back(
    w_ptr, new_ptr, root_ptr, back_ptr, mass_ptr, n, k, w_row, w_col, new_row, new_col, steps,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :].to(tl.int64)
    mass = tl.zeros((ROWS, COLS), tl.float64)
    for step in range(steps):
        rows = ((tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (rows < n) & (cols < k)
        w = tl.load(w_ptr + rows * w_row + cols * w_col, inside, 0.0).to(tl.float64)
        back = w - tl.load(new_ptr + rows * new_row + cols * new_col, inside, 0.0).to(tl.float64)
        tl.store(back_ptr + rows * k + cols, back.to(back_ptr.dtype.element_ty), inside)
        mass += tl.load(root_ptr + rows, rows < n, 0.0) * tl.abs(back)
    tl.store(mass_ptr + tl.program_id(0) * k + cols, tl.sum(mass, 0)[None, :], cols < k)


@triton.jit(**_VARIED)
def _residual(
    rho_ptr, back_ptr, new_ptr, mask_ptr, root_ptr, out_ptr, found_ptr, n, k, new_row, new_col, mask_row, mask_col,
    out_row, out_col, steps, numbers_ptr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Sums and largest numbers are kept for each place in a tile, and put together once: that takes longer than all else."""
    cols = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :].to(tl.int64)
    ridge, scale = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    value = tl.zeros((ROWS, COLS), tl.float64)
    steepest = tl.zeros((ROWS, COLS), tl.float64)
    energy = tl.zeros((ROWS, COLS), tl.float64)
    outside = tl.zeros((ROWS, COLS), tl.float64)
    for step in range(steps):
        rows = ((tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (rows < n) & (cols < k)
        back = tl.load(back_ptr + rows * k + cols, inside, 0.0).to(tl.float64)
        rho = tl.load(rho_ptr + rows * k + cols, inside, 0.0).to(tl.float64) + ridge * back
        tl.store(out_ptr + rows * out_row + cols * out_col, (rho * scale).to(out_ptr.dtype.element_ty), inside)
        value += back * rho
        kept = tl.load(mask_ptr + rows * mask_row + cols * mask_col, inside, 0) != 0
        free = tl.where(kept, rho, 0.0)
        tl.store(rho_ptr + rows * k + cols, free.to(rho_ptr.dtype.element_ty), inside)
        root = tl.load(root_ptr + rows, rows < n, 0.0)
        steepest = tl.maximum(steepest, tl.abs(free) * (1.0 / tl.where(root > 0.0, root, 1.0)))  # a quotient for each row
        energy = tl.maximum(energy, tl.abs(back) * root)
        new = tl.load(new_ptr + rows * new_row + cols * new_col, inside, 0.0).to(tl.float64)
        outside = tl.maximum(outside, tl.where(kept, 0.0, tl.abs(new)))
    to, parts = found_ptr + tl.program_id(0) * k + cols, tl.num_programs(0)
    value = tl.sum(value, 0)[None, :]
    tl.store(to, value, cols < k)
    _store_largest(to + parts * k, steepest, value, cols < k)
    _store_largest(to + 2 * parts * k, energy, value, cols < k)
    _store_largest(to + 3 * parts * k, outside, value, cols < k)


@triton.jit
def _store_largest(to, x, value, here):
    """The largest number of each column; infinite where one was NaN. A maximum does not show that, the sum ``value`` does."""
    largest = tl.max(x, 0)[None, :]
    tl.store(to, tl.where(value == value, largest, float("inf")), here)


def differences(
    w_NK: torch.Tensor, new_NK: torch.Tensor, root_N: torch.Tensor, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """w − ŵ, (N, K) of that dtype, and Σ √A_ii |w_i − ŵ_i|, (K,) float64."""
    grid, steps, (n, k) = strips(w_NK)
    back_NK, mass_PK = root_N.new_empty(n, k, dtype=dtype), root_N.new_empty(grid[0], k)
    with torch.cuda.device(w_NK.device):
        _back[grid](w_NK, new_NK, root_N, back_NK, mass_PK, n, k, *w_NK.stride(), *new_NK.stride(), steps, ROWS, COLS)
    return back_NK, mass_PK.sum(0)


def residuals(
    product_NK: torch.Tensor, back_NK: torch.Tensor, new_NK: torch.Tensor, mask_NK: torch.Tensor, root_N: torch.Tensor,
    ridge: float, scale: float, out_NK: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """With back = w − ŵ, H·back = ``product_NK`` (of the same dtype, C order) and ρ = H·back + λ·back: backᵀρ, and the largest
    |ρ_i|/√A_ii of kept entries, |back_i|·√A_ii and |ŵ_i| of pruned entries, each (K,) float64.

    ``out_NK`` becomes ρ·scale, and the product becomes ρ, 0 on pruned entries.
    """
    grid, steps, (n, k) = strips(product_NK)
    found_4PK = root_N.new_empty(4, grid[0], k)
    numbers = torch.tensor([ridge, scale], dtype=torch.float64).to(root_N.device, non_blocking=True)  # Triton would take float32
    with torch.cuda.device(product_NK.device):
        _residual[grid](
            product_NK, back_NK, new_NK, mask_NK, root_N, out_NK, found_4PK, n, k, *new_NK.stride(), *mask_NK.stride(),
            *out_NK.stride(), steps, numbers, ROWS, COLS,
        )  # fmt: skip
    return found_4PK[0].sum(0), *found_4PK[1:].amax(1)


def strips(like_NK: torch.Tensor) -> tuple[tuple[int, int], int, tuple[int, int]]:
    """The grid of programs, how many tiles each goes down, and the shape."""
    n, k = like_NK.shape
    tiles, across = triton.cdiv(n, ROWS), triton.cdiv(k, COLS)
    steps = max(1, min(_STEPS, tiles * across // _BUSY))
    return (triton.cdiv(tiles, steps), across), steps, (n, k)
