"""One problem through ``qprecon``, and everything that its answer claims against the truth."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

import qprecon

from .exact import nearest
from .problems import Case
from .truth import FLOOR, UNIT, Truth, Value

KINDS = (
    "false_optimal",
    "wrong_bound",
    "wrong_objective",
    "worse_than_start",
    "worse_with_tokens",
    "pruned_not_zero",
    "bounds_violated",
    "not_finite",
    "inconsistent",
    "crash",
    "refused",
    "input_changed",
    "warning",
)
WELL_POSED_DAMPING = 1e-3
_JUDGED = ("auto", "cholesky", "pcg", "admm", "mpax")  # the share of OPTIMAL columns is theirs; the others are references
FLOAT32_ENTRIES = 128 * 2.0**-24  # docs: |E_ij| ≤ this · √(H_ii H_jj) for an H summed in float32


@dataclass(frozen=True)
class Fault:
    """``kind`` is one of ``KINDS``; ``column`` −1 for the whole call."""

    kind: str
    column: int
    detail: str


@dataclass(eq=False)
class Outcome:
    """Of one case."""

    faults: list[Fault] = field(default_factory=list)
    columns: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    well_posed: int = 0
    well_posed_optimal: int = 0
    by_zero: int = 0
    """OPTIMAL because f counts as zero, where H as given has a negative eigenvalue of the size of its rounding."""

    def add(self, kind: str, column: int, detail: str) -> None:
        """Note a fault."""
        self.faults.append(Fault(kind, column, detail))


def run(case: Case) -> Outcome:
    """Solve (or audit) a case and check the answer."""
    outcome = Outcome()
    given = arguments(case)
    before = {name: _bytes(x) for name, x in given.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer = _audited(case, given) if case.backend == "audit" else qprecon.solve(**given, **settings(case))
        except Exception as error:  # any other than a refusal is a fault
            _judge_exception(case, error, outcome)
            answer = None
    for warning in caught:
        if issubclass(warning.category, RuntimeWarning):
            outcome.add("warning", -1, str(warning.message))
    for name, x in given.items():
        if _bytes(x) != before[name]:
            outcome.add("input_changed", -1, name)
    if answer is not None:
        _judge(case, answer, outcome)
    return outcome


def arguments(case: Case) -> dict[str, Any]:
    """The arrays for ``solve``, copies of the case's."""
    arrays = {"H": case.hessian_NN, "W": case.weights_NK, "mask": case.mask_NK, "rhs": case.rhs_NK, "constant": case.constant_K}
    arrays |= {"lower": case.lower, "upper": case.upper, "warm_start": case.warm_start}
    given = {name: x.copy() for name, x in arrays.items() if x is not None}
    if case.kind == "torch":
        import torch

        given = {name: torch.from_numpy(x) for name, x in given.items()}
        for name, dtype in (("W", case.w_dtype), ("H", case.h_dtype)):
            given[name] = given[name].to(getattr(torch, dtype))
    return given


def settings(case: Case) -> dict[str, Any]:
    """The other arguments of ``solve``."""
    found = {"backend": case.backend, "damping": case.damping, "tol": case.tol, "dtype": case.dtype}
    return found | {"max_iterations": case.max_iterations}


def _bytes(x: Any) -> bytes:
    return (x.float().numpy() if str(x.dtype) == "torch.bfloat16" else np.asarray(x)).tobytes()


@dataclass(frozen=True, eq=False)
class _Audited:
    """Weights and the figures of their audit."""

    weights: np.ndarray
    figures: qprecon.Audit

    def __getattr__(self, name: str) -> np.ndarray:
        return getattr(self.figures, name)


def _audited(case: Case, given: dict[str, Any]) -> _Audited:
    candidate_NK, given = case.candidate_NK.copy(), dict(given)
    if case.kind == "torch":
        import torch

        candidate_NK = torch.from_numpy(candidate_NK)
    prepared = qprecon.prepare(given.pop("H"), damping=case.damping)
    return _Audited(case.candidate_NK, prepared.audit(given.pop("W"), given.pop("mask"), candidate_NK, **given))


def _truth(case: Case, dtype: str) -> Truth:
    return Truth(case, qprecon.prepare(arguments(case)["H"], damping=case.damping).ridge, dtype)


