import numpy as np
import pytest

import qprecon
from tests.small_problems import check_against_cholesky, check_bounds, check_limits, problem

pytest.importorskip("osqp")


def test_agrees_with_cholesky():
    solution = check_against_cholesky("osqp")
    assert (solution.relative_gap < 1e-8).all()  # polishing
    assert set(solution.reported_status[:-1]) == {"solved"}
    assert (solution.iterations[:-1] <= 200).all()


def test_agrees_without_polishing():
    check_against_cholesky("osqp", polishing=False)


def test_bounds():
    check_bounds("osqp")


@pytest.mark.parametrize("bound", [np.inf, 1e6])
@pytest.mark.parametrize("pruned", [0, 1])
def test_nothing_is_printed(bound, pruned, capfd):
    """OSQP prints where it finds no active constraint to polish with: nothing is pruned, and no bound holds."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 5))
    h, w, mask = x.T @ x, rng.standard_normal((5, 4)), np.ones((5, 4), dtype=bool)
    mask[:pruned, 0] = False
    rhs = h @ rng.standard_normal((5, 4))
    solution = qprecon.solve(h, w, mask, backend="osqp", rhs=rhs, lower=-bound, upper=bound, tol=1e-6)
    np.testing.assert_allclose(solution.weights[:, 1:], np.linalg.solve(h, rhs)[:, 1:], rtol=1e-3)
    assert (solution.relative_gap <= 1e-6).all() and capfd.readouterr() == ("", "")


def test_workers_change_nothing():
    h, w, mask = problem(k=9)
    one, three = (qprecon.solve(h, w, mask, backend="osqp", damping=0.01, workers=workers) for workers in (1, 3))
    assert np.array_equal(one.weights, three.weights)


def test_limits_are_told():
    check_limits("osqp")
    h, w, mask = problem(decay=2.0)
    solution = qprecon.solve(h, w, mask, backend="osqp", damping=0.001, max_iterations=1)
    assert set(solution.reported_status[:-1]) == {"iteration_limit"}


def test_refusals():
    h, w, mask = problem()
    with pytest.raises(ValueError, match="workers"):
        qprecon.solve(h, w, mask, backend="osqp", wokers=2)
    with pytest.raises(ValueError, match="workers"):
        qprecon.solve(h, w, mask, backend="osqp", workers=0)
    with pytest.raises(qprecon.UnsupportedError, match="float32.*mpax"):
        qprecon.solve(h, w, mask, backend="osqp", dtype="float32")
