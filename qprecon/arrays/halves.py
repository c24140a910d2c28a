"""Float32 products and inverses from float16 halves: three products on a GPU's tensor cores take a fifth of one in float32
(by the rates of an H200 in end_to_end_presets_h200.json).

x·2^e = high + low + (a rest of 2⁻²² |x|), 2^e such that the largest entry lies in [2¹³, 2¹⁴): float16 can then hold the low half
of everything down to 2⁻¹⁶ of the largest, and below that the rest is 2⁻³⁸ of the largest. A product a·b is high·high + low·high +
high·low, one matrix product of three times the depth, summed in float32. The product low·low that is left out is 2⁻²² |a||b|;
tensor cores round sums to about 1e-6 |a||b|. Torch tensors only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .interop import TRITON, Array, dtype_name, namespace

_LARGEST = 14  # the binary exponent of the largest entry
_LEAF = 1024  # inputs up to which LAPACK or cuSOLVER inverts
_TILE, _PANELS = 128, 4
_PANEL_ROWS = 4096  # of a matrix that is halved for one product


@dataclass(frozen=True)
class Halves:
    """x = (high + low)·unit: two float16 matrices and a power of two, or one a column, on the device."""

    high: Array
    low: Array
    unit: Array

    @classmethod
    def of(cls, x: Array, *, used_up: bool = False) -> Halves:
        """The halves of a float32 matrix, which may be used up to save the memory of a copy."""
        unit = unit_of(x)
        return cls(*halved(x.div_(unit) if used_up else x / unit), unit)

    @classmethod
    def of_columns(cls, x: Array) -> Halves:
        """The same with a unit for each column, (1, K), so that small columns keep their digits. x is used up."""
        unit_1K = unit_of(x, 0)
        return cls(*halved(x.div_(unit_1K)), unit_1K)

    def __getitem__(self, part: tuple[slice, slice]) -> Halves:
        return Halves(self.high[part], self.low[part], self.unit)

    @property
    def mT(self) -> Halves:
        """The transpose."""
        return Halves(self.high.mT, self.low.mT, self.unit)


def halved(scaled: Array) -> tuple[Array, Array]:
    """The two halves of what has a unit already, which is used up."""
    high = scaled.half()
    return high, scaled.sub_(high).half()


def unit_of(x: Array, dim: int | None = None) -> Array:
    """The power of two by which x is divided before it is halved, or one along ``dim``; nothing waits for the device."""
    torch = namespace(x)
    return _unit(torch.linalg.vector_norm(x, torch.inf, dim=dim, keepdim=dim is not None))


def _unit(largest: Array) -> Array:
    return power_above(largest.clamp_min(2.0**-100)) * 2.0**-_LARGEST


def power_above(x: Array) -> Array:
    """The power of two next above each positive number; nothing waits for the device."""
    return x / namespace(x).frexp(x).mantissa


def multiply(left: Halves, right: Halves) -> Array:
    """left · right, float32."""
    torch = namespace(left.high)
    rows = torch.cat((left.high, left.low, left.high), 1)
    columns = torch.cat((right.high, right.high, right.low))
    return _wide(rows, columns).mul_(left.unit * right.unit)


class Multiplier:
    """H·P for one H (N, N) and many P (N, K): from halves on a GPU, else in float32. H itself is used up."""

    def __init__(self, matrix_NN: Array):
        self._halved, (m, n) = has_fast_halves(matrix_NN), matrix_NN.shape
        if not self._halved:
            self._matrix_NN = matrix_NN
            return
        torch, self._unit = namespace(matrix_NN), unit_of(matrix_NN)
        self._ones_N = torch.ones(n, dtype=matrix_NN.dtype, device=matrix_NN.device)
        if _in_kernels(matrix_NN):
            from .kernels import split_rows

            self._rows_N3N = split_rows(matrix_NN, self._unit.repeat(m), self._ones_N)
            return
        matrix_NN.div_(self._unit)
        self._rows_N3N = rows_N3N = torch.empty(m, 3 * n, dtype=torch.float16, device=matrix_NN.device)
        rows_N3N[:, :n] = matrix_NN
        rows_N3N[:, 2 * n :] = rows_N3N[:, :n]
        rows_N3N[:, n : 2 * n] = matrix_NN.sub_(rows_N3N[:, :n])

    def __call__(self, p_NK: Array) -> Array:
        """H·P, float32."""
        if not self._halved:
            return self._matrix_NN @ p_NK
        product_NK, unit = self._scaled(p_NK)
        return product_NK.mul_(unit)

    def add_to(self, sum_NK: Array, p_NK: Array) -> None:
        """Add H·P in place."""
        if self._halved:
            sum_NK.addcmul_(*self._scaled(p_NK))
        else:
            sum_NK.addmm_(self._matrix_NN, p_NK)

    def _scaled(self, p_NK: Array) -> tuple[Array, Array]:
        torch, (n, k) = namespace(p_NK), p_NK.shape
        unit = unit_of(p_NK)
        if _in_kernels(p_NK):
            from .kernels import split_columns

            return _wide(self._rows_N3N, split_columns(p_NK, self._ones_N, unit.repeat(k))), self._unit * unit
        scaled_NK = p_NK / unit
        columns_3NK = torch.empty(3 * n, k, dtype=torch.float16, device=p_NK.device)
        columns_3NK[:n] = scaled_NK
        columns_3NK[n : 2 * n] = columns_3NK[:n]
        columns_3NK[2 * n :] = scaled_NK.sub_(columns_3NK[:n])
        return _wide(self._rows_N3N, columns_3NK), self._unit * unit


def symmetric_product(matrix_NN: Array, root_N: Array, x_NK: Array) -> Array:
    """A·x, float32, where |A_ij| ≤ root_i root_j: halved after that scaling, so that no large input costs the others their digits.

    Its error stays below 4e-6 of root_i Σ root_j |x_j|. A row panel of A at a time, so that no halves of all of it exist.
    """
    torch, root_N = namespace(x_NK), root_N.to(x_NK.dtype).contiguous()
    columns_3NK, unit_1K = _split_columns(x_NK, root_N)
    scale_N, unit_1K, out_NK = 2.0**_LARGEST / root_N, unit_1K * 2.0**-_LARGEST, torch.empty_like(x_NK)
    for first in range(0, len(x_NK), _PANEL_ROWS):
        rows = slice(first, first + _PANEL_ROWS)
        product_RK = _wide(_split_rows(matrix_NN[rows], root_N[rows], scale_N), columns_3NK)
        if _in_kernels(product_RK):
            from .kernels import rescale

            rescale(product_RK, root_N[rows], unit_1K, out_NK[rows])
        else:
            out_NK[rows] = product_RK.mul_(root_N[rows, None]).mul_(unit_1K)
    return out_NK


def _split_rows(matrix_RN: Array, root_R: Array, scale_N: Array) -> Array:
    """[high | low | high] of A_ij / root_i · scale_j, (R, 3N) float16."""
    if _in_kernels(matrix_RN):
        from .kernels import split_rows

        return split_rows(matrix_RN, root_R, scale_N)
    scaled = matrix_RN / root_R[:, None]
    scaled.mul_(scale_N)
    high, low = halved(scaled)
    return namespace(high).cat((high, low, high), 1)


def _split_columns(x_NK: Array, root_N: Array) -> tuple[Array, Array]:
    """[high; high; low] of x_ij · root_i / unit_j, (3N, K) float16, and the units, (1, K): small columns keep their digits."""
    if _in_kernels(x_NK):
        from .kernels import largest, split_columns

        unit_1K = _unit(largest(x_NK, root_N))
        return split_columns(x_NK, root_N, unit_1K), unit_1K
    wide_NK = x_NK * root_N[:, None]
    unit_1K = unit_of(wide_NK, 0)
    high_NK, low_NK = halved(wide_NK.div_(unit_1K))
    return namespace(x_NK).cat((high_NK, high_NK, low_NK)), unit_1K


def _in_kernels(x: Array) -> bool:
    """Whether ``kernels`` does what torch's operations do one after another."""
    return TRITON and x.is_cuda and x.numel() > 0 and dtype_name(x) == "float32"


