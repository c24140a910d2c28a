"""The truth in plain float64 numpy and scipy, written from the problem's definition alone: nothing of ``qprecon`` is used here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.optimize

from .families import Problem

FLOOR = 1e-6  # docs: relative gaps are relative to f*, but never to less than this share of the start's objective


@dataclass(frozen=True, eq=False)
class Truth:
    """An optimum ŵ* (N, K) and its objective, of every column; and the energy that rounding errors are measured in.

    ``bounded_K``: False where the kept block has a clearly negative eigenvalue (a singular H after rounding to float32), so that
    f* = −∞ and ŵ* means nothing. ``semidefinite``: the whole of H + λI has none.
    """

    weights_NK: np.ndarray
    objective_K: np.ndarray
    energy_K: np.ndarray
    bounded_K: np.ndarray
    semidefinite: bool


def damped(problem: Problem) -> np.ndarray:
    """H + λI, λ = damping · mean(diag H)."""
    n = len(problem.hessian_NN)
    return problem.hessian_NN + problem.damping * np.diag(problem.hessian_NN).mean() * np.eye(n)


def linear(problem: Problem) -> np.ndarray:
    """g = b − Hw; zero for the default rhs."""
    if problem.rhs_NK is None:
        return np.zeros_like(problem.weights_NK)
    return problem.rhs_NK - problem.hessian_NN @ problem.weights_NK


def objective(problem: Problem, new_NK: np.ndarray) -> np.ndarray:
    """ŵᵀHŵ − 2bᵀŵ + λ‖ŵ − w‖², with the constant wᵀHw added for the default rhs, (K,)."""
    delta_NK, a_NN = new_NK - problem.weights_NK, damped(problem)
    value_K = np.einsum("nk,nk->k", delta_NK, a_NN @ delta_NK)
    if problem.rhs_NK is None:
        return value_K
    w_NK, b_NK, h_NN = problem.weights_NK, problem.rhs_NK, problem.hessian_NN
    # Σ of ŵᵀHŵ − 2bᵀŵ + λ‖Δ‖² regrouped around w, which keeps the digits
    return (
        value_K
        + 2.0 * np.einsum("nk,nk->k", delta_NK, h_NN @ w_NK - b_NK)
        + np.einsum("nk,nk->k", w_NK, h_NN @ w_NK - 2.0 * b_NK)
    )


def bounds(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds on ŵ, (N, K); zero and zero where pruned."""
    shape = problem.weights_NK.shape
    lower_NK = np.broadcast_to(-np.inf if problem.lower is None else problem.lower, shape)
    upper_NK = np.broadcast_to(np.inf if problem.upper is None else problem.upper, shape)
    return np.where(problem.mask_NK, lower_NK, 0.0), np.where(problem.mask_NK, upper_NK, 0.0)


def start(problem: Problem) -> np.ndarray:
    """The masked weights, clipped to the bounds."""
    return np.clip(problem.weights_NK, *bounds(problem))


def mass(problem: Problem, new_NK: np.ndarray) -> np.ndarray:
    """Σ √A_ii |ŵ_i − w_i|, (K,): rounding errors of f are small beside its square."""
    return np.sqrt(np.diag(damped(problem))) @ np.abs(new_NK - problem.weights_NK)


def energy(problem: Problem) -> np.ndarray:
    """The size of the numbers that make up a column's objective: what its rounding errors are relative to, (K,)."""
    delta_NK = start(problem) - problem.weights_NK
    spent_K = np.einsum("nk,nk->k", delta_NK, damped(problem) @ delta_NK)
    if problem.rhs_NK is None:
        return spent_K
    w_NK, b_NK = problem.weights_NK, problem.rhs_NK
    return (
        spent_K
        + 2.0 * np.abs(np.einsum("nk,nk->k", delta_NK, linear(problem)))
        + np.einsum("nk,nk->k", w_NK, problem.hessian_NN @ w_NK)
        + 2.0 * np.abs(w_NK * b_NK).sum(0)
    )


def solve(problem: Problem) -> Truth:
    """One column after the other: Cholesky, least norm where the kept block is singular, ``lsq_linear`` for bounds."""
    a_NN, g_NK = damped(problem), linear(problem)
    lower_NK, upper_NK = bounds(problem)
    out_NK = start(problem)
    bounded_K = np.ones(out_NK.shape[1], dtype=bool)
    for j in range(out_NK.shape[1]):
        free_I = np.flatnonzero(lower_NK[:, j] < upper_NK[:, j])
        if not len(free_I):
            continue
        fixed_N = np.ones(len(out_NK), dtype=bool)
        fixed_N[free_I] = False
        block_II = a_NN[np.ix_(free_I, free_I)]
        bounded_K[j] = problem.has_bounds or _semidefinite(block_II)
        # half the gradient's constant part with ŵ_I = w_I: A_II Δ_I = g_I − A_IF Δ_F
        moved_F = (out_NK[:, j] - problem.weights_NK[:, j])[fixed_N]
        right_I = g_NK[free_I, j] - a_NN[np.ix_(free_I, np.flatnonzero(fixed_N))] @ moved_F
        w_I = problem.weights_NK[free_I, j]
        limits = (lower_NK[free_I, j] - w_I, upper_NK[free_I, j] - w_I)
        out_NK[free_I, j] = w_I + (_bounded(block_II, right_I, *limits) if problem.has_bounds else _unbounded(block_II, right_I))
    out_NK = np.clip(out_NK, lower_NK, upper_NK)
    optimum_K = np.where(bounded_K, objective(problem, out_NK), -np.inf)
    return Truth(out_NK, optimum_K, energy(problem), bounded_K, _semidefinite(a_NN))


