"""Gram matrices on one CPU thread: a whole product, panels of the upper triangle as `qprecon.data.sums` makes them, BLAS's syrk.

    OMP_NUM_THREADS=1 python benchmarks/layers/gram_cpu.py
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import scipy.linalg.blas
import torch

from benchmarks.machine import environment
from qprecon.data import sums

RESULT = Path(__file__).parents[1] / "results" / "gram_cpu.json"
SIZES = ((576, 512), (896, 512), (1536, 512), (4864, 512), (2048, 2048))  # inputs, rows of one product
RUNS = 5


def main() -> None:
    """Measure and write; seconds of the processor, the best of some runs."""
    torch.set_num_threads(1)
    rows = []
    for inputs, tokens in SIZES:
        x_TN = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(0))
        sum_NN = torch.zeros(inputs, inputs)
        with mock.patch.object(sums, "HOST_PANELS_FROM", 10**9):
            whole = _seconds(lambda: sums.add_gram(sum_NN, x_TN))  # noqa: B023
        panels = _seconds(lambda: sums.add_gram(sum_NN, x_TN))  # noqa: B023
        by_columns = {"a": x_TN.numpy().T, "c": sum_NN.numpy().T}
        syrk = _seconds(lambda: scipy.linalg.blas.ssyrk(1.0, beta=1.0, lower=1, overwrite_c=1, **by_columns))  # noqa: B023
        rows.append({"inputs": inputs, "rows": tokens, "whole": whole, "panels": panels, "syrk": syrk})
        print(f"{inputs} inputs, {tokens} rows: {1e3 * whole:.1f} ms, panels {panels / whole:.2f}, syrk {syrk / whole:.2f} of it")
    RESULT.write_text(json.dumps({**environment("cpu"), "results": rows}, indent=1) + "\n")


def _seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(1 + RUNS):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return best


if __name__ == "__main__":
    main()