def inverse(matrix_NN: Array) -> Array:
    """The inverse of a symmetric positive definite float32 matrix, which is used up; NaN if it is not definite numerically.

    On a GPU R = L⁻¹ (A = LLᵀ) is made by halves, then RᵀR: 2 N³ flops in products. The error of A⁻¹ grows with the condition number
    as that of Cholesky in float32 does, times what tensor cores' sums lose (they cut off where float32 rounds): the blocks of L and
    R are bounded, unlike those of an inverse made block by block.
    """
    torch = namespace(matrix_NN)
    if not has_fast_halves(matrix_NN):
        return torch.cholesky_inverse(_cholesky(matrix_NN))
    _invert_factor(matrix_NN)
    factor, n = Halves.of(matrix_NN, used_up=True), len(matrix_NN)
    step = -(-n // (_PANELS * _TILE)) * _TILE
    for first in range(0, n, step):
        panel = slice(first, first + step)
        # R is lower triangular, so its columns of this panel begin at `first`.
        rows = multiply(factor[first:, panel].mT, factor[first:, : panel.stop])
        matrix_NN[panel, : panel.stop] = rows
        matrix_NN[:first, panel] = rows[:, :first].mT
    return matrix_NN


def is_definite(matrix_NN: Array, more: float) -> bool:
    """Whether D⁻½AD⁻½ + more·I has a Cholesky factor, D = diag A ≥ 0; a row of zeros counts as one of the identity.

    Panel by panel, from the panels to its left; their products by halves, which is faster than float32 with many inputs. All
    numbers are at most 1 after scaling, so that the factor is as exact as N·2⁻²² there. One wait for the device.
    """
    torch, n = namespace(matrix_NN), len(matrix_NN)
    diagonal_N = matrix_NN.diagonal()
    root_N = torch.where(diagonal_N > 0, diagonal_N.sqrt(), 1.0)
    more_N = more + (diagonal_N <= 0).to(matrix_NN.dtype)
    high_NN, low_NN = (torch.empty(n, n, dtype=torch.float16, device=matrix_NN.device) for _ in range(2))
    sound = []
    for first in range(0, n, _LEAF):
        left, block = slice(0, first), slice(first, min(first + _LEAF, n))
        width = block.stop - first
        panel_RB = matrix_NN[first:, block] / root_N[first:, None]
        panel_RB /= root_N[block]
        panel_RB.diagonal().add_(more_N[block])
        if first:
            rows = torch.cat((high_NN[first:, left], low_NN[first:, left], high_NN[first:, left]), 1)
            columns = torch.cat((high_NN[block, left], high_NN[block, left], low_NN[block, left]), 1).T
            panel_RB.sub_(_wide(rows, columns), alpha=2.0 ** -(2 * _LARGEST - 2))
        factor_BB = _cholesky(panel_RB[:width])
        sound.append(factor_BB.diagonal().isfinite().all())
        identity_BB = torch.eye(width, dtype=factor_BB.dtype, device=factor_BB.device)
        inverse_BB = torch.linalg.solve_triangular(factor_BB, identity_BB, upper=False)
        panel_RB[width:] = multiply(Halves.of(panel_RB[width:]), Halves.of(inverse_BB).mT) if block.stop < n else 0.0
        panel_RB[:width] = factor_BB
        panel_RB.mul_(2.0 ** (_LARGEST - 1))
        high_NN[first:, block] = panel_RB
        low_NN[first:, block] = panel_RB.sub_(high_NN[first:, block])
    return bool(torch.stack(sound).all()) if sound else True


def _invert_factor(matrix_NN: Array) -> None:
    """Put L⁻¹, lower triangular, in place of a matrix LLᵀ of which only the lower triangle is read."""
    torch, n = namespace(matrix_NN), len(matrix_NN)
    if n <= _LEAF:
        identity = torch.eye(n, dtype=matrix_NN.dtype, device=matrix_NN.device)
        matrix_NN.copy_(torch.linalg.solve_triangular(_cholesky(matrix_NN), identity, upper=False))
        return
    middle = -(-n // (2 * _TILE)) * _TILE
    first, last, across = matrix_NN[:middle, :middle], matrix_NN[middle:, middle:], matrix_NN[middle:, :middle]
    _invert_factor(first)
    first_halves = Halves.of(first)
    below = Halves.of(multiply(Halves.of(across), first_halves.mT))
    last.sub_(multiply(below, below.mT))
    _invert_factor(last)
    across.copy_(multiply(Halves.of(multiply(Halves.of(last), below)), first_halves).neg_())
    matrix_NN[:middle, middle:] = 0


def _cholesky(matrix_NN: Array) -> Array:
    """L; with NaN on its diagonal if there is none. Nothing waits for the device."""
    torch = namespace(matrix_NN)
    factor_NN, failed = torch.linalg.cholesky_ex(matrix_NN)
    factor_NN.diagonal().masked_fill_(failed != 0, torch.nan)
    return factor_NN


def has_fast_halves(x: Array) -> bool:
    """Whether products of 16-bit matrices with float32 results are fast on this tensor's device."""
    return x.is_cuda and wide_product()


@functools.cache
def wide_product() -> bool:
    """Whether this torch has `mm(…, out_dtype=)`, which came with 2.8, for CUDA only."""
    import torch

    overloads = torch.ops.aten.mm.overloads()
    return "dtype_out" in overloads or "dtype" in overloads


def _wide(a: Array, b: Array) -> Array:
    """a·b of float16 matrices, float32."""
    return namespace(a).mm(a, b, out_dtype=namespace(a).float32) if a.is_cuda else a.float() @ b.float()
