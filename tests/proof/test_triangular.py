"""Triangular solves by products: the error that they claim holds, and one that would cost too much is not used."""

import numpy as np
import pytest
import torch

import qprecon
from qprecon.arrays.linalg import lower_inverses
from qprecon.proof import factor as factor
from qprecon.proof import passes as passes
from qprecon.proof import triangular as triangular
from qprecon.proof.factor import certificate, gamma
from qprecon.proof.triangular import blocks


def hessian(n, power, seed=0):
    """A Gram matrix with a decaying spectrum and two large channels."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2 * n, n)) @ np.diag(np.arange(1, n + 1) ** -power)
    x = x @ np.linalg.qr(rng.standard_normal((n, n)))[0]
    x[:, :2] *= 30.0
    return torch.as_tensor(x.T @ x)


def prepared(n, power, damping=0.01):
    """H with its damping, a problem and its certificate, without blocks as on any CPU."""
    h = qprecon.prepare(hessian(n, power), damping=damping)
    w_NK = torch.randn(n, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    problem = h.problem(w_NK, w_NK > 0)
    return problem, certificate(problem.hessian), w_NK


@pytest.mark.parametrize("n, size, power", [(300, 64, 0.5), (300, 128, 2.0), (257, 32, 1.0), (100, 128, 1.0), (128, 128, 1.0)])
def test_the_residual_is_no_larger_than_claimed(n, size, power):
    _, cert, _ = prepared(n, power)
    assert cert.blocks is None
    cut = blocks(cert.factor_NN, cert.root_N, cert.condition, gamma(n), gamma(size), size)
    s_NK = torch.randn(n, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * cert.root_N[:, None]
    y_NK = cut.solve_in_place(s_NK.clone())
    torch.testing.assert_close(y_NK, torch.linalg.solve_triangular(cert.factor_NN, s_NK, upper=False), rtol=1e-9, atol=1e-9)
    exact = np.longdouble(s_NK.numpy()) - np.longdouble(cert.factor_NN.numpy()) @ np.longdouble(y_NK.numpy())
    residual = abs(exact) / (cert.root_N[:, None] * y_NK.norm(dim=0)).numpy()
    assert residual.max() <= cut.error
    assert cut.error * cert.condition**0.5 < 1e-6


def test_a_wrong_inverse_shows_in_the_error(monkeypatch):
    """The claim is computed from the inverses as they are: a bad one is not used, whatever made it."""
    _, cert, _ = prepared(200, 1.0)
    arguments = cert.factor_NN, cert.root_N, cert.condition, gamma(200), gamma(64), 64
    assert blocks(*arguments).error < 1e-10

    def off(lower_Bbb):
        inverse_Bbb = lower_inverses(lower_Bbb)
        inverse_Bbb[-1, -1, 0] += 1e-3 * abs(inverse_Bbb[-1]).max()
        return inverse_Bbb

    monkeypatch.setattr(triangular, "lower_inverses", off)
    assert blocks(*arguments) is None
    monkeypatch.setattr(triangular, "lower_inverses", lambda lower_Bbb: lower_inverses(lower_Bbb) * torch.nan)
    assert blocks(*arguments) is None


def test_audits_with_blocks_are_those_without(monkeypatch):
    """Bounds differ by what the blocks claim to cost, and are never below the true gap."""
    problem, plain, w_NK = prepared(260, 1.0)
    assert plain.blocks is None
    monkeypatch.setattr(factor, "size_for", lambda factor_NN: 64)
    monkeypatch.setattr("qprecon.proof.audit.BLOCKS_FROM", 0)
    cut = certificate(problem.hessian)
    assert cut.blocks is not None
    best = qprecon.solve(problem.hessian_NN, w_NK, problem.mask_NK, "cholesky", damping=0.01, tol=1e-12)
    answer_NK = best.weights + 1e-3 * problem.mask_NK * torch.randn_like(w_NK)
    from qprecon.proof.audit import audit

    first, second = (audit(problem, cert, answer_NK) for cert in (plain, cut))
    np.testing.assert_allclose(second.gap_bound, first.gap_bound, rtol=1e-4)
    assert (second.gap_bound >= second.objective - best.objective).all()
    np.testing.assert_array_equal(second.objective, first.objective)


def test_dead_inputs_leave_no_blocks(monkeypatch):
    monkeypatch.setattr(factor, "size_for", lambda factor_NN: 32)
    h_NN = hessian(100, 1.0)
    h_NN[:, 3] = h_NN[3] = 0.0
    problem = qprecon.prepare(h_NN).problem(torch.ones(100, 2, dtype=torch.float64), torch.ones(100, 2, dtype=torch.bool))
    assert certificate(problem.hessian).blocks is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("n", [2048, 2500])
def test_large_layers_on_a_gpu_take_blocks(n):
    _, host, _ = prepared(n, 1.0)
    h = qprecon.prepare(hessian(n, 1.0).cuda(), damping=0.01)
    cert = certificate(h.problem(torch.ones(n, 2).cuda(), torch.ones(n, 2).cuda()).hessian)
    assert cert.blocks is not None and cert.blocks.error * cert.condition**0.5 < 1e-6
    s_NK = torch.randn(n, 33, dtype=torch.float64)
    y_NK = torch.linalg.solve_triangular(host.factor_NN, s_NK, upper=False)
    torch.testing.assert_close(cert.blocks.solve_in_place(s_NK.cuda()).cpu(), y_NK, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("n, size", [(96, 32), (100, 32), (20, 32), (64, 64)])
def test_both_solves_with_a_factor_are_those_of_the_library(n, size):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(2 * n, n, generator=generator, dtype=torch.float64) * torch.logspace(0, 3, n, dtype=torch.float64)
    a = x.T @ x
    lower, s = torch.linalg.cholesky(a), torch.randn(n, 7, generator=generator, dtype=torch.float64)
    found = triangular.unproven(lower + torch.ones_like(lower).triu(1), size)  # what lies above the diagonal is not looked at
    assert found.error == float("inf") and sum(map(len, found.inverses)) == n
    once, twice = found.solve_in_place(s.clone()), found.solve_transposed_in_place(s.clone())
    torch.testing.assert_close(once, torch.linalg.solve_triangular(lower, s, upper=False), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(twice, torch.linalg.solve_triangular(lower.T, s, upper=True), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(found.solve_transposed_in_place(once), torch.cholesky_solve(s, lower), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("n, power, damping", [(300, 0.5, 0.01), (257, 2.0, 0.01), (130, 1.0, 1e-6), (130, 0.5, 0.0)])
def test_a_distance_from_half_the_products_is_an_upper_bound_and_near(n, power, damping):
    """dᵀAd of rounding errors and of large steps, against extended precision. numpy's way is another."""
    h = qprecon.prepare(hessian(n, power), damping=damping)
    old_NK = torch.randn(n, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    new_NK = old_NK.bfloat16().double()
    new_NK[:, ::3] = 0.0
    new_NK[:, 5] = old_NK[:, 5]
    found_K = passes.distances(h.hessian, h.certificate, new_NK, old_NK).numpy()
    long_NN = np.longdouble(h.hessian.hessian_NN.numpy()) + np.longdouble(h.ridge) * np.eye(n, dtype=np.longdouble)
    d_NK = np.longdouble(new_NK.numpy()) - np.longdouble(old_NK.numpy())
    exact_K = (d_NK * (long_NN @ d_NK)).sum(0)
    assert (found_K >= exact_K).all() and (found_K <= exact_K * (1 + 1e-7)).all() and found_K[5] == 0
    plain = qprecon.prepare(h.hessian.hessian_NN.numpy(), damping=damping)
    by_numpy_K = passes.distances(plain.hessian, plain.certificate, new_NK.numpy(), old_NK.numpy())
    np.testing.assert_allclose(by_numpy_K, found_K, rtol=1e-7)
