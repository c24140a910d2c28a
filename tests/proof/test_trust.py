"""Inputs on which a certificate was once wrong, or a refusal, and what they should give: one test each, with its variants."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

import qprecon
from qprecon import Status
from tests.contract import cases
from tests.fuzz.exact import Exact, nearest, quadratic_gain
from tests.fuzz.problems import Case
from tests.fuzz.truth import Truth

UNBOUNDED = ("auto", "cholesky", "pcg", "admm")


def three_of_four(n: int, k: int) -> np.ndarray:
    """Rows with i % 4 > 0 are kept."""
    return np.repeat((np.arange(n) % 4 > 0)[:, None], k, axis=1)


def loss(x_TN: np.ndarray, w_NK: np.ndarray, new_NK: np.ndarray) -> np.ndarray:
    """‖Xŵ − Xw‖² with X itself, in float64."""
    difference_NK = np.asarray(new_NK, dtype=np.float64) - np.asarray(w_NK, dtype=np.float64)
    return ((x_TN.astype(np.float64) @ difference_NK) ** 2).sum(0)


def tokens(shape: tuple[int, int], large: float = 1.0, seed: int = 0) -> np.ndarray:
    """float32 X, input 7 as large as that."""
    x_TN = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x_TN[:, 7] *= np.float32(large)
    return x_TN


@pytest.mark.parametrize(("backend", "widened"), [("auto", True), *((name, False) for name in UNBOUNDED)])
@pytest.mark.parametrize("damping", [0.0, 1e-12, 1e-10])
@pytest.mark.parametrize(("count", "large"), [(64, 300.0), (64, 1000.0), (64, 1.0), (32, 300.0), (32, 1.0)])
def test_float32_sums_of_fewer_tokens_than_inputs(backend: str, damping: float, count: int, large: float, widened: bool) -> None:
    """H is indefinite by its own rounding: no column is worse than the masked weights, measured with X, and none is OPTIMAL, but
    with a channel so large that 1e-10 of the mean is more than the others' rounding.
    """
    x_TN = tokens((count, 128), large)
    h_NN = x_TN.T @ x_TN
    w_NK, mask_NK = np.random.default_rng(1).standard_normal((128, 8)).astype(np.float32), three_of_four(128, 8)
    solution = qprecon.solve(h_NN.astype(np.float64) if widened else h_NN, w_NK, mask_NK, backend, damping=damping)
    if damping < 1e-10 or large < 1000.0:
        assert set(solution.status) <= {Status.UNCERTIFIED, Status.FELL_BACK}
        assert np.isinf(solution.gap_bound).all()
    start_K = loss(x_TN, w_NK, np.where(mask_NK, w_NK, 0.0))
    assert (loss(x_TN, w_NK, solution.weights) <= start_K).all()
    if backend in ("auto", "pcg") and not damping:
        assert np.median(loss(x_TN, w_NK, solution.weights) / start_K) < 1e-3, "and mostly far better"


@pytest.mark.parametrize(("count", "large"), [(512, 300.0), (512, 1000.0), (256, 1.0)])
def test_1024_inputs_as_they_were_found(count: int, large: float) -> None:
    """32 columns, everything by default: once 32 OPTIMAL with gap 0 and up to 172 000 times the loss, or (256 tokens) refused."""
    x_TN = tokens((count, 1024), large)
    w_NK, mask_NK = np.random.default_rng(1).standard_normal((1024, 32)).astype(np.float32), three_of_four(1024, 32)
    solution = qprecon.solve(x_TN.T @ x_TN, w_NK, mask_NK)
    assert not solution.optimal.any()
    start_K = loss(x_TN, w_NK, np.where(mask_NK, w_NK, 0.0))
    assert (loss(x_TN, w_NK, solution.weights) <= start_K).all()
    damped = qprecon.solve(x_TN.T @ x_TN, w_NK, mask_NK, damping=0.01)
    assert damped.optimal.all()
    assert (loss(x_TN, w_NK, damped.weights) <= start_K).all()


@pytest.mark.parametrize("bounds", [{"lower": -3.0, "upper": 3.0}, {"lower": 0.0}])
@pytest.mark.parametrize("backend", ["auto", "admm", "osqp"])
def test_few_tokens_with_bounds(backend: str, bounds: dict[str, float]) -> None:
    """With bounds they answer as the others do, instead of refusing."""
    x_TN = tokens((16, 64))
    w_NK, mask_NK = np.random.default_rng(1).standard_normal((64, 4)).astype(np.float32), three_of_four(64, 4)
    solution = qprecon.solve(x_TN.T @ x_TN, w_NK, mask_NK, backend, **bounds)
    assert not solution.optimal.any()
    start_NK = np.where(mask_NK, np.clip(w_NK, bounds["lower"], bounds.get("upper")), 0.0)
    assert (loss(x_TN, w_NK, solution.weights) <= loss(x_TN, w_NK, start_NK)).all()


def indefinite_behind(large: float) -> np.ndarray:
    """diag(large, 1, 1, 1) with a block that has the eigenvalue −1.8."""
    h_NN = np.diag([large, 1.0, 1.0, 1.0])
    h_NN[1:, 1:] += np.array([[0.0, 1.1, 2.0], [1.1, 0.0, 2.0], [2.0, 2.0, 0.0]])
    return h_NN


@pytest.mark.parametrize("backend", UNBOUNDED)
@pytest.mark.parametrize("large", [1.0, 1e4, 1e8, 1e14, 1e25])
@pytest.mark.parametrize("kind", ["float64", "float32", "torch"])
def test_indefinite_behind_a_large_channel(backend: str, large: float, kind: str) -> None:
    """However large the channel, H is refused, and the text says what to do; without one no usual damping would be enough."""
    h_NN = indefinite_behind(large)
    given: Any = torch.from_numpy(h_NN) if kind == "torch" else h_NN.astype(kind)
    one_NK, mask_NK = np.ones((4, 1)), np.array([[1], [1], [1], [0]])
    advice = "in float32 or better$" if large == 1.0 else "or take a damping of 0.01, which outweighs it$"
    with pytest.raises(ValueError, match=f"^H is clearly indefinite.*{advice}"):
        qprecon.solve(given, one_NK, mask_NK, backend)


@pytest.mark.parametrize("n", [8, 12, 16, 20])
@pytest.mark.parametrize("damping", [0.0, 1e-15, 1e-12])
@pytest.mark.parametrize("backend", UNBOUNDED)
def test_hilbert(n: int, damping: float, backend: str) -> None:
    """Computed objectives near 0 whose exact value is not: every claim holds in exact arithmetic, as H is given."""
    rng = np.random.default_rng(n)
    h_NN, w_NK, mask_NK = scipy.linalg.hilbert(n), rng.standard_normal((n, 12)), rng.random((n, 12)) < 0.7
    solution = qprecon.solve(h_NN, w_NK, mask_NK, backend, damping=damping)
    ridge = qprecon.ColumnQP(h_NN, w_NK, mask_NK, damping=damping).ridge
    truth = Truth(Case("hilbert", h_NN, w_NK, mask_NK, damping=damping), ridge, "float64")
    value = truth.value(solution.weights)
    for j in range(12):
        f, start = value.objective_K[j], truth.start.objective_K[j]
        assert f <= start
        gap = quadratic_gain(truth.exact_NN[np.ix_(mask_NK[:, j], mask_NK[:, j])], value.residual_NK[mask_NK[:, j], j])
        if solution.status[j] is Status.OPTIMAL and gap is not None:
            assert nearest(gap) <= solution.tol * max(nearest(f - gap), 1e-6 * nearest(start)) * (1 + 1e-9)
        elif solution.status[j] is Status.OPTIMAL:  # indefinite by rounding: then f counts as zero
            assert abs(nearest(f)) <= solution.tol * 1e-6 * nearest(start)


@functools.cache
def in_units(scale: float, dtype: str, backend: str) -> qprecon.Solution:
    """One problem whose H and rhs are given times `scale`."""
    rng = np.random.default_rng(0)
    x_TN, w_NK = rng.standard_normal((400, 24)), rng.standard_normal((24, 5)).astype(np.float32)
    h_NN, mask_NK = x_TN.T @ x_TN, rng.random((24, 5)) < 0.5
    rhs_NK = h_NN @ (w_NK + 0.1 * rng.standard_normal((24, 5)))
    h_NN, rhs_NK = (h_NN * scale).astype(np.float32), (rhs_NK * scale).astype(np.float32)
    return qprecon.solve(h_NN, w_NK, mask_NK, backend, rhs=rhs_NK, damping=0.01, dtype=dtype)


@pytest.mark.parametrize("power", [10, 18, 30, -18, -30])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", ["auto", "cholesky", "pcg", "admm", "adam", "osqp", "mpax"])
def test_any_units_of_h_with_an_rhs(power: int, dtype: str, backend: str) -> None:
    """H times a power of ten is the same problem: no warning, the same weights, all OPTIMAL where any is."""
    if backend != "auto" and dtype not in cases.require(backend).capabilities.dtypes:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found, expected = (in_units(scale, dtype, backend) for scale in (10.0**power, 1.0))
    np.testing.assert_allclose(found.weights, expected.weights, atol=2e-3)
    if backend != "adam":
        assert found.optimal.all() and expected.optimal.all()


@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("backend", ["cholesky", "pcg", "admm"])
def test_the_rounding_of_the_linear_term_counts(size: float, backend: str) -> None:
    """With weights of 1e8, HW is off by 1e-8: no bound may be below the exact gap."""
    rng = np.random.default_rng(0)
    x_TN = rng.standard_normal((60, 10))
    h_NN, w_NK, mask_NK = x_TN.T @ x_TN / 60, size * rng.standard_normal((10, 6)), rng.random((10, 6)) < 0.6
    rhs_NK = h_NN @ w_NK + 1e-3 * rng.standard_normal((10, 6))
    solution = qprecon.solve(h_NN, w_NK, mask_NK, backend, rhs=rhs_NK)
    truth = Truth(Case("large weights", h_NN, w_NK, mask_NK, rhs_NK), 0.0, "float64")
    value = truth.value(solution.weights)
    assert np.isfinite(solution.gap_bound).all()
    for j in range(6):
        assert solution.gap_bound[j] >= truth.gap(value, j)


@pytest.mark.parametrize("backend", UNBOUNDED)
@pytest.mark.parametrize("rhs", [False, True])
def test_what_cannot_be_told_from_the_start_is_the_start(backend: str, rhs: bool) -> None:
    """At the optimum already: the weights come back bit for bit, and nothing has fallen back."""
    rng = np.random.default_rng(0)
    x_TN = rng.standard_normal((200, 20))
    h_NN, mask_NK = x_TN.T @ x_TN, rng.random((20, 6)) < 0.5
    w_NK = np.where(mask_NK, rng.standard_normal((20, 6)), 0.0)
    given = {"rhs": h_NN @ w_NK} if rhs else {}
    solution = qprecon.solve(h_NN, w_NK, mask_NK, backend, damping=0.01, **given)
    np.testing.assert_array_equal(solution.weights, w_NK)
    assert not solution.fell_back.any()
    assert (solution.objective == solution.baseline_objective).all()


def test_small_gains_count_where_they_are_known() -> None:
    """A gain of a billionth of f is taken in float64, and left alone where H is known to float32 only."""
    rng = np.random.default_rng(0)
    x_TN = rng.standard_normal((200, 20)).astype(np.float32)
    h_NN, mask_NK = x_TN.T @ x_TN, np.ones((20, 4), dtype=bool)
    mask_NK[0] = False
    w_NK = rng.standard_normal((20, 4))
    optimum_NK = qprecon.solve(h_NN, w_NK, mask_NK, "cholesky", tol=1e-12).weights
    near_NK = optimum_NK + 3e-7 * mask_NK * rng.standard_normal((20, 4))
    shifted_NK = np.where(mask_NK, near_NK, w_NK)  # the masked weights of this problem are near its optimum for a suitable rhs
    rhs_NK = h_NN.astype(np.float64) @ np.where(mask_NK, optimum_NK, 0.0)
    wide = np.nextafter(h_NN.astype(np.float64), np.inf)  # as good as H, and no longer a widened float32
    wide = 0.5 * (wide + wide.T)
    taken = qprecon.solve(wide, shifted_NK, mask_NK, "cholesky", rhs=rhs_NK, tol=1e-12)
    left = qprecon.solve(h_NN, shifted_NK, mask_NK, "cholesky", rhs=rhs_NK, tol=1e-12, dtype="float64")
    assert (taken.weights != np.where(mask_NK, shifted_NK, 0.0)).any(0).all()
    np.testing.assert_array_equal(left.weights, np.where(mask_NK, shifted_NK, 0.0))


def test_exact_values_are_exact() -> None:
    """The referee: quadratic_gain against numpy on a well-conditioned case, and None for a negative direction."""
    rng = np.random.default_rng(0)
    x_TN, r_N = rng.standard_normal((30, 9)), rng.standard_normal(9)
    a_NN = x_TN.T @ x_TN
    assert float(quadratic_gain(Exact.of(a_NN), Exact.of(r_N))) == pytest.approx(r_N @ np.linalg.solve(a_NN, r_N), rel=1e-10)
    assert quadratic_gain(Exact.of(indefinite_behind(1e14)), Exact.of(np.zeros(4))) is None
    assert quadratic_gain(Exact.of(np.ones((3, 3))), Exact.of(np.ones(3))) == 1
    assert quadratic_gain(Exact.of(np.ones((3, 3))), Exact.of(np.arange(3.0))) is None


def half_precision_gram(n: int = 128) -> torch.Tensor:
    """A Gram matrix stored in bfloat16: dozens of its eigenvalues are negative."""
    x_TN = np.random.default_rng(0).standard_normal((2 * n, n)).astype(np.float32)
    x_TN += 3.0 * x_TN[:, :1]
    return torch.from_numpy(x_TN.T @ x_TN).to(torch.bfloat16)


def barely_indefinite(n: int = 24) -> np.ndarray:
    """A Gram matrix with the smallest eigenvalue moved to −0.5."""
    x_TN = np.random.default_rng(0).standard_normal((2 * n, n))
    values_N, vectors_NN = np.linalg.eigh(x_TN.T @ x_TN / (2 * n))
    values_N[0] = -0.5
    h_NN = (vectors_NN * values_N) @ vectors_NN.T
    return 0.5 * (h_NN + h_NN.T)


@pytest.mark.parametrize("h", [half_precision_gram(), barely_indefinite(), torch.from_numpy(barely_indefinite())])
@pytest.mark.parametrize("backend", ["auto", "cholesky", "admm"])
def test_an_h_that_only_damping_makes_definite(h: Any, backend: str) -> None:
    """Accepted and certified, and the solution says so; without damping it is refused."""
    n = len(h)
    rng = np.random.default_rng(1)
    w_NK, mask_NK = rng.standard_normal((n, 3)), rng.random((n, 3)) < 0.5
    solution = qprecon.solve(h, w_NK, mask_NK, backend, damping=0.6)
    assert solution.optimal.all()
    assert len(solution.notices) == 1 and "positive semidefinite" in solution.notices[0]
    assert solution.notices[0] in solution.summary()
    assert qprecon.prepare(h, damping=0.6).notices == solution.notices
    with pytest.raises(ValueError, match="^H is clearly indefinite"):
        qprecon.solve(h, w_NK, mask_NK, backend)


@pytest.mark.parametrize("shape", [(16, 64), (64, 64), (500, 64)])
@pytest.mark.parametrize("large", [1.0, 1e3])
@pytest.mark.parametrize("dead", [False, True])
def test_no_notice_of_a_gram_matrix(shape: tuple[int, int], large: float, dead: bool) -> None:
    """Neither of float32 sums of few tokens, nor of large or silent channels, in any units."""
    x_TN = tokens(shape, large)
    x_TN[:, 5] *= not dead
    for scale in (1.0, 1e-30, 1e25):
        for h in ((x_TN.T @ x_TN) * np.float32(scale), (x_TN.astype(np.float64).T @ x_TN.astype(np.float64)) * scale):
            assert qprecon.prepare(h, damping=0.01).notices == ()
            assert qprecon.prepare(torch.from_numpy(h), damping=0.01).notices == ()
    assert qprecon.prepare(np.zeros((3, 3)), damping=0.01).notices == ("H is zero: all weights cost the same",)
    assert qprecon.prepare(np.array([[0.0, 1.0], [1.0, 5.0]]), damping=1.0).notices != ()


@pytest.mark.parametrize("backend", ["adam", "cholesky", "pcg", "admm"])
def test_numbers_beyond_a_backends_dtype_warn_of_nothing(backend: str) -> None:
    """H of 1e23 and weights of 1e30 in float32: a status, and no RuntimeWarning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w_NK = np.array([[1e30]], dtype=np.float32)
        solution = qprecon.solve(np.array([[1e23]]), w_NK, np.array([[0]]), backend, dtype="float32")
    assert solution.weights[0, 0] == 0.0


