"""The certificate against the truth: never below it, and not far above it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

import qprecon
from qprecon import Status
from qprecon.proof.audit import FLOOR, Figures, audit, relative_gap
from qprecon.proof.factor import Certificate, certificate
from tests.contract import reference
from tests.contract.families import FAMILIES, Problem, real_layers, real_problem

AUDITED = [name for name in FAMILIES if name != "no_columns"]


def column_qp(problem: Problem) -> qprecon.ColumnQP:
    """The problem as the core sees it."""
    given = problem.arguments()
    names = {"rhs": "rhs_NK", "lower": "lower_NK", "upper": "upper_NK", "damping": "damping"}
    return qprecon.ColumnQP(given["H"], given["W"], given["mask"], **{new: given[old] for old, new in names.items()})


@functools.cache
def known(name: str) -> tuple[Problem, reference.Truth, qprecon.ColumnQP, Certificate]:
    """A family with its optimum, as the core sees it, and the core's certificate."""
    problem = FAMILIES[name].build()
    qp = column_qp(problem)
    return problem, reference.solve(problem), qp, certificate(qp.hessian)


def project(problem: Problem, new_NK: np.ndarray) -> np.ndarray:
    """The nearest feasible point."""
    return np.clip(np.where(problem.mask_NK, new_NK, 0.0), *reference.bounds(problem))


def optimum_and_noise(problem: Problem, truth: reference.Truth, size: float, seed: int) -> np.ndarray:
    """The optimum with random errors of the given relative size, feasible."""
    noise_NK = np.random.default_rng(seed).standard_normal(truth.weights_NK.shape)
    return project(problem, truth.weights_NK + size * np.abs(problem.weights_NK).max() * noise_NK)


def gradient_steps(problem: Problem, steps: int) -> np.ndarray:
    """Projected gradient from the start: iterates as a first-order method leaves them, some at their bounds."""
    a_NN, g_NK, new_NK = reference.damped(problem), reference.linear(problem), reference.start(problem)
    largest = max(float(np.linalg.norm(a_NN, 2)), 1e-300)
    for _ in range(steps):
        new_NK = project(problem, new_NK + (g_NK - a_NN @ (new_NK - problem.weights_NK)) / largest)
    return new_NK


def cg_steps(problem: Problem, steps: int) -> np.ndarray:
    """Masked conjugate gradients from the masked weights, all columns at once, Jacobi-preconditioned."""
    a_NN, g_NK, kept_NK = reference.damped(problem), reference.linear(problem), problem.mask_NK
    inverse_N1 = 1.0 / np.diag(a_NN)[:, None]
    new_NK = reference.start(problem)
    r_NK = np.where(kept_NK, g_NK - a_NN @ (new_NK - problem.weights_NK), 0.0)
    z_NK = inverse_N1 * r_NK
    p_NK, rz_K = z_NK, (r_NK * z_NK).sum(0)
    for _ in range(steps):
        q_NK = np.where(kept_NK, a_NN @ p_NK, 0.0)
        alpha_K = rz_K / np.maximum((p_NK * q_NK).sum(0), 1e-300)
        new_NK, r_NK = new_NK + alpha_K * p_NK, r_NK - alpha_K * q_NK
        z_NK = inverse_N1 * r_NK
        rz_K, before_K = (r_NK * z_NK).sum(0), rz_K
        p_NK = z_NK + rz_K / np.maximum(before_K, 1e-300) * p_NK
    return new_NK


ITERATES: dict[str, Callable[[Problem, reference.Truth], np.ndarray]] = {
    "start": lambda problem, truth: reference.start(problem),
    "noise_1e-1": lambda problem, truth: optimum_and_noise(problem, truth, 1e-1, 0),
    "noise_1e-4": lambda problem, truth: optimum_and_noise(problem, truth, 1e-4, 1),
    "noise_1e-8": lambda problem, truth: optimum_and_noise(problem, truth, 1e-8, 2),
    "gradient_3": lambda problem, truth: gradient_steps(problem, 3),
    "gradient_100": lambda problem, truth: gradient_steps(problem, 100),
    "optimum": lambda problem, truth: truth.weights_NK,
}


