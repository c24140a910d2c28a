"""Derivatives of the optimal weights: one more solve with the same H, and products.

With I the entries that are kept and not held by a bound, A = H + λI and λ = δ · mean(diag H), the optimum has A_II ŵ_I =
(b + λw − Ac)_I, where c are the values at which the other entries are held. For a loss L with v = dL/dŵ let z_I = (A_II)⁻¹ v_I,
and 0 elsewhere. Then

    dL/db = z,   dL/dw = λz,   dL/dc = v − Az,   dL/dH = −½ Σ (zŵᵀ + ŵzᵀ) + (δ/N) Σ zᵀ(w − ŵ) · 1,

sums over columns, 1 the identity. With the default b = Hw, dL/dw = Az and dL/dH gains ½ Σ (zwᵀ + wzᵀ). A certified gap of ε
leaves z off by √ε in the norm of A.

A column whose W, rhs or bounds are not finite has no optimum: its weights are NaN, as its gradients are where the loss uses it.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from .arrays.interop import Array
from .prepared import PreparedHessian
from .solution import Solution
from .status import Status
from .wording import counted


def has_optimum(solution: Solution) -> np.ndarray:
    """(K,) bool, False for columns whose input is not finite. A RuntimeWarning tells of others that are not certified."""
    invalid_K = np.asarray([status is Status.INVALID_INPUT for status in solution.status], dtype=bool)
    left_K = ~solution.optimal & ~invalid_K
    if left_K.any():
        first = int(left_K.argmax())
        warnings.warn(
            f"the weights of {int(left_K.sum())} of {counted(len(left_K), 'column')} are not certified optimal: column {first} is "
            f"{solution.status[first].name}, its relative gap {solution.relative_gap[first]:.1e}, not {solution.tol:g}",
            RuntimeWarning,
            stacklevel=3,
        )
    return ~invalid_K


def adjoint(prepared: PreparedHessian, free_NK: Array, v_NK: Array, tol: float) -> Array:
    """z, (N, K), float64: the solve behind the gradients. A RuntimeWarning tells if it is not certified to ``tol``."""
    solution = prepared.solve(0.0 * v_NK, free_NK, rhs=v_NK, tol=tol, dtype="float64")
    if not solution.optimal.all():
        worst = int(solution.relative_gap.argmax())
        warnings.warn(
            f"the gradients of {int((~solution.optimal).sum())} of {counted(len(solution.optimal), 'column')} are "
            "not certified: column "
            f"{worst} is {solution.status[worst].name}, its relative gap {solution.relative_gap[worst]:.1e}, not {tol:g}",
            RuntimeWarning,
            stacklevel=2,
        )
    return solution.weights


def cotangents(
    h_NN: Array, w_NK: Array, new_NK: Array, v_NK: Array, z_NK: Array, one_NN: Array, damping: float, ridge: Any, given_rhs: bool
) -> tuple[Array, Array, Array]:
    """dL/dH, dL/dw and v − Az, arrays of any one library. one_NN: the identity; ridge: λ; given_rhs: whether b is an argument."""
    product_NK = h_NN @ z_NK + ridge * z_NK
    outer_NN = z_NK @ (-new_NK if given_rhs else w_NK - new_NK).T
    moved = (z_NK * (w_NK - new_NK)).sum() * (damping / len(h_NN))
    return 0.5 * (outer_NN + outer_NN.T) + moved * one_NN, ridge * z_NK if given_rhs else product_NK, v_NK - product_NK
