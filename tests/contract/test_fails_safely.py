"""Bad input, tight limits and lying backends: never falsely OPTIMAL, and never at the neighbours' cost."""

from __future__ import annotations

import re
import sys
import time
import types
from collections.abc import Callable

import numpy as np
import pytest

import qprecon
from qprecon import Status
from qprecon.contract import Backend, Capabilities, Chunk, RawColumns, System, registry

from . import cases, reference
from .families import FAMILIES, Problem

GOOD = ("cholesky", "pcg", "mpax")


def problem() -> Problem:
    """An ordinary family."""
    return FAMILIES["well_conditioned"].build()


@pytest.mark.parametrize("backend", ["auto", *cases.CPU_BACKENDS])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_hessian(backend: str, value: float) -> None:
    """NaN or Inf anywhere in H is refused before anything runs, with H named."""
    given = problem().arguments()
    given["H"] = given["H"].copy()
    given["H"][3, 5] = given["H"][5, 3] = value
    with pytest.raises(ValueError, match="^H holds NaN or Inf"):
        qprecon.solve(**given, backend=backend)


@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_indefinite_hessian(backend: str, damping: float) -> None:
    """A clearly negative eigenvalue is refused, damped or not; one that the damping outweighs is no error."""
    given = problem().arguments()
    values_N, vectors_NN = np.linalg.eigh(given["H"])
    given["H"] = given["H"] - (values_N[0] + 0.5) * np.outer(vectors_NN[:, 0], vectors_NN[:, 0])
    with pytest.raises(ValueError, match="^H is clearly indefinite.*or take a damping of 1, which outweighs it"):
        qprecon.solve(**given | {"damping": damping}, backend=backend)
    heavily = given | {"damping": 0.6}
    if backend in GOOD:
        cases.require(backend)
        assert qprecon.solve(**heavily, backend=backend).optimal.all()


