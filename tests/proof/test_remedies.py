"""What is said of columns that are not certified: why, where the problem tells, and nothing that is so already."""

import re

import numpy as np
import pytest

import qprecon
from qprecon import Status
from qprecon.problem.scaling import layer_scaling
from qprecon.proof.notices import fitted_to_rounding
from qprecon.proof.remedies import Circumstances, advice

RNG = np.random.default_rng(0)
X = RNG.standard_normal((50, 6))
H, W = X.T @ X, RNG.standard_normal((6, 4))
MASK = RNG.random((6, 4)) < 0.6
ONE = np.ones((3, 1))


def problem(damping=0.0, dtype="float64", **more):
    return qprecon.prepare(H.astype(dtype), damping=damping).problem(W, MASK, **more)


@pytest.mark.parametrize("damping", [0.0, 0.01])
@pytest.mark.parametrize(("backend", "more"), [("cholesky", {}), ("pcg", {}), ("admm", {}), ("pcg", {"max_iterations": 1})])
@pytest.mark.parametrize(("h", "w", "way"), [(1, 1e-200, "up"), (1e-300, 1, "up"), (1, 1e200, "down"), (1e300, 1e20, "down")])
def test_where_squares_leave_the_range_it_is_said_to_scale(h, w, way, backend, more, damping):
    solution = qprecon.solve(H * h, W * w, MASK, backend, damping=damping, **more)
    assert not solution.optimal.any()
    said = r"4 \w+: the squares that a certificate is made of leave float64's range: scale W or H " + way
    assert re.search(f"^{said}$", summary := solution.summary(), re.MULTILINE), summary
    assert "dtype=" not in summary and "damping" not in summary and "raise" not in summary and "nan" not in summary


@pytest.mark.parametrize(("h", "w", "said"), [(1, 1e-200, "or H up"), (1e-305, 1, "or H up"), (1, 1e200, "too large")])
def test_an_audit_says_so_too(h, w, said):
    """Of other columns' it says nothing."""
    units_K = np.where(np.arange(W.shape[1]) == 1, w, 1.0 if h == 1 else 1e160)
    audit = qprecon.prepare(H * h, damping=0.01).audit(W * units_K, MASK, W * MASK * units_K)
    assert np.isinf(audit.gap_bound).tolist() == (units_K == w).tolist()
    found = [line for line in audit.summary().splitlines() if said in line]
    assert len(found) == 1 and found[0].startswith("1 column ") and not audit.summary().endswith("without any certificate")


def test_with_an_rhs_it_is_scaled_too():
    solution = qprecon.solve(H, 0 * W, MASK, rhs=1e-200 * W)
    assert solution.optimal.all() or "scale W, or H, and rhs with it, up" in solution.summary()
    assert "scale W, or H, and rhs with it, down" in qprecon.solve(H, W, MASK, rhs=1e200 * W).summary()


@pytest.mark.parametrize("backend", ["auto", "cholesky", "pcg", "admm"])
def test_an_rhs_that_pulls_at_a_dead_input_is_named(backend):
    """There is no minimum, but one with damping, with a bound on that side, where the input is pruned or where rhs is zero."""
    h_NN, mask = np.diag([0.0, 1, 1]), np.array([[1], [1], [0]], bool)
    said = r"1 \w+: f has no minimum, as rhs lies outside H's range: it is not 0 at a kept input whose row of H is zero"
    solve = lambda **more: qprecon.solve(h_NN, ONE, mask, backend, **{"rhs": ONE, **more})  # noqa: E731
    solution = solve()
    assert not solution.optimal.any() and re.search(said, str(solution)), str(solution)
    assert solve(damping=0.01).optimal.all() and solve(rhs=np.array([[0.0], [1], [1]])).optimal.all()
    assert qprecon.solve(h_NN, ONE, ~mask, backend, rhs=ONE).optimal.all()


def test_bounds_on_the_side_that_an_rhs_pulls_to_make_a_minimum():
    h_NN, mask, lost = np.diag([0.0, 1]), np.ones((2, 2), bool), np.array([np.inf, np.inf])
    for bounds, unbounded in (({"upper": 2.0}, 1), ({"lower": -2.0}, 1), ({"lower": -2.0, "upper": 2.0}, 0), ({}, 2)):
        made = qprecon.prepare(h_NN).problem(np.ones((2, 2)), mask, rhs=np.array([[1.0, -1], [1, 1]]), **bounds)
        status_K = np.array([Status.INACCURATE] * 2, dtype=object)
        lines = advice(Circumstances("piqp", "float64", made), status_K, lost)
        assert sum(int(line[0]) for line in lines if "has no minimum" in line) == unbounded


