"""What ``PreparedHessian.audit`` returns: the certificate of weights that somebody else made."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..arrays.chunks import slices
from ..arrays.interop import Array, cast, dtype_name, to_numpy
from ..arrays.memory import automatic_width
from ..problem.column_qp import ColumnQP
from ..wording import counted
from .audit import Figures, audit
from .factor import Certificate, gamma
from .improvement import masked_weights
from .notices import no_lower_bound
from .remedies import BEYOND, LEAST
from .starting_point import Start, check_squared_error, find_start

_BYTES = 8 * 14  # float64 temporaries, per entry of W


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """Figures of each column, (K,) float64 numpy, in the units of H and W; names and meanings are those of ``Solution``.

    Attributes:
        objective: f of the weights, of the damped problem.
        baseline_objective: f of the masked weights, clipped to the bounds.
        stationarity: max over free entries of |half gradient|ᵢ / √(H + λI)ᵢᵢ, relative to √(objective of the masked weights).
        violation: largest distance from the mask and the bounds, in units of W. Weights with one have no certificate.
        gap_bound: certified, f − f* ≤ gap_bound; infinite where nothing can be certified.
        relative_gap: relative to what the optimum costs, see ``qprecon.proof.audit``.
    """

    objective: np.ndarray
    baseline_objective: np.ndarray
    stationarity: np.ndarray
    violation: np.ndarray
    gap_bound: np.ndarray
    relative_gap: np.ndarray

    def certified(self, tol: float) -> np.ndarray:
        """(K,) bool: proved to be within ``tol`` of the optimum."""
        return self.relative_gap <= tol

    def summary(self) -> str:
        """The outcome in words, a line a fact."""
        k = len(self.relative_gap)
        if not k:
            return "no columns"
        unfinite_K = ~np.isfinite(self.objective)
        broken = int((~(self.violation == 0) & ~unfinite_K).sum())
        free_K = np.isinf(self.relative_gap) & np.isfinite(self.gap_bound)  # what the optimum costs is 0, and the gap is not
        worst = int(np.argmax(np.where(free_K, -1.0, self.relative_gap)))
        lines = [f"largest certified relative gap of {counted(k, 'column')} {self.relative_gap[worst]:.2e} (column {worst})"]
        if free := int(free_K.sum()):
            lines.append(f"{counted(free, 'column')} whose optimum costs nothing, so that a gap is relative to 0: see gap_bound")
        if 1.0 < self.relative_gap[worst] < np.inf:
            lines.append(no_lower_bound())
        if unfinite := int(unfinite_K.sum()):
            what = "NaN or Inf in the problem or in these weights, or too large to be squared"
            lines.append(f"{counted(unfinite, 'column')} with {what}: nothing certified")
        if broken:
            lines.append(f"{counted(broken, 'column')} with weights where the mask has none, or out of bounds: nothing certified")
        tiny_K = np.maximum(abs(self.objective), abs(self.baseline_objective)) < LEAST**2
        if tiny := int((np.isinf(self.gap_bound) & (self.violation == 0) & tiny_K).sum()):
            lines.append(f"{counted(tiny, 'column')} without any certificate: {BEYOND}: scale W or H up")
        if none := int(np.isinf(self.gap_bound).sum()) - broken - unfinite - tiny:
            lines.append(f"{counted(none, 'column')} without any certificate")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Audit: {self.summary()}"


@dataclass(frozen=True, eq=False)
class Known:
    """Other weights of the same mask, (N, K), which bound f* from below too.

    gap_K, objective_K, baseline_K: their own gap bounds and f, and that of the masked weights, as a ``Solution`` has them; what is
    not known is computed.
    """

    weights_NK: Array
    gap_K: np.ndarray | None = None
    objective_K: np.ndarray | None = None
    baseline_K: np.ndarray | None = None


def audited(problem: ColumnQP, cert: Certificate, candidate_NK: Array, known: Known | None = None) -> Audit:
    """Audit ``candidate_NK``, weights of any float dtype in the core's library.

    Since f* ≥ f(known) − its gap, f(candidate) − f(known) + that gap bounds the candidate's gap as well: far better where the
    candidate is rounded and the known weights are what was rounded.

    Raises:
        ValueError: another shape than W's.
    """
    if tuple(candidate_NK.shape) != tuple(problem.weights_NK.shape):
        raise ValueError(f"candidate has shape {tuple(candidate_NK.shape)}, W has {tuple(problem.weights_NK.shape)}")
    problem = problem.with_rounded_bounds(dtype_name(candidate_NK), outwards=True)
    n, k = problem.n_inputs, problem.n_columns
    width = automatic_width(problem.place, n, k, _BYTES * n)
    parts = list(slices(np.arange(k), width, contiguous=True)) or [slice(0, 0)]
    sound_K = ~problem.invalid_columns()
    audits = []
    for part in parts:
        figures = audit(problem, cert, cast(candidate_NK[:, part], "float64"), part, certify=known is None or known.gap_K is None)
        if known is not None:
            figures = replace(figures, gap_bound=np.minimum(figures.gap_bound, _apart(problem, cert, figures, known, part)))
        audits.append(_audited(problem, cert, figures, sound_K[part], part, known))
    return Audit(*(np.concatenate([getattr(one, field.name) for one in audits]) for field in fields(Audit)))


def _apart(problem: ColumnQP, cert: Certificate, figures: Figures, known: Known, columns: Any) -> np.ndarray:
    """f(candidate) − f(known) + the gap of the known weights, rounding counted, (K,); infinite where these prove nothing."""
    weights_NK = cast(known.weights_NK[:, columns], "float64")
    if problem.rhs_NK is None and known.objective_K is not None and known.gap_K is not None:
        value_K, gap_K, holds_K = known.objective_K[columns], known.gap_K[columns], True
        rounding_K = _rounding(problem, cert, weights_NK, columns)
    else:
        other = audit(problem, cert, weights_NK, columns, certify=known.gap_K is None)
        value_K, rounding_K, holds_K = other.value, other.rounding, other.violation == 0.0
        gap_K = other.gap_bound if known.gap_K is None else known.gap_K[columns]
    apart_K = (figures.value + figures.rounding) - (value_K - rounding_K) + gap_K
    return np.where(holds_K & (apart_K == apart_K), np.maximum(apart_K, 0.0), np.inf)


def _rounding(problem: ColumnQP, cert: Certificate, weights_NK: Array, columns: Any) -> np.ndarray:
    """A bound on the error of f of these float64 weights, without a right-hand side of their own, (K,): see ``audit``."""
    away_NK = abs(cast(problem.weights_NK[:, columns], "float64") - weights_NK)
    return 2.0 * gamma(problem.n_inputs) * to_numpy(cert.root_N @ away_NK) ** 2


def _audited(
    problem: ColumnQP, cert: Certificate, figures: Figures, sound_K: np.ndarray, columns: Any, known: Known | None
) -> Audit:
    start = _start(problem, cert, figures, columns, known)
    check_squared_error(cert, start, figures, columns)
    usable_K = (figures.violation == 0.0) & sound_K
    return Audit(
        objective=figures.objective,
        baseline_objective=start.masked.objective,
        stationarity=start.relative_stationarity(figures),
        violation=figures.violation,
        gap_bound=np.where(usable_K, figures.gap_bound, np.inf),
        relative_gap=np.where(usable_K, start.relative_gap(problem, figures), np.inf),
    )


def _start(problem: ColumnQP, cert: Certificate, figures: Figures, columns: Any, known: Known | None) -> Start:
    """The masked weights, what a column's objective is relative to; without a product where their f is known."""
    if known is None or known.baseline_K is None or problem.rhs_NK is not None:
        return find_start(problem, cert, "float64", None, columns)
    masked_NK, baseline_K = masked_weights(problem, "float64", columns), known.baseline_K[columns]
    rounding_K = _rounding(problem, cert, masked_NK, columns)
    masked = replace(figures, objective=baseline_K, value=baseline_K, rounding=rounding_K)
    return Start(masked_NK, masked, masked, baseline_K.copy(), np.maximum(baseline_K - rounding_K, 0.0))
