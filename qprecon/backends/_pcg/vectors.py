"""One CG iteration of all columns: plain array operations, or on CUDA a Triton kernel for each pass over memory.

Most of an iteration on a GPU is not the product H·P but the N×K vectors that stream through memory around it: fused, they are
read and written about half as often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...arrays.interop import TRITON, Array, cast, device_type, dtype_name, kind_of, namespace
from ...arrays.linalg import column_dots, take_columns
from .scalars import Goal, Scalars, Seen

_KERNELS_FROM = 2**13  # weights, padding included: kernels are not compiled for less


@dataclass(frozen=True, eq=False)
class Plain:
    """The operations with numpy or torch arrays. The mask is in the vectors' dtype; p and r are zero on pruned entries.

    multiply: H·P of all columns, see ``product``. apply: C⁻¹ of these columns, see ``precondition``.
    """

    mask_NK: Array
    multiply: Any
    apply: Any
    takes_no_memory = is_rough = False

    def take(self, index: Array, r_NK: Array, p_NK: Array) -> tuple[Plain, Array, Array]:
        """For some of the columns; with r and p of these."""
        narrow = Plain(take_columns(self.mask_NK, index), self.multiply, self.apply.take(index))
        return narrow, take_columns(r_NK, index), take_columns(p_NK, index)

    def begin(self, x_NK: Array, r_NK: Array, scalars: Scalars, goal: Goal) -> tuple[Array, Array]:
        """r as iterations keep it, and the first direction p = z = C⁻¹r, a new array; sets rz and active. x, which kernels take,
        stays as it is."""
        z_NK, scalars.rz_K, scalars.beyond_K = self._precondition(r_NK)
        scalars.active_K = scalars.rz_K > 0
        return r_NK, z_NK

    def look(self, scalars: Scalars, goal: Goal) -> Seen:
        """See ``Goal.look``."""
        return goal.look(scalars)

    def step(self, x_NK: Array, r_NK: Array, p_NK: Array, scalars: Scalars) -> None:
        """One iteration of every active column, in place; a finished column's step is zero.

        x += αp and r −= αAp on kept entries, α = rz / pᵀAp; a column whose curvature is not positive stops. Then p = z + βp with
        z = C⁻¹r and β the ratio of the new rz to the old.
        """
        self._advance(x_NK, r_NK, p_NK, self.multiply(p_NK), scalars)
        self._turn(p_NK, r_NK, scalars)

    def _advance(self, x_NK: Array, r_NK: Array, p_NK: Array, q_NK: Array, scalars: Scalars) -> None:
        curvature_K = column_dots(p_NK, q_NK)
        scalars.active_K = scalars.active_K & (curvature_K > 0)
        alpha_K = _ratio(scalars.rz_K, curvature_K, scalars.active_K)
        _add_scaled(x_NK, p_NK, alpha_K)
        q_NK *= self.mask_NK
        _add_scaled(r_NK, q_NK, -alpha_K)
        scalars.gain_K = scalars.gain_K + alpha_K * scalars.rz_K
        scalars.iterations_K = scalars.iterations_K + scalars.active_K

    def _turn(self, p_NK: Array, r_NK: Array, scalars: Scalars) -> None:
        z_NK, rz_K, scalars.beyond_K = self._precondition(r_NK)
        beta_K = _ratio(rz_K, scalars.rz_K, scalars.active_K)
        p_NK *= beta_K[None, :]
        p_NK += z_NK
        scalars.active_K, scalars.rz_K = scalars.active_K & (rz_K > 0), rz_K

    def _precondition(self, r_NK: Array) -> tuple[Array, Array, Array]:
        """z = D⁻¹r − w on kept entries, rᵀz, and how much more rᵀC⁻¹r with all inputs is."""
        z_NK, correction = r_NK * self.apply.inverse_diagonal_N1, self.apply.correction(r_NK)
        if correction is None:
            rz_K = column_dots(r_NK, z_NK)
            return z_NK, rz_K, namespace(rz_K).zeros_like(rz_K)
        w_NK, beyond_K = correction
        w_NK *= self.mask_NK
        z_NK -= w_NK
        return z_NK, column_dots(r_NK, z_NK), beyond_K


def vectors(like_NK: Array, mask_NK: Array, multiply: Any, apply: Any) -> Any:
    """The operations for arrays like ``like_NK``; ``mask_NK`` is bool."""
    n, k = like_NK.shape
    if TRITON and device_type(like_NK) == "cuda" and dtype_name(like_NK) == "float32" and n * k > _KERNELS_FROM:
        from .fused import Fused

        return Fused(mask_NK, multiply, apply)
    return Plain(cast(mask_NK, dtype_name(like_NK)), multiply, apply)


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
