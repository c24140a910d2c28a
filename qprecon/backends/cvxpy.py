"""Any QP solver that cvxpy has installed; a reference that shares nothing with the other backends but the problem.

Both of the paper's forms in x = ŵ − start: "box", one parametrised problem for all columns, canonicalised once (DPP), with rows
fixed · x = 0 for the pruned entries; and "reduced", one smaller problem a column with H_II.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np

from ..contract.interface import Chunk, RawColumns, SolveChunk, System
from ..errors import reraise_from_signal
from ._shared.options import CvxpyOptions

_PREFERRED = ("CLARABEL", "PIQP", "PROXQP", "OSQP", "HIGHS", "SCS")
# what each solver calls its accuracies, iteration limit and time limit (None: it has none)
_SETTINGS: dict[str, tuple[tuple[str, ...], str | None, str | None]] = {
    "CLARABEL": (("tol_gap_abs", "tol_gap_rel", "tol_feas"), "max_iter", "time_limit"),
    "OSQP": (("eps_abs", "eps_rel"), "max_iter", "time_limit"),
    "SCS": (("eps_abs", "eps_rel"), "max_iters", "time_limit_secs"),
    "PIQP": (("eps_abs", "eps_rel", "eps_duality_gap_abs", "eps_duality_gap_rel"), "max_iter", None),
    "PROXQP": (("eps_abs", "eps_rel"), "max_iter", None),
    "HIGHS": (("primal_feasibility_tolerance", "dual_feasibility_tolerance"), "qp_iteration_limit", "time_limit"),
}
_WORDS = {
    cp.OPTIMAL: "optimal",
    cp.OPTIMAL_INACCURATE: "optimal but inaccurate",
    cp.USER_LIMIT: "iteration_limit",
    cp.INFEASIBLE: "infeasible",
    cp.INFEASIBLE_INACCURATE: "infeasible (inaccurate)",
    cp.UNBOUNDED: "unbounded",
    cp.UNBOUNDED_INACCURATE: "unbounded (inaccurate)",
    cp.SOLVER_ERROR: "solver error",
}
Solved = tuple[np.ndarray | None, str, int]


@dataclass(frozen=True)
class Options(CvxpyOptions):
    """Those of `CvxpyOptions`, with a solver that is installed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver is not None and self.solver.upper() not in cp.installed_solvers():
            raise ValueError(f"cvxpy has no solver {self.solver!r} installed; it has {', '.join(cp.installed_solvers())}")


def prepare(system: System, options: Options) -> SolveChunk:
    """Choose the solver; the box form is canonicalised at the first column and then shared."""
    hessian_NN = system.hessian_NN
    installed = cp.installed_solvers()
    solver = options.solver.upper() if options.solver else next((s for s in _PREFERRED if s in installed), None)
    if solver is None:
        raise ValueError(f"none of {', '.join(_PREFERRED)} is installed for cvxpy")
    boxes: dict[bool, _Box] = {}

    def solve_chunk(chunk: Chunk) -> RawColumns:
        bounded = chunk.lower_NK is not None or chunk.upper_NK is not None
        if options.form == "box" and bounded not in boxes:
            boxes[bounded] = _Box(hessian_NN, bounded)
        solve_one = boxes[bounded].solve if options.form == "box" else _reduced(hessian_NN)
        return _solve_columns(chunk, solver, solve_one)

    return solve_chunk


def _solve_columns(chunk: Chunk, solver: str, solve_one: Callable[..., Solved]) -> RawColumns:
    k = chunk.start_NK.shape[1]
    out = RawColumns(chunk.start_NK.copy(), np.full(k, "time_limit", dtype=object), np.zeros(k, dtype=np.int64), {"solver": solver})
    for j in range(k):
        left = None if chunk.deadline is None else chunk.deadline - time.monotonic()
        if left is not None and left <= 0.0:
            break
        settings = {"solver": solver, **_settings(solver, chunk.tolerance, chunk.max_iterations, left)}
        x_N, out.reported_status[j], out.iterations[j] = solve_one(chunk, j, settings)
        if chunk.deadline is not None and out.reported_status[j] == "iteration_limit" and time.monotonic() >= chunk.deadline:
            out.reported_status[j] = "time_limit"
        if x_N is not None and np.isfinite(x_N).all():
            out.weights_NK[:, j] += np.where(chunk.mask_NK[:, j], x_N, 0.0)
    return out


