"""Multipliers of the mask and the bounds: OSQP's and cvxpy's own, optimality conditions, what f gains when one gives way."""

import dataclasses

import numpy as np
import pytest
import torch

import qprecon


def problem(rhs=False, bounds=True, n=14, k=5, seed=0):
    rng = np.random.default_rng(seed)
    x_TN = rng.standard_normal((60, n))
    given = {"H": x_TN.T @ x_TN, "W": rng.standard_normal((n, k)), "mask": rng.random((n, k)) < 0.7, "damping": 0.05}
    if rhs:
        given["rhs"] = given["H"] @ (given["W"] + 0.5 * rng.standard_normal((n, k)))
    if bounds:
        given |= {"lower": -0.6 * np.ones((n, k)), "upper": rng.random((n, k))}
    return given


def solved(given, **more):
    bounded = "lower" in given or "upper" in given
    return qprecon.solve(**given, backend="osqp" if bounded else "cholesky", tol=1e-10, dtype="float64", **more)


def box(given):
    """The paper's constrained form: ΔᵀQΔ + cᵀΔ, lower ≤ Δ ≤ upper."""
    names = {"H": "hessian_NN", "W": "weights_NK", "mask": "mask_NK", "rhs": "rhs_NK", "lower": "lower_NK", "upper": "upper_NK"}
    return qprecon.box_form(qprecon.ColumnQP(**{names.get(name, name): value for name, value in given.items()}))


def osqps(form, j):
    import osqp
    import scipy.sparse as sparse

    solver, n = osqp.OSQP(), len(form.quadratic_NN)
    solver.setup(
        sparse.csc_matrix(np.triu(2.0 * form.quadratic_NN)), form.linear_NK[:, j], sparse.eye(n, format="csc"),
        form.lower_NK[:, j], form.upper_NK[:, j], eps_abs=1e-11, eps_rel=1e-11, max_iter=100_000, polishing=True, verbose=False,
    )  # fmt: skip
    return solver.solve().y


def cvxpys(form, j):
    """cvxpy has a multiplier ≥ 0 for each inequality: the upper one's less the lower one's."""
    import cvxpy

    x = cvxpy.Variable(len(form.quadratic_NN))
    lower, upper, fixed = form.lower_NK[:, j], form.upper_NK[:, j], form.lower_NK[:, j] == form.upper_NK[:, j]
    below, above, equal = np.isfinite(lower) & ~fixed, np.isfinite(upper) & ~fixed, fixed
    limits = [x[equal] == lower[equal], x[below] >= lower[below], x[above] <= upper[above]]
    objective = cvxpy.quad_form(x, cvxpy.psd_wrap(form.quadratic_NN)) + form.linear_NK[:, j] @ x
    cvxpy.Problem(cvxpy.Minimize(objective), limits).solve(
        solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12
    )
    y = np.zeros(len(lower))
    for where, sign, limit in ((equal, 1.0, limits[0]), (below, -1.0, limits[1]), (above, 1.0, limits[2])):
        y[where] += sign * (limit.dual_value if limit.dual_value is not None else 0.0)
    return y


@pytest.mark.parametrize("rhs", [False, True])
@pytest.mark.parametrize("bounds", [False, True])
@pytest.mark.parametrize(("module", "reference"), [("osqp", osqps), ("cvxpy", cvxpys)])
def test_they_are_those_of_other_solvers(module, reference, rhs, bounds):
    pytest.importorskip(module)
    given = problem(rhs, bounds)
    solution, form = solved(given), box(given)
    assert solution.optimal.all()
    for j in range(5):
        expected = reference(form, j)
        np.testing.assert_allclose(solution.duals[:, j], expected, atol=2e-5 * abs(expected).max())


@pytest.mark.parametrize("rhs", [False, True])
def test_optimality_conditions(rhs):
    given = problem(rhs)
    solution = solved(given)
    y_NK, w_NK, mask_NK = solution.duals, solution.weights, given["mask"]
    at_upper, at_lower = abs(w_NK - given["upper"]) < 1e-9, abs(w_NK - given["lower"]) < 1e-9
    gradient_NK = -2.0 * solution.residual
    scale = abs(gradient_NK).max()
    assert abs(gradient_NK + y_NK).max() < 1e-4 * scale
    assert (y_NK[mask_NK & ~at_upper & ~at_lower] == 0.0).all()
    assert (y_NK[mask_NK & at_upper] >= 0.0).all() and (y_NK[mask_NK & at_lower] <= 0.0).all()
    assert (y_NK[mask_NK & at_upper] > 0.0).any() and (y_NK[mask_NK & at_lower] < 0.0).any()
    assert (y_NK[~mask_NK] > 0.0).any() and (y_NK[~mask_NK] < 0.0).any()


def test_what_f_gains_when_a_constraint_gives_way():
    """f* changes by −y for each unit by which the value that a weight is held at is raised."""
    given, step = problem(), 1e-4
    solution = solved(given)
    held = np.argwhere(abs(solution.duals) > 0.1 * abs(solution.duals).max())
    assert len(held) > 5
    for i, j in held[:12]:
        moved = [dict(given) for _ in range(2)]
        for one, sign in zip(moved, (1.0, -1.0), strict=True):
            value = (solution.weights[i, j] if given["mask"][i, j] else 0.0) + sign * step
            for name in ("lower", "upper"):
                one[name] = given[name].copy()
                one[name][i, j] = value
            one["mask"] = given["mask"].copy()
            one["mask"][i, j] = True
        up, down = (solved(one).objective[j] for one in moved)
        assert (up - down) / (2 * step) == pytest.approx(-solution.duals[i, j], rel=1e-3)


def test_fixed_by_equal_bounds():
    """A weight that both bounds hold at one value has a multiplier of either sign."""
    given = problem()
    given["lower"][:3] = given["upper"][:3] = 0.2
    given["mask"][:3] = True
    solution = solved(given)
    np.testing.assert_allclose(solution.duals[:3], 2.0 * solution.residual[:3])
    assert (solution.duals[:3] > 0).any() and (solution.duals[:3] < 0).any()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_of_the_weights_kind_and_only_when_asked_for(kind):
    given = problem(bounds=False)
    if kind == "torch":
        given = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    solution = qprecon.solve(**given, dtype="float32")
    assert "duals" not in vars(solution)
    assert type(solution.duals) is type(solution.weights) and solution.duals.dtype == solution.weights.dtype
    assert solution.duals is solution.duals
    mask, residual = np.asarray(given["mask"], dtype=bool), np.asarray(solution.residual)
    np.testing.assert_allclose(np.asarray(solution.duals), np.where(mask, 0.0, 2.0 * residual), rtol=1e-6)
    with pytest.raises(ValueError, match="duals"):
        dataclasses.replace(solution, problem=None).duals  # noqa: B018


def test_bounds_that_float32_rounds():
    """The answer is at the rounded bound, which may lie on either side of the given one: it holds all the same."""
    given = problem()
    expected = solved(given)
    found = qprecon.solve(**given, backend="admm", dtype="float32", tol=1e-6)
    strong = abs(expected.duals) > 1e-2 * abs(expected.duals).max()
    np.testing.assert_allclose(found.duals[strong], expected.duals[strong], rtol=0.05)
    assert ((found.duals != 0) == (expected.duals != 0))[strong].all()
