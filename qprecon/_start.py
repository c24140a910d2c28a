"""Where columns start from, and what a column's objective is measured in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .audit import Audit, Certificate, audit
from .interop import Array, cast, like, namespace, to_numpy
from .linalg import column_dots
from .problem import ColumnQP


@dataclass(frozen=True, eq=False)
class Start:
    """Where a chunk starts: the masked weights, or the warm start where that is better."""

    weights_NK: Array
    audit: Audit
    baseline_K: np.ndarray  # objective of the masked weights
    energy_K: np.ndarray  # scale of the objective, positive where anything is to be gained


def find_start(problem: ColumnQP, cert: Certificate, dtype: str, warm_NK: Array | None, columns: Any) -> Start:
    """The start of the chosen columns; ``warm_NK`` is a caller's (N, K) warm start for the whole problem."""
    masked_NK = problem.clip(cast(problem.weights_NK[:, columns], dtype), columns)
    figures = audit(problem, cert, masked_NK, columns, certify=False)
    baseline_K = figures.objective.copy()
    energy_K = _energy(problem, cert, masked_NK, figures, columns)
    if warm_NK is None:
        return Start(masked_NK, figures, baseline_K, energy_K)
    xp = namespace(masked_NK)
    warm_chunk_NK = problem.clip(warm_NK[:, columns], columns)
    warm_figures = audit(problem, cert, warm_chunk_NK, columns, certify=False)
    with np.errstate(invalid="ignore"):
        better_K = warm_figures.objective < figures.objective
    weights_NK = xp.where(like(better_K, masked_NK)[None, :], warm_chunk_NK, masked_NK)
    return Start(weights_NK, warm_figures.where(better_K, figures), baseline_K, energy_K)


def _energy(problem: ColumnQP, cert: Certificate, masked_NK: Array, figures: Audit, columns: Any) -> np.ndarray:
    """What a column's objective is measured in: f(start), or with an explicit rhs, where f has no zero, the larger of
    ΔᵀAΔ + 2|gᵀΔ| and the gain of a Jacobi step.
    """
    if problem.rhs_NK is None:
        return figures.objective.copy()  # the figures are updated in place
    back_NK = cast(problem.weights_NK[:, columns], "float64") - cast(masked_NK, "float64")
    g_NK = problem.linear("float64", columns)
    quadratic_K = column_dots(back_NK, figures.rho_NK - g_NK)
    diagonal_N1 = cert.diagonal_N[:, None]
    xp = namespace(back_NK)
    positive_N1 = xp.where(diagonal_N1 > 0, diagonal_N1, xp.ones_like(diagonal_N1))
    kept_NK = cast(problem.mask_NK[:, columns], "float64")
    jacobi_K = (figures.rho_NK**2 * kept_NK / positive_N1).sum(0)
    total_K = quadratic_K + 2.0 * abs(column_dots(back_NK, g_NK))
    return np.maximum(to_numpy(total_K), to_numpy(jacobi_K))
