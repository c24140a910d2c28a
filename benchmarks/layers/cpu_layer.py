"""A real layer on the CPU: qprecon to a certified 1e-4 beside a plain loop of scipy's float64 Cholesky over the columns.

    OMP_NUM_THREADS=2 OPENBLAS_NUM_THREADS=2 python benchmarks/layers/cpu_layer.py [--npz LAYER.npz ...] [--out FILE]

Each .npz holds H (N, N) and W (N, K); without any, the layers of tests/fixtures/real are taken (24 columns each). Wanda mask, 50 %,
1 % damping. The two take turns; seconds are medians, the loop's from some of its columns scaled to all of them. The load average
tells whether the machine was free.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # the package and the benchmarks of this checkout

import qprecon
from benchmarks.inputs.backend_cases import FIXTURES
from benchmarks.inputs.problems import from_file, from_fixture
from benchmarks.machine import processor

DAMPING, TOL, SPARSITY = 0.01, 1e-4, 0.5
RESULTS = pathlib.Path(__file__).parents[1] / "results" / "cpu_layer.json"


def cholesky_loop(h_NN: np.ndarray, w_NK: np.ndarray, mask_NK: np.ndarray) -> np.ndarray:
    """What one would write without qprecon: gather, factor and solve, column by column, in float64."""
    a_NN = h_NN.astype(np.float64)
    a_NN[np.diag_indices_from(a_NN)] += DAMPING * a_NN.diagonal().mean()
    right_NK = a_NN @ w_NK.astype(np.float64)
    out_NK = np.zeros_like(right_NK)
    for j in range(w_NK.shape[1]):
        index_I = np.flatnonzero(mask_NK[:, j])
        factor = scipy.linalg.cho_factor(a_NN[np.ix_(index_I, index_I)], lower=True, check_finite=False)
        out_NK[index_I, j] = scipy.linalg.cho_solve(factor, right_NK[index_I, j], check_finite=False)
    return out_NK


def take_turns(runs: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of each run and its last answer, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    answers: dict[str, Any] = {}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            answers[name] = run()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return seconds, answers


def measure(name: str, arrays: tuple[np.ndarray, ...], loop_columns: int, repeats: int) -> list[dict[str, Any]]:
    """Rows for the loop and for qprecon with numpy and torch inputs."""
    import torch

    h_NN, w_NK, mask_NK = arrays[0].astype(np.float32), arrays[1].astype(np.float32), arrays[2]
    n, k = w_NK.shape
    some = min(loop_columns, k)
    solve = lambda *given: qprecon.solve(*given, damping=DAMPING, tol=TOL)  # noqa: E731
    tensors = [torch.as_tensor(x) for x in (h_NN, w_NK, mask_NK)]
    loop = "scipy float64 Cholesky loop"
    seconds, answers = take_turns(
        {
            loop: lambda: cholesky_loop(h_NN, w_NK[:, :some], mask_NK[:, :some]),
            "qprecon, numpy": lambda: solve(h_NN, w_NK, mask_NK),
            "qprecon, torch": lambda: solve(*tensors),
        },
        repeats,
    )
    rows = []
    for method, taken in seconds.items():
        scale = k / some if method == loop else 1.0
        row = {"problem": name, "n": n, "k": k, "method": method, "seconds": scale * statistics.median(taken)}
        row |= {"seconds_min": scale * min(taken), "runs": len(taken), "columns_timed": some if method == loop else k}
        if method != loop:
            solution = answers[method]
            optimal = np.mean([status is qprecon.Status.OPTIMAL for status in solution.status])
            row |= {"relative_gap": float(solution.relative_gap.max()), "certified_fraction": float(optimal)}
            row |= {"iterations": int(solution.iterations.max()), "ran": solution.provenance.backend}
            row["faster_than_loop"] = rows[0]["seconds"] / row["seconds"]
            row["faster_than_loop_min"] = rows[0]["seconds_min"] / row["seconds_min"]
        rows.append(row)
        print(f"{name:20} {n}x{k} {method:28} {row['seconds']:8.3f} s  {row.get('faster_than_loop', 1.0):5.1f}x", flush=True)
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--npz", type=pathlib.Path, action="append", help="a layer; repeat for several")
    parser.add_argument("--loop-columns", type=int, default=96, help="columns of the loop that are timed")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    layers = {path.stem: from_file(path, sparsity=SPARSITY) for path in args.npz or ()}
    layers = layers or {path.stem: from_fixture(path, SPARSITY) for path in sorted(FIXTURES.glob("*.npz"))}
    about = {
        "device": f"{len(os.sched_getaffinity(0))} cores of {processor()}",
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("numpy", "scipy", "torch")},
    }
    rows = []
    for name, arrays in layers.items():
        load = os.getloadavg()[0]
        rows += [{**row, "load_average": load, **about} for row in measure(name, arrays, args.loop_columns, args.repeats)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
