"""OSQP (Stellato et al., arXiv:1711.08013): ADMM on a sparse KKT factor, then polishing; a reference for general bounds.

Box form in x = ŵ − start: minimise ½xᵀHx − residualᵀx with identity constraint rows, lower = upper = 0 where pruned. One set-up a
layer and worker; a column only updates q and the bounds, which refactorises where the set of fixed rows changes. H is dense, so a
column costs about N³/6 without BLAS: seconds at N = 2000.

OSQP releases the interpreter lock while it solves, so threads share H and are safe beside any fork.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import osqp
import scipy.sparse as sparse

from ..contract.interface import Chunk, RawColumns, SolveChunk, System
from ._shared.options import OsqpOptions as Options

_ITERATION_LIMIT = 20_000
_RHO = 0.1  # OSQP's first penalty, which it adapts
_WORDS = {
    osqp.SolverStatus.OSQP_SOLVED: "solved",
    osqp.SolverStatus.OSQP_SOLVED_INACCURATE: "solved inaccurately",
    osqp.SolverStatus.OSQP_MAX_ITER_REACHED: "iteration_limit",
    osqp.SolverStatus.OSQP_TIME_LIMIT_REACHED: "time_limit",
    osqp.SolverStatus.OSQP_PRIMAL_INFEASIBLE: "primal infeasible",
    osqp.SolverStatus.OSQP_DUAL_INFEASIBLE: "dual infeasible",
    osqp.SolverStatus.OSQP_NON_CVX: "not convex",
}


def prepare(system: System, options: Options) -> SolveChunk:
    """The upper triangle of H, and the solvers, made when first needed and kept from chunk to chunk."""
    upper_NN = sparse.triu(sparse.csc_matrix(system.hessian_NN), format="csc")
    solvers: list[osqp.OSQP] = []

    def solve_chunk(chunk: Chunk) -> RawColumns:
        k = chunk.start_NK.shape[1]
        workers = min(k, options.workers or max(1, min(_usable_cores(), k // 8)))
        while len(solvers) < workers:
            solvers.append(_set_up(upper_NN))
        out = RawColumns(chunk.start_NK.copy(), np.full(k, "time_limit", dtype=object), np.zeros(k, dtype=np.int64))
        columns, lock = iter(range(k)), threading.Lock()
        if workers == 1:
            _work(solvers[0], chunk, columns, lock, out, options.polishing)
        else:
            with ThreadPoolExecutor(workers) as pool:
                jobs = [pool.submit(_work, solver, chunk, columns, lock, out, options.polishing) for solver in solvers[:workers]]
                for job in jobs:
                    job.result()
        return out

    return solve_chunk


def bytes_per_column(n_inputs: int, itemsize: int, options: Any) -> float:
    """W-shaped arrays only: columns are solved one at a time."""
    return 12.0 * n_inputs * itemsize


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _set_up(upper_NN: Any) -> osqp.OSQP:
    """The core scales already, so OSQP's own scaling is off: its residuals are those of the problem given."""
    n = upper_NN.shape[0]
    zero_N = np.zeros(n)
    solver = osqp.OSQP()
    identity_NN = sparse.identity(n, format="csc")
    solver.setup(upper_NN, zero_N, identity_NN, zero_N, zero_N, verbose=False, scaling=0, rho=_RHO, polishing=False)
    return solver


def _work(solver: osqp.OSQP, chunk: Chunk, columns: Any, lock: Any, out: RawColumns, polishing: bool) -> None:
    """Take columns until none are left or time is up; every worker writes columns of its own."""
    # residuals of the normalised problem: well below the gap wanted, which is of second order in them only where κ allows
    accuracy = max(0.1 * chunk.tolerance, 1e-10)
    solver.update_settings(eps_abs=accuracy, eps_rel=accuracy, max_iter=chunk.max_iterations or _ITERATION_LIMIT)
    while True:
        with lock:
            j = next(columns, None)
        if j is None:
            return
        if chunk.deadline is not None:
            left = chunk.deadline - time.monotonic()
            if left <= 0.0:
                return
            solver.update_settings(time_limit=left)
        lower_N, upper_N = _bounds(chunk, j)
        residual_N = chunk.residual_NK[:, j]
        solver.update(q=-residual_N, l=lower_N, u=upper_N)
        solver.warm_start(x=np.zeros_like(residual_N), y=np.where(chunk.mask_NK[:, j], 0.0, residual_N))
        result = solver.solve(raise_error=False)
        out.reported_status[j] = _WORDS.get(result.info.status_val, result.info.status)
        out.iterations[j] = result.info.iter
        if polishing and result.info.status_val == osqp.SolverStatus.OSQP_SOLVED and _is_active(result, lower_N, upper_N):
            result = _polished(solver)
            out.iterations[j] += result.info.iter
        if result.info.rho_updates:  # what one column taught is not the next one's, which may be another thread's or solve's
            solver.update_settings(rho=_RHO)
        if result.x is not None and np.isfinite(result.x).all():
            out.weights_NK[:, j] += np.clip(result.x, lower_N, upper_N)


def _is_active(result: Any, lower_N: np.ndarray, upper_N: np.ndarray) -> bool:
    """Whether some constraint is active by OSQP's own rule. Without one there is nothing to polish, which OSQP would print."""
    x_N, y_N = result.x, result.y
    return bool(((x_N - lower_N < -y_N) | (upper_N - x_N < y_N)).any())


def _polished(solver: osqp.OSQP) -> Any:
    """The answer once more, from where the solver is, with polishing."""
    solver.update_settings(polishing=True)
    try:
        return solver.solve(raise_error=False)
    finally:
        solver.update_settings(polishing=False)


def _bounds(chunk: Chunk, j: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds on x: 0 where pruned."""
    kept_N, start_N = chunk.mask_NK[:, j], chunk.start_NK[:, j]
    lower_N = -np.inf if chunk.lower_NK is None else chunk.lower_NK[:, j] - start_N
    upper_N = np.inf if chunk.upper_NK is None else chunk.upper_NK[:, j] - start_N
    return np.where(kept_N, lower_N, 0.0), np.where(kept_N, upper_N, 0.0)
