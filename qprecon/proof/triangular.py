"""‖L⁻¹s‖ of many columns by products: on a GPU a library's triangular solve runs at a third of the rate of its products.

L is cut into blocks of rows. With X the computed inverse of a diagonal block, y_i = X (s_i − Σ_{j<i} L_ij y_j). Inverses are less
stable than substitution: what they cost is computed, not assumed. With t = s_i − Σ L_ij y_j, the residual of y in block i is

    |res| ≤ G|t| + 2γ_N |L||y|,   G = |I − L_ii X| + γ_b |L_ii||X|    (Higham, sections 3.1 and 3.5: products in any order),

and |t_j| ≤ √A_jj ‖y‖ but for |res_j|, as LLᵀ ⪯ A makes the rows of L no longer than that. So |res_j| ≤ error · √A_jj ‖y‖, with
``error`` from the largest row of G, weighted by √A. In the norm of A⁻¹ that is at most error · ‖y‖ √condition, as it is with γ_N
for ``error`` after substitution (`audit`), and ‖Ly‖ is at most ‖y‖ there: sᵀA⁻¹s ≤ (‖y‖ + error · ‖y‖ √condition)².

Torch tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays.interop import Array, device_type, namespace
from ..arrays.linalg import column_dots, identity, lower_inverses

_FROM, _LARGE = 2048, 8192  # inputs from which products are faster, and from which blocks are larger
BLOCKS_FROM = 2**24
"""N·K from which the inverses are worth making: at 4096 x 4096 that took an H200 about as long as they saved, 2 ms
(benchmarks/results/layer_phases_tried.json)."""
_PANELS = 8  # of L's columns in a product with its transpose
_PANEL_ROWS = {"cpu": 64, "cuda": 1024}
"""At least so many to a panel: on a GPU fewer take no longer than the launches for another panel."""
WORST = 1e-4
"""‖residual‖ / ‖y‖ in the norm of A⁻¹ up to which blocks are used: it is added to every bound."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """L (N, N) float64, the inverses of its diagonal blocks, (b, b) each, and the bound ``error`` of this module's head."""

    factor_NN: Array
    inverses: list[Array]
    error: float

    def solve_in_place(self, s_NK: Array) -> Array:
        """y, in the place of s (N, K) float64."""
        first = 0
        for inverse_bb in self.inverses:
            rows = slice(first, first + len(inverse_bb))
            if first:
                t_bK = namespace(s_NK).addmm(s_NK[rows], self.factor_NN[rows, :first], s_NK[:first], alpha=-1)
                namespace(s_NK).mm(inverse_bb, t_bK, out=s_NK[rows])
            else:
                s_NK[rows] = inverse_bb @ s_NK[rows]
            first = rows.stop
        return s_NK

    def solve_transposed_in_place(self, s_NK: Array) -> Array:
        """L⁻ᵀs, in the place of s (N, K) float64; ``error`` says nothing of it."""
        last = len(s_NK)
        for inverse_bb in reversed(self.inverses):
            rows = slice(last - len(inverse_bb), last)
            t_bK = s_NK[rows]
            if last < len(s_NK):
                t_bK = namespace(s_NK).addmm(t_bK, self.factor_NN[last:, rows].mT, s_NK[last:], alpha=-1)
            s_NK[rows] = inverse_bb.mT @ t_bK
            last = rows.start
        return s_NK


def blocks(factor_NN: Array, root_N: Array, condition: float, gamma_n: float, gamma_b: float, size: int) -> Blocks | None:
    """The blocks of a factor, or None where their inverses would cost the certificates more than ``WORST``.

    ``root_N``: √A_ii, positive. ``gamma_n``, ``gamma_b``: γ for sums of N and of ``size`` numbers.
    """
    inverses, largest, first = [], 0.0, 0
    for block_Bbb in _diagonal_blocks(factor_NN, size):
        count, width = block_Bbb.shape[:2]
        inverse_Bbb = lower_inverses(block_Bbb)
        off_Bbb = abs(identity(width, block_Bbb) - block_Bbb @ inverse_Bbb)
        off_Bbb = off_Bbb + 2.1 * gamma_b * (abs(block_Bbb) @ abs(inverse_Bbb))  # that of ``off`` itself, and that of X·t
        root_Bb = root_N[first : first + count * width].reshape(count, width)
        share = float(((off_Bbb @ root_Bb[:, :, None])[:, :, 0] / root_Bb).max())
        largest = max(largest, share) if share == share else float("inf")
        inverses += list(inverse_Bbb)
        first += count * width
    error = 1.05 * (largest + 3.0 * gamma_n)
    return Blocks(factor_NN, inverses, error) if error * condition**0.5 <= WORST and largest < 1e-3 else None


def transposed_norms(factor_NN: Array, d_NK: Array) -> Array:
    """‖Lᵀd‖ of every column of d, (K,), with little more than the half of a full product's operations."""
    total_K = 0.0 * d_NK[:1].sum(0)
    step = max(_PANEL_ROWS[device_type(d_NK)], -(-len(factor_NN) // _PANELS))
    for first in range(0, len(factor_NN), step):
        panel_BK = factor_NN[first:, first : first + step].T @ d_NK[first:]
        total_K = total_K + column_dots(panel_BK, panel_BK)
    return total_K**0.5


def unproven(factor_NN: Array, size: int) -> Blocks:
    """The blocks of a factor that no certificate is made with; their ``error`` is infinite."""
    inverses = [inverse_bb for block_Bbb in _diagonal_blocks(factor_NN, size) for inverse_bb in lower_inverses(block_Bbb)]
    return Blocks(factor_NN, inverses, float("inf"))


def _diagonal_blocks(factor_NN: Array, size: int) -> list[Array]:
    """The lower triangles on the diagonal: those of ``size`` rows together, then the rest, if there is one, as a stack of one."""
    torch, n = namespace(factor_NN), len(factor_NN)
    cuts = [slice(first, min(first + size, n)) for first in range(0, n, size)]
    whole, rest = ([cut for cut in cuts if (cut.stop - cut.start == size) is full] for full in (True, False))
    return [torch.stack([factor_NN[cut, cut] for cut in part]).tril() for part in (whole, rest) if part]


def size_for(factor_NN: Array) -> int:
    """Rows of a block, 0 where substitution is as fast."""
    n = len(factor_NN)
    return 0 if device_type(factor_NN) != "cuda" or n < _FROM else 256 if n < _LARGE else 512