@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
@pytest.mark.parametrize("where", ["W", "rhs", "lower", "upper"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_column_beside_healthy_ones(backend: str, where: str, value: float) -> None:
    """NaN or Inf in one column: that column is INVALID_INPUT, its neighbours come out as if it were not there."""
    record = cases.require(backend)
    if where in ("lower", "upper") and not (record.capabilities.bounds and np.isnan(value)):
        return  # an infinite bound is no bound
    source = FAMILIES["bounds_and_rhs" if where in ("lower", "upper") else "rhs_of_dense_model"].build()
    given = source.arguments()
    shape = given["W"].shape
    if where == "W":
        del given["rhs"]
    if where in ("lower", "upper"):
        given[where] = np.broadcast_to(given[where], shape)
    bad = given | {where: given[where].copy()}
    bad[where][7, 2] = value
    healthy_K = [0, 1, 3, 4, 5]
    take = lambda x: x[:, healthy_K] if isinstance(x, np.ndarray) and x.shape == shape else x  # noqa: E731
    without = {name: take(x) if name != "H" else x for name, x in given.items()}
    steps = {"steps": 50} if backend == "adam" else {}
    found, expected = (qprecon.solve(**x, backend=backend, tol=1e-3, **steps) for x in (bad, without))
    assert found.status[2] is Status.INVALID_INPUT
    assert not found.optimal[2]
    assert found.status[healthy_K].tolist() == expected.status.tolist()
    if backend in GOOD:
        assert found.optimal[healthy_K].all()
    np.testing.assert_allclose(found.weights[:, healthy_K], expected.weights, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found.objective[healthy_K], expected.objective, rtol=1e-8)
    with pytest.raises(qprecon.NotOptimalError, match="1 INVALID_INPUT"):
        found.raise_for_status()


@pytest.mark.parametrize("family", ["outlier_channels", "kappa_1e8", "rhs_of_dense_model", "bounds_active", "singular_half_rank"])
@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
def test_one_iteration(backend: str, family: str) -> None:
    """One iteration allowed: whatever comes back is audited, and no worse than the masked weights."""
    record = cases.require(backend)
    given, truth = cases.truth(family, "float64")
    if given.has_bounds and not record.capabilities.bounds:
        return
    solution = qprecon.solve(**given.arguments(), backend=backend, max_iterations=1, tol=1e-6)
    cases.check(given, solution, truth)
    assert (solution.iterations <= 200).all(), "a limit of one iteration may be overshot to the next check, not ignored"


@pytest.mark.parametrize("limit", [1e-9, 0.02])
@pytest.mark.parametrize("backend", cases.CPU_BACKENDS)
def test_tiny_time_limit(backend: str, limit: float) -> None:
    """A limit that leaves no time: every column is audited, none is falsely OPTIMAL, and the call ends soon."""
    cases.require(backend)
    given, truth = cases.truth("kappa_1e8", "float64")
    started = time.monotonic()
    solution = qprecon.solve(**given.arguments(), backend=backend, time_limit=limit, tol=1e-6)
    assert time.monotonic() - started < 20.0
    cases.check(given, solution, truth)
    if limit < 1e-6:
        assert set(solution.status) == {Status.TIME_LIMIT}
        np.testing.assert_array_equal(solution.weights, reference.start(given))


def _register(monkeypatch: pytest.MonkeyPatch, solve_chunk: Callable[[System, Chunk], object], **capabilities: object) -> None:
    """Make ``solve_chunk(system, chunk)`` the built-in backend "liar"."""
    module = types.ModuleType("liar_backend")
    module.prepare = lambda system, options: lambda chunk: solve_chunk(system, chunk)
    monkeypatch.setitem(sys.modules, "liar_backend", module)
    record = Backend("liar", "liar_backend", "a test", capabilities=Capabilities(scaling="mean", **capabilities))
    monkeypatch.setattr(registry, "BUILT_IN", (*registry.BUILT_IN, record))


def _constant(value: float) -> Callable[[System, Chunk], RawColumns]:
    return lambda system, chunk: RawColumns(np.full_like(chunk.start_NK, value), "optimal")


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 1e300, 7.0])
@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.parametrize("rhs", [False, True])
def test_garbage_that_claims_to_be_optimal(monkeypatch: pytest.MonkeyPatch, value: float, warm_start: bool, rhs: bool) -> None:
    """NaN, Inf and garbage fall back to the masked weights, and are counted."""
    _register(monkeypatch, _constant(value), warm_start=warm_start)
    given, truth = cases.truth("rhs_of_dense_model" if rhs else "well_conditioned", "float64")
    with np.errstate(all="ignore"):
        solution = qprecon.solve(**given.arguments(), backend="liar")
    assert set(solution.status) == {Status.FELL_BACK}
    assert solution.fell_back.all()
    assert set(solution.reported_status) == {"optimal"}
    np.testing.assert_array_equal(solution.weights, reference.start(given))
    cases.check(given, solution, truth)


def test_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten return is an error with the backend's name."""
    _register(monkeypatch, lambda system, chunk: None)
    with pytest.raises(qprecon.BackendBrokenError, match="'liar'.* None, not RawColumns"):
        qprecon.solve(**cases.truth("well_conditioned", "float64")[0].arguments(), backend="liar")


def test_garbage_in_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that solves all columns but one, where it returns NaN: only that one falls back."""

    def solve_chunk(system: System, chunk: Chunk) -> RawColumns:
        out_NK = np.array(chunk.start_NK)
        for j in range(out_NK.shape[1]):
            kept_I = np.flatnonzero(chunk.mask_NK[:, j])
            out_NK[kept_I, j] += np.linalg.solve(system.hessian_NN[np.ix_(kept_I, kept_I)], chunk.residual_NK[kept_I, j])
        out_NK[np.argmax(chunk.mask_NK[:, 4]), 4] = np.nan
        return RawColumns(out_NK, "optimal")

    _register(monkeypatch, solve_chunk)
    given, truth = cases.truth("two_of_four", "float64")
    solution = qprecon.solve(**given.arguments(), backend="liar")
    assert solution.status.tolist() == [Status.OPTIMAL] * 4 + [Status.FELL_BACK] + [Status.OPTIMAL]
    assert solution.fell_back.tolist() == [False] * 4 + [True] + [False]
    cases.check(given, solution, truth)


def test_the_start_returned_as_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returning the start unchanged is no fallback, but it is not OPTIMAL either."""
    _register(monkeypatch, lambda system, chunk: RawColumns(chunk.start_NK, "optimal"), warm_start=True)
    given, truth = cases.truth("well_conditioned", "float64")
    solution = qprecon.solve(**given.arguments(), backend="liar")
    assert set(solution.status) == {Status.INACCURATE}
    assert not solution.fell_back.any()
    cases.check(given, solution, truth)


