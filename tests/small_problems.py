"""Small problems for the backends' own tests, and their independent solutions."""

from __future__ import annotations

import numpy as np
import scipy.optimize

import qprecon


def gram(n: int, tokens: int = 200, decay: float = 1.0, seed: int = 0) -> np.ndarray:
    """XᵀX with eigenvalues falling like i^-decay and two loud channels, (n, n) float64."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((n, n)))
    x = rng.standard_normal((tokens, n)) * np.arange(1, n + 1) ** (-decay / 2) @ basis.T
    x[:, rng.choice(n, 2, replace=False)] *= 8.0
    return x.T @ x


def problem(n: int = 24, k: int = 5, decay: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """H, W and a mask that keeps about half; the last column keeps everything."""
    rng = np.random.default_rng(seed + 1)
    mask = rng.random((n, k)) < 0.5
    mask[:, -1] = True
    weights = (0.05 * rng.standard_normal((n, k))).astype(np.float32)  # so that no backend's dtype rounds them
    return gram(n, decay=decay, seed=seed), weights.astype(np.float64), mask


def right_hand_side(h: np.ndarray, w: np.ndarray, seed: int = 5) -> np.ndarray:
    """A b = XᵀY that is not HW."""
    noise = np.random.default_rng(seed).standard_normal(w.shape)
    return h @ (w + 0.03 * noise)


def bounded(h: np.ndarray, w: np.ndarray, mask: np.ndarray, damping: float, lower: float, upper: float) -> np.ndarray:
    """The bounded optimum, column by column, by scipy's lsq_linear."""
    damped = h + damping * np.mean(np.diag(h)) * np.eye(len(h))
    root = np.linalg.cholesky(damped).T
    out = np.zeros_like(w)
    for j in range(w.shape[1]):
        kept = np.flatnonzero(mask[:, j])
        result = scipy.optimize.lsq_linear(root[:, kept], root @ w[:, j], (lower, upper), method="bvls", tol=1e-14)
        out[kept, j] = result.x
    return out


def objective(h: np.ndarray, w: np.ndarray, new: np.ndarray, damping: float) -> np.ndarray:
    """(ŵ − w)ᵀ(H + λI)(ŵ − w), (k,)."""
    damped = h + damping * np.mean(np.diag(h)) * np.eye(len(h))
    return ((new - w) * (damped @ (new - w))).sum(0)


def check_against_cholesky(backend: str, tol: float = 1e-4, dtype: str = "float64", **options: object) -> qprecon.Solution:
    """Default rhs and explicit rhs are OPTIMAL and within tol of a float64 Cholesky."""
    h, w, mask = problem()
    for rhs in (right_hand_side(h, w), None):
        exact = qprecon.solve(h, w, mask, backend="cholesky", damping=0.01, dtype="float64", rhs=rhs)
        solution = qprecon.solve(h, w, mask, backend=backend, damping=0.01, dtype=dtype, tol=tol, rhs=rhs, **options)
        assert (solution.status == qprecon.Status.OPTIMAL).all(), solution.status
        assert (solution.weights[~mask] == 0).all()
        scale = exact.objective if rhs is None else exact.baseline_objective - exact.objective
        assert (solution.objective - exact.objective <= 1.1 * tol * scale + 1e-12).all()
    return solution


def check_bounds(backend: str, dtype: str = "float64", tol: float = 1e-4, **options: object) -> None:
    """Active bounds: as good as lsq_linear, feasible, certified."""
    h, w, mask = problem()
    reference = bounded(h, w, mask, 0.01, -0.04, 0.03)
    best = objective(h, w, reference, 0.01)
    assert ((reference == -0.04) | (reference == 0.03)).sum() > 5  # the bounds do bind
    solution = qprecon.solve(h, w, mask, backend=backend, damping=0.01, lower=-0.04, upper=0.03, dtype=dtype, tol=tol, **options)
    assert (solution.status == qprecon.Status.OPTIMAL).all(), (solution.status, solution.relative_gap)
    assert (solution.weights <= 0.03 + 1e-8).all() and (solution.weights >= -0.04 - 1e-8).all()
    assert (solution.violation <= 1e-9).all()
    assert (solution.objective <= best * (1 + 1.1 * tol) + 1e-12).all() and (solution.objective >= best * (1 - 1e-6)).all()


def check_limits(backend: str, **options: object) -> None:
    """One iteration and no time: the truth is told, and OPTIMAL only where it is true."""
    h, w, mask = problem(decay=2.0)
    exact = qprecon.solve(h, w, mask, backend="cholesky", damping=0.001)
    for limits in ({"max_iterations": 1}, {"time_limit": 1e-6}):
        solution = qprecon.solve(h, w, mask, backend=backend, damping=0.001, **limits, **options)
        claimed = solution.status == qprecon.Status.OPTIMAL
        excess = (solution.objective - exact.objective) / np.maximum(exact.objective, 1e-300)
        assert (excess[claimed & (exact.objective > 1e-12)] <= 1e-4).all()
        assert (solution.objective <= solution.baseline_objective * (1 + 1e-9)).all()
        if "time_limit" in limits:  # the column that keeps everything needs no backend
            assert (solution.status[:-1] == qprecon.Status.TIME_LIMIT).all(), solution.status
