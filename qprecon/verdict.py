"""What ``PreparedHessian.audit`` returns: the certificate of weights that somebody else made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._start import find_start
from .audit import audit
from .certificate import Certificate
from .interop import Array, cast, dtype_name
from .problem import ColumnQP


@dataclass(frozen=True, eq=False)
class Audit:
    """Figures of each column, (K,) float64 numpy, in the units of H and W; the same as in ``Solution``.

    Attributes:
        objective: f of the weights, of the damped problem.
        baseline_objective: f of the masked weights, clipped to the bounds.
        gap_bound: certified, f − f* ≤ gap_bound; infinite where nothing can be certified.
        relative_gap: relative to what the optimum costs, see ``qprecon.audit``.
        stationarity: largest half gradient over the free entries, in units of √A_ii.
        violation: largest distance from the mask and the bounds, in units of W. Weights with one have no certificate.
    """

    objective: np.ndarray
    baseline_objective: np.ndarray
    gap_bound: np.ndarray
    relative_gap: np.ndarray
    stationarity: np.ndarray
    violation: np.ndarray

    def certified(self, tol: float) -> np.ndarray:
        """(K,) bool: proved to be within ``tol`` of the optimum."""
        return self.relative_gap <= tol


def audited(problem: ColumnQP, cert: Certificate, candidate_NK: Array) -> Audit:
    """Audit ``candidate_NK``, weights of any float dtype in the core's library.

    Raises:
        ValueError: another shape than W's, or no floats.
    """
    if tuple(candidate_NK.shape) != tuple(problem.weights_NK.shape):
        raise ValueError(f"candidate has shape {tuple(candidate_NK.shape)}, W has {tuple(problem.weights_NK.shape)}")
    if not dtype_name(candidate_NK).startswith(("float", "bfloat")):
        raise ValueError(f"candidate must be a floating array, got dtype {dtype_name(candidate_NK)}")
    every = slice(0, problem.n_columns)
    start = find_start(problem, cert, "float64", None, every)
    figures = audit(problem, cert, cast(candidate_NK, "float64"), every)
    usable_K = (figures.violation == 0.0) & ~problem.invalid_columns()
    gap_K = np.where(usable_K, figures.gap_bound, np.inf)
    relative_K = np.where(usable_K, start.relative_gap(problem, figures), np.inf)
    return Audit(figures.objective, start.masked.objective, gap_K, relative_K, figures.stationarity, figures.violation)
