"""Where the time of bringing 8B layers to int4 and int8 goes, with the effort of the preset "fast". Needs a GPU with 40 GB.

    python benchmarks/layers/rounding_parts.py [--out FILE]

Random layers, half of the weights pruned, solved first. The second of two runs counts; each part waits for the device.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import qprecon
from qprecon.grids import find_grid, on_grid
from qprecon.llm.settings.presets import PRESETS

RESULTS = Path(__file__).parents[1] / "results" / "rounding_parts.json"
LAYERS = ((4096, 6144), (4096, 28672), (14336, 4096))  # inputs, outputs of layers that share H
PARTS = ("search_scales", "_ordered_factor", "feedback", "descend", "audited", "fit_scales", "fast_product")


def timed(name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """A part of `on_grid` that adds up its seconds."""
    own = getattr(on_grid, name)

    def part(*arguments: Any, **more: Any) -> Any:
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = own(*arguments, **more)
        torch.cuda.synchronize()
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - started
        return result

    return part


def measure(n: int, k: int, grids: tuple[str, ...], spent: dict[str, float]) -> list[dict]:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2 * n, n, device="cuda", generator=generator) * torch.logspace(0, -2, n, device="cuda")
    w = torch.randn(n, k, device="cuda", generator=generator) * 0.02
    mask = w.abs() > 0.0135
    prepared = qprecon.prepare(x.T @ x, damping=0.01)
    solution, rows = prepared.solve(w, mask), []
    for name in grids:
        for _ in range(2):
            spent.clear()
            started = time.perf_counter()
            effort = PRESETS["fast"]["rounding_options"]
            prepared.round(w, mask, solution, find_grid(name, scale_dtype="bfloat16"), **effort)
            torch.cuda.synchronize()
            whole = time.perf_counter() - started
        card, day = torch.cuda.get_device_name(), datetime.date.today().isoformat()
        rows.append({"n": n, "k": k, "grid": name, "card": card, "date": day, "whole": whole, **spent})
        parts = ", ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in spent.items())
        print(f"{n} → {k}, {name}: {1e3 * whole:.0f} ms: {parts}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("not measured: this needs an NVIDIA GPU", file=sys.stderr)
        return 1
    spent: dict[str, float] = {}
    for name in PARTS:
        setattr(on_grid, name, timed(name, spent))
    rows = [row for n, k in LAYERS for row in measure(n, k, ("int4", "int8"), spent)]
    arguments.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
