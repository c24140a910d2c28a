"""What was tried for a fast bounded solver of our own: active sets on top of pcg, beside ADMM.

    OMP_NUM_THREADS=1 python benchmarks/layers/active_sets.py

A round holds the weights that are at a bound which their gradient pushes against, solves for the others by pcg (each round nearer
to the tolerance, with K_j made anew for the round's mask), clips, and takes the clipped step if f falls, half of it otherwise, and
a scaled gradient step where that fails too (Bertsekas 1982; the sets are those of Hintermüller, Ito and Kunisch 2002). Seconds are
those of the processor. The results are in docs/backends.md; the method is not in the package.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import qprecon
from benchmarks.inputs.backend_cases import DAMPING
from benchmarks.inputs.backend_cases import cases as all_cases
from benchmarks.machine import environment
from qprecon.arrays.linalg import column_dots
from qprecon.backends import pcg
from qprecon.backends._pcg import precondition
from qprecon.contract import registry
from qprecon.contract.interface import Chunk, RawColumns, System

RESULT = Path(__file__).parents[1] / "results" / "active_sets.json"
LOOSE = (0.3, 0.03, 0.003, 0.0)  # relative gaps of the first rounds
ROUNDS, TOL, RUNS = 40, 1e-4, 3


def prepare(system: System, options: pcg.Options) -> Any:
    """As pcg's, for numpy chunks with bounds."""
    size = system.hessian_NN.shape[0]
    shared = precondition.low_rank(system.hessian_NN, system.ridge, max(16, pcg.chosen_rank(size, options, "cpu")), 1)
    return lambda chunk: _solve(system.hessian_NN, shared, chunk)


def _solve(hessian_NN: np.ndarray, shared: precondition.LowRank, chunk: Chunk) -> RawColumns:
    """Columns that are done leave; ``at`` says which the others are."""
    multiply, inverse_N1 = pcg.product(hessian_NN, None, "full"), 1.0 / shared.diagonal_N[:, None]
    answer_NK, word_K = chunk.start_NK.copy(), np.full(chunk.start_NK.shape[1], "stalled", object)
    iterations_K, at = np.zeros(len(word_K), np.int64), np.arange(len(word_K))
    for number in range(ROUNDS):
        free_NK = _free(chunk)
        tolerance = max(chunk.tolerance, LOOSE[min(number, len(LOOSE) - 1)])
        inner = replace(chunk, mask_NK=free_NK, lower_NK=None, upper_NK=None, tolerance=tolerance)
        raw = pcg._solve(multiply, precondition.for_columns(shared, free_NK), inner, {})
        iterations_K[at] += raw.iterations
        step_NK = _step(hessian_NN, chunk, raw.weights_NK - chunk.start_NK, free_NK, inverse_N1)
        clipped_K = (step_NK + chunk.start_NK != raw.weights_NK).any(0)
        product_NK = hessian_NN @ step_NK
        gain_K = column_dots(step_NK, 2.0 * chunk.residual_NK - product_NK).astype(np.float64)
        chunk = replace(
            chunk, start_NK=_clip(chunk, chunk.start_NK + step_NK), residual_NK=chunk.residual_NK - product_NK,
            start_objective_K=chunk.start_objective_K - gain_K, improved_K=chunk.improved_K + gain_K,
        )  # fmt: skip
        estimate = lambda some_NK: 2.0 * column_dots(chunk.residual_NK * some_NK * inverse_N1, chunk.residual_NK * some_NK)  # noqa: B023, E731
        base_K = np.maximum(chunk.start_objective_K if chunk.linear_NK is None else chunk.improved_K, 1e-6)
        settled_K = (raw.reported_status == "converged") & (tolerance <= chunk.tolerance) & ~clipped_K
        settled_K &= estimate(_free(chunk) & ~free_NK) <= 0.3 * chunk.tolerance * base_K
        done_K = settled_K | (estimate(_free(chunk)) <= chunk.tolerance * base_K)
        answer_NK[:, at], word_K[at[done_K]] = chunk.start_NK, "converged"
        if done_K.all():
            break
        chunk, at = _some(chunk, ~done_K), at[~done_K]
    return RawColumns(answer_NK, word_K, iterations_K)


