"""Columns one after the other through a solver of quadratic programs, each reduced to its kept inputs.

In x = (ŵ − start)_I, I the kept inputs: minimise ½xᵀH_II x − r_Iᵀx, lower ≤ x ≤ upper, r the residual at the start. A further call
goes on from a start that is nearly right, where x is small and solvers' absolute accuracies are worth more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sparse

from ...contract.interface import Chunk, RawColumns


@dataclass(frozen=True, eq=False)
class Reduced:
    """One column's problem; float64, bounds ±inf where there are none. seconds: until the deadline, or None."""

    hessian_II: np.ndarray
    residual_I: np.ndarray
    lower_I: np.ndarray
    upper_I: np.ndarray
    accuracy: float
    max_iterations: int | None
    seconds: float | None


CLARABEL_WORDS = {
    "Solved": "solved",
    "AlmostSolved": "solved inaccurately",
    "MaxIterations": "iteration_limit",
    "MaxTime": "time_limit",
    "PrimalInfeasible": "primal infeasible",
    "DualInfeasible": "dual infeasible",
    "NumericalError": "numerical trouble",
    "InsufficientProgress": "no more progress",
}
"""Clarabel's statuses as the core knows them; Moreau, which has its interior-point method, has the same."""

Answer = tuple[np.ndarray | None, str, int]
"""x or None, a status word, iterations."""


def bound_rows(given: Reduced, form: str) -> tuple[Any, np.ndarray]:
    """The finite bounds as A x ≤ b: A in a format of scipy's ("csc", "csr"), rows x ≤ upper and −x ≤ −lower, and b."""
    above, below = np.flatnonzero(np.isfinite(given.upper_I)), np.flatnonzero(np.isfinite(given.lower_I))
    identity_II = sparse.identity(len(given.residual_I), format="csr")
    rows = sparse.vstack([identity_II[above], -identity_II[below]], format=form)
    return rows, np.concatenate([given.upper_I[above], -given.lower_I[below]])


def solve_reduced(hessian_NN: np.ndarray, chunk: Chunk, solve: Callable[[Reduced], Answer]) -> RawColumns:
    """Every column of a chunk; those that time did not suffice for keep their start.

    The accuracy asked for is 1e-3 of the gap wanted: solvers measure it in residuals, relative to a start of objective 1.
    """
    k = chunk.start_NK.shape[1]
    out = RawColumns(chunk.start_NK.copy(), np.full(k, "time_limit", dtype=object), np.zeros(k, dtype=np.int64))
    for j in range(k):
        seconds = None if chunk.deadline is None else chunk.deadline - time.monotonic()
        if seconds is not None and seconds <= 0.0:
            break
        index_I = np.flatnonzero(chunk.mask_NK[:, j])
        if not len(index_I):
            out.reported_status[j] = "nothing is kept"
            continue
        at_I = chunk.start_NK[index_I, j]
        lower_I, upper_I = (
            np.full(len(index_I), infinite) if bound_NK is None else bound_NK[index_I, j] - at_I
            for bound_NK, infinite in ((chunk.lower_NK, -np.inf), (chunk.upper_NK, np.inf))
        )
        given = Reduced(
            hessian_NN[np.ix_(index_I, index_I)], chunk.residual_NK[index_I, j], lower_I, upper_I,
            max(1e-3 * chunk.tolerance, 1e-11), chunk.max_iterations, seconds,
        )  # fmt: skip
        x_I, out.reported_status[j], out.iterations[j] = solve(given)
        if x_I is not None and np.isfinite(x_I).all():
            out.weights_NK[index_I, j] += np.clip(x_I, lower_I, upper_I)
    return out
