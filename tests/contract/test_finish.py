"""What "auto" does with the columns that its fast backend leaves: a direct method finishes them."""

import numpy as np
import pytest
import torch

import qprecon
from qprecon.backends import admm, cholesky, pcg
from qprecon.contract import RawColumns
from qprecon.engine import solving
from tests.contract.families import real_problem


def _problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(900, 300, generator=generator)
    return x.T @ x, torch.randn(300, 200, generator=generator), torch.rand(300, 200, generator=generator) > 0.5


@pytest.fixture
def lame(monkeypatch):
    """pcg that never moves its first five columns."""
    solve = pcg._solve

    def stuck(multiply, apply, chunk, extras):
        raw = solve(multiply, apply, chunk, extras)
        raw.weights_NK[:, :5] = chunk.start_NK[:, :5]
        return raw

    monkeypatch.setattr(pcg, "_solve", stuck)


@pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.numpy()], ids=["torch", "numpy"])
def test_auto_finishes_what_pcg_leaves(lame, convert):
    h_NN, w_NK, mask_NK = map(convert, _problem())
    w_NK = w_NK + 0  # a copy
    w_NK[0, 7] = float("nan")  # an invalid column shifts the indices
    solution = qprecon.solve(h_NN, w_NK, mask_NK, damping=0.01)
    sound = np.arange(200) != 7
    assert solution.optimal[sound].all()
    assert not solution.optimal[7]
    assert not solution.fell_back.any()
    assert solution.provenance.automatic["finished by"] == "cholesky: 5 columns"
    assert (solution.iterations[:5] > 0).all()  # pcg's, though a direct method takes none
    reference = qprecon.solve(h_NN, w_NK, mask_NK, "cholesky", damping=0.01)
    np.testing.assert_allclose(solution.objective[sound], reference.objective[sound], rtol=1e-4)


def test_a_finish_that_fails_takes_nothing_away(lame, monkeypatch):
    """What was there before it was no fallback: it stays, with its status."""
    broken = lambda system, options: lambda chunk: RawColumns(float("nan") * chunk.start_NK, "solved", 0)  # noqa: E731
    monkeypatch.setattr(cholesky, "prepare", broken)
    solution = qprecon.solve(*_problem(), damping=0.01)
    alone = qprecon.solve(*_problem(), "pcg", damping=0.01)
    assert solution.provenance.automatic["finished by"] == "cholesky: 5 columns"
    assert list(solution.status) == list(alone.status) and solution.optimal.sum() == 195
    assert not solution.fell_back.any() and torch.equal(solution.weights, alone.weights)


def test_a_named_backend_is_left_alone(lame):
    """Whoever asks for pcg gets pcg's answer, and its honest status."""
    solution = qprecon.solve(*_problem(), "pcg", damping=0.01)
    assert (~solution.optimal).sum() == 5
    assert set(solution.status[~solution.optimal]) <= {qprecon.Status.INACCURATE, qprecon.Status.FELL_BACK}


def _bounded(dtype):
    """A problem on which ADMM, which stops after three iterations here, certifies next to nothing."""
    h_NN, w_NK, mask_NK = _problem()
    limit = 1.5 * float(w_NK.abs().mean())
    return {
        "H": h_NN[:60, :60].to(dtype), "W": w_NK[:60, :30].to(dtype), "mask": mask_NK[:60, :30], "lower": -limit, "upper": limit,
        "damping": 0.01,
    }  # fmt: skip


