"""pcg in the space of the samples: the answers of a dense solve, few iterations, and safety where the hint is wrong."""

import numpy as np
import pytest

import qprecon
from qprecon.backends._pcg import samples as _samples
from qprecon.status import Status


def layer(samples, n=160, k=12, seed=0, spread=2.0, kept=0.5):
    """A Gram matrix of few samples with inputs of very different sizes and correlated ones, float64."""
    rng = np.random.default_rng(seed)
    x_TN = rng.standard_normal((samples, n)) @ (np.eye(n) + rng.standard_normal((n, n)) / n) * np.logspace(spread, -spread, n)
    w_NK = rng.standard_normal((n, k)) / np.logspace(spread, -spread, n)[:, None]
    mask_NK = rng.random((n, k)) < kept
    return x_TN.T @ x_TN, w_NK, mask_NK


def as_kind(kind, *arrays):
    if kind == "numpy":
        return arrays
    torch = pytest.importorskip("torch")
    return tuple(torch.from_numpy(array) for array in arrays)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype, tol", [("float32", 1e-4), ("float64", 1e-8)])
@pytest.mark.parametrize("samples", [1, 8, 40])
def test_the_answers_are_those_of_a_dense_solve(kind, dtype, tol, samples):
    h_NN, w_NK, mask_NK = layer(samples)
    prepared = qprecon.prepare(*as_kind(kind, h_NN), damping=0.01, samples=samples)
    solution = prepared.solve(*as_kind(kind, w_NK, mask_NK), "pcg", tol=tol, dtype=dtype)
    assert solution.provenance.automatic["preconditioner"] == f"samples, rank {_samples.sketch_width(160, samples)}"
    assert (solution.status == Status.OPTIMAL).all() and not np.asarray(solution.weights)[~mask_NK].any()
    exact = qprecon.solve(h_NN, w_NK, mask_NK, "cholesky", damping=0.01, dtype="float64")
    np.testing.assert_allclose(np.asarray(solution.objective), np.asarray(exact.objective), rtol=2 * tol)


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_iterations_do_not_grow_with_the_condition_number(spread):
    h_NN, w_NK, mask_NK = layer(60, n=600, k=20, spread=spread)
    hinted = qprecon.prepare(h_NN, damping=1e-4, samples=60).solve(w_NK, mask_NK, "pcg", tol=1e-6)
    assert (hinted.status == Status.OPTIMAL).all() and max(hinted.iterations) <= 100
    if spread == 1.0:
        plain = qprecon.prepare(h_NN, damping=1e-4).solve(w_NK, mask_NK, "pcg", tol=1e-6)
        assert max(plain.iterations) > 1.5 * max(hinted.iterations)


def test_a_second_solve_goes_on_from_other_weights():
    h_NN, w_NK, mask_NK = layer(30)
    prepared = qprecon.prepare(h_NN, damping=0.01, samples=30)
    first = prepared.solve(w_NK, mask_NK, "pcg", tol=1e-2)
    rng = np.random.default_rng(5)
    for start_NK in (first.weights, mask_NK * rng.standard_normal(w_NK.shape)):
        second = prepared.solve(w_NK, mask_NK, "pcg", tol=1e-8, dtype="float64", warm_start=start_NK)
        assert (second.status == Status.OPTIMAL).all()


@pytest.mark.parametrize("said", [0, 5, 20])
def test_a_rank_above_what_was_said_costs_time_but_no_accuracy(said):
    h_NN, w_NK, mask_NK = layer(60)
    solution = qprecon.prepare(h_NN, damping=0.01, samples=said).solve(w_NK, mask_NK, "pcg")
    assert (solution.status == Status.OPTIMAL).all()
    assert solution.provenance.automatic["preconditioner"].startswith("dc")


@pytest.mark.parametrize("kept, samples", [(0.2, 30), (0.5, 60), (0.9, 110)])
def test_where_samples_are_no_fewer_than_the_kept_inputs_it_is_the_usual_way(kept, samples):
    h_NN, w_NK, mask_NK = layer(samples, kept=kept)
    solution = qprecon.prepare(h_NN, damping=0.01, samples=samples).solve(w_NK, mask_NK, "pcg")
    assert solution.provenance.automatic["preconditioner"].startswith("dc") and (solution.status == Status.OPTIMAL).all()


def test_odd_columns_and_matrices():
    h_NN, w_NK, mask_NK = layer(20)
    h_NN[3], h_NN[:, 3] = 0, 0  # a dead input
    mask_NK[:, 0], mask_NK[:, 1] = False, True
    w_NK[:, 2] = 0
    prepared = qprecon.prepare(h_NN, damping=0.01, samples=20)
    solution = prepared.solve(w_NK, mask_NK, "pcg")
    exact = prepared.solve(w_NK, mask_NK, "cholesky", dtype="float64")
    assert (solution.status == exact.status).all()
    np.testing.assert_allclose(solution.objective, exact.objective, rtol=2e-4, atol=1e-12)
    nothing = qprecon.prepare(np.zeros((160, 160)), damping=0.01, samples=0).solve(w_NK, mask_NK, "pcg")
    assert not np.asarray(nothing.objective).any()


def test_limits_are_kept():
    h_NN, w_NK, mask_NK = layer(40)
    prepared = qprecon.prepare(h_NN, damping=1e-6, samples=40)
    solution = prepared.solve(w_NK, mask_NK, "pcg", tol=1e-10, dtype="float64", max_iterations=2)
    assert (solution.status == Status.ITERATION_LIMIT).any()


@pytest.mark.parametrize("samples", [-1, 2.5, "many", True])
def test_a_wrong_number_of_samples_is_named(samples):
    with pytest.raises(ValueError, match="samples"):
        qprecon.prepare(np.eye(3), samples=samples)


def test_the_factor_is_that_of_h():
    h_NN, _, _ = layer(30, spread=1.0)
    a_NN = h_NN + 0.1 * np.eye(len(h_NN))
    space = _samples.SampleSpace.of(a_NN, 0.1, 30)
    assert np.linalg.norm(space.factor_Nr @ space.factor_Nr.T - h_NN, 2) <= 1e-12 * np.linalg.norm(h_NN, 2)


def test_f_is_exact_enough_for_one_round_where_h_is_rounded():
    """H in float32 from tokens of very different sizes, λ small beside most of its eigenvalues, a quarter of a real down
    projection's inputs and tokens. What F lacks of H would cost rounds of refinement."""
    rng, n, samples = np.random.default_rng(3), 1216, 256
    x_TN = rng.standard_normal((samples, n)) * np.exp(rng.standard_normal(n)) / np.arange(1.0, samples + 1)[:, None] ** 0.5
    h_NN = (x_TN.T @ x_TN).astype(np.float32)
    ridge = 0.01 * float(np.diag(h_NN).mean())
    a_NN = h_NN + ridge * np.eye(n)
    space = _samples.SampleSpace.of(a_NN.astype(np.float32), ridge, samples)
    assert np.linalg.norm(space.factor_Nr @ space.factor_Nr.T - h_NN, 2) <= 0.2 * ridge
    w_NK = rng.standard_normal((n, 16)).astype(np.float32)
    score_NK = abs(w_NK) * np.diag(h_NN)[:, None] ** 0.5  # Wanda's
    mask_NK = score_NK > np.median(score_NK, 0)
    solution = qprecon.prepare(h_NN, damping=0.01, samples=samples).solve(w_NK, mask_NK, "pcg")
    assert solution.optimal.all() and max(solution.iterations) <= 40
