"""What is true of some weights, in exact arithmetic: objective, residual, and how far the optimum lies below.

The gap f(ŵ) − f* is exact where a column keeps few inputs and has no bounds. Elsewhere it is the exact gain of the best point that
a Newton method in float64 finds from ŵ, a lower bound of the gap. Either way a fault that rests on it is proved: by a point that
is better than the certificate allows, or by a direction of negative curvature.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from .exact import Exact, nearest, quadratic_gain
from .problems import Case

FLOOR = 1e-6  # docs: relative gaps are relative to f*, but never to less than this share of the start's objective
UNIT = 2.0**-53
_EXACT_UP_TO = 14  # kept inputs
INFINITE = float("inf")


@dataclass(frozen=True, eq=False)
class Value:
    """Of some weights: f and the residual g − AΔ, without rounding."""

    weights_NK: np.ndarray
    objective_K: list[Fraction]
    residual_NK: Exact


class Truth:
    """A case as ``solve`` poses it: bounds rounded to the dtype of the answer, λ in float64."""

    def __init__(self, case: Case, ridge: float, dtype: str) -> None:
        self.case, self.ridge, self.dtype = case, ridge, dtype
        h_NN = case.hessian_NN
        if not np.array_equal(h_NN, h_NN.T):
            h_NN = h_NN.dtype.type(0.5) * (h_NN + h_NN.T)
        self.hessian_NN = h_NN.astype(np.float64)
        self.damped_NN = self.hessian_NN + ridge * np.eye(len(h_NN))
        self.exact_NN = Exact.of(self.hessian_NN).plus_diagonal(ridge)
        self.w_NK = Exact.of(case.weights_NK)
        self.g_NK = self.constant_K = None
        if case.rhs_NK is not None:
            b_NK = Exact.of(case.rhs_NK)
            self.g_NK = b_NK - Exact.of(self.hessian_NN) @ self.w_NK
            given_K = np.zeros(case.weights_NK.shape[1]) if case.constant_K is None else case.constant_K
            dense_K = _column_totals(self.w_NK * (b_NK + self.g_NK))
            self.constant_K = [Fraction(float(given)) - dense for given, dense in zip(given_K, dense_K, strict=True)]
        shape = case.weights_NK.shape
        limits = []
        for bound, infinite in ((case.lower, -np.inf), (case.upper, np.inf)):
            bound = np.asarray(infinite if bound is None else bound.astype(dtype), dtype=np.float64)
            limits.append(np.broadcast_to(bound, shape))
        self.lower_NK, self.upper_NK = limits
        self.start = self.value(self.start_weights())

    def start_weights(self) -> np.ndarray:
        """The masked weights in the dtype of the answer, clipped to the bounds."""
        with np.errstate(over="ignore"):
            w_NK = self.case.weights_NK.astype(self.dtype).astype(np.float64)
        return np.where(self.case.mask_NK, np.clip(w_NK, self.lower_NK, self.upper_NK), 0.0)

    def value(self, new_NK: np.ndarray) -> Value:
        """f and the residual at some weights."""
        new_NK = new_NK.astype(np.float64)
        delta_NK = Exact.of(new_NK) - self.w_NK
        product_NK = self.exact_NN @ delta_NK
        objective_K = _column_totals(delta_NK * product_NK)
        if self.g_NK is None:
            return Value(new_NK, objective_K, Exact(-product_NK.ints, product_NK.exponent))
        linear_K = _column_totals(delta_NK * self.g_NK)
        objective_K = [q - 2 * g + c for q, g, c in zip(objective_K, linear_K, self.constant_K, strict=True)]
        return Value(new_NK, objective_K, self.g_NK - product_NK)

    def feasible(self, new_NK: np.ndarray) -> tuple[bool, bool]:
        """Whether pruned entries are exactly zero, and whether kept ones are inside their bounds."""
        kept_NK = self.case.mask_NK
        inside = (new_NK >= self.lower_NK) & (new_NK <= self.upper_NK)
        return bool((new_NK[~kept_NK] == 0.0).all()), bool(inside[kept_NK].all())

    def scaled_smallest(self) -> float:
        """Smallest eigenvalue of D^-½ A D^-½ on live inputs, D the diagonal; −inf where a dead input has something beside it."""
        diagonal_N = self.damped_NN.diagonal()
        live_N = diagonal_N > 0
        if (diagonal_N < 0).any() or (self.damped_NN[~live_N] != 0).any():
            return -np.inf
        if not live_N.any():
            return 1.0
        scale_N = np.exp2(-np.round(np.log2(diagonal_N[live_N]) / 2.0))
        b_NN = self.damped_NN[np.ix_(live_N, live_N)] * scale_N[:, None] * scale_N
        root_N = np.sqrt(b_NN.diagonal())
        return float(np.linalg.eigvalsh(b_NN / root_N[:, None] / root_N)[0])

    def rounding(self, value: Value, j: int) -> float:
        """Σ of the magnitudes that f is summed from, for its documented rounding error."""
        delta_N = np.abs(value.weights_NK[:, j] - self.case.weights_NK[:, j].astype(np.float64))
        size_NN, w_N = np.abs(self.damped_NN), np.abs(self.case.weights_NK[:, j].astype(np.float64))
        total = float(delta_N @ (size_NN @ delta_N))
        if self.case.rhs_NK is not None:
            g_N = np.abs(self.case.rhs_NK[:, j].astype(np.float64)) + size_NN @ w_N
            total += float(2.0 * delta_N @ g_N + 2.0 * w_N @ g_N)
            total += 0.0 if self.case.constant_K is None else float(self.case.constant_K[j])
        return total

    def scale(self, j: int) -> float:
        """What f is measured in for an explicit rhs: ΔᵀAΔ + 2|gᵀΔ| of the start, or the gain of a Jacobi step if that is more."""
        delta_N = Exact.of(self.start.weights_NK[:, j]) - self.w_NK[:, j]
        quadratic = (delta_N * (self.exact_NN @ delta_N)).total()
        linear = (delta_N * self.g_NK[:, j]).total()
        r_N, diagonal_N = self.start.residual_NK[:, j].floats(), self.damped_NN.diagonal()
        usable_N = self.case.mask_NK[:, j] & (diagonal_N > 0)
        with np.errstate(under="ignore", over="ignore"):
            roots_N = r_N[usable_N] / np.sqrt(diagonal_N[usable_N])
            return max(nearest(quadratic + 2 * abs(linear)), float(roots_N @ roots_N))

    def gap(self, value: Value, j: int) -> Fraction | float:
        """f(ŵ) − f*, or a lower bound of it (see the module); inf where f is unbounded below."""
        kept_I = np.flatnonzero(self.case.mask_NK[:, j])
        if not len(kept_I):
            return Fraction(0)
        if not self.case.has_bounds and len(kept_I) <= _EXACT_UP_TO:
            gain = quadratic_gain(self.exact_NN[np.ix_(kept_I, kept_I)], value.residual_NK[kept_I, j])
            return INFINITE if gain is None else gain
        return self._descend(value, j, kept_I)

    def _descend(self, value: Value, j: int, kept_I: np.ndarray) -> Fraction | float:
        """The exact gain of a projected Newton method from ŵ."""
        a_II, r_I = self.exact_NN[np.ix_(kept_I, kept_I)], value.residual_NK[kept_I, j]
        block_II = self.damped_NN[np.ix_(kept_I, kept_I)]
        at_I = value.weights_NK[kept_I, j]
        room = self.lower_NK[kept_I, j] - at_I, self.upper_NK[kept_I, j] - at_I
        gain, bounded = Fraction(0), self.case.has_bounds
        moved_I = np.zeros(len(kept_I))
        for _ in range(12 if bounded else 3):
            r64_I = r_I.floats()
            free_I = ~(((moved_I <= room[0]) & (r64_I <= 0)) | ((moved_I >= room[1]) & (r64_I >= 0)))
            best, best_I = Fraction(0), None
            for x_I in _steps(block_II, r64_I, free_I):
                if bounded:
                    x_I = _inside(moved_I + x_I, room) - moved_I
                    if not ((moved_I + x_I >= room[0]) & (moved_I + x_I <= room[1])).all():
                        continue
                elif self._curves_down(a_II, x_I):
                    return INFINITE
                more = _gain(a_II, r_I, x_I)
                if more > best:
                    best, best_I = more, x_I
            if best_I is None:
                break
            gain, moved_I = gain + best, moved_I + best_I
            r_I = r_I - a_II @ Exact.of(best_I)
            if best * 10**6 < gain:
                break
        # with bounds a sum of rounded steps may miss the box by a rounding: not for a proof, but far below what is compared
        return gain

    @staticmethod
    def _curves_down(a_II: Exact, x_I: np.ndarray) -> bool:
        step_I = Exact.of(x_I)
        return (step_I * (a_II @ step_I)).total() < 0


def _gain(a_II: Exact, r_I: Exact, x_I: np.ndarray) -> Fraction:
    step_I = Exact.of(x_I)
    return 2 * (step_I * r_I).total() - (step_I * (a_II @ step_I)).total()


def _inside(x_I: np.ndarray, room: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return np.clip(x_I, *room)


def _steps(block_II: np.ndarray, r_I: np.ndarray, free_I: np.ndarray) -> list[np.ndarray]:
    """Newton steps on the free inputs with several cut-offs of small eigenvalues, shortened ones, and the least eigenvector."""
    live_F = np.flatnonzero(free_I & (block_II.diagonal() > 0))
    if not len(live_F):
        return []
    root_F = np.sqrt(block_II.diagonal()[live_F])
    with np.errstate(all="ignore"):
        values, vectors = np.linalg.eigh(block_II[np.ix_(live_F, live_F)] / root_F[:, None] / root_F)
        c_F = vectors.T @ (r_I[live_F] / root_F)
        found = []
        for least in (0.0, 1e-15, 1e-12, 1e-6):
            inverse_F = np.divide(1.0, np.abs(values), out=np.zeros_like(values), where=np.abs(values) > least)
            x_I = np.zeros(len(block_II))
            x_I[live_F] = (vectors @ (inverse_F * c_F)) / root_F
            found += [x_I, 0.3 * x_I, 0.05 * x_I] if least in (0.0, 1e-12) else [x_I]
        along_I = np.zeros(len(block_II))
        along_I[live_F] = vectors[:, 0] / root_F
        if values[0] < 1e-9:
            found.append(along_I)
    return [x_I for x_I in found if np.isfinite(x_I).all()]


def _column_totals(x_NK: Exact) -> list[Fraction]:
    return [x_NK[:, j].total() for j in range(x_NK.ints.shape[1])]