@pytest.fixture
def short(monkeypatch):
    """ADMM with a limit of its own that it runs into."""
    monkeypatch.setattr(admm, "_ITERATION_LIMIT", 3)
    monkeypatch.setattr(solving, "_patience", lambda task, limits, last: limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("convert", [lambda x: x, lambda x: np.asarray(x) if torch.is_tensor(x) else x], ids=["torch", "numpy"])
@pytest.mark.parametrize("finisher", ["piqp", "clarabel"])
def test_auto_finishes_what_admm_leaves_with_an_interior_point_method(short, monkeypatch, finisher, convert, dtype):
    pytest.importorskip(finisher)
    monkeypatch.setattr(solving, "_WITH_BOUNDS", (finisher,))
    problem = {name: convert(value) for name, value in _bounded(dtype).items()}
    solution = qprecon.solve(**problem, tol=1e-6)
    assert solution.optimal.all()
    said = solution.provenance.automatic["finished by"]
    assert said.startswith(finisher) and int(said.split()[1]) > 10
    weights_NK, mask_NK = np.asarray(solution.weights), np.asarray(problem["mask"])
    assert weights_NK.dtype == np.asarray(problem["W"]).dtype  # what was certified is what is returned
    assert not weights_NK[~mask_NK].any() and (abs(weights_NK.astype(np.float64)) <= problem["upper"]).all()
    reference = qprecon.solve(**{name: convert(value) for name, value in _bounded(torch.float64).items()}, backend="osqp", tol=1e-9)
    np.testing.assert_allclose(solution.objective, reference.objective, rtol=3e-6)


def test_with_bounds_nobody_finishes_where_the_caller_set_the_limit_or_nothing_is_installed(short, monkeypatch):
    pytest.importorskip("piqp")
    limited = qprecon.solve(**_bounded(torch.float64), tol=1e-6, max_iterations=3)
    assert "finished by" not in limited.provenance.automatic and (limited.status == qprecon.Status.ITERATION_LIMIT).any()
    monkeypatch.setattr(solving, "_WITH_BOUNDS", ())
    assert not qprecon.solve(**_bounded(torch.float64), tol=1e-6).optimal.all()


def test_with_bounds_a_large_rest_is_left(short, monkeypatch):
    """An interior-point method factors each column's block in every iteration."""
    monkeypatch.setattr(solving, "_INTERIOR_WORK", 1e5)
    assert "finished by" not in qprecon.solve(**_bounded(torch.float64), tol=1e-6).provenance.automatic


def _hard():
    """A real layer on which ADMM takes thousands of iterations, float32."""
    arguments = real_problem("smollm2_0_o_proj", columns=24).arguments("float32")
    limit = 2.0 * float(abs(arguments["W"]).mean())
    return arguments | {"lower": -limit, "upper": limit}


def test_admm_is_given_no_more_than_the_other_would_take():
    pytest.importorskip("piqp")
    solution = qprecon.solve(**_hard(), tol=1e-6)
    assert solution.optimal.all() and solution.provenance.automatic["finished by"].startswith("piqp")
    assert max(solution.iterations) < 576


def test_where_the_other_fails_admm_goes_on(monkeypatch):
    piqp = pytest.importorskip("qprecon.backends.piqp")
    monkeypatch.setattr(piqp, "_solve", lambda given: (None, "numerical trouble", 1))
    solution = qprecon.solve(**_hard(), tol=1e-4)
    assert solution.optimal.all() and max(solution.iterations) > 576


def test_a_named_admm_is_left_alone(short):
    assert not qprecon.solve(**_bounded(torch.float64), backend="admm", tol=1e-6).optimal.all()


@pytest.mark.parametrize("seed", [0, 30, 31, 39, 46, 47])
def test_a_finish_counts_where_values_cannot_be_told_apart(seed):
    """Its certificates are sharper than pcg's, and both objectives are equal to within their rounding."""
    rng, n, k = np.random.default_rng(seed), 64, 16
    x = rng.standard_normal((500, n)) @ rng.standard_normal((n, n))
    h, w, mask = x.T @ x, rng.standard_normal((n, k)), rng.random((n, k)) < 0.5
    for tol in (1e-8, 1e-10):
        assert qprecon.solve(h, w, mask, tol=tol).optimal.all()


def test_a_warm_start_whose_certificate_is_too_weak_gives_way():
    """However near its value is to the optimum's."""
    rng, n, k = np.random.default_rng(0), 64, 16
    x = rng.standard_normal((500, n)) @ rng.standard_normal((n, n))
    h, w, mask = x.T @ x, rng.standard_normal((n, k)), rng.random((n, k)) < 0.5
    best = qprecon.solve(h, w, mask, "cholesky")
    for size in 10.0 ** -np.arange(3, 10):
        warm = best.weights * (1 + size * rng.standard_normal((n, k)))
        gap = qprecon.prepare(h).audit(w, mask, warm).relative_gap
        solution = qprecon.solve(h, w, mask, "cholesky", warm_start=warm, tol=max(gap.max() / 10, 1e-15))
        assert solution.optimal.all() and (solution.relative_gap <= gap * (1 + 1e-9)).all()


@pytest.mark.parametrize("backend", ["pcg", "admm"])
@pytest.mark.parametrize("damping", [0.0, 0.01])
@pytest.mark.parametrize("more", [{}, {"rhs": True}, {"batch_size": 50}])
def test_a_warm_start_far_nearer_than_tol_costs_no_iteration(backend, damping, more):
    """With inputs of sizes up to 10^4. Columns that start elsewhere are solved beside it."""
    rng, n, k = np.random.default_rng(0), 512, 64
    x_TN = rng.standard_normal((4 * n, n)) * 10 ** rng.uniform(0, 4, n)
    w_NK, mask_NK, h_NN = rng.standard_normal((n, k)), rng.random((n, k)) < 0.5, x_TN.T @ x_TN
    if "rhs" in more:
        more = {"rhs": h_NN @ rng.standard_normal((n, k))}
    prepared = qprecon.prepare(h_NN, damping=damping)
    warm_NK = prepared.solve(w_NK, mask_NK, "cholesky", **more).weights * (1 + 1e-9 * rng.standard_normal((n, k)))
    far_K = np.arange(k) % 5 == 0
    warm_NK[:, far_K] *= 1.1
    solution = prepared.solve(w_NK, mask_NK, backend, warm_start=warm_NK, **more)
    assert solution.optimal.all() and ((solution.iterations > 0) == far_K).all()
    np.testing.assert_array_equal(solution.weights[:, ~far_K], warm_NK[:, ~far_K])
    known = prepared.audit(w_NK, mask_NK, warm_NK, **{name: value for name, value in more.items() if name == "rhs"})
    np.testing.assert_allclose(solution.gap_bound[~far_K], known.gap_bound[~far_K], rtol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "pcg", "cholesky", "admm"])
