"""All sums over columns that a report wants of a layer, in one pass over its matrices on a GPU; float64, in a fixed order.

Sums are kept for each place in a tile, and put together once, as in `qprecon.proof.kernels`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qprecon.proof.kernels import COLS, ROWS, strips


@triton.jit(do_not_specialize=["n", "steps"])  # else compiled anew where one is 1, or divisible by 16
def _column_sums(
    dense_ptr, mask_ptr, new_ptr, stored_ptr, of_dense_ptr, of_change_ptr, out_ptr, n, k, dense_row, dense_col, mask_row, mask_col,
    new_row, new_col, stored_row, stored_col, steps, DENSE: tl.constexpr, CHANGED: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    cols = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :].to(tl.int64)
    energy, added = tl.zeros((ROWS, COLS), tl.float64), tl.zeros((ROWS, COLS), tl.float64)
    pruned, moved = tl.zeros((ROWS, COLS), tl.float64), tl.zeros((ROWS, COLS), tl.float64)
    zeros, kept, finite = tl.zeros((ROWS, COLS), tl.int32), tl.zeros((ROWS, COLS), tl.int32), tl.zeros((ROWS, COLS), tl.int32)
    for step in range(steps):
        rows = ((tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (rows < n) & (cols < k)
        dense = tl.load(dense_ptr + rows * dense_row + cols * dense_col, inside, 0.0).to(tl.float64)
        new = tl.load(new_ptr + rows * new_row + cols * new_col, inside, 0.0).to(tl.float64)
        stored = tl.load(stored_ptr + rows * stored_row + cols * stored_col, inside, 1.0)
        mask = tl.load(mask_ptr + rows * mask_row + cols * mask_col, inside, 1) != 0
        if DENSE:
            energy += dense * tl.load(of_dense_ptr + rows * k + cols, inside, 0.0).to(tl.float64)
        if CHANGED:
            both = tl.where(inside, (new - dense) + (stored.to(tl.float64) - dense), 0.0)
            added += both * tl.load(of_change_ptr + rows * k + cols, inside, 0.0).to(tl.float64)
        lost = tl.where(mask, 0.0, dense)
        pruned += lost * lost
        moved += (new - dense) * (new - dense)
        zeros += (stored == 0.0).to(tl.int32)
        kept += (mask & inside).to(tl.int32)
        finite += (inside & (tl.abs(stored) < float("inf"))).to(tl.int32)
    to, apart = out_ptr + tl.program_id(0) * k + cols, tl.num_programs(0).to(tl.int64) * k
    tl.store(to, tl.sum(energy, 0)[None, :], cols < k)
    tl.store(to + apart, tl.sum(added, 0)[None, :], cols < k)
    tl.store(to + 2 * apart, tl.sum(pruned, 0)[None, :], cols < k)
    tl.store(to + 3 * apart, tl.sum(moved, 0)[None, :], cols < k)
    tl.store(to + 4 * apart, tl.sum(zeros, 0).to(tl.float64)[None, :], cols < k)
    tl.store(to + 5 * apart, tl.sum(kept, 0).to(tl.float64)[None, :], cols < k)
    tl.store(to + 6 * apart, tl.sum(finite, 0).to(tl.float64)[None, :], cols < k)


def column_sums(
    dense_NK: torch.Tensor, mask_NK: torch.Tensor, new_NK: torch.Tensor, stored_NK: torch.Tensor,
    of_dense_NK: torch.Tensor | None, of_change_NK: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Of each column, (7, K) float64: denseᵀ(H·dense), (new + stored − 2 dense)ᵀ(H·change), ‖pruned weights‖², ‖new − dense‖²,
    how many stored weights are zero, how many are kept, and how many stored weights are finite. The products in C order; 0 in the
    place of what needs one that is None."""
    grid, steps, (n, k) = strips(dense_NK)
    out_7PK = torch.empty(7, grid[0], k, dtype=torch.float64, device=dense_NK.device)
    products = [dense_NK if product_NK is None else product_NK for product_NK in (of_dense_NK, of_change_NK)]
    with torch.cuda.device(dense_NK.device):
        _column_sums[grid](
            dense_NK, mask_NK, new_NK, stored_NK, *products, out_7PK, n, k, *dense_NK.stride(), *mask_NK.stride(), *new_NK.stride(),
            *stored_NK.stride(), steps, of_dense_NK is not None, of_change_NK is not None, ROWS, COLS,
        )  # fmt: skip
    return out_7PK.sum(1)