@pytest.mark.parametrize("backend", ["cholesky", "pcg", "admm"])
@pytest.mark.parametrize("size", [1e27, 3e29])
def test_factors_beyond_float32_scale_weights_within_it(backend: str, size: float) -> None:
    """A small channel beside one of 1e35 and weights of 1e30: the factors that scale them are beyond float32.

    The answer is found where float32 holds it (-7.8e37), and is the masked weights, without a warning, where it does not (-7.8e39).
    """
    h_NN = np.array([[2.0927313481011144e14, 5.4347686035996833e24], [5.4347686035996833e24, 1.4148485540020524e35]])
    w_NK, mask_NK = np.array([[1e30], [-size]], dtype=np.float32), np.array([[1], [0]])
    optimum = float(w_NK[0, 0]) + h_NN[0, 1] * float(w_NK[1, 0]) / h_NN[0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = qprecon.solve(h_NN, w_NK, mask_NK, backend, dtype="float32")
    if abs(optimum) < np.finfo(np.float32).max:
        assert solution.status[0] is Status.OPTIMAL
        assert solution.weights[0, 0] == pytest.approx(optimum, rel=1e-4)
    else:
        assert solution.status[0] is Status.FELL_BACK
        assert solution.weights[0, 0] == w_NK[0, 0]


def test_an_objective_below_zero_is_shown_as_it_is() -> None:
    """Where H has negative eigenvalues of the size of its rounding, f may be below 0: it was shown as 0, which is further off.

    20 blocks of [[1, -1], [-1, 1 - e]] and a difference of ones: f = -20 e, and no number on the way is rounded.
    """
    e = 2.0**-43
    h_NN = scipy.linalg.block_diag(*20 * [np.array([[1.0, -1.0], [-1.0, 1.0 - e]])])
    ones_NK = np.ones((40, 1))
    audit = qprecon.prepare(h_NN).audit(ones_NK, ones_NK, 0.0 * ones_NK)
    assert audit.objective[0] == -20.0 * e
    assert audit.relative_gap[0] > 1e-4


def notice_of_rounding(solution: qprecon.Solution) -> int:
    """How many columns the notice names, 0 without one."""
    found = [notice for notice in solution.notices if "tokens" in notice]
    assert all(notice in solution.summary() for notice in found)
    return int(found[0].split()[0]) if found else 0


@pytest.mark.parametrize("kind", ["numpy", "torch", "widened"])
@pytest.mark.parametrize("large", [1.0, 1e3])
def test_certified_by_rounding_alone_is_said(kind: str, large: float) -> None:
    """Fewer tokens than kept inputs: where float32 happens to make H definite, every certified column is named, and no other."""
    named = 0
    for seed in range(60):
        x_TN = tokens((30, 32), large, seed)
        h = x_TN.T @ x_TN
        h = torch.from_numpy(h) if kind == "torch" else h.astype(np.float64) if kind == "widened" else h
        w_NK, mask_NK = np.random.default_rng(seed).standard_normal((32, 8)).astype(np.float32), np.ones((32, 8), dtype=bool)
        mask_NK[:1], mask_NK[1:12, 4:] = False, False  # 31 kept inputs, and 20
        solution = qprecon.solve(h, torch.from_numpy(w_NK) if kind == "torch" else w_NK, mask_NK, "cholesky")
        expected = int(solution.optimal[:4].sum())
        assert notice_of_rounding(solution) == expected
        assert solution.optimal[4:].all()
        named += expected
    assert named >= 4


@pytest.mark.parametrize("given", [{"damping": 0.01}, {"damping": 1e-4}, {"count": 200}])
def test_no_notice_where_h_is_known(given: dict[str, Any]) -> None:
    """With damping, or with more tokens than inputs."""
    x_TN = tokens((given.pop("count", 30), 32))
    w_NK, mask_NK = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32), three_of_four(32, 8)
    assert qprecon.solve(x_TN.T @ x_TN, w_NK, mask_NK, **given).notices == ()
