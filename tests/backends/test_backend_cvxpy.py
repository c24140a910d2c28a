import pytest

import qprecon
from tests.small_problems import check_against_cholesky, check_bounds, check_limits, problem

cvxpy = pytest.importorskip("cvxpy")


@pytest.mark.parametrize("form", ["box", "reduced"])
def test_agrees_with_cholesky(form):
    solution = check_against_cholesky("cvxpy", form=form)
    assert set(solution.reported_status[:-1]) == {"optimal"}
    assert solution.provenance.automatic["solver"] in cvxpy.installed_solvers()


@pytest.mark.parametrize("form", ["box", "reduced"])
def test_bounds(form):
    check_bounds("cvxpy", form=form)


@pytest.mark.parametrize("solver", ["CLARABEL", "OSQP", "SCS"])
def test_named_solver(solver):
    if solver not in cvxpy.installed_solvers():
        pytest.skip(f"{solver} is not installed")
    solution = check_against_cholesky("cvxpy", solver=solver.lower())
    assert solution.provenance.automatic["solver"] == solver


def test_tolerance_reaches_the_solver():
    h, w, mask = problem(decay=2.0)
    bounds = {"lower": -0.04, "upper": 0.03, "damping": 0.001}
    solution = qprecon.solve(h, w, mask, backend="cvxpy", tol=1e-8, **bounds)
    assert (solution.status == qprecon.Status.OPTIMAL).all(), solution.relative_gap


def test_limits_are_told():
    check_limits("cvxpy")
    check_limits("cvxpy", solver="SCS", form="reduced")


def test_refusals():
    h, w, mask = problem()
    with pytest.raises(ValueError, match="solver"):
        qprecon.solve(h, w, mask, backend="cvxpy", solvr="OSQP")
    with pytest.raises(ValueError, match="form"):
        qprecon.solve(h, w, mask, backend="cvxpy", form="dual")
    with pytest.raises(ValueError, match="no solver 'NONE'"):
        qprecon.solve(h, w, mask, backend="cvxpy", solver="NONE")