def test_dense_weights_returned_as_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that ignores the mask costs nothing in the objective; the mask is applied before the audit."""
    _register(monkeypatch, lambda system, chunk: RawColumns(chunk.weights_NK, "optimal"))
    given, truth = cases.truth("well_conditioned", "float64")
    solution = qprecon.solve(**given.arguments(), backend="liar")
    assert not solution.optimal.any()
    np.testing.assert_array_equal(solution.weights, reference.start(given))
    cases.check(given, solution, truth)


def test_bounds_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer outside the bounds is clipped before the audit; an unconstrained optimum clipped is not OPTIMAL."""

    def unconstrained(system: System, chunk: Chunk) -> RawColumns:
        out_NK = np.array(chunk.start_NK)
        for j in range(out_NK.shape[1]):
            kept_I = np.flatnonzero(chunk.mask_NK[:, j])
            out_NK[kept_I, j] += np.linalg.solve(system.hessian_NN[np.ix_(kept_I, kept_I)], chunk.residual_NK[kept_I, j])
        return RawColumns(out_NK, "optimal")

    _register(monkeypatch, unconstrained, bounds=True)
    given, truth = cases.truth("bounds_active", "float64")
    solution = qprecon.solve(**given.arguments(), backend="liar", tol=1e-6)
    assert not solution.optimal.any()
    cases.check(given, solution, truth)


def test_a_backend_that_writes_into_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that opens the mask and flattens H for itself changes neither the caller's arrays nor the audit."""

    def vandal(system: System, chunk: Chunk) -> RawColumns:
        for x in (chunk.mask_NK, chunk.weights_NK, chunk.start_NK, chunk.residual_NK, chunk.linear_NK, system.hessian_NN):
            if x is not None:
                x[...] = 1
        return RawColumns(chunk.weights_NK, "optimal")

    _register(monkeypatch, vandal)
    for family in ("well_conditioned", "rhs_of_dense_model"):
        given, truth = cases.truth(family, "float64")
        before = {name: x for name, x in given.arguments().items() if isinstance(x, np.ndarray)}
        arguments = given.arguments() | {name: x.copy() for name, x in before.items()}
        solution = qprecon.solve(**arguments, backend="liar")
        for name, x in before.items():
            np.testing.assert_array_equal(arguments[name], x, err_msg=name)
        assert not solution.optimal.any()
        cases.check(given, solution, truth)


