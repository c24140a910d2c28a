import numpy as np
import pytest

import qprecon
from tests.small_problems import check_against_cholesky, check_bounds, check_limits, problem


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_agrees_with_cholesky(dtype):
    solution = check_against_cholesky("admm", dtype=dtype)
    assert set(solution.reported_status[:-1]) == {"solved"}
    assert (solution.iterations[:-1] <= 100).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bounds(dtype):
    check_bounds("admm", dtype=dtype)


@pytest.mark.parametrize("tol", [1e-2, 1e-6, 1e-8])
def test_tolerances(tol):
    check_against_cholesky("admm", tol=tol)


@pytest.mark.parametrize("rho", [1e-3, 0.1, 50.0])
def test_any_first_penalty_is_balanced(rho):
    h, w, mask = problem(n=64, k=8, decay=2.0)
    solution = qprecon.solve(h, w, mask, backend="admm", damping=0.01, rho=rho)
    assert (solution.status == qprecon.Status.OPTIMAL).all()
    assert solution.iterations.max() <= 400
    assert 1e-3 < solution.provenance.automatic["rho"] < 10.0


def test_torch_agrees_with_numpy():
    torch = pytest.importorskip("torch")
    h, w, mask = problem(k=12)
    ours = qprecon.solve(h, w, mask, backend="admm", damping=0.01, batch_size=5)
    theirs = qprecon.solve(*(torch.as_tensor(x) for x in (h, w, mask)), backend="admm", damping=0.01, batch_size=5)
    assert isinstance(theirs.weights, torch.Tensor)
    assert np.allclose(ours.weights, theirs.weights.numpy(), atol=1e-9)


def test_columns_that_finish_early_are_left_alone():
    h, w, mask = problem(n=64, k=8, decay=3.0)
    mask[1:, 0] = False  # an easy column beside harder ones
    solution = qprecon.solve(h, w, mask, backend="admm", damping=0.001)
    assert (solution.status == qprecon.Status.OPTIMAL).all()
    assert solution.iterations[0] <= solution.iterations.max()


def test_float32_gives_up_where_rounding_rules():
    h, w, mask = problem(n=64, k=4, decay=3.0)
    solution = qprecon.solve(h, w, mask, backend="admm", dtype="float32")
    assert solution.iterations.max() < 6 * 5000  # far from six rounds at the limit


def test_limits_are_told():
    check_limits("admm")


def test_refusals():
    h, w, mask = problem()
    with pytest.raises(ValueError, match="relaxation"):
        qprecon.solve(h, w, mask, backend="admm", relaxatoin=1.5)
    for options in ({"rho": 0.0}, {"relaxation": 2.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            qprecon.solve(h, w, mask, backend="admm", **options)
