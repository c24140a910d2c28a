"""The two forms of the paper as plain arrays, for any outside solver.

Both minimise over Δ = ŵ − w with the paper's convention, **no factor ½**: ΔᵀQΔ + cᵀΔ + constant. A solver that minimises
½xᵀPx + qᵀx wants P = 2Q, q = c.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays.interop import cast, to_numpy
from ..wording import counted
from .column_qp import ColumnQP


@dataclass(frozen=True, eq=False)
class BoxForm:
    """Constrained form (paper, eq. constrained_objective): pruned entries have lower = upper = −w.

    quadratic_NN (N, N), linear_NK (N, K), lower_NK and upper_NK (N, K; ±inf where free), constant_K (K,); float64 numpy.
    """

    quadratic_NN: np.ndarray
    linear_NK: np.ndarray
    lower_NK: np.ndarray
    upper_NK: np.ndarray
    constant_K: np.ndarray

    def weights(self, delta_NK: np.ndarray, weights_NK: np.ndarray) -> np.ndarray:
        """ŵ = w + Δ with the fixed entries exactly zero."""
        fixed_NK = (self.lower_NK == self.upper_NK) & (self.lower_NK == -weights_NK)
        return np.where(fixed_NK, 0.0, weights_NK + delta_NK)


@dataclass(frozen=True, eq=False)
class ReducedForm:
    """Unconstrained form of one column (paper, eq. unconstrained_qp_params): Q_j = H_II, c_j = −2 H_IS w_S (H damped).

    index_I (I,) kept inputs, quadratic_II (I, I), linear_I, lower_I, upper_I (I,; ±inf where free), constant; float64 numpy.
    """

    index_I: np.ndarray
    quadratic_II: np.ndarray
    linear_I: np.ndarray
    lower_I: np.ndarray
    upper_I: np.ndarray
    constant: float


def box_form(problem: ColumnQP) -> BoxForm:
    """The constrained form of every column of ``problem``."""
    w_NK = to_numpy(cast(problem.weights_NK, "float64"))
    mask_NK = to_numpy(problem.mask_NK)
    g_NK = problem.linear("float64")
    linear_NK = np.zeros_like(w_NK) if g_NK is None else -2.0 * to_numpy(g_NK)
    lower_NK, upper_NK = _delta_bounds(problem, w_NK)
    return BoxForm(
        quadratic_NN=to_numpy(problem.damped_hessian("float64")),
        linear_NK=linear_NK,
        lower_NK=np.where(mask_NK, lower_NK, -w_NK),
        upper_NK=np.where(mask_NK, upper_NK, -w_NK),
        constant_K=_constant(problem),
    )


def reduced_form(problem: ColumnQP, column: int) -> ReducedForm:
    """The unconstrained form of one column; its bounds are infinite unless the problem has some."""
    if not -problem.n_columns <= column < problem.n_columns:
        raise IndexError(f"column {column} is not there: the problem has {counted(problem.n_columns, 'column')}")
    column %= problem.n_columns
    a_NN = to_numpy(problem.damped_hessian("float64"))
    w_N = to_numpy(cast(problem.weights_NK[:, column], "float64"))
    kept_N = to_numpy(problem.mask_NK[:, column])
    index_I, index_S = np.flatnonzero(kept_N), np.flatnonzero(~kept_N)
    linear_I = -2.0 * a_NN[np.ix_(index_I, index_S)] @ w_N[index_S]
    constant = float(w_N[index_S] @ a_NN[np.ix_(index_S, index_S)] @ w_N[index_S])
    one = slice(column, column + 1)
    g_NK = problem.linear("float64", one)
    if g_NK is not None:
        g_N = to_numpy(g_NK)[:, 0]
        linear_I = linear_I - 2.0 * g_N[index_I]
        constant += float(2.0 * g_N[index_S] @ w_N[index_S])
    lower_NK, upper_NK = _delta_bounds(problem, to_numpy(cast(problem.weights_NK, "float64")))
    return ReducedForm(
        index_I=index_I,
        quadratic_II=a_NN[np.ix_(index_I, index_I)],
        linear_I=linear_I,
        lower_I=lower_NK[index_I, column],
        upper_I=upper_NK[index_I, column],
        constant=constant + float(_constant(problem)[column]),
    )


def _delta_bounds(problem: ColumnQP, w_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    def shifted(bound_NK, infinite: float) -> np.ndarray:
        if bound_NK is None:
            return np.full_like(w_NK, infinite)
        return to_numpy(cast(bound_NK, "float64")) - w_NK

    return shifted(problem.lower_NK, -np.inf), shifted(problem.upper_NK, np.inf)


def _constant(problem: ColumnQP) -> np.ndarray:
    """What the Δ form leaves out: wᵀHw − 2 rhsᵀw for an explicit rhs, 0 for the default one."""
    if problem.rhs_NK is None:
        return np.zeros(problem.n_columns)
    w_NK = to_numpy(cast(problem.weights_NK, "float64"))
    h_NN = to_numpy(cast(problem.hessian_NN, "float64"))
    b_NK = to_numpy(cast(problem.rhs_NK, "float64"))
    return np.einsum("nk,nk->k", w_NK, h_NN @ w_NK - 2.0 * b_NK)
