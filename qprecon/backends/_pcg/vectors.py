"""The vector work of one CG iteration: plain array operations, or on CUDA a Triton kernel for each pass over memory.

Most of an iteration on a GPU is not the product H·P but the N×K vectors that stream through memory around it: fused, they are
read and written about half as often.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from ...arrays.interop import Array, cast, device_type, dtype_name, kind_of, namespace
from ...arrays.linalg import column_dots, take_columns

TRITON = importlib.util.find_spec("triton") is not None


@dataclass(eq=False)
class Scalars:
    """The numbers of each column, (K,): rᵀz, what f has gained (same dtype), whether it goes on (bool), iterations (int32)."""

    rz_K: Array
    gain_K: Array
    active_K: Array
    iterations_K: Array

    @staticmethod
    def zeros(like_NK: Array) -> Scalars:
        """Before the first iteration."""
        xp, first = namespace(like_NK), like_NK[0]
        return Scalars(xp.zeros_like(first), xp.zeros_like(first), first != first, xp.zeros_like(first, dtype=xp.int32))

    def take(self, index: Array) -> Scalars:
        """Of some of the columns."""
        return Scalars(self.rz_K[index], self.gain_K[index], self.active_K[index], self.iterations_K[index])


@dataclass(frozen=True, eq=False)
class Plain:
    """The operations with numpy or torch arrays. The mask is in the vectors' dtype; p and r are zero on pruned entries."""

    mask_NK: Array
    tail: int = 0

    def take(self, index: Array) -> Plain:
        """For some of the columns."""
        return Plain(take_columns(self.mask_NK, index), self.tail)

    def begin(self, r_NK: Array, w_NK: Array | None, inverse_N1: Array, scalars: Scalars) -> Array:
        """First direction p = z = D⁻¹r − w on kept entries; sets rz and active."""
        z_NK, scalars.rz_K = self._precondition(r_NK, w_NK, inverse_N1)
        scalars.active_K = scalars.rz_K > 0
        return z_NK

    def advance(self, x_NK: Array, r_NK: Array, p_NK: Array, q_NK: Array, scalars: Scalars) -> None:
        """x += αp and r −= αq on kept entries in place, α = rz / pᵀq; a column whose curvature is not positive stops."""
        curvature_K = column_dots(p_NK, q_NK)
        scalars.active_K = scalars.active_K & (curvature_K > 0)
        alpha_K = _ratio(scalars.rz_K, curvature_K, scalars.active_K)
        _add_scaled(x_NK, p_NK, alpha_K)
        q_NK *= self.mask_NK
        _add_scaled(r_NK, q_NK, -alpha_K)
        scalars.gain_K = scalars.gain_K + alpha_K * scalars.rz_K
        scalars.iterations_K = scalars.iterations_K + scalars.active_K

    def turn(self, p_NK: Array, r_NK: Array, w_NK: Array | None, inverse_N1: Array, scalars: Scalars) -> None:
        """z = D⁻¹r − w on kept entries, then p = z + βp in place with β the ratio of the new rz to the old. ``w_NK`` is used up."""
        z_NK, rz_K = self._precondition(r_NK, w_NK, inverse_N1)
        beta_K = _ratio(rz_K, scalars.rz_K, scalars.active_K)
        p_NK *= beta_K[None, :]
        p_NK += z_NK
        scalars.active_K, scalars.rz_K = scalars.active_K & (rz_K > 0), rz_K

    def _precondition(self, r_NK: Array, w_NK: Array | None, inverse_N1: Array) -> tuple[Array, Array]:
        z_NK = r_NK * inverse_N1
        if w_NK is not None:
            w_NK *= self.mask_NK
            z_NK -= w_NK
        return z_NK, column_dots(r_NK, z_NK)

    def low(self, p_NK: Array) -> Array:
        """p in bfloat16, and ``tail`` rows below it for the product to fill."""
        low_NK = p_NK.bfloat16()
        return namespace(p_NK).cat([low_NK, low_NK.new_empty(self.tail, p_NK.shape[1])])


def vectors(like_NK: Array, mask_NK: Array, tail: int = 0) -> Any:
    """The operations for arrays like ``like_NK``; ``mask_NK`` is bool."""
    if TRITON and device_type(like_NK) == "cuda" and dtype_name(like_NK) == "float32":
        from .kernels import Fused

        return Fused(mask_NK.contiguous(), tail)
    return Plain(cast(mask_NK, dtype_name(like_NK)), tail)


def _ratio(a_K: Array, b_K: Array, usable_K: Array) -> Array:
    """a / b where usable, else 0."""
    xp = namespace(a_K)
    return xp.where(usable_K, a_K / xp.where(usable_K, b_K, xp.ones_like(b_K)), xp.zeros_like(a_K))


def _add_scaled(x_NK: Array, y_NK: Array, scale_K: Array) -> None:
    """x += y·scale in place."""
    if kind_of(x_NK) == "torch":
        x_NK.addcmul_(y_NK, scale_K[None, :])
    else:
        x_NK += y_NK * scale_K[None, :]
