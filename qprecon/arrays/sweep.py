"""One sweep over the inputs with the inverse factor: each is projected in turn, and the later ones make up for it.

With (H + λI)⁻¹ = UᵀU, U upper triangular, U[i:, i:]ᵀ U[i:, i:] is the inverse of what is left of H + λI from input i on. So if
input i goes from w_i to p(w_i), the best that the later inputs can do is w_j − U_ij e_i with e_i = (w_i − p(w_i)) / U_ii, and it
costs e_i² (Hassibi and Stork 1993; SparseGPT, arXiv 2301.00774, equation 3; GPTQ, arXiv 2210.17323, algorithm 1).

What p is does not matter here: zero where a weight is pruned (`qprecon.llm.masks.sparsegpt`), the nearest value of a grid
(`qprecon.grids.rounding.feedback`), or both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .interop import Array, namespace
from .linalg import subtract_outer, subtract_product

Project = Callable[[Array, int], Array]
"""`project(row_K, i)`: what becomes of input i of a block, (K,); a new array. It may change nothing."""

Error = Callable[[Array, int], Array]
"""`error(row_K, i)`: (w_i − p(w_i)) / U_ii, (K,); a new array."""


def sweep(weights_NK: Array, factor_NN: Array, blocks: Iterable[slice], begin: Callable[[slice], Error]) -> None:
    """Repair the weights in place; afterwards row i is what it was when its turn came, so p of it is the answer.

    Args:
        weights_NK: (N, K), row by row in memory.
        factor_NN: U, (N, N).
        blocks: of inputs, in order, without gaps. Later blocks are repaired once a block, by one product.
        begin: called with each block when all earlier ones have been made up for; from then on `weights_NK[block]` is repaired
            from row to row, so that the error function may choose what goes as late as it likes.
    """
    for rows in blocks:
        error_BK = within(weights_NK[rows], factor_NN[rows, rows], begin(rows))
        if rows.stop < len(weights_NK):
            subtract_product(weights_NK[rows.stop :], factor_NN[rows, rows.stop :].T, error_BK)


def within(block_BK: Array, factor_BB: Array, error: Error) -> Array:
    """The sweep within a block, in place; what its rows were changed by over U_ii, (B, K)."""
    errors = []
    for i in range(len(block_BK)):
        errors.append(error_K := error(block_BK[i], i))
        subtract_outer(block_BK[i + 1 :], factor_BB[i, i + 1 :], error_K)
    return namespace(block_BK).stack(errors)


def error_of(project: Project, factor_BB: Array) -> Error:
    """The error function of any projection, for the block of U."""
    return lambda row_K, i: (row_K - project(row_K, i)) / factor_BB[i, i]


def blocks_of(n: int, size: int, multiple: int = 1) -> list[slice]:
    """Blocks of about `size` of n inputs: the nearest multiple below, or `multiple` itself."""
    step = max(1, size // multiple) * multiple
    return [slice(first, min(first + step, n)) for first in range(0, n, step)]