def refusal_is_right(truth: Truth) -> bool:
    """Whether H + λI is no Gram matrix by more than summing in float32 explains; by half of that it may be called either."""
    return truth.scaled_smallest() < -0.25 * len(truth.damped_NN) * FLOAT32_ENTRIES


def semidefinite(truth: Truth) -> bool:
    """Whether H + λI has no negative eigenvalue beyond float64 rounding: docs, 16 n γ, and nγ for the factorisation itself."""
    n = len(truth.damped_NN)
    return truth.scaled_smallest() >= -17.0 * n * 1.05 * (n + 12) * UNIT


def _judge_exception(case: Case, error: Exception, outcome: Outcome) -> None:
    text = str(error)
    if isinstance(error, ValueError) and "indefinite" in text:
        truth = _truth(case, "float64")
        outcome.refused = 1
        if not refusal_is_right(truth):
            outcome.add("refused", -1, f"scaled smallest eigenvalue {truth.scaled_smallest():.2e}: {text}")
    elif isinstance(error, ValueError) and ("too small" in text or "too large" in text):
        outcome.refused = 1
    else:
        outcome.add("crash", -1, f"{type(error).__name__}: {text[:200]}")


def _judge(case: Case, answer: Any, outcome: Outcome) -> None:
    audited = isinstance(answer, _Audited)
    dtype = "float64" if audited else answer.provenance.dtype
    new_NK = np.asarray(answer.weights, dtype=np.float64)
    outcome.columns = new_NK.shape[1]
    if not np.isfinite(new_NK).all():
        outcome.add("not_finite", int(np.argmin(np.isfinite(new_NK).all(0))), "NaN or infinite weights")
        return
    truth = _truth(case, dtype)
    value = truth.value(new_NK)
    zeros, inside = truth.feasible(new_NK)
    if not zeros:
        outcome.add("pruned_not_zero", -1, "")
    if not inside:
        outcome.add("bounds_violated", -1, "")
    semi = semidefinite(truth)
    for j in range(new_NK.shape[1]):
        gap = _check_bound(truth, value, j, answer, semi, outcome)
        _check_objective(truth, value, j, answer, outcome)
        if not audited:
            _check_solution(truth, value, j, answer, outcome)
        if answer.relative_gap[j] <= case.tol:
            _check_optimal(truth, value, j, answer, gap, semi, outcome)
    if case.tokens_TN is not None and case.rhs_NK is None and not audited:
        _check_tokens(truth, value, outcome)


def _check_bound(truth: Truth, value: Value, j: int, answer: Any, semi: bool, outcome: Outcome) -> Fraction | float:
    gap, bound = truth.gap(value, j), float(answer.gap_bound[j])
    if np.isnan(bound) or bound < 0.0:
        outcome.add("wrong_bound", j, f"gap_bound is {bound}")
    elif np.isfinite(bound) and Fraction(bound) * (1 + Fraction(1, 10**9)) < gap:  # f itself may be the bound, to a billionth
        # singular by rounding: f* >= 0 is taken from H being a Gram matrix, so the bound may be f itself
        if not (semi and truth.case.rhs_NK is None and Fraction(bound) >= value.objective_K[j]):
            outcome.add("wrong_bound", j, f"gap_bound {bound:.6e}, true gap {_number(gap):.6e}")
    return gap


def _check_objective(truth: Truth, value: Value, j: int, answer: Any, outcome: Outcome) -> None:
    found, exact = float(answer.objective[j]), value.objective_K[j]
    n = len(truth.damped_NN)
    allowed = 4.0 * (n + 10) * UNIT * truth.rounding(value, j) + 1e-290
    if not np.isfinite(found) or abs(Fraction(found) - exact) > Fraction(allowed):
        outcome.add("wrong_objective", j, f"objective {found:.6e}, exact {nearest(exact):.6e}, allowed error {allowed:.1e}")


