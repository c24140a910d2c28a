"""A tall factor F (N, r) times the vectors of all columns.

Two float16 numbers hold 22 bits of a float32 one, so that a GPU's tensor cores can make the product: halves against halves, summed
in float32. They round those sums less well than float32 units do: tests allow 5e-6 of |F||x|. float16 reaches from 6e-8 to 65504
only. So F = diag(s)·F̂ has its rows brought to one size, and what a column holds is scaled by a power of two.
"""

from __future__ import annotations

from ...arrays.halves import halved, unit_of
from ...arrays.interop import Array, namespace


class Factor:
    """The products in F's own dtype. F̂ and s, (N, r) and (N, 1), are given."""

    def __init__(self, even_Nr: Array, row_N1: Array) -> None:
        self.factor_Nr = even_Nr * row_N1

    def project(self, x_NK: Array) -> Array:
        """Fᵀx, (r, K)."""
        return (x_NK.T @ self.factor_Nr).T

    def expand(self, t_rK: Array) -> Array:
        """Ft, (N, K)."""
        return self.factor_Nr @ t_rK


class FactorInHalves:
    """The products from float16 numbers, for float32 on CUDA; ``unit`` is what F̂ was divided by, a power of two."""

    def __init__(self, even_Nr: Array, row_N1: Array) -> None:
        xp, self.row_N1, self.unit = namespace(even_Nr), row_N1, unit_of(even_Nr)
        high, low = halved(even_Nr / self.unit)
        self.rows_2rN = xp.cat([high, low], 1).T.contiguous()
        self.wide_N3r = xp.cat([high, high, low], 1)

    def project(self, x_NK: Array) -> Array:
        """Fᵀx, (r, K). All four products of halves at once keep the device busier than the three that count."""
        return self.unit * self.even_project(self.row_N1 * x_NK)

    def even_project(self, even_NK: Array) -> Array:
        """F̂ᵀ of what is scaled by rows already, in units of ``unit``."""
        xp, unit_1K = namespace(even_NK), unit_of(even_NK, 0)
        products = xp.mm(self.rows_2rN, xp.cat(halved(even_NK / unit_1K), 1), out_dtype=even_NK.dtype)
        return products.view(2, self.wide_N3r.shape[1] // 3, 2, even_NK.shape[1]).sum((0, 2)) * unit_1K

    def expand(self, t_rK: Array) -> Array:
        """Ft, (N, K)."""
        xp, unit_1K = namespace(t_rK), unit_of(t_rK, 0)
        return xp.mm(self.wide_N3r, self.stacked(t_rK / unit_1K), out_dtype=t_rK.dtype) * (unit_1K * self.unit) * self.row_N1

    def stacked(self, t_rK: Array) -> Array:
        """t with `wide_N3r` @ t3 = F̂t in units of ``unit``, (3r, K) float16; the product of the low halves is left out. t is used
        up."""
        high, low = halved(t_rK)
        return namespace(t_rK).cat([high, low, high])
