"""The start of columns, and the scale of a column's objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.chunks import indices_of
from ..arrays.interop import Array, cast, dtype_name, like, namespace, to_numpy
from ..arrays.linalg import column_dots, column_norms
from ..problem.column_qp import ColumnQP
from .audit import Figures, audit, audit_begun, relative_gap
from .factor import Certificate, gamma
from .improvement import masked_weights, surely_better


@dataclass(frozen=True, eq=False)
class Start:
    """Where a chunk starts: the masked weights, or the warm start where that is better.

    Attributes:
        weights_NK, audit: the start and its figures.
        masked: the figures of the masked weights.
        energy_K: scale of the objective, positive where anything is to be gained.
        floor_K: the same, less what rounding may have added to it.
        zero_K: with a known constant, the dense weights' objective, which every value is measured from, less its rounding.
        slack_K: how far below zero a squared error may come out: by rounding, and as rhs and constant are the caller's sums.
        held_K: of columns that keep all inputs, where W has more digits than the weights: what rounding it to them may cost.
    """

    weights_NK: Array
    audit: Figures
    masked: Figures
    energy_K: np.ndarray
    floor_K: np.ndarray
    zero_K: np.ndarray | None = None
    slack_K: np.ndarray | None = None
    held_K: np.ndarray | None = None

    def relative_gap(self, problem: ColumnQP, figures: Figures) -> np.ndarray:
        """Gaps of the chunk's figures relative to what its optimum costs, (K,): see ``audit.relative_gap``. 0 for W itself, as near
        as the dtype holds it, where nothing is pruned."""
        gap_K = relative_gap(problem, figures, self.baseline_K, self.floor_K, self.zero_K)
        return gap_K if self.held_K is None else np.where(figures.gap_bound <= self.held_K, 0.0, gap_K)

    def relative_stationarity(self, figures: Figures) -> np.ndarray:
        """Stationarity of the chunk's figures relative to the root of what its objective is measured in, (K,)."""
        scale_K = np.sqrt(np.maximum(self.energy_K, 0.0))
        return np.divide(figures.stationarity, scale_K, out=np.zeros_like(scale_K), where=scale_K > 0)

    @property
    def baseline_K(self) -> np.ndarray:
        """The value of the masked weights, less what rounding may have added to it."""
        return self.masked.value - self.masked.rounding


def find_start(problem: ColumnQP, cert: Certificate, dtype: str, warm_NK: Array | None, columns: Any) -> Start:
    """The start of the chosen columns; ``warm_NK`` is a caller's (N, K) warm start for the whole problem."""
    return start_begun(problem, cert, dtype, warm_NK, columns)()


def start_begun(
    problem: ColumnQP, cert: Certificate, dtype: str, warm_NK: Array | None, columns: Any
) -> Callable[[], Start]:
    """``find_start``, begun: the device has been asked for what the masked weights come to."""
    masked_NK = masked_weights(problem, dtype, columns)
    rough = warm_NK is None and cert.factor_NN is not None and cert.dead_N is None
    arrives = audit_begun(problem, cert, masked_NK, columns, certify=False, rough=rough)

    def start() -> Start:
        masked = arrives()
        energy_K, floor_K = _energy(problem, cert, masked_NK, masked, columns)
        zero_K, slack_K = _zero(problem, columns)
        held_K = _held(problem, cert, dtype, columns)
        known = Start(masked_NK, masked, masked, energy_K, floor_K, zero_K, slack_K, held_K)
        return known if warm_NK is None else _better(problem, cert, known, warm_NK, columns)

    return start


def _better(problem: ColumnQP, cert: Certificate, start: Start, warm_NK: Array, columns: Any) -> Start:
    """The start with the warm one where that is better."""
    masked_NK, masked = start.weights_NK, start.masked
    warm_chunk_NK = problem.clip(warm_NK[:, columns], columns)
    warm = audit(problem, cert, warm_chunk_NK, columns, certify=False)
    better_K = surely_better(problem, cert, warm_chunk_NK, warm, masked, columns)
    weights_NK = namespace(masked_NK).where(like(better_K, masked_NK)[None, :], warm_chunk_NK, masked_NK)
    return replace(start, weights_NK=weights_NK, audit=warm.where(better_K, masked))


