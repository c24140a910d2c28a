"""What a matrix costs once and a column each time, by inputs: the figures by which columns are dealt to ranks.

    python benchmarks/ranks/dealing_costs.py --inputs 4096 14336 --out-json benchmarks/results/dealing_costs.json

For each number of inputs a layer with few and one with many columns are prepared, solved and audited, as a rank does (Wanda's masks
of 50 %, tokens with outlier channels). The difference gives the seconds of a column, the rest what is done once; `seconds_once` and
`seconds_of_column` of qprecon/llm/ranks/dealing.py stand beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import qprecon
from qprecon.llm.ranks.dealing import seconds_of_column, seconds_once

FEW, MANY, TIMES = 512, 4096, 3


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, nargs="+", default=[4096, 14336])
    parser.add_argument("--columns", type=int, nargs=2, default=[FEW, MANY])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out-json", default="benchmarks/results/dealing_costs.json")
    arguments = parser.parse_args()
    rows = []
    for n in arguments.inputs:
        few, many = arguments.columns
        seconds = {k: measured(n, k, arguments.device) for k in (few, many)}
        column = (seconds[many] - seconds[few]) / (many - few)
        rows.append({
            "inputs": n, "columns": arguments.columns, "seconds": list(seconds.values()), "once": seconds[few] - few * column,
            "column": column, "once_assumed": seconds_once(n), "column_assumed": seconds_of_column(n),
        })  # fmt: skip
        print(rows[-1], flush=True)
    card = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu"
    Path(arguments.out_json).write_text(json.dumps({"card": card, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def measured(n: int, k: int, device: str) -> float:
    """Seconds of one layer of n inputs and k outputs, the best of some."""
    generator = torch.Generator(device).manual_seed(0)
    x_TN = torch.randn(2 * n, n, generator=generator, device=device) * torch.rand(n, generator=generator, device=device).add_(0.1)
    x_TN[:, :: max(n // 16, 1)] *= 20
    hessian_NN = x_TN.T @ x_TN
    del x_TN
    weights_NK = torch.randn(n, k, generator=generator, device=device)
    score_NK = weights_NK.abs() * hessian_NN.diagonal().sqrt().unsqueeze(1)
    mask_NK = score_NK >= score_NK.median(0).values
    best = float("inf")
    for _ in range(TIMES):
        started = time.perf_counter()
        prepared = qprecon.prepare(hessian_NN, damping=0.01)
        prepared.solve(weights_NK, mask_NK, tol=1e-4)
        prepared.release()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
