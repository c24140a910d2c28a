"""Scales for given weights: from the largest of each group, or searched.

Shapes: N inputs, K columns, G groups of inputs.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ..arrays.interop import Array, namespace
from .formats import E4M3, Fitted, Grid, round_to_dtype

_SHRINKS = 25
_LEAST_SHRINK = 0.4
_LARGEST_WHOLE = 2.0**127


def fit_scales(grid: Grid, w_NK: Array) -> Fitted:
    """Scales that put the largest weight of each group on the largest unit. w_NK: weights, (N, K), 0 where pruned."""
    return scales_of_range(grid, *group_range(grid, w_NK)) if grid.scaled else Fitted(grid, w_NK[:0])


def group_range(grid: Grid, w_NK: Array) -> tuple[Array, Array]:
    """Smallest and largest weight of each group, with 0 among them; without zero points the same on both sides; (G, K)."""
    xp, (n, k), groups = namespace(w_NK), w_NK.shape, grid.groups(len(w_NK))
    if n == 0:
        nothing_GK = xp.zeros_like(w_NK.reshape(groups, 0, k).sum(1))
        return nothing_GK, nothing_GK
    w_GBK = w_NK.reshape(groups, n // groups, k)
    if grid.symmetric:
        most_GK = xp.amax(abs(w_GBK), 1)
        return -most_GK, most_GK
    return xp.amin(w_GBK, 1).clip(None, 0), xp.amax(w_GBK, 1).clip(0, None)


def scales_of_range(grid: Grid, least_GK: Array, most_GK: Array, whole: float | None = None) -> Fitted:
    """Scales for groups whose weights lie between these, see ``group_range``. whole: nvfp4's one scale, made unless given."""
    xp, zero_GK = namespace(most_GK), None
    if grid.symmetric:
        scale_GK = most_GK / grid.largest
    else:
        low, high = grid.code_range
        scale_GK = (most_GK - least_GK) / (high - low)
        zero_GK = (low - least_GK / xp.where(scale_GK > 0, scale_GK, xp.ones_like(scale_GK))).round().clip(low, high)
    scale_GK, whole = stored_scales(grid, scale_GK, whole)
    return Fitted(grid, scale_GK, zero_GK, whole)


def stored_scales(grid: Grid, scale_GK: Array, whole: float | None = None) -> tuple[Array, float]:
    """Scales as a file holds them, (G, K), and nvfp4's scale for all of them, which is made of the largest unless given.

    A scale that is 0, or too small for its dtype, becomes 1: all weights of its group are then 0.
    """
    xp = namespace(scale_GK)
    if grid.scale == "e4m3":
        if whole is None:
            most = float(scale_GK.max()) if scale_GK.shape[1] else 0.0
            # A number of float32, as a file holds it; with denormal weights the quotient would be none.
            whole = float(np.float32(min(E4M3.largest / most, _LARGEST_WHOLE))) if most > 0 else 1.0
        scale_GK = E4M3.nearest(scale_GK * whole)
    elif grid.scale == "power":
        scale_GK = _nearest_power(scale_GK)
    else:
        scale_GK = round_to_dtype(scale_GK, grid.scale_dtype)
    return xp.where(scale_GK > 0, scale_GK, xp.ones_like(scale_GK)), whole or 1.0


def search_scales(grid: Grid, w_NK: Array, weight_N: Array) -> Fitted:
    """The best of 25 shares of each group's largest weight, by Σ weight_i (w_i − q_i)², for ``w_NK`` with its zeros."""
    fitted = fit_scales(grid, w_NK)
    if not grid.scaled or not w_NK.shape[0]:
        return fitted
    xp, (n, k), groups = namespace(w_NK), w_NK.shape, grid.groups(len(w_NK))
    w_GBK, weight_GB1 = w_NK.reshape(groups, n // groups, k), weight_N.reshape(groups, n // groups, 1)
    least_GK, most_GK = group_range(grid, w_NK)
    # Only shares of one group are compared: all are brought to one size, so that squares stay within the dtype's range.
    unit_G1K, weight_GB1 = power_near(xp.maximum(most_GK, -least_GK))[:, None], weight_GB1 / power_near(weight_GB1.max())
    best_GK = most_GK + float("inf")
    for step in range(_SHRINKS):
        share = 1.0 - step * (1.0 - _LEAST_SHRINK) / (_SHRINKS - 1)
        tried = scales_of_range(grid, share * least_GK, share * most_GK, fitted.whole)  # nvfp4's one scale is that of all
        error_GK = (weight_GB1 * ((w_GBK - tried.by_group().nearest(w_GBK)) / unit_G1K) ** 2).sum(1)
        better_GK = error_GK < best_GK
        best_GK = xp.where(better_GK, error_GK, best_GK)
        fitted = tried.mapped(partial(xp.where, better_GK), fitted)
    return fitted


def power_near(x: Array) -> Array:
    """The power of two nearest to each number, 1 for 0: dividing by it changes no digit."""
    xp, power = namespace(x), _nearest_power(x)
    return xp.where(power > 0, power, xp.ones_like(power))


def _nearest_power(x: Array) -> Array:
    """The power of two nearest to each positive number, in the logarithm; 0 stays 0."""
    xp = namespace(x)
    mantissa, exponent = xp.frexp(x)
    exponent = exponent - xp.where(mantissa < 2.0**-0.5, xp.ones_like(exponent), xp.zeros_like(exponent))
    return xp.where(x > 0, xp.ldexp(xp.ones_like(x), exponent), xp.zeros_like(x))