def _settings(solver: str, tolerance: float, max_iterations: int | None, left: float | None) -> dict[str, Any]:
    """The accuracy asked for is 1e-3 of the gap wanted: solvers measure it in residuals, relative to a start of objective 1."""
    accuracies, iterations, seconds = _SETTINGS.get(solver, ((), None, None))
    found: dict[str, Any] = dict.fromkeys(accuracies, max(1e-3 * tolerance, 1e-10))
    if max_iterations is not None and iterations is not None:
        found[iterations] = max_iterations
    if left is not None and seconds is not None:
        found[seconds] = left
    return found


class _Box:
    """minimise xᵀHx − 2rᵀx with fixed · x = 0 and, where there are bounds, has · x ≥ lower, has · x ≤ upper (all parameters)."""

    def __init__(self, hessian_NN: np.ndarray, bounded: bool) -> None:
        n = hessian_NN.shape[0]
        self.x_N, self.linear_N, self.fixed_N = cp.Variable(n), cp.Parameter(n), cp.Parameter(n)
        self.sides: list[tuple[Any, Any, str]] = []
        constraints = [cp.multiply(self.fixed_N, self.x_N) == 0]
        for name in ("lower_NK", "upper_NK") if bounded else ():
            has_N, bound_N = cp.Parameter(n), cp.Parameter(n)
            side = cp.multiply(has_N, self.x_N)
            constraints.append(side >= bound_N if name == "lower_NK" else side <= bound_N)
            self.sides.append((has_N, bound_N, name))
        objective = cp.quad_form(self.x_N, cp.psd_wrap(hessian_NN)) + self.linear_N @ self.x_N
        self.problem = cp.Problem(cp.Minimize(objective), constraints)

    def solve(self, chunk: Chunk, j: int, settings: dict[str, Any]) -> Solved:
        """One column."""
        self.linear_N.value = -2.0 * chunk.residual_NK[:, j]
        self.fixed_N.value = (~chunk.mask_NK[:, j]).astype(np.float64)
        for has_N, bound_N, name in self.sides:
            has_N.value, bound_N.value = _side(chunk, j, name)
        return _solved(self.problem, self.x_N, settings)


def _side(chunk: Chunk, j: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Which entries have a finite bound on this side (1.0 or 0.0), and the bound on x, else 0: solvers differ about ∞."""
    bound_NK = getattr(chunk, name)
    if bound_NK is None:
        return np.zeros(chunk.start_NK.shape[0]), np.zeros(chunk.start_NK.shape[0])
    bound_N = bound_NK[:, j] - chunk.start_NK[:, j]
    has_N = chunk.mask_NK[:, j] & np.isfinite(bound_N)
    return has_N.astype(np.float64), np.where(has_N, bound_N, 0.0)


def _reduced(hessian_NN: np.ndarray) -> Callable[..., Solved]:
    def solve(chunk: Chunk, j: int, settings: dict[str, Any]) -> Solved:
        index_I = np.flatnonzero(chunk.mask_NK[:, j])
        if not len(index_I):
            return None, "nothing is kept", 0
        x_I = cp.Variable(len(index_I))
        objective = cp.quad_form(x_I, cp.psd_wrap(hessian_NN[np.ix_(index_I, index_I)])) - 2.0 * chunk.residual_NK[index_I, j] @ x_I
        constraints = []
        for name in ("lower_NK", "upper_NK"):
            has_N, bound_N = _side(chunk, j, name)
            rows = np.flatnonzero(has_N[index_I])
            if len(rows):
                side, bound_R = x_I[rows], bound_N[index_I[rows]]
                constraints.append(side >= bound_R if name == "lower_NK" else side <= bound_R)
        answer_I, word, iterations = _solved(cp.Problem(cp.Minimize(objective), constraints), x_I, settings)
        if answer_I is None:
            return None, word, iterations
        x_N = np.zeros(hessian_NN.shape[0])
        x_N[index_I] = answer_I
        return x_N, word, iterations

    return solve


def _solved(problem: cp.Problem, variable: cp.Variable, settings: dict[str, Any]) -> Solved:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Solution may be inaccurate")  # the audit says how inaccurate
            problem.solve(warm_start=False, **settings)
    except (cp.SolverError, ValueError) as error:  # solvers' own interfaces refuse what they cannot do with a ValueError
        reraise_from_signal(error)
        return None, f"solver error: {str(error)[:80]}", 0
    word = _WORDS.get(problem.status, problem.status)
    iterations = problem.solver_stats.num_iters if problem.solver_stats is not None else 0
    return variable.value, word, int(iterations or 0)
