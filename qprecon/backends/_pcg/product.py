"""H·P in the precision that pays.

On a GPU H is split as FFᵀ + E: the few large eigenvalues, F(FᵀP), nearly as in float32, and the small rest E·P in float16
with float32 accumulation. Without the split the rounding of the large part drowns the small one. The residual recurrence is then
good to a relative gap of some 1e-7 on real layers (tests/backends/test_product.py); beyond that the core's audit restarts it from a
float64 residual.

float16 needs numbers of one size: with S = diag(s), s a power of two near √H_ii, the product is S[Ê + F̂F̂ᵀ]S·P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...arrays.halves import power_above, unit_of
from ...arrays.interop import Array, cast, device_type, dtype_name, namespace
from .factor import FactorInHalves

_ONE_BY_ONE = 4
"""Columns up to which products are made one by one: H is read for each, and a library takes longer for a tile of columns."""
_PANEL = 4096  # rows
_LIFT, _ROOM = 2.0**7, 2.0**8
"""What Ê, whose entries are 1 at most, is multiplied by, as small numbers of float16 lose digits; room for N large ones in F̂ᵀSP."""


@dataclass(frozen=True, eq=False)
class Full:
    """The product in the dtype of H."""

    hessian_NN: Array

    def __call__(self, p_NK: Array) -> Array:
        return self.hessian_NN @ p_NK


@dataclass(frozen=True, eq=False)
class Narrow:
    """The product in the dtype of H with vectors in a wider one."""

    hessian_NN: Array

    def __call__(self, p_NK: Array) -> Array:
        narrow_NK = cast(p_NK, dtype_name(self.hessian_NN))
        if narrow_NK.shape[1] <= _ONE_BY_ONE and device_type(p_NK) == "cuda":
            columns = [self.hessian_NN @ column_N for column_N in narrow_NK.T.contiguous()]
            return cast(namespace(p_NK).stack(columns, 1), dtype_name(p_NK))
        return cast(self.hessian_NN @ narrow_NK, dtype_name(p_NK))


@dataclass(frozen=True, eq=False)
class Split:
    """F(FᵀP) from halves (`factor`) plus E·P in float16, as one product: [lift·Ê F̂₃] times S·P above (F̂ᵀSP)₃."""

    factor: FactorInHalves
    wide_NM: Array  # lift·Ê beside F̂'s three halves, float16
    lift: float = _LIFT

    @property
    def tail(self) -> int:
        """Rows wanted below P."""
        return self.factor.wide_N3r.shape[1]

    @property
    def inner(self) -> Array:
        """What F̂ᵀSP, in units of the factor's unit, is multiplied by in the product."""
        return self.lift * self.factor.unit**2

    def __call__(self, p_NK: Array) -> Array:
        """Without the kernels of ``fused``, which write p with its halves."""
        import torch

        even_NK = self.factor.row_N1 * p_NK
        unit_1K = _ROOM * unit_of(even_NK, 0)
        even_NK /= unit_1K
        both_MK = torch.cat([even_NK.half(), self.factor.stacked(self.inner * self.factor.even_project(even_NK))])
        return torch.mm(self.wide_NM, both_MK, out_dtype=torch.float32) * (unit_1K / self.lift) * self.factor.row_N1


def product(hessian_NN: Array, factor_Nr: Array | None, precision: str) -> Any:
    """The operator for a layer; ``precision`` is "full" or "fp16"."""
    if precision == "full" or factor_Nr is None:
        return Full(hessian_NN)
    row_N1, n = _roots(hessian_NN.diagonal())[:, None], len(hessian_NN)
    factor = FactorInHalves(factor_Nr / row_N1, row_N1)
    wide_NM = factor.wide_N3r.new_empty(n, n + factor.wide_N3r.shape[1])
    for first in range(0, n, _PANEL):  # E in float32 is a second H
        rows = slice(first, min(first + _PANEL, n))
        rest_RN = hessian_NN[rows].addmm(factor_Nr[rows], factor_Nr.T, alpha=-1.0)
        wide_NM[rows, :n] = rest_RN.div_(row_N1[rows] / _LIFT).div_(row_N1.T)
    wide_NM[:, n:] = factor.wide_N3r
    return Split(factor, wide_NM)


def _roots(diagonal_N: Array) -> Array:
    """The powers of two next above the roots, 1 for what has none."""
    xp = namespace(diagonal_N)
    return power_above(xp.where(diagonal_N > 0, diagonal_N, 0.25 * xp.ones_like(diagonal_N)).sqrt())


def chosen_precision(hessian_NN: Array, factor_Nr: Array | None, wanted: str) -> str:
    """fp16 for float32 data on a GPU with a low rank to split off; otherwise the full dtype."""
    able = (
        factor_Nr is not None
        and device_type(hessian_NN) == "cuda"
        and dtype_name(hessian_NN) == "float32"
    )
    if wanted == "fp16" and not able:
        raise ValueError("precision='fp16' needs float32 data on a CUDA device and preconditioner='dc'")
    return ("fp16" if able else "full") if wanted == "auto" else wanted
