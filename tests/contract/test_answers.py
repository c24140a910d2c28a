"""Every form in which a backend's answer can be wrong is a BackendBrokenError that names the backend and what is wrong."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import qprecon
from qprecon.contract import Backend, Capabilities, RawColumns, registry
from qprecon.contract.answers import Checked
from tests.small_problems import problem

K = problem()[1].shape[1] - 1  # its last column keeps everything and needs no backend


def install(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """A backend "odd" with these functions."""
    module = types.ModuleType("odd_backend")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, "odd_backend", module)
    record = Backend("odd", "odd_backend", "a test", capabilities=Capabilities(dtypes=("float64",)))
    monkeypatch.setattr(registry, "BUILT_IN", (*registry.BUILT_IN, record))


def answering(monkeypatch: pytest.MonkeyPatch, make: Callable[[np.ndarray], Any]) -> None:
    """A backend that answers with what ``make`` makes of the start."""
    install(monkeypatch, prepare=lambda system, options: lambda chunk: make(chunk.start_NK.copy()))


def solve() -> qprecon.Solution:
    H, W, mask = problem()
    return qprecon.solve(H, W, mask, backend="odd", dtype="float64")


class Odd:
    """Nothing that anyone could use."""

    def __bool__(self) -> bool:
        raise RuntimeError("who asks?")


WRONG = {
    "None": (lambda x: None, "None, not RawColumns"),
    "a tuple": (lambda x: (x, "solved", 3), "tuple, not RawColumns"),
    "the class": (lambda x: RawColumns, "not RawColumns"),
    "no weights": (lambda x: RawColumns(None), "weights are None"),
    "weights as a list": (lambda x: RawColumns(x.tolist()), "weights are a list"),
    "weights as a number": (lambda x: RawColumns(1.0), "weights are a float"),
    "sparse weights": (lambda x: RawColumns(scipy.sparse.csr_matrix(x)), "weights are a csr_matrix"),
    "masked weights": (lambda x: RawColumns(np.ma.masked_array(x)), "weights are a MaskedArray"),
    "weights on meta": (lambda x: RawColumns(torch.zeros(x.shape, device="meta")), "weights are a Tensor"),
    "transposed": (lambda x: RawColumns(x.T), "weights have shape"),
    "one axis more": (lambda x: RawColumns(x[None]), "weights have shape"),
    "complex": (lambda x: RawColumns(x + 0j), "dtype complex128"),
    "whole": (lambda x: RawColumns(x.astype(int)), "dtype int64"),
    "objects": (lambda x: RawColumns(x.astype(object)), "dtype object"),
    "words": (lambda x: RawColumns(x.astype(str)), "dtype <U"),
    "no status": (lambda x: RawColumns(x, None), "status words are None"),
    "a number as status": (lambda x: RawColumns(x, 0), "status words are 0"),
    "an empty status": (lambda x: RawColumns(x, ""), "status of a column is ''"),
    "one status too few": (lambda x: RawColumns(x, ["solved"] * (K - 1)), rf"status words of shape \({K - 1},\) for {K}"),
    "statuses in a column": (lambda x: RawColumns(x, np.full((K, 1), "solved")), rf"status words of shape \({K}, 1\)"),
    "a status that is none": (lambda x: RawColumns(x, ["solved"] * (K - 1) + [None]), "status of a column is None"),
    "a status without a truth": (lambda x: RawColumns(x, ["solved"] * (K - 1) + [Odd()]), "status of a column is <"),
    "a misspelt limit": (lambda x: RawColumns(x, "iteration limit"), "'iteration limit' is not known; 'iteration_limit'"),
    "a shouted limit": (lambda x: RawColumns(x, ["solved"] * (K - 1) + ["TIME_LIMIT"]), "'TIME_LIMIT' is not known; 'time_limit'"),
    "no iterations": (lambda x: RawColumns(x, "solved", None), "iterations are None"),
    "iterations below 0": (lambda x: RawColumns(x, "solved", -5), "iterations are -5"),
    "half an iteration": (lambda x: RawColumns(x, "solved", 0.5), "iterations are 0.5"),
    "NaN iterations": (lambda x: RawColumns(x, "solved", float("nan")), "iterations are nan"),
    "infinite iterations": (lambda x: RawColumns(x, "solved", np.inf), "iterations are inf"),
    "one below 0": (lambda x: RawColumns(x, "solved", np.arange(K) - 1), "iterations are array"),
    "iterations as words": (lambda x: RawColumns(x, "solved", ["3"] * K), "iterations are"),
    "iterations as truth": (lambda x: RawColumns(x, "solved", [True] * K), "iterations are"),
    "iterations ragged": (lambda x: RawColumns(x, "solved", [[1], [2, 3]]), "iterations are"),
    "iterations too many": (lambda x: RawColumns(x, "solved", np.zeros(K + 1, int)), rf"iterations of shape \({K + 1},\) for {K}"),
    "extras as a list": (lambda x: RawColumns(x, "solved", 0, [1]), "extras are"),
    "extras by number": (lambda x: RawColumns(x, "solved", 0, {1: 2}), "extras are"),
    "seconds as words": (lambda x: RawColumns(x, "solved", 0, {"compile_seconds": "3"}), "compile_seconds is '3'"),
    "negative seconds": (lambda x: RawColumns(x, "solved", 0, {"compile_seconds": -1.0}), "compile_seconds is -1.0"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_an_answer_of_another_form(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    make, words = WRONG[fault]
    answering(monkeypatch, make)
    with pytest.raises(qprecon.BackendBrokenError, match=rf"^backend 'odd'.*{words}"):
        solve()


@pytest.mark.parametrize("iterations", [7, np.int32(7), 7.0, [7] * K, np.full(K, 7.0), torch.full((K,), 7)])
@pytest.mark.parametrize("words", ["done", ("done",) * K, np.full(K, "done"), np.full(K, "done", dtype=object)])
def test_every_form_that_is_right(monkeypatch: pytest.MonkeyPatch, words: Any, iterations: Any) -> None:
    """One for all columns or one each, of any library; a word that is not understood is passed on."""
    answering(monkeypatch, lambda x: RawColumns(torch.from_numpy(x), words, iterations, {"note": object(), "compile_seconds": 0.0}))
    solution = solve()
    assert solution.reported_status[:K].tolist() == ["done"] * K
    assert solution.iterations[:K].tolist() == [7] * K and solution.iterations.dtype == np.int64


@pytest.mark.parametrize(("limit", "told"), [(1.0, True), (5.0, False), (None, False)])
def test_a_compilation_longer_than_the_time_limit_is_told(monkeypatch: pytest.MonkeyPatch, limit: float | None, told: bool) -> None:
    """Nothing cuts a compilation short: the summary says what it took where that alone is over the limit."""
    answering(monkeypatch, lambda x: RawColumns(x, "time_limit", 0, {"compile_seconds": 1.5}))
    H, W, mask = problem()
    said = qprecon.solve(H, W, mask, backend="odd", dtype="float64", time_limit=limit).summary()
    assert ("of compilation, which no limit cuts short, against 1 s" in said) == told
    assert ("time limit:" in said) == told


IDLE = {"prepare": lambda system, options: lambda chunk: None}
SET_UP = {
    "returns nothing": ({"prepare": lambda system, options: None}, "prepare returned None"),
    "is missing": ({}, "no function prepare"),
    "is no function": ({"prepare": 3}, "no function prepare"),
    "takes one argument": ({"prepare": lambda system: None}, "failed to set up: TypeError"),
    "has odd bytes": ({**IDLE, "bytes_per_column": lambda *_: None}, "bytes_per_column returned None"),
    "has NaN bytes": ({**IDLE, "bytes_per_column": lambda *_: np.nan}, "bytes_per_column returned nan"),
    "fails in bytes": ({**IDLE, "bytes_per_column": lambda n: 1}, "failed in bytes_per_column"),
}


@pytest.mark.parametrize("fault", SET_UP)
def test_a_set_up_of_another_form(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    functions, words = SET_UP[fault]
    install(monkeypatch, **functions)
    with pytest.raises(qprecon.BackendBrokenError, match=f"^backend 'odd'.*{words}"):
        solve()


@pytest.mark.parametrize("renewed", [None, lambda chunk: None])
def test_what_fresh_returns_is_looked_at_too(monkeypatch: pytest.MonkeyPatch, renewed: Any) -> None:
    def solve_chunk(chunk: Any) -> RawColumns:
        raise AssertionError("a fresh one was asked for")

    solve_chunk.fresh = lambda: renewed  # type: ignore[attr-defined]
    install(monkeypatch, prepare=lambda system, options: solve_chunk)
    with pytest.raises(qprecon.BackendBrokenError, match="^backend 'odd'.* None, not"):
        solve()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["prepare", "solve_chunk"])
def test_what_is_not_the_backends_fault_passes(monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]) -> None:
    def fail(*_: Any) -> Any:
        raise error

    install(monkeypatch, prepare=fail if where == "prepare" else lambda system, options: fail)
    with pytest.raises(error):
        solve()


def test_a_value_error_refuses_h_in_prepare_and_is_a_fault_in_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("operands could not be broadcast")

    install(monkeypatch, prepare=fail)
    with pytest.raises(ValueError, match="backend 'odd' refuses this H: operands"):
        solve()
    install(monkeypatch, prepare=lambda system, options: fail)
    with pytest.raises(qprecon.BackendBrokenError, match="backend 'odd' failed.*operands") as caught:
        solve()
    assert isinstance(caught.value.__cause__, ValueError)


def test_one_that_is_called_through_another_is_named_once() -> None:
    inner = Checked("odd", lambda chunk: None)
    with pytest.raises(qprecon.BackendBrokenError, match="^backend 'odd': it answered with None"):
        Checked("odd", lambda chunk: inner(chunk))(types.SimpleNamespace(start_NK=np.zeros((2, 1))))
