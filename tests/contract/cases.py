"""Which backends run, and what is checked of every solution against the independent references."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest

import qprecon
from qprecon.contract import Backend, registry
from qprecon.problem.hessian import ENTRY

from . import reference
from .families import FAMILIES, Problem

CPU_BACKENDS = tuple(record.name for record in registry.BUILT_IN if "cpu" in record.capabilities.devices)
SLOW = ("adam", "clarabel", "cvxpy", "moreau", "osqp", "piqp")  # references: run on the small families only


def require(backend: str) -> Backend:
    """The record of a backend; skips if it is not installed, or fails where QPRECON_REQUIRE_ALL_BACKENDS is 1."""
    record = registry.find(backend)
    if not record.installed:
        message = f"{backend} is not installed: {', '.join(record.missing())} missing"
        if os.environ.get("QPRECON_REQUIRE_ALL_BACKENDS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return record


@functools.cache
def truth(family: str, dtype: str) -> tuple[Problem, reference.Truth]:
    """The problem that arrays in ``dtype`` pose, and its optimum."""
    problem = FAMILIES[family].build().rounded(dtype)
    return problem, reference.solve(problem)


def check(problem: Problem, solution: qprecon.Solution, truth: reference.Truth) -> np.ndarray:
    """Recompute everything that a solution claims; returns the true relative gap of each column."""
    new_NK = np.asarray(solution.weights, dtype=np.float64)
    k = problem.weights_NK.shape[1]
    assert new_NK.shape == problem.weights_NK.shape
    for name in ("status", "reported_status", "iterations", "objective", "gap_bound", "relative_gap", "violation", "fell_back"):
        assert getattr(solution, name).shape == (k,), name
    _check_feasible(problem, solution, new_NK)
    rounding_K = 1e-12 * truth.energy_K + 1e-300

    f_K = reference.objective(problem, new_NK)
    start_NK = reference.start(problem)
    start_K = reference.objective(problem, start_NK)
    unit = np.finfo(str(solution.provenance.dtype)).eps
    np.testing.assert_allclose(solution.objective, f_K, rtol=1e-9, atol=rounding_K.max(initial=0.0))
    assert (np.abs(solution.objective - f_K) <= 1e-9 * np.abs(f_K) + rounding_K).all(), "audited objective"
    # the start is rounded to the backend's dtype, which moves its objective
    assert (np.abs(solution.baseline_objective - start_K) <= 20 * unit * truth.energy_K + rounding_K).all(), "baseline objective"
    assert (solution.objective <= solution.baseline_objective + rounding_K).all(), "never worse than the start"

    gap_K = reference.gap(problem, new_NK, truth)
    assert np.isinf(solution.gap_bound[np.isinf(gap_K)]).all(), "a gap was certified of a problem without an optimum"
    assert (solution.gap_bound >= gap_K * (1 - 1e-9) - rounding_K).all(), "the certificate is below the truth"
    assert (solution.gap_bound >= 0).all()
    if problem.rhs_NK is None and truth.semidefinite:
        # f* >= 0 is known; f's own rounding is added where it matters, and without a factor that of H's entries
        assert (solution.gap_bound <= solution.objective + _known_to(problem) * reference.mass(problem, new_NK) ** 2).all()

    finite_K = np.isfinite(solution.gap_bound)
    assert np.isinf(solution.relative_gap[~finite_K]).all()
    bound_K = np.where(finite_K, solution.gap_bound, 0.0)
    claimed_K = reference.relative_gap(problem, bound_K, new_NK, f_K - bound_K)
    np.testing.assert_allclose(solution.relative_gap[finite_K], claimed_K[finite_K], rtol=1e-3, atol=1e-12, err_msg="definition")
    optimal_K = np.array([status is qprecon.Status.OPTIMAL for status in solution.status], dtype=bool)
    assert (optimal_K == (solution.relative_gap <= solution.tol)).all(), "OPTIMAL if and only if relative_gap <= tol"
    true_K = reference.relative_gap(problem, np.maximum(gap_K - rounding_K, 0.0), new_NK, f_K - gap_K)
    assert (true_K[optimal_K] <= solution.tol * (1 + 1e-6)).all(), "falsely OPTIMAL"
    _check_stationarity(problem, solution, new_NK)
    return true_K


def _known_to(problem: Problem) -> float:
    """What f is known to, in units of the column's mass squared: its own rounding, and H's (``qprecon.problem.hessian.ENTRY``)."""
    n, h_NN = len(problem.hessian_NN), problem.hessian_NN
    summed_in_float32 = (h_NN == h_NN.astype(np.float32)).all()
    return 4.0 * (n + 12) * 2.0**-53 + ENTRY * (2.0**-24 if summed_in_float32 else 2.0**-53)


def _check_feasible(problem: Problem, solution: qprecon.Solution, new_NK: np.ndarray) -> None:
    assert np.isfinite(new_NK).all()
    assert (new_NK[~problem.mask_NK] == 0.0).all(), "pruned entries are exact zeros"
    lower_NK, upper_NK = reference.bounds(problem)
    outside_K = np.maximum(lower_NK - new_NK, new_NK - upper_NK).max(0, initial=0.0)
    assert (outside_K == 0.0).all(), "outside the bounds"
    assert (solution.violation == 0.0).all()


def _check_stationarity(problem: Problem, solution: qprecon.Solution, new_NK: np.ndarray) -> None:
    """Audited residuals: recomputed without bounds; with bounds, never more than the gradient without regard to them."""
    energy_K = reference.energy_scale(problem)
    scale_K = np.sqrt(np.where(energy_K > 0, energy_K, 1.0))
    residual_K = np.where(energy_K > 0, reference.scaled_residual(problem, new_NK), 0.0) / scale_K
    if problem.has_bounds:
        assert (solution.stationarity <= residual_K * (1 + 1e-6) + 1e-9).all()
    else:
        np.testing.assert_allclose(solution.stationarity, residual_K, rtol=1e-4, atol=1e-11)