@pytest.mark.parametrize("iterate", ITERATES)
@pytest.mark.parametrize("name", AUDITED)
def test_certificate_is_never_below_the_truth(name: str, iterate: str) -> None:
    """gap_bound ≥ f(ŵ) − f* at any feasible point of any family; relative slack 1e-9 and the rounding of f itself."""
    problem, truth, qp, cert = known(name)
    new_NK = ITERATES[iterate](problem, truth)
    figures = audit(qp, cert, new_NK)
    gap_K = reference.gap(problem, new_NK, truth)
    bound_K = np.where(np.isnan(figures.gap_bound), np.inf, figures.gap_bound)
    rounding_K = 1e-12 * truth.energy_K
    assert (bound_K >= gap_K * (1 - 1e-9) - rounding_K).all(), (bound_K / gap_K).min()
    spent_K = np.abs(reference.objective(problem, new_NK)) + truth.energy_K
    assert (np.abs(figures.objective - reference.objective(problem, new_NK)) <= 1e-12 * spent_K).all()
    assert (figures.violation == 0.0).all()


@pytest.mark.parametrize("name", [name for name in AUDITED if not FAMILIES[name].build().has_bounds])
def test_certificate_is_exact_for_all_kept(name: str) -> None:
    """With everything kept (A_II = A) the bound is the gap, but for the shift that makes the factor safe."""
    problem, _, _, cert = known(name)
    if cert.factor_NN is None:  # then it must be singular to working precision
        eigenvalues = np.linalg.eigvalsh(reference.damped(problem))
        assert eigenvalues[0] <= 1e-11 * eigenvalues[-1]
        return
    problem = dataclasses.replace(problem, mask_NK=np.ones_like(problem.mask_NK))
    qp, truth = column_qp(problem), reference.solve(problem)
    new_NK = optimum_and_noise(problem, truth, 1e-2, 3)
    gap_K = reference.gap(problem, new_NK, truth)
    assert (audit(qp, cert, new_NK).gap_bound <= 1.2 * gap_K + 1e-12 * truth.energy_K).all()


@pytest.mark.parametrize("name", real_layers())
@pytest.mark.parametrize("damping", [0.01, 0.0])
def test_looseness_on_real_layers(name: str, damping: float) -> None:
    """On CG iterates of real layers the bound is at most 50 times the true gap in the median."""
    problem = real_problem(name, columns=24, damping=damping)
    if damping == 0.0 and (np.diag(problem.hessian_NN) == 0.0).any():
        alive_N = np.diag(problem.hessian_NN) > 0.0
        problem = dataclasses.replace(
            problem,
            hessian_NN=problem.hessian_NN[np.ix_(alive_N, alive_N)],
            weights_NK=problem.weights_NK[alive_N],
            mask_NK=problem.mask_NK[alive_N],
        )
    truth, qp = reference.solve(problem), column_qp(problem)
    cert, ratios = certificate(qp.hessian), []
    for steps in (4, 8, 16, 32, 64):
        new_NK = cg_steps(problem, steps)
        gap_K = reference.gap(problem, new_NK, truth)
        bound_K = audit(qp, cert, new_NK).gap_bound
        assert (bound_K >= gap_K * (1 - 1e-9)).all()
        ratios.append(np.median(bound_K / gap_K))
    assert np.median(ratios) <= 50.0, ratios


ORACLE_FAMILIES = ("well_conditioned", "outlier_channels", "kappa_1e4", "two_of_four", *(f"real_{x}" for x in real_layers()))