def check_squared_error(cert: Certificate, start: Start, figures: Figures, columns: Any) -> None:
    """ValueError where the weights of these figures, those of some columns, have a squared error clearly below zero."""
    if start.slack_K is None:
        return
    low_K = figures.objective + figures.rounding + cert.entry * figures.mass**2 + start.slack_K
    if (low_K < 0.0).any():
        raise ValueError(f"{_TOO_SMALL} {int(indices_of(columns)[low_K.argmin()])}: the answer's squared error would be negative")


def _held(problem: ColumnQP, cert: Certificate, dtype: str, columns: Any) -> np.ndarray | None:
    """``Start.held_K``: (Σ √A_ii u|w_i|)² with the unit roundoff u of the dtype; -1, which no gap is, where something is pruned."""
    if problem.rhs_NK is not None or dtype == "float64" or dtype_name(problem.weights_NK) != "float64":
        return None
    whole_K = to_numpy(problem.mask_NK[:, columns].all(0))
    if not whole_K.any():
        return None
    mass_K = to_numpy(cert.root_N @ abs(problem.weights_NK[:, columns]))
    held_K = (0.5 * float(np.finfo(dtype).eps) * mass_K) ** 2
    return np.where(whole_K & np.isfinite(held_K), held_K, -1.0)


_TOO_SMALL = "constant is too small for rhs and H in column"


def _zero(problem: ColumnQP, columns: Any) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """``Start.zero_K`` and ``Start.slack_K``.

    Raises:
        ValueError: a constant so small that the dense weights would have a negative squared error.
    """
    if problem.constant_K is None or problem.rhs_NK is None:
        return None, None
    w_NK: Array = cast(problem.weights_NK[:, columns], "float64")
    rhs_NK: Array = cast(problem.rhs_NK[:, columns], "float64")
    g_NK: Array = problem.linear("float64", columns)
    given_K = problem.constant_K[columns]
    zero_K = given_K - column_dots(w_NK, rhs_NK + g_NK)
    rounding_K = 4.0 * gamma(problem.n_inputs) * (given_K + column_dots(abs(w_NK), abs(rhs_NK) + abs(g_NK)))
    # rhs and constant are the caller's sums over tokens, perhaps in float32: they need not agree to float64's accuracy
    slack_K = 1e-3 * given_K + rounding_K
    if bool((zero_K < -slack_K).any()):
        worst = int(indices_of(columns)[to_numpy(zero_K + 1e-3 * given_K).argmin()])
        raise ValueError(f"{_TOO_SMALL} {worst}: the dense weights' squared error would be negative")
    return to_numpy(zero_K - rounding_K), to_numpy(slack_K)


def _energy(
    problem: ColumnQP, cert: Certificate, masked_NK: Array, masked: Figures, columns: Any
) -> tuple[np.ndarray, np.ndarray]:
    """What a column's objective is measured in, and a lower bound of it: f(start), or with an explicit rhs, where f has no zero,
    the larger of ΔᵀAΔ + 2|gᵀΔ| and the gain of a Jacobi step.
    """
    if problem.rhs_NK is None:
        return masked.value.copy(), np.maximum(masked.value - masked.rounding, 0.0)
    w_NK = cast(problem.weights_NK[:, columns], "float64")
    linear_K = to_numpy(column_dots(w_NK - cast(masked_NK, "float64"), problem.linear("float64", columns)))
    total_K = masked.value - 2.0 * linear_K + 2.0 * abs(linear_K)
    xp = namespace(w_NK)
    live_N1 = cert.root_N[:, None]
    live_N1 = xp.where(live_N1 > 0, live_N1, xp.ones_like(live_N1))
    step_NK = abs(cast(masked.rho_NK, "float64")) * cast(problem.mask_NK[:, columns], "float64") * (cert.unit / live_N1)
    noise_K = gamma(problem.n_inputs) * (like(masked.mass, w_NK) + cert.root_N @ abs(w_NK))
    jacobi_K = to_numpy(column_norms(step_NK)) ** 2
    surely_K = to_numpy(column_norms(xp.maximum(step_NK - noise_K[None, :], xp.zeros_like(step_NK)))) ** 2 * (1.0 - 1e-6)
    return np.maximum(total_K, jacobi_K), np.maximum(total_K - 2.0 * masked.rounding, surely_K)
