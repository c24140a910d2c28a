"""What rounding costs real layers: f of what is stored over that of the best real-valued weights, by grid and method, and the gap.

    python benchmarks/layers/rounding.py      (a minute on a CPU; rewrites benchmarks/results/rounding.json)

The layers are those of tests/fixtures/real (24 columns each), 50 % sparse by Wanda's mask, damping 0.01, in float64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import qprecon
from qprecon.grids import Grid, find_grid
from qprecon.grids.on_grid import METHODS
from tests.contract.families import real_layer, real_layers

RESULTS = Path(__file__).parents[1] / "results" / "rounding.json"


def grids() -> dict[str, Grid]:
    """What is measured, with bfloat16 scales as a bfloat16 model has them."""
    named = {f"int4, groups of {size}": ("int4", size) for size in (32, 64)} | {"int3, groups of 64": ("int3", 64)}
    named |= {name: (name, "default") for name in ("int8", "fp8", "nvfp4", "mxfp4", "bf16")}
    return {label: find_grid(name, group_size=size, scale_dtype="bfloat16") for label, (name, size) in named.items()}


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
    return rows


def main() -> int:
    rows = [row for name in real_layers() for row in measure(name)]
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    for row in rows:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
