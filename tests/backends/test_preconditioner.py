"""The preconditioner of pcg against the formula, written out densely."""

import numpy as np
import pytest
import torch

import qprecon
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
    return mask_NK * (operator.inverse_diagonal_N1 * residual_NK - operator.correction(residual_NK)[0])


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


def test_it_knows_what_the_other_inputs_add():
    """rᵀC⁻¹r with all inputs, less what it is with the kept ones: nothing where none is pruned, or none kept."""
    h_NN, mask_NK, shared, rng = layer(rank=16)
    residual_NK = rng.standard_normal(mask_NK.shape) * mask_NK
    whole_NN = np.linalg.inv(shared.factor_Nr @ shared.factor_Nr.T + np.diag(shared.diagonal_N))
    for operator in (precondition.for_columns(shared, mask_NK), precondition.for_few_columns(shared, mask_NK)):
        kept_K = (residual_NK * applied(operator, residual_NK, mask_NK)).sum(0)
        beyond_K = operator.correction(residual_NK)[1]
        np.testing.assert_allclose(kept_K + beyond_K, (residual_NK * (whole_NN @ residual_NK)).sum(0), rtol=1e-9)
        assert beyond_K[0] == 0.0 and beyond_K[1] <= 1e-12 * kept_K[1] and (beyond_K[2:] > 1e-3 * kept_K[2:]).all()


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


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_of_an_h_that_only_damping_makes_positive_the_positive_directions_are_taken(library):
    """Four large eigenvalues are negative and four positive."""
    rng = np.random.default_rng(0)
    vectors_NN = np.linalg.qr(rng.standard_normal((40, 40)))[0]
    values_N = np.array([-3.0] * 4 + [100.0] * 4 + [0.0] * 32)
    h_NN = vectors_NN @ np.diag(values_N) @ vectors_NN.T + 5.0 * np.eye(40)
    shared = precondition.low_rank(h_NN if library == "numpy" else torch.from_numpy(h_NN), 5.0, 8, 2)
    taken_NN = vectors_NN @ np.diag(np.maximum(values_N, 0.0)) @ vectors_NN.T
    np.testing.assert_allclose(shared.factor_Nr @ shared.factor_Nr.T, taken_NN, atol=1e-9)
    assert (shared.diagonal_N >= 5.0).all()


@pytest.mark.parametrize("loud", [1.0, 1e4])
@pytest.mark.parametrize("damping", [1e-2, 1e-4])
def test_few_samples_summed_in_fewer_digits_are_their_rank_all_the_same(damping, loud):
    """H of 16 samples, one of them loud, summed in float32 and solved in float64: beyond its rank it is noise of either sign."""
    rng = np.random.default_rng(0)
    x_TN = rng.standard_normal((16, 512)).astype(np.float32)
    x_TN[0] *= loud
    mask_NK = rng.random((512, 32)) < 0.5
    solution = qprecon.solve(x_TN.T @ x_TN, rng.standard_normal((512, 32)), mask_NK, "pcg", damping=damping)
    assert solution.optimal.all() and solution.iterations.max() <= 3 and solution.provenance.dtype == "float64"


@pytest.mark.parametrize("kappa", [1e2, 1e6])
def test_power_steps_of_a_large_h_need_no_more_than_bfloat16(kappa, monkeypatch):
    """As on a GPU, by panels: what is left is no larger than by float32 steps, and the panels are those of H."""
    rng = np.random.default_rng(2)
    vectors_NN = np.linalg.qr(rng.standard_normal((256, 256)))[0]
    values_N = np.logspace(0, -np.log10(kappa), 256)
    h_NN = torch.from_numpy((vectors_NN * values_N @ vectors_NN.T).astype(np.float32))
    mm, shapes = torch.mm, []
    monkeypatch.setattr(precondition, "has_fast_halves", lambda x: True)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: shapes.append(tuple(a.shape)) or mm(a.float(), b.float()))

    def left(rows):
        monkeypatch.setattr(precondition, "_ROUGH_FROM", rows)
        factor_Nr = precondition.low_rank(h_NN, 0.0, 24, 3).factor_Nr.double()
        return float(torch.linalg.eigvalsh(h_NN.double() - factor_Nr @ factor_Nr.T)[-1])

    exact, rough = left(257), left(100)
    assert shapes == [(100, 256), (100, 256), (56, 256)] * 3
    assert values_N[24] <= rough * (1 + 1e-5) and rough < 1.02 * exact


@pytest.mark.parametrize("kappa", [1e2, 1e6])
def test_the_low_rank_is_as_good_as_the_largest_eigenvectors(kappa):
    """In float32; the largest eigenvalue that is left is at most twice that of the best low rank."""
    rng = np.random.default_rng(1)
    vectors_NN = np.linalg.qr(rng.standard_normal((200, 200)))[0]
    values_N = np.logspace(0, -np.log10(kappa), 200)
    h_NN = (vectors_NN * values_N @ vectors_NN.T).astype(np.float32)
    shared = precondition.low_rank(h_NN, 0.0, 16, 2)
    left = np.linalg.eigvalsh(h_NN.astype(float) - shared.factor_Nr.astype(float) @ shared.factor_Nr.T.astype(float))
    assert -1e-6 < left[0] and left[-1] < 2.0 * values_N[16]


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
