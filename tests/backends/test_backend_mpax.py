import logging
import os
import subprocess
import sys

import numpy as np
import pytest

import qprecon
from tests.small_problems import check_against_cholesky, check_bounds, check_limits, problem

jax = pytest.importorskip("jax")
pytest.importorskip("mpax")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_agrees_with_cholesky(dtype):
    solution = check_against_cholesky("mpax", dtype=dtype)
    assert set(solution.reported_status[:-1]) == {"optimal"}
    assert (solution.iterations[:-1] >= 73).all() and solution.iterations.max() < 2000


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bounds(dtype):
    check_bounds("mpax", dtype=dtype)


def test_limits_are_told():
    check_limits("mpax")
    h, w, mask = problem(decay=2.0)
    solution = qprecon.solve(h, w, mask, backend="mpax", damping=0.001, max_iterations=1)
    assert set(solution.reported_status[:-1]) == {"iteration_limit"}


def test_segments_under_a_deadline_get_there_too():
    h, w, mask = problem(decay=3.0)
    solution = qprecon.solve(h, w, mask, backend="mpax", damping=1e-4, time_limit=300.0)
    assert (solution.status == qprecon.Status.OPTIMAL).all()
    assert solution.iterations.max() > 1024  # more than the first segment


def test_hard_column_sets():
    """κ near 1e6 without damping: slow, but certified."""
    h, w, mask = problem(decay=4.0)
    solution = qprecon.solve(h, w, mask, backend="mpax")
    assert np.linalg.cond(h) > 1e5
    assert (solution.status == qprecon.Status.OPTIMAL).all(), solution.relative_gap


def test_batches_padded_and_compiled_once():
    h, w, mask = problem(k=8)
    whole = qprecon.solve(h, w, mask, backend="mpax", damping=0.01)
    parts = qprecon.solve(h, w, mask, backend="mpax", damping=0.01, batch=3)  # 3, 3 and 1 columns
    again = qprecon.solve(h, w, mask, backend="mpax", damping=0.01, batch=3)
    chunks = qprecon.solve(h, w, mask, backend="mpax", damping=0.01, batch_size=4)
    assert again.timing.compile == chunks.timing.compile == 0.0
    for other in (parts, chunks):
        assert np.allclose(whole.weights, other.weights, rtol=1e-3, atol=1e-6)
        assert (other.status == qprecon.Status.OPTIMAL).all()


def test_leaves_the_process_as_it_was():
    root, stream = logging.getLogger(), logging.NullHandler()
    before = list(root.handlers), root.level, jax.config.jax_enable_x64, dict(os.environ)
    root.addHandler(stream)
    try:
        h, w, mask = problem()
        solution = qprecon.solve(h, w, mask, backend="mpax", damping=0.01, dtype="float64")
        assert stream in root.handlers and len(root.handlers) == len(before[0]) + 1
        assert solution.weights.dtype == np.float64
    finally:
        root.removeHandler(stream)
    assert (list(root.handlers), root.level, jax.config.jax_enable_x64, dict(os.environ)) == before
    assert jax.numpy.ones(2).dtype == np.float32


def test_fresh_process_keeps_x64_and_environment():
    code = (
        "import os; before = dict(os.environ)\n"
        "import jax; jax.config.update('jax_enable_x64', True)\n"
        "import qprecon.backends.mpax\n"
        "assert dict(os.environ) == before and jax.config.jax_enable_x64\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_jax_arrays_come_back_as_jax_arrays():
    h, w, mask = (jax.numpy.asarray(x) for x in problem())
    solution = qprecon.solve(h, w, mask, backend="mpax", damping=0.01)
    assert isinstance(solution.weights, jax.Array)
    assert (solution.status == qprecon.Status.OPTIMAL).all()


def test_paper_setting():
    h, w, mask = problem(n=24, k=12)
    exact = qprecon.solve(h, w, mask, backend="cholesky", damping=0.01)
    solution = qprecon.solve(h, w, mask, backend="mpax", damping=0.01, paper=True)
    assert set(solution.reported_status[:-1]) == {"optimal"}  # by its own test, not by the audit
    assert (solution.objective <= solution.baseline_objective).all()
    excess = (solution.objective - exact.objective)[:-1] / exact.objective[:-1]
    # raw scale: at H/1e4 the same tolerance asks for much less
    quiet = qprecon.solve(1e-4 * h, w, mask, backend="mpax", damping=0.01, paper=True)
    excess_quiet = (1e4 * quiet.objective - exact.objective)[:-1] / exact.objective[:-1]
    assert excess_quiet.max() > 3 * excess.max()


def test_paper_skips_a_layer_that_did_not_converge():
    h, w, mask = problem(n=24, k=12, decay=4.0)
    solution = qprecon.solve(h, w, mask, backend="mpax", paper=True, max_iterations=1)
    assert "did not converge" in solution.provenance.automatic["skipped"]
    assert np.array_equal(solution.weights, np.where(mask, w, 0.0))
    assert (solution.status[:-1] == qprecon.Status.ITERATION_LIMIT).all()


def test_calling_form_without_jit(monkeypatch):
    """Neither padded nor compiled here. The real thing compiles for half a minute at every call: see the next test."""
    from qprecon.backends import mpax

    widths = []

    def stand_in(qp, c_NB, *rest):
        widths.append(c_NB.shape[1])
        return jax.numpy.zeros_like(c_NB), jax.numpy.full(c_NB.shape[1], 6), jax.numpy.full(c_NB.shape[1], 137)

    monkeypatch.setattr(mpax, "solve_columns", stand_in)
    h, w, mask = problem(n=24, k=6)
    solution = qprecon.solve(h, w, mask, backend="mpax", damping=0.01, jit=False, batch=3)
    assert widths == [3, 2] and solution.timing.compile == 0.0
    assert (solution.status[:-1] == qprecon.Status.ITERATION_LIMIT).all()


@pytest.mark.skipif(os.environ.get("QPRECON_FULL_CONTRACT") != "1", reason="half a minute; QPRECON_FULL_CONTRACT=1 runs it")
def test_calling_form_without_jit_for_real():
    h, w, mask = problem(n=24, k=3)
    handlers = list(logging.getLogger().handlers)
    solution = qprecon.solve(h, w, mask, backend="mpax", damping=0.01, jit=False)
    assert (solution.status == qprecon.Status.OPTIMAL).all()
    assert logging.getLogger().handlers == handlers


def test_refusals():
    h, w, mask = problem()
    with pytest.raises(ValueError, match="did you mean 'paper'"):
        qprecon.solve(h, w, mask, backend="mpax", papre=True)
    with pytest.raises(ValueError, match="batch"):
        qprecon.solve(h, w, mask, backend="mpax", batch=0)
