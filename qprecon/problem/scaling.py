"""Scaling, once, for every backend: absolute tolerances mean nothing before it (see docs/mathematics.md).

Every factor is a power of two, so that scaling and unscaling round nothing. H is divided by its mean diagonal, or made nearly
unit-diagonal (Jacobi) for the backends that ask for it; each column is divided by the square root of its start's objective. A
dead input (zero diagonal) and a column whose objective is zero keep the factor 1. "none" leaves everything as it is, to
show what that costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..arrays.interop import Array, cast, dtype_name, like
from ..arrays.linalg import add_to_diagonal, power_of_two
from .hessian import Hessian


@dataclass(frozen=True, eq=False)
class Scaling:
    """A layer's scaling: H' = S H S / h, with the input factors S as an (N, 1) float64 core array and their least and largest."""

    hessian_scale: float
    input_N1: Array
    input_range: tuple[float, float] = (1.0, 1.0)
    scale_columns: bool = True

    def hessian(self, hessian: Hessian, dtype: str) -> Array:
        """S (H + λI) S / h in the given dtype. H is scaled before it is rounded: its numbers may lie outside the dtype's range."""
        wider = "float64" if "float64" in (dtype, dtype_name(hessian.hessian_NN)) else "float32"
        ridge = hessian.ridge / self.hessian_scale
        if self.input_range == (1.0, 1.0):
            scaled_NN = cast(hessian.hessian_NN, wider) * (1.0 / self.hessian_scale)
            return add_to_diagonal(cast(scaled_NN, dtype), ridge, used_up=True)
        s_N1 = cast(self.input_N1, wider)
        scaled_NN = cast(hessian.hessian_NN, wider) * (s_N1 / self.hessian_scale) * s_N1[:, 0][None, :]
        return add_to_diagonal(cast(scaled_NN, dtype), cast(ridge * self.input_N1[:, 0] ** 2, dtype), used_up=True)

    def columns(self, energy_K: np.ndarray) -> ColumnScaling:
        """Add the factors t of some columns, from the objective scale of each, (K,), in the units of the problem."""
        factor_K = np.ones(len(energy_K))
        if self.scale_columns:
            factor_K = power_of_two(np.sqrt(np.maximum(energy_K, 0.0) / self.hessian_scale))
        least, largest = (float(x) for x in (factor_K.min(initial=1.0), factor_K.max(initial=1.0)))
        total = (self.input_range[0] * least, self.input_range[1] * largest)
        column_1K = like(factor_K, self.input_N1)[None, :]
        return ColumnScaling(self, factor_K, functools.cache(lambda dtype: cast(column_1K, dtype)), total)


@dataclass(frozen=True, eq=False)
class ColumnScaling:
    """w' = S⁻¹ w / t and g' = S g / (h t); objectives shrink by h t².

    Attributes:
        layer: h and S.
        factor_K: t, (K,) float64 numpy.
        column_1K: t as a core array of a dtype, made once for each.
        factor_range: holds all factors S t.
    """

    layer: Scaling
    factor_K: np.ndarray
    column_1K: Callable[[str], Array]
    factor_range: tuple[float, float]

    def weights(self, w_NK: Array) -> Array:
        """w, or a bound on it, to w'."""
        wide = self._wide(w_NK)
        return cast(cast(w_NK, wide) / self._factor(wide), dtype_name(w_NK))

    def unscale_weights(self, w_NK: Array) -> Array:
        """w' back to w."""
        wide = self._wide(w_NK)
        return cast(cast(w_NK, wide) * self._factor(wide), dtype_name(w_NK))

    def linear(self, g_NK: Array) -> Array:
        """g to g'."""
        dtype = dtype_name(g_NK)
        input_N1 = cast(self.layer.input_N1 / self.layer.hessian_scale, dtype)
        return g_NK * input_N1 / self.column_1K(dtype)

    def residual(self, rho_NK: Array, unit: float) -> Array:
        """A residual that is given in units of ``unit`` to the scaled problem's: no number on the way leaves the dtype's range."""
        dtype, change = dtype_name(rho_NK), unit / self.layer.hessian_scale
        if change == 1.0 and self.layer.input_range == (1.0, 1.0):
            return rho_NK / self.column_1K(dtype)
        return rho_NK * cast(self.layer.input_N1 * change, dtype) / self.column_1K(dtype)

    def objective(self, f_K: np.ndarray) -> np.ndarray:
        """An objective (or a difference of two), (K,) float64 numpy, to the scaled problem's."""
        return f_K / (self.layer.hessian_scale * self.factor_K**2)

    def _wide(self, w_NK: Array) -> str:
        """The dtype to scale weights in: their own, or float64 where a factor is not among its normal numbers."""
        numbers = np.finfo(dtype_name(w_NK))
        return dtype_name(w_NK) if numbers.tiny <= self.factor_range[0] and self.factor_range[1] <= numbers.max else "float64"

    def _factor(self, dtype: str) -> Array:
        if self.layer.input_range == (1.0, 1.0):
            return self.column_1K(dtype)
        return cast(self.layer.input_N1, dtype) * self.column_1K(dtype)


def layer_scaling(kind: str, hessian: Hessian, dtype: str) -> Scaling:
    """The scaling of a layer; ``kind`` is "mean", "jacobi" or "none". ValueError for an H beyond the dtype's normal numbers."""
    diagonal_N = hessian.diagonal_N + hessian.ridge
    live_N = diagonal_N > 0
    mean = float(power_of_two(diagonal_N[live_N].mean())) if live_N.any() and kind != "none" else 1.0
    if mean < float(np.finfo(dtype).tiny):
        raise ValueError(f"H is too small for {dtype}: its mean diagonal is about {mean:.1e}; scale it up")
    if kind == "none" and not diagonal_N.max(initial=0.0) < float(np.finfo(dtype).max):
        wider = "" if dtype == "float64" else " or use dtype='float64'"
        raise ValueError(f"H is too large for {dtype}, and this backend takes it unscaled; scale it down{wider}")
    input_N = np.ones_like(diagonal_N)
    if kind == "jacobi":
        input_N = 1.0 / power_of_two(np.sqrt(diagonal_N / mean))
    input_range = (float(input_N.min(initial=1.0)), float(input_N.max(initial=1.0)))
    return Scaling(mean, like(input_N, hessian.hessian_NN)[:, None], input_range, scale_columns=kind != "none")