def test_w_as_near_as_the_dtype_holds_it_is_optimal_where_nothing_is_pruned(backend):
    """Of a W with more digits than the weights: there is nothing to solve. Other columns are as they were."""
    rng = np.random.default_rng(0)
    x_TN, w_NK = rng.standard_normal((400, 160)), rng.standard_normal((160, 30))
    mask_NK = rng.random((160, 30)) < 0.5
    plain = qprecon.solve(x_TN.T @ x_TN, w_NK, mask_NK, backend, damping=0.01, dtype="float32", batch_size=7)
    mask_NK[:, [3, 20]] = True
    solution = qprecon.solve(x_TN.T @ x_TN, w_NK, mask_NK, backend, damping=0.01, dtype="float32", batch_size=7)
    whole_K = mask_NK.all(0)
    assert solution.optimal.all() and (solution.iterations[whole_K] == 0).all() and (solution.relative_gap[whole_K] == 0).all()
    np.testing.assert_array_equal(solution.weights[:, whole_K], w_NK[:, whole_K].astype(np.float32))
    assert (solution.gap_bound[whole_K] >= solution.objective[whole_K]).all() and (solution.objective[whole_K] > 0).all()
    np.testing.assert_allclose(solution.objective[~whole_K], plain.objective[~whole_K], rtol=1e-4)
    far_NK = w_NK * np.where(whole_K, 1e170, 1.0)  # no square of it is a number: nothing is said to be optimal
    assert not qprecon.solve(x_TN.T @ x_TN, far_NK, mask_NK, "cholesky", damping=0.01, dtype="float32").optimal[whole_K].any()
