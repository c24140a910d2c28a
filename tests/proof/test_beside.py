"""A factor that is computed beside other work: nothing uses it too early, and nothing trusts one that does not exist."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import qprecon
from qprecon.arrays.linalg import cholesky
from qprecon.proof import beside, factor


class Late:
    """A factor that is not there before it was asked for; the matrix is a CPU's."""

    asked = 0

    def __init__(self, a_NN: torch.Tensor) -> None:
        self.matrix_NN, self.factor_NN = a_NN, torch.full_like(a_NN, torch.nan)

    @property
    def exists(self) -> bool:
        Late.asked += 1
        found_NN = cholesky(self.matrix_NN)
        if found_NN is not None:
            self.factor_NN.copy_(found_NN)
        return found_NN is not None


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(factor, "worth_beginning", lambda a_NN: isinstance(a_NN, torch.Tensor))
    monkeypatch.setattr(factor, "begin_cholesky", Late)
    Late.asked = 0


def layer(n=48, k=5, least=0.0, seed=0):
    """H with a largest eigenvalue of about 1 and this least one, W and a mask."""
    rng = np.random.default_rng(seed)
    vectors_NN = np.linalg.qr(rng.standard_normal((n, n)))[0]
    values_N = np.linspace(0.2, 1.0, n)
    values_N[0] = least
    h_NN = (vectors_NN * values_N) @ vectors_NN.T
    w_NK = rng.standard_normal((n, k))
    return tuple(map(torch.from_numpy, (0.5 * (h_NN + h_NN.T), w_NK, rng.random((n, k)) > 0.5)))


@pytest.mark.parametrize("backend", ["pcg", "cholesky", "auto"])
def test_a_solve_is_the_same(late, backend, monkeypatch):
    h_NN, w_NK, mask_NK = layer()
    found = qprecon.solve(h_NN, w_NK, mask_NK, backend, damping=0.01)
    assert Late.asked and found.optimal.all()
    monkeypatch.undo()
    usual = qprecon.solve(h_NN, w_NK, mask_NK, backend, damping=0.01)
    np.testing.assert_array_equal(found.weights, usual.weights)
    np.testing.assert_array_equal(found.gap_bound, usual.gap_bound)


def test_a_certificate_alone_waits_for_its_factor(late):
    prepared = qprecon.prepare(layer()[0], damping=0.01)
    assert prepared.certificate.factor_NN.isfinite().all() and Late.asked


def test_without_such_a_factor_the_solve_begins_again(late, monkeypatch):
    """The least eigenvalue is above −λ, but not by λ/16: another factor has to be looked for."""
    ridge = 0.01 * 0.6
    h_NN, w_NK, mask_NK = layer(least=-0.97 * ridge)
    found = qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01)
    assert Late.asked
    monkeypatch.undo()
    usual = qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01)
    np.testing.assert_array_equal(found.gap_bound, usual.gap_bound)
    assert list(found.status) == list(usual.status)


def test_an_indefinite_h_is_refused_all_the_same(late):
    h_NN, w_NK, mask_NK = layer(least=-0.5)
    with pytest.raises(ValueError, match="H is clearly indefinite"):
        qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_it_is_the_same_factor():
    n = 2500
    x = torch.randn(2 * n, n, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    h_NN = x.T @ x
    mask_NK = torch.rand(n, 128, device="cuda") > 0.5
    prepared = qprecon.prepare(h_NN, damping=0.01)
    solution = prepared.solve(torch.randn(n, 128, device="cuda"), mask_NK, "pcg")
    cert = prepared.certificate
    assert solution.optimal.all() and cert.begun is not None and cert.begun.exists
    a_NN = h_NN.double()
    a_NN.diagonal().add_(prepared.hessian.ridge - cert.shift_N)
    torch.testing.assert_close(cert.factor_NN.tril(), torch.linalg.cholesky(a_NN), rtol=1e-12, atol=1e-12)
    missing = beside.begin_cholesky(-a_NN)
    assert not missing.exists