@pytest.mark.parametrize(
    ("status", "backend", "dtype", "more", "gap", "said"),
    [
        ("INACCURATE", "pcg", "float32", {}, 0.1, "use dtype='float64', a larger tol, backend='cholesky' or damping, e.g. 0.01"),
        ("INACCURATE", "pcg", "float64", {}, 0.1, "use a larger tol, backend='cholesky' or damping, e.g. 0.01"),
        ("INACCURATE", "pcg", "float64", {"damping": 0.01}, 2.0, "use backend='cholesky' or more damping"),
        ("INACCURATE", "cholesky", "float64", {"damping": 0.01}, 2.0, "use more damping"),
        ("INACCURATE", "admm", "float64", {"lower": 0.0}, 0.1, "use a larger tol, backend='piqp' or damping, e.g. 0.01"),
        ("INACCURATE", "piqp", "float64", {"lower": 0.0}, 0.1, "use a larger tol or damping, e.g. 0.01"),
        ("FELL_BACK", "pcg", "float32", {}, 0.1, "use dtype='float64', backend='cholesky' or damping, e.g. 0.01"),
        ("FELL_BACK", "cholesky", "float64", {"damping": 0.01}, 0.1, "use another backend or more damping"),
        (
            "FELL_BACK", "cholesky", "float64", {"dtype": "float32"}, 0.1,
            "use another backend, an H that was summed in float64 (qprecon.gram) or damping, e.g. 0.01",
        ),
        ("UNCERTIFIED", "cholesky", "float64", {}, 2.0, "add damping, e.g. 0.01"),
        ("UNCERTIFIED", "cholesky", "float64", {"damping": 1e-15}, 2.0, "add more damping, e.g. 0.01"),
        ("ITERATION_LIMIT", "pcg", "float64", {}, 2.0, "raise max_iterations"),
        ("INVALID_INPUT", "pcg", "float64", {}, np.inf, "repair the input"),
    ],
)
def test_nothing_is_advised_that_is_so_already(status, backend, dtype, more, gap, said):
    member = Status[status]
    status_K = np.array([Status.OPTIMAL, member, member, Status.OPTIMAL], dtype=object)
    (line,) = advice(Circumstances(backend, dtype, problem(**more)), status_K, np.array([0.0, gap, gap, 0.0]))
    assert line == f"2 {status}: {member.value.split(': ')[0]}: {said}"


def test_of_a_solution_without_its_problem_what_is_known_is_said():
    lines = advice(Circumstances("pcg", "float64"), np.array([Status.INACCURATE], dtype=object), np.array([np.inf]))
    assert lines[0].endswith(": use backend='cholesky' or damping, e.g. 0.01")


def test_an_indefinite_h_that_no_usual_damping_outweighs_is_not_told_to_take_one():
    for damping in (0.0, 0.01, 0.5):
        with pytest.raises(ValueError, match="clearly indefinite.*accumulate XᵀX in float32 or better$"):
            qprecon.solve(np.array([[1.0, 2], [2, 1]]), np.ones((2, 1)), np.ones((2, 1)), damping=damping)


def test_weights_that_follow_the_rounding_of_h_ask_for_more_than_there_is():
    """20 tokens for some 24 kept inputs, and a damping below what float32 sums are known to."""
    rng = np.random.default_rng(0)
    x_TN = rng.standard_normal((20, 32)).astype(np.float32)
    weights, mask = rng.standard_normal((32, 4)).astype(np.float32), rng.random((32, 4)) < 0.75
    solution = qprecon.solve(x_TN.T @ x_TN, weights, mask, "cholesky", damping=1e-7, tol=0.5, dtype="float64")
    assert solution.notices[0].endswith("The certificates hold for H as given: add more damping, e.g. 0.01, or tokens")


def test_of_the_usual_damping_more_is_asked_for_without_naming_it():
    """Two inputs are the same and so far above 3000 others that 0.01 of the mean is below what their sums are known to."""
    h_NN = np.eye(3000, dtype=np.float32)
    h_NN[:2, :2] = 1e5
    mask = np.arange(3000)[:, None] < 2
    (said,) = fitted_to_rounding(qprecon.prepare(h_NN, damping=0.01).problem(np.ones((3000, 1)), mask), np.array([0]))
    assert said.endswith("The certificates hold for H as given: add more damping, or tokens")


def test_an_h_beyond_float64_is_not_told_to_take_float64():
    with pytest.raises(ValueError, match="too large for float32.* or use dtype='float64'$"):
        layer_scaling("none", qprecon.prepare(1e39 * np.eye(2)).hessian, "float32")
    with pytest.raises(ValueError, match="too large for float64.*scale it down$"):
        layer_scaling("none", qprecon.prepare(np.diag([np.finfo(float).max, 1.0])).hessian, "float64")
