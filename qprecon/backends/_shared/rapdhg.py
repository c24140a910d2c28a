"""One call of MPAX's rAPDHG for many columns that share H.

What it needs, found by trial with MPAX 0.2.4: a constraint row that is not zero (else NaN after the whole iteration limit), hence
x₀ ≥ −1e8; ``create_qp`` outside jit, since it branches on values; jax ≥ 0.6.2, else vmap copies H for every column.
It checks its limits every 64 iterations only, so no call takes fewer than 73.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from mpax.mp_io import create_qp
from mpax.rapdhg import raPDHG
from mpax.utils import QuadraticProgrammingProblem, TerminationStatus

WORDS = {
    TerminationStatus.OPTIMAL: "optimal",
    TerminationStatus.PRIMAL_INFEASIBLE: "primal infeasible",
    TerminationStatus.DUAL_INFEASIBLE: "dual infeasible",
    TerminationStatus.TIME_LIMIT: "time_limit",
    TerminationStatus.ITERATION_LIMIT: "iteration_limit",
    TerminationStatus.NUMERICAL_ERROR: "numerical error",
}


def shared_problem(hessian_NN: Any) -> QuadraticProgrammingProblem:
    """Everything but a column's own vectors: ½xᵀHx with the dummy row."""
    n, dtype = hessian_NN.shape[0], hessian_NN.dtype
    zero_N, none_0N = jnp.zeros(n, dtype), jnp.zeros((0, n), dtype)
    row_1N = jnp.zeros((1, n), dtype).at[0, 0].set(1.0)
    floor_1 = jnp.full(1, -1e8, dtype)
    qp = create_qp(hessian_NN, zero_N, none_0N, zero_N[:0], row_1N, floor_1, zero_N, zero_N, use_sparse_matrix=False)
    return dataclasses.replace(qp, is_lp=False)  # static in MPAX, and an array until here


def solve_columns(
    qp: QuadraticProgrammingProblem,
    c_NB: Any,
    lower_NB: Any,
    upper_NB: Any,
    constant_B: Any,
    eps_abs: Any,
    eps_rel: Any,
    limit: Any,
) -> tuple[Any, Any, Any]:
    """x (N, B), MPAX's status codes (B,) and iterations (B,); may be traced, tolerances and limit too."""

    def solve_one(c_N: Any, lower_N: Any, upper_N: Any, constant: Any) -> tuple[Any, Any, Any]:
        column = dataclasses.replace(
            qp,
            objective_vector=c_N,
            objective_constant=constant,
            variable_lower_bound=lower_N,
            variable_upper_bound=upper_N,
            isfinite_variable_lower_bound=jnp.isfinite(lower_N),
            isfinite_variable_upper_bound=jnp.isfinite(upper_N),
        )
        result = raPDHG(eps_abs=eps_abs, eps_rel=eps_rel, iteration_limit=limit).optimize(column)
        return result.primal_solution, result.termination_status, result.iteration_count

    return jax.vmap(solve_one, in_axes=(1, 1, 1, 0), out_axes=(1, 0, 0))(c_NB, lower_NB, upper_NB, constant_B)