@pytest.mark.parametrize("name", ORACLE_FAMILIES)
def test_independent_oracle(name: str) -> None:
    """f* = w_Sᵀ(G_SS)⁻¹w_S with G = (H + λI)⁻¹: the references, the solver and this third way agree."""
    problem, truth, _, _ = known(name)
    inverse_NN = np.linalg.inv(reference.damped(problem))
    solution = qprecon.solve(**problem.arguments(), backend="cholesky", tol=1e-9)
    for j in range(problem.weights_NK.shape[1]):
        pruned_S = np.flatnonzero(~problem.mask_NK[:, j])
        w_S = problem.weights_NK[pruned_S, j]
        oracle = w_S @ np.linalg.solve(inverse_NN[np.ix_(pruned_S, pruned_S)], w_S)
        np.testing.assert_allclose([truth.objective_K[j], solution.objective[j]], oracle, rtol=1e-7)


def _figures(value: float, gap_bound: float, rounding: float = 0.0) -> Figures:
    one = lambda x: np.array([x])  # noqa: E731
    return Figures(one(value), one(gap_bound), one(0.0), one(0.0), one(value), one(rounding), one(0.0), np.zeros((1, 1)))


@pytest.mark.parametrize(
    ("objective", "gap_bound", "start", "expected"),
    [
        (0.0, 0.0, 0.0, 0.0),  # nothing to lose, nothing lost
        (1.0, 0.0, 1.0, 0.0),
        (1.1, 0.1, 2.0, 0.1),  # relative to f*, which is at least f − gap
        (1.0, 1.0, 2.0, 0.5 / FLOOR),  # f* may be 0: relative to the floor
        (1e-9, 1e-9, 1.0, 1e-9 / FLOOR),
        (1.0, np.inf, 2.0, np.inf),
        (1.0, np.nan, 2.0, np.inf),
        (np.nan, np.nan, np.nan, np.inf),
        (1.0, 0.5, 0.0, 1.0),
    ],
)
def test_relative_gap_default_rhs(objective: float, gap_bound: float, start: float, expected: float) -> None:
    """gap / max(f − gap, FLOOR · f_start), 0 for 0/0, and never a number where the gap is none."""
    problem = qprecon.ColumnQP(np.eye(1), np.ones((1, 1)), np.ones((1, 1), dtype=bool))
    found = relative_gap(problem, _figures(objective, gap_bound), np.array([start]), np.array([start]))
    np.testing.assert_allclose(found, [expected])


def test_relative_gap_allows_for_rounding() -> None:
    """What f may be too large by is not there to divide by."""
    problem = qprecon.ColumnQP(np.eye(1), np.ones((1, 1)), np.ones((1, 1), dtype=bool))
    found = relative_gap(problem, _figures(1.0, 0.1, rounding=0.4), np.array([2.0]), np.array([2.0]))
    np.testing.assert_allclose(found, [0.1 / 0.5])
    found = relative_gap(problem, _figures(1.0, 0.1, rounding=2.0), np.array([2.0]), np.array([2.0]))
    np.testing.assert_allclose(found, [0.1 / (2.0 * FLOOR)])


@pytest.mark.parametrize(
    ("objective", "gap_bound", "start", "scale", "expected"),
    [
        (-1.0, 0.0, -1.0, 1.0, 0.0),  # the start is optimal
        (-3.0, 0.1, -1.0, 1.0, 0.05),  # relative to the improvement
        (-1.0, 1e-9, -1.0, 2.0, 1e-9 / (2 * FLOOR)),  # no improvement: relative to the floor
        (0.0, 0.0, 0.0, 0.0, 0.0),
        (0.0, np.inf, 0.0, 1.0, np.inf),
    ],
)
def test_relative_gap_explicit_rhs(objective: float, gap_bound: float, start: float, scale: float, expected: float) -> None:
    """gap / max(f_start − f, FLOOR · scale)."""
    one = np.ones((1, 1))
    problem = qprecon.ColumnQP(np.eye(1), one, one.astype(bool), rhs_NK=one)
    found = relative_gap(problem, _figures(objective, gap_bound), np.array([start]), np.array([scale]))
    np.testing.assert_allclose(found, [expected])


