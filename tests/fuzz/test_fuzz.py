"""Problems of the fuzzer, a few through MPAX, and the fuzzer itself: it repeats, and it finds faults that are there."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest

import qprecon
from qprecon.proof import audit as auditing

from .__main__ import installed, main, one_thread
from .campaign import Tally
from .checks import arguments, run, settings
from .problems import Case, make
from .shrink import lines_of, shrink

SEED, PART = 12, 300
PROBLEMS = int(os.environ.get("QPRECON_FUZZ_PROBLEMS", "600"))  # 3000 take five times as long
QUICK = tuple(name for name in installed() if name not in ("mpax", "cvxpy"))  # mpax compiles for seconds, cvxpy starts for seconds


@pytest.mark.parametrize("first", range(0, PROBLEMS, PART))
def test_no_fault_in_random_problems(first: int) -> None:
    """No false OPTIMAL, wrong bound, crash, warning or changed input, and 99 % of the well-posed columns are OPTIMAL."""
    tally, found = Tally(SEED, QUICK), []
    with one_thread():
        for index in range(first, min(first + PART, PROBLEMS)):
            case = make(SEED, index, QUICK)
            outcome = run(case)
            tally.add(index, case.backend, outcome)
            found += [f"problem {index}: {fault}" for fault in outcome.faults]
    assert not found, "\n".join(found[:20])
    assert tally.share() >= 0.99, tally.as_json()["well_posed"]


@pytest.mark.parametrize("backend", ["mpax", "cvxpy"])
def test_the_slow_backends(backend: str) -> None:
    """A handful through each that is installed; the campaign has more."""
    if backend not in installed():
        pytest.skip(f"{backend} is not installed")
    for index in range(3):
        outcome = run(make(SEED, index, (backend,)))
        assert not outcome.faults, (index, outcome.faults)


def test_a_problem_comes_from_its_seed_and_index_alone() -> None:
    """The same twice, others for another index or seed."""
    one, again, other = make(3, 17), make(3, 17), make(3, 18)
    for field in dataclasses.fields(one):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(again, field.name))
    assert one.hessian_NN.shape != other.hessian_NN.shape or (one.hessian_NN != other.hessian_NN).any()


BROKEN = {
    "false_optimal": ("_quadratic_term", lambda *_: 0.0),
    "wrong_bound": ("gamma", lambda n: 0.0),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_it_finds_a_broken_certificate(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the quadratic term or the rounding errors left out, the fault is found, and its reproduction is small and runs."""
    name, broken = BROKEN[kind]
    monkeypatch.setattr(auditing, name, broken)
    index = next(i for i in range(400) if any(fault.kind == kind for fault in run(make(SEED, i, QUICK)).faults))
    small = shrink(make(SEED, index, QUICK), kind, runs=150)
    assert any(fault.kind == kind for fault in run(small).faults)
    assert small.weights_NK.shape[1] == 1
    text = lines_of(small)
    assert text.startswith("import numpy as np, qprecon\nH = np.array([[")
    if small.backend != "audit":
        scope: dict[str, object] = {}
        exec(text, scope)
        expected = qprecon.solve(**arguments(small), **settings(small))
        np.testing.assert_array_equal(np.asarray(scope["found"].weights), np.asarray(expected.weights))


@pytest.mark.parametrize("kind", ["worse_than_start", "pruned_not_zero", "not_finite", "input_changed", "crash", "warning"])
def test_it_finds_other_faults(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solve that does each of the things that must not happen."""
    solve = qprecon.solve
    rng = np.random.default_rng(0)
    x_TN = rng.standard_normal((30, 6))
    case = Case("a test", x_TN.T @ x_TN, rng.standard_normal((6, 2)), rng.random((6, 2)) < 0.5)

    def wrong(H: np.ndarray, W: np.ndarray, mask: np.ndarray, **more: object) -> qprecon.Solution:
        if kind == "crash":
            raise ZeroDivisionError
        solution = solve(H, W, mask, **more)
        if kind == "warning":
            np.float64(1e300) * np.float64(1e300)
        if kind == "input_changed":
            W[0, 0] += 1.0
        changes = {"worse_than_start": 2.0 * mask, "pruned_not_zero": 1.0 * ~mask, "not_finite": np.full(W.shape, np.nan)}
        return dataclasses.replace(solution, weights=solution.weights + changes.get(kind, 0.0))

    monkeypatch.setattr(qprecon, "solve", wrong)
    assert kind in {fault.kind for fault in run(case).faults}


def test_the_command(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """It counts, writes the JSON and goes on from it."""
    file = tmp_path / "fuzz.json"
    given = ["--seed", "5", "--backends", "auto,cholesky,audit", "--json", str(file)]
    assert main([*given, "--problems", "20"]) == 0
    assert main([*given, "--problems", "40"]) == 0
    assert "40 problems of seed 5" in capsys.readouterr().out
    text = file.read_text()
    backends = "auto,cholesky,audit"
    assert main(["--seed", "5", "--backends", backends, "--problems", "40", "--json", str(tmp_path / "once.json")]) == 0
    drop = lambda text: [line for line in text.splitlines() if '"seconds"' not in line]  # noqa: E731
    assert drop(text) == drop((tmp_path / "once.json").read_text())