def _check_solution(truth: Truth, value: Value, j: int, solution: qprecon.Solution, outcome: Outcome) -> None:
    case, status = truth.case, solution.status[j]
    outcome.statuses[status.name] += 1
    optimal = status is qprecon.Status.OPTIMAL
    if optimal != bool(solution.relative_gap[j] <= case.tol):
        outcome.add("inconsistent", j, f"{status.name} with relative_gap {solution.relative_gap[j]:.2e}")
    if status is qprecon.Status.FELL_BACK and not (solution.fell_back[j] and value.objective_K[j] == truth.start.objective_K[j]):
        if case.warm_start is None:
            outcome.add("inconsistent", j, "FELL_BACK, but not to the start")
    if value.objective_K[j] > truth.start.objective_K[j]:
        worse = nearest(value.objective_K[j] - truth.start.objective_K[j])
        outcome.add("worse_than_start", j, f"f {nearest(value.objective_K[j]):.6e}, {worse:.1e} above the masked weights'")
    if _well_posed(case, j):
        outcome.well_posed += 1
        outcome.well_posed_optimal += optimal


def _check_optimal(truth: Truth, value: Value, j: int, answer: Any, gap: Fraction | float, semi: bool, outcome: Outcome) -> None:
    case = truth.case
    true = relative_gap(truth, value, j, gap)
    if true <= case.tol:
        return
    floor = FLOOR * nearest(truth.start.objective_K[j])
    if semi and case.rhs_NK is None and abs(nearest(value.objective_K[j])) <= case.tol * floor:
        outcome.by_zero += 1
        return
    detail = f"true relative gap {true:.3e}, claimed {answer.relative_gap[j]:.3e}, tol {case.tol:g}"
    outcome.add("false_optimal", j, f"{detail}; f {nearest(value.objective_K[j]):.4e}, gap {_number(gap):.4e}")


def _well_posed(case: Case, j: int) -> bool:
    """Whether a column has enough damping, no limit set, an H in float32 or better, and a weight to make up for."""
    if case.damping < WELL_POSED_DAMPING or case.max_iterations is not None or case.backend not in _JUDGED or case.indefinite:
        return False
    return bool((case.weights_NK[~case.mask_NK[:, j], j] != 0.0).any())


def relative_gap(truth: Truth, value: Value, j: int, gap: Fraction | float) -> float:
    """The true gap relative to what docs/mathematics.md says, a part in 1e9 smaller for this division's own rounding."""
    if gap == 0:
        return 0.0
    if gap == float("inf"):
        return float("inf")
    if truth.case.rhs_NK is None or truth.case.constant_K is not None:
        base = max(nearest(value.objective_K[j] - gap), FLOOR * nearest(truth.start.objective_K[j]))
    else:
        base = max(nearest(truth.start.objective_K[j] - value.objective_K[j]), FLOOR * truth.scale(j))
    return nearest(gap) / base * (1.0 - 1e-9) if base > 0.0 else float("inf")


def _check_tokens(truth: Truth, value: Value, outcome: Outcome) -> None:
    """Measured with X itself no column is worse than the masked weights."""
    x_TN = truth.case.tokens_TN.astype(np.longdouble)
    w_NK = truth.case.weights_NK.astype(np.longdouble)

    def loss(new_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        delta_NK = new_NK.astype(np.longdouble) - w_NK
        rounding_TK = np.abs(x_TN) @ np.abs(delta_NK)
        error_TK = x_TN @ delta_NK
        ridge_K = np.longdouble(truth.ridge) * (delta_NK**2).sum(0)
        return (error_TK**2).sum(0) + ridge_K, 1e-17 * (rounding_TK * np.abs(error_TK)).sum(0)

    (mine_K, slack_K), (start_K, start_slack_K) = loss(value.weights_NK), loss(truth.start.weights_NK)
    worse_K = mine_K > start_K * (1 + 1e-15) + slack_K + start_slack_K
    for j in np.flatnonzero(worse_K):
        outcome.add("worse_with_tokens", int(j), f"{float(mine_K[j]):.6e} instead of {float(start_K[j]):.6e}")


def _number(x: Fraction | float) -> float:
    return nearest(x) if isinstance(x, Fraction) else x


def versions() -> dict[str, str]:
    """Of what matters for a result."""
    names = ("qprecon", "numpy", "scipy", "torch", "jax", "mpax", "osqp", "cvxpy", "piqp", "clarabel", "moreau")
    return {name: importlib.metadata.version(name) for name in names if _installed(name)}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