def _semidefinite(a_NN: np.ndarray) -> bool:
    eigenvalues = np.linalg.eigvalsh(a_NN)
    return bool(eigenvalues[0] >= -1e-12 * abs(eigenvalues[-1]))


def _unbounded(block_II: np.ndarray, right_I: np.ndarray) -> np.ndarray:
    eigenvalues = np.linalg.eigvalsh(block_II)
    if eigenvalues[0] <= 1e-12 * eigenvalues[-1]:  # singular to working precision
        return np.linalg.lstsq(block_II, right_I, rcond=1e-12)[0]
    factor = scipy.linalg.cho_factor(block_II)
    step_I = scipy.linalg.cho_solve(factor, right_I)
    return step_I + scipy.linalg.cho_solve(factor, right_I - block_II @ step_I)


def _bounded(block_II: np.ndarray, right_I: np.ndarray, lower_I: np.ndarray, upper_I: np.ndarray) -> np.ndarray:
    lower_factor_II = np.linalg.cholesky(block_II)
    target_I = scipy.linalg.solve_triangular(lower_factor_II, right_I, lower=True)
    found = scipy.optimize.lsq_linear(lower_factor_II.T, target_I, (lower_I, upper_I), method="bvls", tol=1e-14)
    assert found.status > 0, found.message
    return np.clip(found.x, lower_I, upper_I)


def gap(problem: Problem, new_NK: np.ndarray, truth: Truth) -> np.ndarray:
    """f(ŵ) − f*, (K,), as eᵀAe + 2eᵀ∇ with e = ŵ − ŵ*: no cancellation of nearly equal objectives. Inf where f* = −∞."""
    error_NK, a_NN = new_NK - truth.weights_NK, damped(problem)
    half_gradient_NK = a_NN @ (truth.weights_NK - problem.weights_NK) - linear(problem)
    if not problem.has_bounds:
        half_gradient_NK = np.zeros_like(half_gradient_NK)  # zero on kept entries, and errors are zero on pruned ones
    gap_K = np.einsum("nk,nk->k", error_NK, a_NN @ error_NK) + 2.0 * np.einsum("nk,nk->k", error_NK, half_gradient_NK)
    return np.where(truth.bounded_K, gap_K, np.inf)


def relative_gap(problem: Problem, gap_K: np.ndarray, new_NK: np.ndarray, optimum_K: np.ndarray) -> np.ndarray:
    """The documented definition with ``gap_K`` as the gap: to f*, or with an explicit rhs to the improvement reached, (K,)."""
    start_K, floor_K = objective(problem, start(problem)), energy_scale(problem)
    if problem.rhs_NK is None:
        base_K = np.maximum(optimum_K, FLOOR * start_K)
    else:
        base_K = np.maximum(start_K - objective(problem, new_NK), FLOOR * floor_K)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(gap_K <= 0.0, 0.0, gap_K / base_K)


def energy_scale(problem: Problem) -> np.ndarray:
    """What the documentation calls the energy of a start: f for the default rhs, else max(ΔᵀAΔ + 2|gᵀΔ|, a Jacobi step's gain)."""
    delta_NK, a_NN, g_NK = start(problem) - problem.weights_NK, damped(problem), linear(problem)
    spent_K = np.einsum("nk,nk->k", delta_NK, a_NN @ delta_NK)
    if problem.rhs_NK is None:
        return spent_K
    residual_NK = np.where(problem.mask_NK, g_NK - a_NN @ delta_NK, 0.0)
    diagonal_N1 = np.where(np.diag(a_NN) > 0, np.diag(a_NN), 1.0)[:, None]
    jacobi_K = (residual_NK**2 / diagonal_N1).sum(0)
    return np.maximum(spent_K + 2.0 * np.abs(np.einsum("nk,nk->k", delta_NK, g_NK)), jacobi_K)


def scaled_residual(problem: Problem, new_NK: np.ndarray) -> np.ndarray:
    """max over kept entries of |half gradient|ᵢ / √A_ii, without regard to bounds, (K,)."""
    a_NN = damped(problem)
    residual_NK = np.where(problem.mask_NK, linear(problem) - a_NN @ (new_NK - problem.weights_NK), 0.0)
    diagonal_N = np.where(np.diag(a_NN) > 0, np.diag(a_NN), 1.0)
    return np.abs(residual_NK / np.sqrt(diagonal_N)[:, None]).max(0, initial=0.0)
