"""rAPDHG (Lu and Yang, arXiv:2311.07710), the paper's solver, through MPAX (arXiv:2412.09734) on JAX.

Box form (paper, eq. constrained_objective): all columns share H, and a pruned entry is a variable with lower = upper. The variables
are x = ŵ − start, so that x = 0 is the warm start, a pruned entry is fixed at exactly 0, and float32 rounds the update rather than
the weights. MPAX minimises ½xᵀQx + cᵀx; Q = H and c = −residual make that half of f.

Tolerance: MPAX stops on ‖gradient‖ ≤ ε‖c‖ and |xᵀgradient| ≤ ε·½f, of first order in the error where the gap is of second order.
What gap the same ε leaves depends on the condition number, by orders of magnitude. The core asks for half of ``tol`` at
first and for less where that was not enough, so ε is twice the chunk's tolerance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from mpax.utils import QuadraticProgrammingProblem, TerminationStatus

from ..contract.interface import Chunk, RawColumns, SolveChunk, System
from ._shared.jax import bucket, compiled, precision, root_logger_kept, start_without_preallocation
from ._shared.options import MpaxOptions as Options
from ._shared.rapdhg import WORDS, shared_problem, solve_columns

start_without_preallocation()

PAPER_TOLERANCE, PAPER_BATCH = 1e-2, 96
_ITERATION_LIMIT = 100_000  # the paper's; enough for κ of a few 1e6
_FIRST_SEGMENT = 1024  # iterations between two looks at the clock, doubled each time; only used under a deadline


def prepare(system: System, options: Options) -> SolveChunk:
    """Build the problem that all columns share."""
    n, dtype = system.hessian_NN.shape[0], system.hessian_NN.dtype
    if n == 0:
        return lambda chunk: RawColumns(chunk.start_NK)
    with precision(dtype, not options.paper):
        qp = shared_problem(system.hessian_NN)

    def solve_chunk(chunk: Chunk) -> RawColumns:
        with precision(dtype, not options.paper), root_logger_kept():
            raw = _solve_batches(qp, chunk, options)
            return _skip_rule(qp, chunk, raw) if options.paper else raw

    return solve_chunk


def bytes_per_column(n_inputs: int, itemsize: int, options: Any) -> float:
    """MPAX keeps some thirty vectors a column, and the loop's copies of them."""
    return (12.0 if options.batch or options.paper else 60.0) * n_inputs * itemsize


def _solve_batches(qp: QuadraticProgrammingProblem, chunk: Chunk, options: Options) -> RawColumns:
    k = chunk.start_NK.shape[1]
    size = options.batch or (PAPER_BATCH if options.paper else k)
    parts, compile_seconds = [], 0.0
    status, iterations = np.full(k, "time_limit", dtype=object), np.zeros(k, dtype=np.int64)
    for first in range(0, k, max(size, 1)):
        some = slice(first, min(first + size, k))
        data, base_NB = _batch_data(chunk, some, options)
        answer, seconds = _run(qp, data, size, chunk, options)
        compile_seconds += seconds
        parts.append(chunk.start_NK[:, some] if answer is None else base_NB + answer[0])
        if answer is not None:
            status[some], iterations[some] = answer[1:]
    weights_NK = jnp.concatenate(parts, axis=1) if parts else chunk.start_NK
    return RawColumns(weights_NK, status, iterations, {"compile_seconds": compile_seconds})


def _batch_data(chunk: Chunk, some: slice, options: Options) -> tuple[list[Any], Any]:
    """c, lower, upper (N, B), the objective's constant (B,), and the weights that x is counted from."""
    kept_NB, start_NB = chunk.mask_NK[:, some], chunk.start_NK[:, some]
    if options.paper:  # Δ = ŵ − w, from Δ = 0
        base_NB = chunk.weights_NK[:, some]
        c_NB = jnp.zeros_like(base_NB) if chunk.linear_NK is None else -chunk.linear_NK[:, some]
        constant_B = jnp.zeros(base_NB.shape[1], base_NB.dtype)
    else:
        base_NB, c_NB = start_NB, -chunk.residual_NK[:, some]
        value_K = chunk.start_objective_K if chunk.linear_NK is None else -chunk.improved_K
        constant_B = 0.5 * jnp.asarray(value_K[some], base_NB.dtype)
    bounds = []
    for bound_NK, infinite in ((chunk.lower_NK, -jnp.inf), (chunk.upper_NK, jnp.inf)):
        free_NB = jnp.full_like(base_NB, infinite) if bound_NK is None else bound_NK[:, some] - base_NB
        bounds.append(jnp.where(kept_NB, free_NB, -base_NB))
    return [c_NB, *bounds, constant_B], base_NB


