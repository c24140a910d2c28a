"""The preconditioner of pcg against the formula, written out densely."""

import numpy as np
import pytest

from qprecon.backends._pcg import precondition as precondition


def layer(seed=0, n=40, k=7, rank=6):
    """A Gram matrix with a few large directions, masks with an empty and a full column, and its low-rank part."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * n, n)) * np.logspace(1, -1, n)
    h_NN = x.T @ x + 0.1 * np.eye(n)
    mask_NK = rng.random((n, k)) > 0.5
    mask_NK[:, 0], mask_NK[:, 1] = False, True
    return h_NN, mask_NK, precondition.low_rank(h_NN, 0.1, rank, 1), rng


def applied(operator, residual_NK, mask_NK):
    """C⁻¹r on kept entries."""
    return mask_NK * (operator.inverse_diagonal_N1 * residual_NK - operator.correction(residual_NK))


@pytest.mark.parametrize("slab", [2.0**26, 1.0])  # all pair products at once, or as few at a time as may be
def test_it_inverts_the_kept_block(monkeypatch, slab):
    monkeypatch.setattr(precondition, "_SLAB", slab)
    h_NN, mask_NK, shared, rng = layer(rank=16)  # 136 pairs: three slabs of 64
    residual_NK = rng.standard_normal(mask_NK.shape) * mask_NK
    z_NK = applied(precondition.for_columns(shared, mask_NK), residual_NK, mask_NK)
    c_NN = shared.factor_Nr @ shared.factor_Nr.T + np.diag(shared.diagonal_N)
    for j in range(mask_NK.shape[1]):
        kept = np.flatnonzero(mask_NK[:, j])
        np.testing.assert_allclose(z_NK[kept, j], np.linalg.solve(c_NN[np.ix_(kept, kept)], residual_NK[kept, j]), rtol=1e-6)


def test_for_few_columns_it_is_exact_where_float32_is_not():
    """Four directions are far above all others, and the residual lies in them: C⁻¹r is what is left of numbers that cancel."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 64)) + 300.0 * rng.standard_normal((400, 4)) @ rng.standard_normal((4, 64))
    h_NN = (x.T @ x).astype(np.float32)
    shared = precondition.low_rank(h_NN, 1.0, 8, 1)
    mask_NK = rng.random((64, 3)) > 0.3
    residual_NK = mask_NK * (h_NN @ (mask_NK * rng.standard_normal((64, 3)))).astype(np.float32)
    c_NN = shared.factor_Nr.astype(float) @ shared.factor_Nr.T.astype(float) + np.diag(shared.diagonal_N.astype(float))
    exact_NK = np.zeros((64, 3))
    for j in range(3):
        kept = np.flatnonzero(mask_NK[:, j])
        exact_NK[kept, j] = np.linalg.solve(c_NN[np.ix_(kept, kept)], residual_NK[kept, j])

    def error(operator):
        wrong_NK = applied(operator, residual_NK.astype(operator.inverse_diagonal_N1.dtype), mask_NK) - exact_NK
        return np.abs(wrong_NK).max() / np.abs(exact_NK).max()

    assert error(precondition.for_few_columns(shared, mask_NK)) < 1e-8
    assert error(precondition.for_columns(shared, mask_NK)) > 1e-3


def test_the_low_rank_lies_below_h_and_takes_its_large_part():
    h_NN, _, shared, _ = layer()
    rest_NN = h_NN - 0.1 * np.eye(len(h_NN)) - shared.factor_Nr @ shared.factor_Nr.T
    values = np.linalg.eigvalsh(h_NN)
    assert np.linalg.eigvalsh(rest_NN)[0] > -1e-9 * values[-1]
    assert np.linalg.eigvalsh(rest_NN)[-1] < 2.0 * values[-7]  # the largest of those that six directions leave
    assert (shared.diagonal_N > 0).all()


@pytest.mark.parametrize("power_steps", [0, 1, 2])
def test_fewer_directions_than_the_rank(power_steps):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 30))
    shared = precondition.low_rank(x.T @ x + 0.01 * np.eye(30), 0.01, 8, power_steps)
    np.testing.assert_allclose(shared.factor_Nr @ shared.factor_Nr.T, x.T @ x, atol=1e-8 * np.trace(x.T @ x))
