"""Every call of pcg and its audit while the first blocks of a model are pruned: columns, iterations, gaps, milliseconds.

    python benchmarks/models/block_calls.py --model llama-3.1-8b --blocks 3     (one GPU, a minute)
    python benchmarks/models/block_calls.py --model tiny --device cpu           (to check that the script runs)

The model with random weights is pruned twice in one process: in the first run kernels are compiled, unless Triton's cache on the
disk has them. The device is waited for at the ends of each call. ``alone``: of the first columns that go on after the others of
their chunk, the objective that they came with (1 at the start), what the call took off it, and the largest entries of the residual
that is left: the input, its H_ii (1 on average) and its share of the residual.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # the package and the benchmarks of this checkout

from benchmarks.models import end_to_end
from qprecon.backends import pcg
from qprecon.engine import in_progress

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "block_calls.json"
QUANTILES = (0.0, 0.5, 0.99, 1.0)
_FEW, _WORST, _MOST = 64, 4, 8


def left_behind(multiply: Any, chunk: Any, raw: Any) -> list[dict[str, Any]]:
    """Facts of the columns of a call for a few; none of other calls, and none of the empty columns that fill a call up."""
    if not isinstance(multiply, pcg.Full) or chunk.start_NK.shape[1] > _FEW:
        return []
    h_NN, found = multiply.hessian_NN, []
    for column in torch.as_tensor(chunk.mask_NK).any(0).nonzero()[:_MOST, 0].tolist():
        kept_N, step_N = chunk.mask_NK[:, column], raw.weights_NK[:, column] - chunk.start_NK[:, column]
        rest_N = kept_N * (chunk.residual_NK[:, column] - h_NN @ step_N)
        shares_N = rest_N.abs() / rest_N.abs().sum()
        worst = shares_N.argsort(descending=True)[:_WORST].tolist()
        found.append({
            "objective": float(chunk.start_objective_K[column]), "kept": int(kept_N.sum()),
            "word": str(raw.reported_status[column]),
            "gain": float(step_N @ (chunk.residual_NK[:, column] + rest_N)), "iterations": int(raw.iterations[column]),
            "residual": [[input, float(h_NN[input, input]), float(shares_N[input])] for input in worst],
        })  # fmt: skip
    return found


def wait() -> None:
    """For the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seen(calls: list[dict[str, Any]]) -> contextlib.ExitStack:
    """Until it is closed, calls of pcg's iterations and of audits are added to the list."""
    solve, accept, stack = pcg._solve, in_progress.InProgress.accept, contextlib.ExitStack()

    def _solve(multiply, apply, chunk, extras):
        wait()
        began = time.perf_counter()
        raw = solve(multiply, apply, chunk, extras)
        wait()
        words, counts = np.unique(raw.reported_status.astype(str), return_counts=True)
        calls.append({
            "product": type(multiply).__name__, "inputs": chunk.start_NK.shape[0], "columns": chunk.start_NK.shape[1],
            "tolerance": chunk.tolerance, "iterations": int(raw.iterations.max()), "ms": 1e3 * (time.perf_counter() - began),
            "words": dict(zip(words.tolist(), counts.tolist(), strict=True)), "alone": left_behind(multiply, chunk, raw),
        })  # fmt: skip
        return raw

    def accepted(self, local, raw, answer_NK):
        wait()
        began = time.perf_counter()
        accept(self, local, raw, answer_NK)
        wait()
        gap_K = self.results.relative_gap[local]
        if calls and "audit_ms" not in calls[-1]:
            calls[-1] |= {
                "audit_ms": 1e3 * (time.perf_counter() - began), "audited": len(local), "failing": int((gap_K > 1e-4).sum()),
                "gaps": np.quantile(np.minimum(gap_K, 1e9), QUANTILES).tolist(),
            }  # fmt: skip

    stack.callback(setattr, pcg, "_solve", solve)
    stack.callback(setattr, in_progress.InProgress, "accept", accept)
    pcg._solve, in_progress.InProgress.accept = _solve, accepted
    return stack


def main() -> None:
    """Print and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--blocks", default="3")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--samples", default="128")
    parser.add_argument("--seqlen", default="2048")
    parser.add_argument("--workdir", default="/tmp/qprecon-end-to-end")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    found = {}
    for name in ("first", "second"):
        run, calls = pathlib.Path(tempfile.mkdtemp()) / "run.json", list[dict[str, Any]]()
        sys.argv = ["end_to_end", "--out-json", str(run)]
        for key in ("model", "blocks", "device", "samples", "seqlen", "workdir"):
            sys.argv += [f"--{key}", getattr(args, key)]
        with seen(calls), contextlib.redirect_stdout(sys.stderr):
            end_to_end.main()
        whole = json.loads(run.read_text())[0]
        found["about"] = {key: whole[key] for key in ("model", "gpu", "versions", "samples", "seqlen", "settings")}
        found[name] = {key: whole[key] for key in ("seconds", "max_relative_gap", "uncertified_columns")} | {"calls": calls}
        for call in calls:
            print(name, call)
    found["about"]["date"] = datetime.date.today().isoformat()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
