"""What rounding costs real layers: f of what is stored over that of the best real-valued weights, by grid and method, and the gap.

    python benchmarks/layers/rounding.py      (two minutes on a CPU; rewrites benchmarks/results/rounding.json)

The layers are those of tests/fixtures/real (24 columns each), 50 % sparse by Wanda's mask, damping 0.01, in float64.

"exact-64" and "exact-16", for int4 in groups of 64 only: what "sweep" does, from another start. So many inputs of a column are
rounded, the kept ones that are left are solved for again exactly, and so on. It costs a solve a block and column, and is no better.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import qprecon
from qprecon.grids import Grid, find_grid
from qprecon.grids.formats import Fitted
from qprecon.grids.on_grid import METHODS, Effort
from qprecon.grids.rounding import descend, refit_scales
from qprecon.grids.scales import search_scales
from tests.contract.families import real_layer, real_layers

RESULTS = Path(__file__).parents[1] / "results" / "rounding.json"
EXACT, EXACT_GRID = (64, 16), "int4, groups of 64"


def grids() -> dict[str, Grid]:
    """What is measured, with bfloat16 scales as a bfloat16 model has them."""
    named = {f"int4, groups of {size}": ("int4", size) for size in (32, 64)} | {"int3, groups of 64": ("int3", 64)}
    named |= {name: (name, "default") for name in ("int8", "fp8", "nvfp4", "mxfp4", "bf16")}
    return {label: find_grid(name, group_size=size, scale_dtype="bfloat16") for label, (name, size) in named.items()}


def exact_blocks(
    a_NN: np.ndarray, w_NK: np.ndarray, best_NK: np.ndarray, mask_NK: np.ndarray, grid: Grid, block: int
) -> np.ndarray:
    """f of each column, with scales, order, descent and effort as those of "sweep"."""
    order_N, effort = np.argsort(-np.diag(a_NN), kind="stable"), Effort()
    weight_N = 1.0 / np.diag(np.linalg.inv(a_NN))
    fitted, least_K = search_scales(grid, best_NK, weight_N), np.full(w_NK.shape[1], np.inf)
    for _ in range(1 + effort.repeats):
        q_NK = _resolved(a_NN, a_NN @ w_NK, fitted, best_NK, mask_NK, order_N, block)
        q_NK, r_NK = descend(a_NN, fitted, q_NK, a_NN @ (w_NK - q_NK), mask_NK, effort.sweeps)
        for _ in range(effort.refits):
            fitted, q_NK, r_NK = refit_scales(a_NN, fitted, q_NK, r_NK)
            q_NK, r_NK = descend(a_NN, fitted, q_NK, r_NK, mask_NK, effort.sweeps)
        least_K = np.minimum(least_K, ((w_NK - q_NK) * r_NK).sum(0))
    return least_K


def _resolved(
    a_NN: np.ndarray, b_NK: np.ndarray, fitted: Fitted, best_NK: np.ndarray, mask_NK: np.ndarray, order_N: np.ndarray, block: int
) -> np.ndarray:
    q_NK = best_NK.copy()
    for j in range(q_NK.shape[1]):
        kept = order_N[mask_NK[order_N, j]]
        for first in range(0, len(kept), block):
            rows, done, rest = kept[first : first + block], kept[: first + block], kept[first + block :]
            q_NK[rows, j] = fitted.nearest(q_NK)[rows, j]
            missing = b_NK[rest, j] - a_NN[np.ix_(rest, done)] @ q_NK[done, j]
            q_NK[rest, j] = np.linalg.solve(a_NN[np.ix_(rest, rest)], missing)
    return q_NK


def measure(name: str) -> list[dict]:
    h, w, _ = real_layer(name)
    score = np.abs(w) * np.sqrt(np.diag(h))[:, None]
    mask = score >= np.sort(score, axis=0)[len(w) // 2]
    prepared = qprecon.prepare(h, damping=0.01)
    solution = prepared.solve(w, mask)
    best = solution.objective.sum()
    rows = []
    for label, grid in grids().items():
        for method in METHODS:
            found = prepared.round(w, mask, solution, grid, method=method)
            cost, gap = found.objective.sum(), found.gap_bound.sum()
            ratio, bound = round(float(cost / best), 5), round(float(gap / (cost - gap)), 5)
            rows.append({"layer": name, "grid": label, "method": method, "over_optimum": ratio, "stored_gap": bound})
    a_NN = h + prepared.ridge * np.eye(len(h))
    for block in EXACT:
        cost = exact_blocks(a_NN, w, solution.weights, mask, grids()[EXACT_GRID], block).sum()
        rows.append({"layer": name, "grid": EXACT_GRID, "method": f"exact-{block}", "over_optimum": round(float(cost / best), 5)})
    return rows


def main() -> int:
    rows = [row for name in real_layers() for row in measure(name)]
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    for row in rows:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
