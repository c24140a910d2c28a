"""The public interface: solutions, statuses, dtypes, automatic choices, backends."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch

import qprecon
from qprecon import Status
from qprecon.contract import registry
from tests.contract import cases
from tests.contract.arguments import MASK, H, W, given
from tests.contract.families import FAMILIES


def test_reduced_form_of_a_column_that_is_not_there() -> None:
    """A column out of range is an IndexError that says how many there are; negative ones count from the end, with an rhs too."""
    problem = qprecon.ColumnQP(H, W * [[1.0, 2.0]], MASK, rhs_NK=W * [[3.0, 4.0]])
    last, negative = qprecon.reduced_form(problem, 1), qprecon.reduced_form(problem, -1)
    np.testing.assert_array_equal(last.linear_I, negative.linear_I)
    assert last.constant == negative.constant
    for column in (2, -3):
        with pytest.raises(IndexError, match=f"column {column}.*2 columns"):
            qprecon.reduced_form(problem, column)


@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
def test_default_dtype_is_one_that_the_backend_has(backend: str) -> None:
    """float32 data goes to a float64-only backend without a dtype being asked for; asking for the wrong one is an error."""
    record = cases.require(backend)
    options = {"steps": 20} if backend == "adam" else {}
    arguments = FAMILIES["well_conditioned"].build().arguments("float32")
    solution = qprecon.solve(**arguments, backend=backend, tol=1e-2, **options)
    assert solution.provenance.dtype in record.capabilities.dtypes
    assert solution.weights.dtype == solution.provenance.dtype
    if "float32" not in record.capabilities.dtypes:
        assert "float64" in solution.provenance.automatic["dtype"]
        with pytest.raises(qprecon.UnsupportedError, match="float32 arithmetic; these can: cholesky"):
            qprecon.solve(**arguments, backend=backend, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), torch.float32])
def test_dtype_spellings(dtype: Any) -> None:
    """A dtype may be named by a string or be numpy's or torch's own."""
    assert qprecon.solve(**given(), dtype=dtype).weights.dtype == np.float32


def test_solution() -> None:
    """A Solution is frozen, speaks in words, and passes through raise_for_status when all columns are optimal."""
    solution = qprecon.solve(**given(), backend="cholesky")
    for name in ("weights", "status", "tol"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(solution, name, None)
    assert solution.raise_for_status() is solution
    text = solution.summary()
    assert "6 of 6 columns certified optimal to 0.0001 by 'cholesky'" in text
    assert "float64 on cpu" in text
    assert repr(solution).startswith("Solution: 6 of 6")
    assert len(repr(solution)) < 1000
    assert solution.counts() == {Status.OPTIMAL: 6}
    assert solution.timing.total == pytest.approx(sum(dataclasses.astuple(solution.timing)))
    assert min(dataclasses.astuple(solution.timing)) >= 0.0
    assert solution.iterations.dtype == np.int64
    assert set(solution.provenance.versions) >= {"numpy", "scipy"}
    assert solution.provenance.options == {}


@pytest.mark.parametrize("form", ["default", "rhs", "constant"])
def test_the_summary_says_where_a_gap_is_relative_to_the_floor(form: str) -> None:
    """Without damping and with few tokens the dense outputs are met exactly; with many, or with damping, something is lost."""
    rng = np.random.default_rng(0)
    weights_NK, mask_NK = rng.standard_normal((12, 3)), np.arange(36).reshape(12, 3) % 2 == 0
    few_TN, many_TN = rng.standard_normal((3, 12)), rng.standard_normal((60, 12))

    def said(x_TN: np.ndarray, **more: object) -> str:
        H, target_TK = x_TN.T @ x_TN, x_TN @ weights_NK
        if form != "default":
            more["rhs"] = x_TN.T @ target_TK
        if form == "constant":
            more["constant"] = (target_TK**2).sum(0)
        return qprecon.solve(H, weights_NK, mask_NK, backend="cholesky", tol=0.5, **more).summary()

    assert "of the start's objective" not in said(many_TN)
    found = said(few_TN, damping=1e-9)
    assert ("3 columns: gap relative to 1e-06 of the start's objective, as their optima cost" in found) == (form != "rhs"), found


def test_the_summary_has_no_ratio_where_objectives_can_be_negative() -> None:
    arguments = {name: np.asarray(array, dtype=np.float64) for name, array in given().items() if name in ("H", "W", "mask")}
    rhs = arguments["H"] @ arguments["W"]
    constant = (arguments["W"] * rhs).sum(0) * 1.01
    assert "of the masked weights')" in qprecon.solve(**arguments).summary()
    assert "of the masked weights')" in qprecon.solve(**arguments, rhs=rhs, constant=constant).summary()
    below = dataclasses.replace(solution := qprecon.solve(**arguments), objective=-1e-14 * solution.baseline_objective)
    assert "(0.000 of the masked weights')" in below.summary()  # what rounding leaves of an f of 0
    assert "objective " in (said := qprecon.solve(**arguments, rhs=rhs).summary()) and "of the masked" not in said


def test_a_prepared_hessian_says_what_it_is() -> None:
    H = np.eye(6, dtype=np.float32)
    assert repr(qprecon.prepare(H)) == "PreparedHessian(6 inputs, damping 0, float32 on cpu)"
    assert repr(qprecon.prepare(H, damping=0.01, samples=50)).startswith("PreparedHessian(6 inputs, damping 0.01, 50 samples, ")


def test_solution_that_is_not_optimal() -> None:
    """raise_for_status raises with the summary, which names the status, its count and its remedy."""
    solution = qprecon.solve(**FAMILIES["kappa_1e8"].build().arguments(), backend="pcg", max_iterations=1)
    assert not solution.optimal.any()
    with pytest.raises(qprecon.NotOptimalError, match="6 ITERATION_LIMIT: .*raise max_iterations"):
        solution.raise_for_status()
    assert "0 of 6 columns" in repr(solution)


def test_summary_without_columns() -> None:
    """K = 0 is a solution too."""
    solution = qprecon.solve(**FAMILIES["no_columns"].build().arguments())
    assert solution.summary() == "nothing to solve: 64 inputs, 0 outputs"
    assert solution.raise_for_status() is solution


def test_no_inputs() -> None:
    """N = 0 is legal and trivially optimal."""
    solution = qprecon.solve(np.zeros((0, 0)), np.zeros((0, 2)), np.zeros((0, 2), dtype=bool))
    assert solution.weights.shape == (0, 2)
    assert solution.optimal.all()


def test_answers_that_h_is_too_rough_to_judge_are_uncertified() -> None:
    """H of rank 8 in float32, undamped: they look better than the masked weights, by less than H is known to."""
    arguments = FAMILIES["rank_8_of_256"].build().arguments()
    arguments |= {name: np.asarray(arguments[name], dtype=np.float32) for name in ("H", "W")}
    solution = qprecon.solve(**arguments, backend="admm")
    fell_back = solution.fell_back
    assert fell_back.any() and set(solution.status[fell_back]) == {Status.UNCERTIFIED}
    masked = arguments["W"] * (np.asarray(arguments["mask"]) != 0)
    assert np.array_equal(np.asarray(solution.weights)[:, fell_back], masked[:, fell_back])


@pytest.mark.parametrize("with_rhs", [False, True])
def test_a_start_that_nothing_improves_is_certified(with_rhs: bool) -> None:
    """The optimum as a warm start, and a backend that is stopped before it comes near."""
    arguments = FAMILIES["well_conditioned"].build().arguments() | {"dtype": "float64", "damping": 0.01}
    if with_rhs:
        arguments["rhs"] = np.asarray(arguments["H"]) @ np.asarray(arguments["W"])[:, ::-1]
    best = qprecon.solve(**arguments, backend="cholesky")
    solution = qprecon.solve(**arguments, backend="admm", warm_start=best.weights, max_iterations=1)
    assert best.optimal.all() and solution.optimal.all()


@pytest.mark.parametrize(
    ("more", "dtype"),
    [({"tol": 1e-6, "damping": 1e-3}, "float32"), ({"tol": 9e-7, "damping": 0.1}, "float64"), ({"damping": 9e-4}, "float64")],
)
def test_the_dtype_is_chosen_as_documented(more: dict[str, Any], dtype: str) -> None:
    single = {"H": np.eye(3, dtype=np.float32), "W": np.ones((3, 2), dtype=np.float32), "mask": MASK}
    assert qprecon.solve(**single, **more).provenance.dtype == dtype


def test_status_messages_say_what_to_do() -> None:
    """Every status but OPTIMAL ends with a remedy."""
    for status in Status:
        assert len(status.value) > 20
        assert (":" in status.value) == (status is not Status.OPTIMAL)


def test_automatic_choices_are_explained() -> None:
    """What "auto" chose stands in the provenance with its reason; what was given does not."""
    solution = qprecon.solve(**given())
    assert solution.provenance.automatic["backend"].startswith(solution.provenance.backend + ":")
    assert solution.provenance.automatic["dtype"].startswith("float64:")
    assert solution.provenance.automatic["batch_size"] == 6
    chosen = qprecon.solve(**given(), backend="cholesky", dtype="float64", batch_size=3).provenance.automatic
    assert not {"backend", "dtype", "batch_size"} & set(chosen)


def test_available_backends() -> None:
    """Every built-in backend is listed with what it can do and how to get it; asking imports nothing."""
    listed = qprecon.available_backends()
    assert set(listed) >= {"cholesky", "pcg", "admm", "adam", "mpax", "osqp", "piqp", "clarabel", "cvxpy"}
    assert "auto" not in listed
    for name, entry in listed.items():
        assert set(entry) == {"installed", "summary", "extra", "missing", "capabilities"}, name
        assert entry["installed"] == (not entry["missing"])
        assert entry["summary"]
        assert {"bounds", "linear", "devices", "dtypes", "scaling"} <= set(entry["capabilities"])
        if registry.find(name).requires:
            assert entry["extra"], f"{name} needs packages, and no extra is named that brings them"
    assert [name for name in ("mpax", "osqp", "piqp", "clarabel", "cvxpy") if not listed[name]["capabilities"]["bounds"]] == []
    assert listed["cholesky"]["installed"] and listed["pcg"]["installed"]


def test_every_backend_has_what_the_registry_asks_for() -> None:
    """A module with ``prepare``, a docstring, and Options, if any, as a frozen dataclass with defaults."""
    for record in registry.BUILT_IN:
        cases.require(record.name)
        module = importlib.import_module(record.target)
        assert module.__doc__
        assert list(inspect.signature(module.prepare).parameters) == ["system", "options"]
        if hasattr(module, "Options"):
            assert module.Options.__dataclass_params__.frozen
            module.Options()