def _free(chunk: Chunk) -> np.ndarray:
    """Kept weights that no bound holds."""
    x_NK, r_NK = chunk.start_NK, chunk.residual_NK
    return chunk.mask_NK & ~(((x_NK <= chunk.lower_NK) & (r_NK <= 0)) | ((x_NK >= chunk.upper_NK) & (r_NK >= 0)))


def _clip(chunk: Chunk, x_NK: np.ndarray) -> np.ndarray:
    return np.where(chunk.mask_NK, np.clip(x_NK, chunk.lower_NK, chunk.upper_NK), 0).astype(x_NK.dtype)


def _step(
    hessian_NN: np.ndarray, chunk: Chunk, aim_NK: np.ndarray, free_NK: np.ndarray, inverse_N1: np.ndarray
) -> np.ndarray:
    """The largest of some clipped steps with which f does not rise; zero for a column that has none."""
    step_NK, left = _clip(chunk, chunk.start_NK + aim_NK) - chunk.start_NK, np.arange(aim_NK.shape[1])
    gradient_NK = np.where(free_NK, chunk.residual_NK, 0) * inverse_N1
    product_NK = hessian_NN @ gradient_NK
    cauchy_K = column_dots(gradient_NK, chunk.residual_NK) / np.maximum(column_dots(gradient_NK, product_NK), 1e-30)
    trials = [aim_NK, 0.5 * aim_NK, 0.25 * aim_NK, *(4.0**-k * cauchy_K * gradient_NK for k in range(4))]
    for trial_NK in trials:
        some = _some(chunk, left)
        step_NK[:, left] = _clip(some, some.start_NK + trial_NK[:, left]) - some.start_NK
        own_NK = step_NK[:, left]
        left = left[~(column_dots(own_NK, 2.0 * some.residual_NK - hessian_NN @ own_NK) >= 0)]
        if not len(left):
            return step_NK
    step_NK[:, left] = 0
    return step_NK


def _some(chunk: Chunk, index: np.ndarray) -> Chunk:
    names = ("weights", "mask", "start", "residual", "linear", "lower", "upper")
    arrays = {name: getattr(chunk, name) for name in (*(f"{name}_NK" for name in names), "start_objective_K", "improved_K")}
    return replace(chunk, **{name: None if array is None else array[..., index] for name, array in arrays.items()})


def _measured(arguments: dict[str, Any], backend: str) -> dict[str, Any]:
    seconds = []
    for _ in range(1 + RUNS):
        began = time.process_time()
        solution = qprecon.solve(**arguments, backend=backend, damping=DAMPING, tol=TOL)
        seconds.append(time.process_time() - began)
    certified = int(sum(status is qprecon.Status.OPTIMAL for status in solution.status))
    held = np.isclose(abs(solution.weights), arguments["upper"]) & arguments["mask"]
    return {
        "seconds": statistics.median(seconds[1:]), "certified": certified, "columns": len(solution.status),
        "iterations": int(solution.iterations.max()), "held": float(held.sum() / arguments["mask"].sum()),
    }  # fmt: skip


def main() -> None:
    """Measure and write."""
    capabilities = replace(registry.find("pcg").capabilities, bounds=True)
    rows = []
    for case in (case for case in all_cases("cpu", processor=True) if case.bounded and not case.rhs):
        arguments = case.arguments("cpu")
        admm = _measured(arguments, "admm")
        with mock.patch.object(pcg, "prepare", prepare):
            record = registry.find("pcg")
            object.__setattr__(record, "capabilities", capabilities)
            tried = _measured(arguments, "pcg")
        free = {name: value for name, value in arguments.items() if name not in ("lower", "upper")}
        unbounded = _measured({**free, "upper": np.inf, "lower": -np.inf}, "pcg")
        rows.append({"problem": case.name, "admm": admm, "active sets": tried, "pcg without bounds": unbounded})
        said = {name: f"{1e3 * each['seconds']:.0f} ms, {each['certified']} of {each['columns']}, {each['iterations']} iterations"
                for name, each in rows[-1].items() if name != "problem"}  # fmt: skip
        print(case.name, f"held {admm['held']:.0%}", said, flush=True)
    RESULT.write_text(json.dumps({**environment("cpu"), "tol": TOL, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