@pytest.mark.parametrize("shape", ["transposed", "one column", "one row", "scalar", "short"])
def test_answer_of_wrong_shape(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """An answer of another shape, broadcastable or not, is a broken backend, which is named with both shapes."""

    def wrong(system: System, chunk: Chunk) -> RawColumns:
        x_NK = chunk.start_NK
        answers = {"transposed": x_NK.T, "one column": x_NK[:, :1], "one row": x_NK[:1], "scalar": x_NK[0, 0], "short": x_NK[:-1]}
        return RawColumns(answers[shape], "optimal")

    _register(monkeypatch, wrong)
    with pytest.raises(qprecon.BackendBrokenError, match=r"backend 'liar'.*weights.*\(64, 6\)"):
        qprecon.solve(**problem().arguments(), backend="liar")


def test_a_backend_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception inside a backend is a broken backend, by name; the exception is chained."""

    def fail(system: System, chunk: Chunk) -> RawColumns:
        raise ZeroDivisionError("a bug")

    _register(monkeypatch, fail)
    with pytest.raises(qprecon.BackendBrokenError, match="'liar' failed.*a bug") as caught:
        qprecon.solve(**problem().arguments(), backend="liar")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_running_out_of_memory_halves_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that does not fit is solved in halves, and the report says so; every column is solved once."""
    widths = []

    def greedy(system: System, chunk: Chunk) -> RawColumns:
        widths.append(chunk.start_NK.shape[1])
        if widths[-1] > 2:
            raise MemoryError
        return RawColumns(chunk.start_NK, "optimal")

    _register(monkeypatch, greedy)
    solution = qprecon.solve(**problem().arguments(), backend="liar", batch_size=6)
    assert widths == [6, 3, 2, 1, 3, 2, 1]
    assert "memory" in solution.provenance.automatic["batch_size"]
    monkeypatch.undo()
    _register(monkeypatch, lambda system, chunk: (_ for _ in ()).throw(MemoryError("no")))
    with pytest.raises(MemoryError):
        qprecon.solve(**problem().arguments(), backend="liar")


def test_backend_not_installed_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package and a package that fails to import are two errors, each naming the backend and what to do."""
    missing = Backend("absent", "absent_backend", "a test", requires=("no_such_package_here",), extra="absent")
    broken = Backend("broken", "no_such_module_here", "a test")
    monkeypatch.setattr(registry, "BUILT_IN", (*registry.BUILT_IN, missing, broken))
    with pytest.raises(qprecon.BackendNotInstalledError, match=r"'absent' needs no_such_package_here.*qprecon\[absent\]"):
        qprecon.solve(**problem().arguments(), backend="absent")
    with pytest.raises(qprecon.BackendBrokenError, match="'broken' is installed but fails to import"):
        qprecon.solve(**problem().arguments(), backend="broken")
    listed = qprecon.available_backends()
    assert listed["absent"]["installed"] is False
    assert listed["absent"]["missing"] == ["no_such_package_here"]


def test_a_backend_that_fails_to_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in ``prepare`` is a broken backend; the cause is chained."""
    _register(monkeypatch, _constant(0.0))
    sys.modules["liar_backend"].prepare = lambda system, options: {}["nothing"]
    with pytest.raises(qprecon.BackendBrokenError, match="'liar' failed to set up") as caught:
        qprecon.solve(**problem().arguments(), backend="liar")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(("least", "advised"), [(-0.005, 0.01), (-0.05, 0.1), (-0.095, 1.0), (-1.5, None)])
def test_the_damping_that_an_indefinite_hessian_is_told_to_take_is_enough(least: float, advised: float | None) -> None:
    """Or none is named."""
    given = problem().arguments() | {"damping": 0.0}
    values_N, vectors_NN = np.linalg.eigh(given["H"])
    mean = np.trace(given["H"]) / len(values_N)
    values_N[0] = least * mean
    given["H"] = (vectors_NN * values_N) @ vectors_NN.T
    with pytest.raises(ValueError, match="^H is clearly indefinite") as refused:
        qprecon.solve(**given, backend="pcg")
    said = re.search(r"take a damping of (\S+), which outweighs it$", str(refused.value))
    assert (said and float(said[1])) == advised
    if advised is not None:
        assert qprecon.solve(**given | {"damping": advised}, backend="pcg").optimal.all()


@pytest.mark.parametrize("backend", ["pcg", "admm", "osqp"])
def test_a_limit_of_iterations_holds_beside_columns_that_are_done(backend: str) -> None:
    """One column is pruned wholly and done at once; the others stop where they stop without it."""
    cases.require(backend)
    rng = np.random.default_rng(3)
    x_TN = rng.standard_normal((120, 40)) * np.logspace(0, -3, 40)
    w_NK, mask_NK = rng.standard_normal((40, 6)), rng.random((40, 6)) < 0.5
    mask_NK[:, 4] = False
    given = {"H": x_TN.T @ x_TN, "W": w_NK, "mask": mask_NK, "damping": 1e-6, "max_iterations": 2}
    together, alone = (qprecon.solve(**given, backend=backend, batch_size=size) for size in (6, 1))
    assert list(together.status) == list(alone.status)
    limited = together.status == qprecon.Status.ITERATION_LIMIT
    assert limited.sum() == 5 and list(together.iterations[limited]) == list(alone.iterations[limited])
