"""PIQP, Clarabel and Moreau: agreement with independent solutions, bounds, limits, and what they say."""

import numpy as np
import pytest

import qprecon
from tests.small_problems import check_against_cholesky, check_bounds, check_limits, problem

pytestmark = pytest.mark.parametrize("backend", ["piqp", "clarabel", "moreau"])


@pytest.fixture(autouse=True)
def installed(backend):
    pytest.importorskip(backend)


def test_agrees_with_cholesky(backend):
    solution = check_against_cholesky(backend)
    assert set(solution.reported_status[:-1]) == {"solved"}
    assert (solution.iterations[:-1] <= 20).all()
    check_against_cholesky(backend, tol=1e-10)


def test_bounds(backend):
    check_bounds(backend)
    check_bounds(backend, tol=1e-8)


def test_bounds_on_one_side_and_on_some_entries(backend):
    """Against OSQP; infinite bounds are none."""
    pytest.importorskip("osqp")
    h, w, mask = problem()
    lower = np.where(np.arange(24)[:, None] % 3 == 0, -0.01, -np.inf) * np.ones_like(w)
    for bounds in ({"lower": lower}, {"upper": 0.02}, {"lower": lower, "upper": np.inf}, {"lower": 0.0, "upper": 0.0}):
        found, expected = (
            qprecon.solve(h, w, mask, name, damping=0.01, tol=1e-8, **bounds) for name in (backend, "osqp")
        )
        assert found.optimal.all() and expected.optimal.all()
        np.testing.assert_allclose(found.weights, expected.weights, atol=1e-5)


def test_methods_of_moreau(backend):
    if backend == "moreau":
        check_bounds("moreau", method="active_set", tol=1e-8)
        check_against_cholesky("moreau", method="active_set")  # without any bound, the other one
        with pytest.raises(ValueError, match="active_set"):
            qprecon.solve(*problem(), "moreau", method="simplex")


def test_limits_are_told(backend):
    check_limits(backend)
    h, w, mask = problem(decay=2.0)
    solution = qprecon.solve(h, w, mask, backend, damping=0.001, max_iterations=1, lower=-0.01, upper=0.01)
    assert set(solution.reported_status[:-1]) == {"iteration_limit"}
    assert (solution.weights[~mask] == 0).all() and (abs(solution.weights) <= 0.01).all()


def test_empty_columns_and_options(backend):
    h, w, mask = problem()
    mask[:, 0] = False
    solution = qprecon.solve(h, w, mask, backend, damping=0.01)
    assert solution.optimal.all() and (solution.weights[:, 0] == 0).all()
    with pytest.raises(ValueError, match="polishing"):
        qprecon.solve(h, w, mask, backend, polishing=True)
    with pytest.raises(qprecon.UnsupportedError, match="float32"):
        qprecon.solve(h, w, mask, backend, dtype="float32")
