"""The preconditioner of pcg against the formula, written out densely."""

import numpy as np
import pytest
import threadpoolctl
import torch

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


@pytest.mark.parametrize("rows, where", [(40, "host"), (160, "host"), (161, "GPU")])
def test_a_gpus_small_cores_have_their_eigenvectors_from_one_thread_of_the_host(rows, where, monkeypatch):
    """The threads of numpy's BLAS would be in the way of torch's for a while. The matrix is a CPU's here."""
    x = torch.randn(2 * rows, rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    core_rr, eigh, threads = x.T @ x, np.linalg.eigh, []

    def watched(a_rr):
        threads.extend(each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas")
        return eigh(a_rr)

    monkeypatch.setattr(np.linalg, "eigh", watched)
    usual_rr, top = precondition._mixing(core_rr, rows - 8, 1e-6)
    assert not threads
    monkeypatch.setattr(precondition, "device_type", lambda x: "cuda")
    found_rr, its_top = precondition._mixing(core_rr, rows - 8, 1e-6)
    assert set(threads) == ({1} if where == "host" else set())
    assert isinstance(found_rr, torch.Tensor) and its_top == pytest.approx(top, rel=1e-12)
    torch.testing.assert_close(found_rr @ found_rr.T, usual_rr @ usual_rr.T, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("rank", [32, 127, 128, 192])
def test_inverses_by_blocks_are_the_librarys(rank, monkeypatch):
    """As a GPU makes them from 128 rows on; 192 halves to blocks of 24 rows, 127 is none that can be halved."""
    x_Krr = torch.randn(3, rank, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    gram_Krr = 1e3 * x_Krr.mT @ x_Krr
    gram_Krr = 0.5 * (gram_Krr + gram_Krr.mT)
    expected = torch.linalg.inv(gram_Krr.double() + torch.eye(rank, dtype=torch.float64))
    monkeypatch.setattr(precondition, "device_type", lambda x: "cuda")
    found = precondition._inverse_plus_identity(gram_Krr)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