def test_indefinite_by_rounding_is_not_certified() -> None:
    """A rank-8 H stored in float32 has small negative eigenvalues: f < 0 can be reached, so f* ≥ 0 certifies nothing."""
    problem = FAMILIES["rank_8_of_256"].build()
    solution = qprecon.solve(**problem.arguments("float32"), backend="cholesky", dtype="float64")
    assert {status for status in solution.status} == {Status.UNCERTIFIED}
    assert np.isinf(solution.gap_bound).all()
    assert qprecon.solve(**problem.arguments("float32"), backend="cholesky").optimal.sum() == 0


def test_unbounded_column_is_not_certified() -> None:
    """An rhs that pulls at a dead kept input makes the column unbounded below: no certificate, with or without a shared factor."""
    for rank in (8, 64):  # 8: H is singular, so that each column has its own factor
        rng = np.random.default_rng(0)
        x_TN = rng.standard_normal((rank, 32))
        x_TN[:, 3] = 0.0
        mask_NK = np.zeros((32, 2), dtype=bool)
        mask_NK[[1, 3, 7]] = True
        w_NK = rng.standard_normal((32, 2))
        h_NN = x_TN.T @ x_TN
        rhs_NK = h_NN @ w_NK
        rhs_NK[3, 0] += 1.0
        solution = qprecon.solve(h_NN, w_NK, mask_NK, backend="cholesky", rhs=rhs_NK)
        assert solution.status[0] is not Status.OPTIMAL, rank
        assert np.isinf(solution.gap_bound[0])
        assert solution.status[1] is Status.OPTIMAL


def test_stationarity_is_relative_to_the_start_beside_finished_columns() -> None:
    """A column that needs no solving beside the others does not change what their residuals are relative to."""
    problem = FAMILIES["kept_and_pruned_columns"].build().rounded("float32")
    solution = qprecon.solve(**problem.arguments("float32"), backend="cholesky", dtype="float32")
    new_NK = solution.weights.astype(np.float64)
    residual_K = reference.scaled_residual(problem, new_NK)
    energy_K = reference.energy_scale(problem)
    ordinary_K = [0, 2, 3, 5]
    np.testing.assert_allclose(solution.stationarity[ordinary_K], residual_K[ordinary_K] / np.sqrt(energy_K[ordinary_K]), rtol=1e-4)
    np.testing.assert_allclose(solution.baseline_objective, energy_K, rtol=1e-5)


@pytest.mark.parametrize("backend", ["pcg", "cholesky"])
@pytest.mark.parametrize("scale", [1e-165, 1e-300])
def test_underflow_is_never_certified(backend, scale):
    """An objective that is 0 only because its terms leave float64's range is no proof; 1e-100 still is well inside."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 48))
    w_NK = rng.standard_normal((48, 20))
    mask_NK = rng.random((48, 20)) > 0.5
    assert not qprecon.solve(x.T @ x, w_NK * scale, mask_NK, backend).optimal.any()
    rhs_NK = rng.standard_normal((48, 20)) * scale
    assert not qprecon.solve(x.T @ x, np.zeros((48, 20)), mask_NK, backend, rhs=rhs_NK).optimal.any()
    assert qprecon.solve(x.T @ x, w_NK * 1e-100, mask_NK, backend).optimal.all()


def test_the_gap_of_a_whole_column_is_no_less_than_what_it_loses() -> None:
    """Where nothing is pruned f* is 0, and the gap is f itself: in exact arithmetic, with all digits."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        x_TN = rng.standard_normal((12, 6))
        h_NN, w_NK = x_TN.T @ x_TN, rng.standard_normal((6, 3))
        found = qprecon.prepare(h_NN).audit(w_NK, np.ones((6, 3), dtype=bool), w_NK.astype(np.float16))
        apart = [[Fraction(float(w)) - Fraction(float(np.float16(w))) for w in column] for column in w_NK.T]
        exact_NN = [[Fraction(float(h)) for h in row] for row in h_NN]
        exact = [sum(d[i] * exact_NN[i][j] * d[j] for i in range(6) for j in range(6)) for d in apart]
        assert all(Fraction(float(bound)) >= true for bound, true in zip(found.gap_bound, exact, strict=True))
