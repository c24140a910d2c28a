"""A tall factor F (N, r) times the vectors of all columns.

Three bfloat16 pieces hold a float32 number, so that a GPU's tensor cores can make the product: pieces against pieces, summed in
float32. They round those sums less well than float32 units: 1e-6 to 2e-6 of |F||x| was seen on an H100, where float32 products
gave 3e-7 at most. Fᵀx took about as long as in float32, Ft down to half as long, and here it joins the product with E (`product`).
"""

from __future__ import annotations

from ...arrays.interop import TRITON, Array, namespace
from ...arrays.linalg import bfloat16_parts


class Factor:
    """The products in F's own dtype."""

    def __init__(self, factor_Nr: Array) -> None:
        self.factor_Nr = factor_Nr

    def project(self, x_NK: Array) -> Array:
        """Fᵀx, (r, K)."""
        return (x_NK.T @ self.factor_Nr).T

    def expand(self, t_rK: Array) -> Array:
        """Ft, (N, K)."""
        return self.factor_Nr @ t_rK


class FactorInPieces(Factor):
    """The products from bfloat16 pieces, for float32 on CUDA."""

    def __init__(self, factor_Nr: Array) -> None:
        super().__init__(factor_Nr)
        xp = namespace(factor_Nr)
        high, middle, low = bfloat16_parts(factor_Nr, 3)
        self.rows_3rN = xp.cat([high, middle, low], 1).T.contiguous()
        self.wide_N6r = xp.cat([high, high, high, middle, middle, low], 1)

    def project(self, x_NK: Array) -> Array:
        """All nine products of pieces at once: one wide product keeps the device busier than the six that count."""
        rank, columns = self.factor_Nr.shape[1], x_NK.shape[1]
        products = namespace(x_NK).mm(self.rows_3rN, pieces(x_NK), out_dtype=x_NK.dtype)
        return products.view(3, rank, 3, columns).sum((0, 2))

    def expand(self, t_rK: Array) -> Array:
        xp = namespace(t_rK)
        return xp.mm(self.wide_N6r, self.stacked(t_rK), out_dtype=t_rK.dtype)

    def stacked(self, t_rK: Array) -> Array:
        """t with `wide_N6r` @ t6 = Ft, (6r, K) bfloat16; products below 2⁻²⁴ are left out."""
        high, middle, low = pieces(t_rK).split(t_rK.shape[1], 1)
        return namespace(t_rK).cat([high, middle, low, high, middle, high])


def pieces(x_NK: Array) -> Array:
    """The bfloat16 pieces of a float32 matrix side by side, (N, 3K)."""
    if TRITON:
        from .kernels import pieces as fused

        return fused(x_NK)
    return namespace(x_NK).cat(list(bfloat16_parts(x_NK, 3)), 1)
