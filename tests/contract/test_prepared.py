"""A prepared Hessian: the same answers as without one, and everything that depends on H made once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import qprecon
from qprecon import certificate as certificate_module
from qprecon import prepared as prepared_module
from qprecon import registry

from .families import FAMILIES

RNG = np.random.default_rng(3)
X = RNG.standard_normal((200, 24)) @ RNG.standard_normal((24, 24))
H = X.T @ X
W = RNG.standard_normal((24, 6))
MASK = RNG.random((24, 6)) < 0.5
TARGET = X @ W + RNG.standard_normal((200, 6))
RHS = X.T @ TARGET


@pytest.fixture
def count(monkeypatch):
    """How many Cholesky factorisations certificates made, and how often each backend was set up."""
    seen = {"cholesky": 0, "prepare": []}
    real_cholesky, real_load = certificate_module.cholesky, registry.load

    def cholesky(a_NN):
        seen["cholesky"] += 1
        return real_cholesky(a_NN)

    def load(record, options):
        loaded = real_load(record, options)

        def prepare(system, own):
            seen["prepare"].append(record.name)
            return loaded.prepare(system, own)

        return dataclasses.replace(loaded, prepare=prepare)

    monkeypatch.setattr(certificate_module, "cholesky", cholesky)
    monkeypatch.setattr(registry, "load", load)
    return seen


@pytest.mark.parametrize("backend", ["auto", "cholesky", "pcg", "admm"])
@pytest.mark.parametrize("family", ["well_conditioned", "rhs_of_dense_model"])
def test_the_same_bits_as_solve(backend, family):
    given = FAMILIES[family].build().arguments()
    h, w, mask, damping = given.pop("H"), given.pop("W"), given.pop("mask"), given.pop("damping", 0.0)
    prepared = qprecon.prepare(h, damping=damping)
    for _ in range(2):
        one, other = prepared.solve(w, mask, backend, **given), qprecon.solve(h, w, mask, backend, damping=damping, **given)
        assert np.array_equal(one.weights, other.weights) and np.array_equal(one.relative_gap, other.relative_gap)


@pytest.mark.parametrize("backend", ["cholesky", "pcg", "admm"])
def test_five_damped_solves_make_one_factorisation(backend, count):
    prepared = qprecon.prepare(H, damping=0.01)
    for seed in range(5):
        mask = np.random.default_rng(seed).random(MASK.shape) < 0.5
        assert prepared.solve(W, mask, backend).optimal.all()
    assert count == {"cholesky": 1, "prepare": [backend]}
    prepared.audit(W, MASK, W * MASK)
    assert count["cholesky"] == 1
    prepared.solve(W, MASK, backend, dtype="float32", tol=1e-3)
    assert count == {"cholesky": 1, "prepare": [backend] * 2}


def test_undamped_solves_climb_one_ladder(count):
    prepared = qprecon.prepare(H)
    prepared.solve(W, MASK, "cholesky")
    ladder = count["cholesky"]
    for _ in range(4):
        prepared.solve(W, MASK, "cholesky")
    assert count["cholesky"] == ladder


def test_options_of_a_backend_have_set_ups_of_their_own(count):
    prepared = qprecon.prepare(H, damping=0.01)
    for rho in (0.1, 0.2, 0.1):
        prepared.solve(W, MASK, "admm", rho=rho)
    assert count["prepare"] == ["admm"] * 2


def test_released_things_are_made_again(count):
    prepared = qprecon.prepare(H, damping=0.01)
    first = prepared.solve(W, MASK, "pcg")
    prepared.release()
    assert np.array_equal(prepared.solve(W, MASK, "pcg").weights, first.weights)
    assert count == {"cholesky": 2, "prepare": ["pcg"] * 2}


def test_the_inverse_factor_is_made_once_a_damping(monkeypatch):
    made = []
    real = prepared_module.upper_inverse_factor
    monkeypatch.setattr(prepared_module, "upper_inverse_factor", lambda a: made.append(a.dtype.name) or real(a))
    prepared = qprecon.prepare(H, damping=0.02)
    for damping, dtype in ((0.01, "float32"), (0.01, "float32"), (None, "float32"), (0.02, "float32"), (0.01, "float64")):
        factor = prepared.inverse_factor(damping, dtype)
        damped = H + (0.02 if damping is None else damping) * np.mean(np.diag(H)) * np.eye(24)
        exact = 1e-3 if dtype == "float32" else 1e-10
        assert factor.dtype == dtype and np.array_equal(factor, np.triu(factor))
        assert np.abs(factor.T @ factor @ damped - np.eye(24)).max() < exact
        trailing = factor[7:, 7:].T @ factor[7:, 7:]
        assert np.abs(trailing @ damped[7:, 7:] - np.eye(17)).max() < exact
    assert made == ["float32", "float32", "float64"]
    with pytest.raises(ValueError, match="damping"):
        qprecon.prepare(np.diag([1.0, 0.0])).inverse_factor(0.0)


def test_torch_and_numpy_share_a_prepared_hessian():
    torch = pytest.importorskip("torch")
    prepared = qprecon.prepare(H, damping=0.01)
    solution = prepared.solve(torch.tensor(W), torch.tensor(MASK), "cholesky")
    assert isinstance(solution.weights, torch.Tensor)
    assert np.allclose(solution.weights.numpy(), prepared.solve(W, MASK, "cholesky").weights, rtol=1e-10, atol=1e-12)
    u = qprecon.prepare(torch.tensor(H), damping=0.01).inverse_factor(dtype="float64")
    assert np.allclose(u.numpy(), prepared.inverse_factor(dtype="float64"), rtol=1e-8, atol=1e-10)


def test_audit_of_anybodys_weights():
    prepared = qprecon.prepare(H, damping=0.01)
    best = prepared.solve(W, MASK, "cholesky", tol=1e-8)
    for candidate in (best.weights, best.weights.astype(np.float32), best.weights.astype(np.float16), W * MASK, 0 * W):
        audit = prepared.audit(W, MASK, candidate)
        true = audit.objective - best.objective
        assert (audit.gap_bound >= true * (1 - 1e-6) - 1e-9 * best.objective).all() and (audit.violation == 0).all()
        assert np.allclose(audit.baseline_objective, best.baseline_objective)
    assert prepared.audit(W, MASK, best.weights).certified(1e-8).all()
    assert not prepared.audit(W, MASK, W * MASK).certified(1e-3).any()
    outside = prepared.audit(W, MASK, W)
    assert (outside.violation > 0).all() and np.isinf(outside.gap_bound).all() and not outside.certified(0.5).any()
    for bad, word in ((W[:5], "candidate"), (np.ones(W.shape, dtype=int), "candidate")):
        with pytest.raises(ValueError, match=word):
            prepared.audit(W, MASK, bad)


def test_a_constant_gives_the_objective_its_zero():
    prepared = qprecon.prepare(H, damping=0.01)
    constant = (TARGET**2).sum(0)
    with_zero = prepared.solve(W, MASK, "cholesky", rhs=RHS, constant=constant)
    without = prepared.solve(W, MASK, "cholesky", rhs=RHS)
    loss = ((TARGET - X @ with_zero.weights) ** 2).sum(0) + prepared.ridge * ((with_zero.weights - W) ** 2).sum(0)
    assert np.allclose(with_zero.objective, loss, rtol=1e-10)
    assert np.allclose(with_zero.objective, without.objective + constant)
    assert np.array_equal(with_zero.weights, without.weights)
    assert (with_zero.relative_gap <= 1.01 * with_zero.gap_bound / loss).all()
    rough = prepared.audit(W, MASK, with_zero.weights * (1 + 1e-4), rhs=RHS, constant=constant)
    assert np.allclose(rough.relative_gap, rough.gap_bound / (rough.objective - rough.gap_bound), rtol=1e-6)


@pytest.mark.parametrize("backend", ["pcg", "admm"])
def test_gaps_relative_to_a_small_loss_are_reached(backend):
    """Where the target is nearly reached, tol is asked of a loss that is far smaller than the gain."""
    target = X @ (W * MASK) + 1e-4 * RNG.standard_normal(TARGET.shape)
    prepared = qprecon.prepare(H, damping=1e-6)
    solution = prepared.solve(W, MASK, backend, rhs=X.T @ target, constant=(target**2).sum(0), dtype="float64")
    assert solution.optimal.all()


def test_what_is_wrong_with_a_constant():
    prepared = qprecon.prepare(H, damping=0.01)
    constant = (TARGET**2).sum(0)
    for bad in (constant[:2], -constant, 0.1 * constant, np.nan * constant):
        with pytest.raises(ValueError, match="constant"):
            prepared.solve(W, MASK, rhs=RHS, constant=bad)
    with pytest.raises(ValueError, match="constant.*rhs"):
        prepared.solve(W, MASK, constant=constant)


@pytest.mark.parametrize("rhs", [None, RHS])
def test_the_residual_is_half_the_gradient(rhs):
    solution = qprecon.solve(H, W, MASK, damping=0.01, rhs=rhs, dtype="float64")
    ridge = 0.01 * np.mean(np.diag(H))
    b = H @ W if rhs is None else rhs
    want = b + ridge * W - (H + ridge * np.eye(24)) @ solution.weights
    assert np.allclose(solution.residual, want, rtol=0, atol=1e-9 * np.abs(want).max())
    assert solution.residual is solution.residual
    assert np.abs(solution.residual[MASK]).max() < 1e-3 * np.abs(solution.residual[~MASK]).max()
    with pytest.raises(ValueError, match="problem"):
        dataclasses.replace(solution, problem=None).residual  # noqa: B018


def test_a_problem_stays_as_it_was_given():
    """Bounds are rounded to the dtype of the answer on a copy."""
    lower = np.full(W.shape, -0.1)
    problem = qprecon.ColumnQP(H, W, MASK, lower_NK=lower)
    rounded = problem.with_rounded_bounds("float32")
    assert problem.lower_NK.dtype == np.float64 and rounded.lower_NK.dtype == np.float32
    assert rounded.hessian is problem.hessian
