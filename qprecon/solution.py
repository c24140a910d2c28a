"""What ``solve`` returns."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arrays.checksum import bits
from .arrays.interop import Array, cast, dtype_name, from_core, namespace, to_core
from .errors import NotOptimalError
from .problem.column_qp import ColumnQP
from .proof.notices import at_the_floor, fitted_to_rounding, no_lower_bound
from .proof.passes import bounds_that_hold
from .proof.remedies import Circumstances, advice
from .status import Status
from .wording import counted


@dataclass(frozen=True)
class Timing:
    """Seconds once the arguments were checked: set-up (normalisation, the backend's shared work), compilation, solving, and the
    audit. On a GPU they are the device's, without the work that it had been given before."""

    setup: float = 0.0
    compile: float = 0.0
    solve: float = 0.0
    audit: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the four."""
        return self.setup + self.compile + self.solve + self.audit


@dataclass(frozen=True)
class Provenance:
    """How the answer came about: enough to repeat it."""

    backend: str
    versions: dict[str, str]
    device: str
    dtype: str
    options: dict[str, Any]
    automatic: dict[str, Any] = field(default_factory=dict)
    """What was chosen automatically, and by what rule."""


@dataclass(frozen=True, eq=False, repr=False)
class Solution:
    """The answer to a ``ColumnQP``, audited.

    Attributes:
        weights: ŵ, (N, K), of the caller's array kind, on the caller's device; exactly 0 where pruned.
        status: (K,) object array of ``Status``, set by the audit.
        reported_status: (K,) object array of strings: what the backend said of itself. Not evidence.
        iterations: (K,) int64; 0 for direct methods.
        objective: (K,) float64, f(ŵ) of the damped problem (ŵ − w)ᵀ(H + λI)(ŵ − w), or with an explicit rhs
            ŵᵀHŵ − 2rhsᵀŵ + λ‖ŵ − w‖². It may lie below 0 by rounding: its own, or H's. All figures are float64 numpy arrays in
            the units of H and W as given.
        baseline_objective: (K,) the same of the start: the masked weights, clipped to the bounds.
        stationarity: (K,) max over free entries of |half gradient|ᵢ / √(H + λI)ᵢᵢ, relative to √(objective of the start):
            dimensionless.
        violation: (K,) largest distance from the bounds and the mask, in units of W.
        gap_bound: (K,) certified: f(ŵ) − f* ≤ gap_bound, every rounding error counted. Inf where nothing can be certified. Where H
            is singular and not damped, it may be of the Gram matrix that H is the rounding of (docs/mathematics.md).
        relative_gap: (K,) gap_bound / max(f − gap_bound, FLOOR · f_start); for an explicit rhs relative to f_start − f. See
            ``qprecon.proof.audit``. 0 where nothing is pruned and ŵ is W, as near as its dtype holds it.
        fell_back: (K,) bool: the backend's answer was not finite or not surely better than the start, which is returned. An answer
            that float64 cannot tell from the start is replaced by it too, and not counted.
        tol: the relative gap that was asked for.
        timing, provenance: see their classes.
        problem: what was solved. It keeps H, W, mask, rhs and bounds in memory, but nothing that was made of H.
            ``dataclasses.replace(solution, problem=None)`` drops them; then there is no ``residual`` either.
        sums: checksums of W, mask and rhs; with them ``residual`` and ``duals`` check that these have not changed.
    """

    weights: Array
    status: np.ndarray
    reported_status: np.ndarray
    iterations: np.ndarray
    objective: np.ndarray
    baseline_objective: np.ndarray
    stationarity: np.ndarray
    violation: np.ndarray
    gap_bound: np.ndarray
    relative_gap: np.ndarray
    fell_back: np.ndarray
    tol: float
    timing: Timing
    provenance: Provenance
    problem: ColumnQP | None = None
    sums: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def residual(self) -> Array:
        """ρ = rhs + λW − (H + λI)Ŵ, (N, K), minus half the gradient: of the weights' kind and dtype, made when first asked for.

        Computed as (H + λI)(W − Ŵ), and rhs − HW where there is one, in float64. On pruned entries it is the gradient that decides
        which of them would gain most by being kept. Ask for it before you write the weights into W.

        Raises:
            ValueError: H, W, the mask or rhs was changed in place since the solve, or ``problem`` is None.
        """
        problem, new_NK, rho_NK = self._rho()
        return from_core(cast(rho_NK, dtype_name(new_NK)), problem.place)

    @functools.cached_property
    def duals(self) -> Array:
        """Multipliers y of the mask and the bounds, (N, K), of the weights' kind and dtype, made when first asked for.

        ∇f(Ŵ) + y = 0 up to what the certificate allows, with OSQP's signs: y > 0 where an upper bound holds a weight back, y < 0
        where a lower one does, of either sign on pruned entries, 0 on free ones. So y is 2ρ on pruned entries and at bounds, with ρ
        the ``residual``: the rate at which f would fall if the constraint gave way. Where bounds hold is decided as for the
        certificate (``qprecon.proof.audit``), since a solver may leave a weight just short of its bound.
        """
        problem, new_NK, rho_NK = self._rho()
        xp, zero_NK = namespace(rho_NK), 0.0 * rho_NK
        held_NK = ~problem.mask_NK
        diagonal_N1 = cast(problem.hessian_NN.diagonal(), "float64")[:, None] + problem.ridge
        rounded = problem.with_rounded_bounds(dtype_name(new_NK), outwards=True)
        for takes_NK, _ in bounds_that_hold(rounded, rho_NK, cast(new_NK, "float64"), diagonal_N1):
            held_NK = held_NK | takes_NK
        return from_core(cast(xp.where(held_NK, 2.0 * rho_NK, zero_NK), dtype_name(new_NK)), problem.place)

    def _rho(self) -> tuple[ColumnQP, Array, Array]:
        """The problem, the weights in the core's library, and their residual in float64."""
        if self.problem is None:
            raise ValueError("the solution was parted from its problem, so it has neither residual nor duals")
        problem = self.problem
        problem.hessian.check_unchanged()
        for name, array in problem.given():
            if name in self.sums and bool(bits(array) != self.sums[name]):
                raise ValueError(
                    f"{name} was changed in place since the solve, so its residual and duals cannot be had any more: ask for them "
                    f"before, or solve with a copy of {name}"
                )
        new_NK = to_core(self.weights, problem.place, "weights")
        rho_NK = problem.damped_product(cast(problem.weights_NK, "float64") - cast(new_NK, "float64"))
        g_NK = problem.linear("float64")
        return problem, new_NK, rho_NK if g_NK is None else rho_NK + g_NK

    @functools.cached_property
    def notices(self) -> tuple[str, ...]:
        """What the certificates do not say, in words; computed when first asked for.

        Whether only the damping makes H positive semidefinite (``PreparedHessian.notices``), and of how many certified columns the
        weights may follow the rounding of an H that was summed in float32 from too few tokens.
        """
        if self.problem is None:
            return ()
        changed_K = self.optimal & (self.objective != self.baseline_objective)  # the others are as they started
        return (*self.problem.hessian.notices, *fitted_to_rounding(self.problem, np.flatnonzero(changed_K)))

    @property
    def optimal(self) -> np.ndarray:
        """(K,) bool: certified to ``tol``."""
        return self.relative_gap <= self.tol

    def counts(self) -> dict[Status, int]:
        """Number of columns in each status that occurs."""
        return dict(Counter(self.status.tolist()))

    def summary(self) -> str:
        """The outcome in words, a line a fact."""
        n, k = int(self.weights.shape[0]), len(self.status)
        if not n or not k:  # there is nothing that a certificate could be of
            return f"nothing to solve: {counted(n, 'input')}, {counted(k, 'output')}"
        optimal = f"{int(self.optimal.sum())} of {counted(k, 'column')}"
        lines = [f"{optimal} certified optimal to {self.tol:g} by '{self.provenance.backend}'"]
        if k:
            worst = int(np.argmax(self.relative_gap))
            lines.append(f"largest certified relative gap {self.relative_gap[worst]:.2e} (column {worst})")
            if 1.0 < self.relative_gap[worst] < np.inf:
                lines.append(no_lower_bound(self.problem is not None and self.problem.hessian.damping > 0.0))
            if floor := at_the_floor(self.gap_bound, self.relative_gap, self._cost()):
                lines.append(floor)
            start, end = float(self.baseline_objective.sum()), float(self.objective.sum())
            if self.problem is not None and self.problem.constant_K is not None:  # a squared error, but for its rounding
                end = max(end, 0.0)
            if np.isfinite(end - start) and (start > 0 or self._can_be_negative()):
                ratio = "" if self._can_be_negative() else f" ({max(end, 0.0) / start:.3f} of the masked weights')"
                lines.append(f"objective {start:.4g} -> {end:.4g}{ratio}")
        solve = Circumstances(self.provenance.backend, self.provenance.dtype, self.problem)
        lines += advice(solve, self.status, self.relative_gap)
        lines += [f"notice: {notice}" for notice in self.notices]
        if over := self.provenance.automatic.get("time_limit"):
            lines.append(f"time limit: {over}")
        t = self.timing
        lines.append(
            f"{t.total:.3g} s: set-up {t.setup:.3g}, compile {t.compile:.3g}, solve {t.solve:.3g}, audit {t.audit:.3g}; "
            f"{self.provenance.dtype} on {self.provenance.device}"
        )
        return "\n".join(lines)

    def _cost(self) -> np.ndarray:
        """What a relative gap is relative to but for its floor, (K,): the least that the optimum can cost, or what was gained."""
        if self._can_be_negative():
            least_K, most_K = self.objective, self.baseline_objective
        else:
            least_K, most_K = self.gap_bound, self.objective
        with np.errstate(invalid="ignore"):  # of columns that are beyond float64, as their status says
            return most_K - least_K

    def _can_be_negative(self) -> bool:
        """Whether f has no natural zero: an explicit rhs without its constant."""
        return self.problem is not None and self.problem.rhs_NK is not None and self.problem.constant_K is None

    def raise_for_status(self) -> Solution:
        """Return self, or raise ``NotOptimalError`` if a column is not certified to ``tol``."""
        if not self.optimal.all():
            raise NotOptimalError(self.summary())
        return self

    def __repr__(self) -> str:
        return f"Solution: {self.summary()}"
