"""H·P for a few columns on a GPU: the kernel that reads H once, a product for each column, and a library's for all of them.

    python benchmarks/layers/few_columns.py [--out FILE]

Milliseconds are medians of 20 calls started from Python, by the device's clock; `memory` is what reading H takes at the rate of a
copy on the same card. Errors are of the norm, relative to |H||P|.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package of this checkout

from qprecon.backends._pcg.skinny import few_columns

RESULT = Path(__file__).parents[1] / "results" / "few_columns.json"
INPUTS, COLUMNS = (4096, 14336), (1, 2, 4, 8, 16, 32, 64)
_COPIED = 2**28  # numbers


def milliseconds(work: Callable[[], Any]) -> float:
    """The median of 20, after three to warm up."""
    found = []
    for _ in range(23):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found[3:])


def measure(n: int, k: int, copy_ms: float) -> dict[str, Any]:
    """A row: one H, P of float64 as columns that go on alone have it."""
    generator = torch.Generator("cuda").manual_seed(0)
    h_NN = torch.randn(n, n, device="cuda", generator=generator)
    p_NK = torch.randn(n, k, device="cuda", generator=generator, dtype=torch.float64)
    ways = {
        "kernel": lambda: few_columns(h_NN, p_NK),
        "one by one": lambda: torch.stack([h_NN @ column_N for column_N in p_NK.float().T.contiguous()], 1).double(),
        "library": lambda: (h_NN @ p_NK.float()).double(),
    }
    narrow_NK = p_NK.float().double()
    exact_NK, size_NK = h_NN.double() @ narrow_NK, h_NN.abs().double() @ narrow_NK.abs()
    return {
        "inputs": n,
        "columns": k,
        "ms": {name: milliseconds(way) for name, way in ways.items()},
        "memory_ms": copy_ms * n * n / (2 * _COPIED),
        "errors": {name: float(((way() - exact_NK) / size_NK).norm() / k**0.5 / n**0.5) for name, way in ways.items()},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    out = parser.parse_args().out
    numbers = torch.zeros(_COPIED, device="cuda")
    copy_ms = milliseconds(numbers.clone)
    del numbers
    rows = [measure(n, k, copy_ms) for n in INPUTS for k in COLUMNS]
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    for row in rows:
        times = ", ".join(f"{name} {each:.3f}" for name, each in row["ms"].items())
        print(f"{row['inputs']} x {row['columns']}: {times} ms; memory {row['memory_ms']:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