def _run(
    qp: QuadraticProgrammingProblem, data: list[Any], size: int, chunk: Chunk, options: Options
) -> tuple[tuple[Any, np.ndarray, np.ndarray] | None, float]:
    """One batch, in segments if there is a deadline: (x, words, iterations) or None if there was no time, and compile seconds."""
    expired = lambda: chunk.deadline is not None and time.monotonic() >= chunk.deadline  # noqa: E731
    if expired():
        return None, 0.0
    width = data[0].shape[1]
    solver, data, seconds = _executable(qp, data, size, options)
    limit = chunk.max_iterations or _ITERATION_LIMIT
    segment = limit if chunk.deadline is None or options.paper else min(limit, _FIRST_SEGMENT)
    tolerances = _tolerances(chunk.tolerance, qp.objective_matrix.dtype, options)
    total_NB, done, iterations = 0.0, 0, 0
    while not expired():
        x_NB, codes, counts = solver(qp, *data, *tolerances, jnp.asarray(segment, jnp.int32))
        codes, counts = np.asarray(codes), np.asarray(counts)
        total_NB, iterations = total_NB + x_NB, iterations + counts
        done += segment
        if done >= limit or (codes[:width] != TerminationStatus.ITERATION_LIMIT).all():
            break
        data = _continue_from(qp, data, x_NB)
        segment = min(2 * segment, limit - done)
    if not done:
        return None, seconds
    words = np.array([WORDS.get(int(code), f"MPAX status {code}") for code in codes[:width]], dtype=object)
    if done < limit:
        words[words == "iteration_limit"] = "time_limit"
    return (total_NB[:, :width], words, iterations[:width]), seconds


def _tolerances(tolerance: float, dtype: Any, options: Options) -> tuple[Any, Any]:
    """eps_abs and eps_rel; the absolute one only keeps the test reachable where f* is nearly 0."""
    if options.paper:
        return jnp.asarray(PAPER_TOLERANCE, dtype), jnp.asarray(PAPER_TOLERANCE, dtype)
    return jnp.asarray(max(1e-6 * tolerance, 4.0 * float(jnp.finfo(dtype).eps)), dtype), jnp.asarray(2.0 * tolerance, dtype)


def _continue_from(qp: QuadraticProgrammingProblem, data: list[Any], x_NB: Any) -> list[Any]:
    """The same problem in x − x_NB."""
    c_NB, lower_NB, upper_NB, constant_B = data
    product_NB = qp.objective_matrix @ x_NB
    gained_B = (x_NB * (c_NB + 0.5 * product_NB)).sum(0)
    return [c_NB + product_NB, lower_NB - x_NB, upper_NB - x_NB, constant_B + gained_B]


def _executable(
    qp: QuadraticProgrammingProblem, data: list[Any], size: int, options: Options
) -> tuple[Callable[..., Any], list[Any], float]:
    """The compiled solver, the batch padded to its width, and the seconds spent compiling."""
    if not options.jit:
        return solve_columns, data, 0.0
    n, width = data[0].shape
    key = (n, str(data[0].dtype), next(iter(data[0].devices())), options.paper)
    full = bucket(key, width, size)
    data = _pad(data, full - width)
    eps, limit = _tolerances(1e-4, data[0].dtype, options), jnp.asarray(1, jnp.int32)
    solver, seconds = compiled(solve_columns, (*key, full), qp, *data, *eps, limit)
    return solver, data, seconds


def _pad(data: list[Any], extra: int) -> list[Any]:
    """Columns with x = 0 as their only point: they are done at the first check."""
    return [jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, extra),)) for x in data] if extra else data


def _skip_rule(qp: QuadraticProgrammingProblem, chunk: Chunk, raw: RawColumns) -> RawColumns:
    """The paper's appendix on hyperparameters: an update of the layer that mostly failed or that made it worse is dropped."""
    new_NK = jnp.where(chunk.mask_NK, raw.weights_NK, 0.0)
    delta_NK = new_NK - chunk.weights_NK
    error_K = (delta_NK * (qp.objective_matrix @ delta_NK)).sum(0)
    if chunk.linear_NK is not None:
        error_K = error_K - 2.0 * (chunk.linear_NK * delta_NK).sum(0)
    unconverged = (raw.reported_status != "optimal").mean() > 0.5 if len(raw.reported_status) else False
    grew = not float(np.asarray(error_K).sum()) <= float(np.asarray(chunk.start_objective_K).sum())
    if not (unconverged or grew):
        return raw
    why = "skipped: most columns did not converge" if unconverged else "skipped: the layer's error grew"
    limit = "iteration_limit" if unconverged and (raw.reported_status == "iteration_limit").any() else why
    return RawColumns(chunk.start_NK, limit, raw.iterations, {**raw.extras, "skipped": why})
