"""Low-bit weights: perplexities of models pruned, rounded, or both, by this package and by published methods.

    python benchmarks/models/grid.py --model FOLDER --data FOLDER --device cuda --group 64 [--cases fast best joint rank]

Cases are groups (see inputs/grid_cases.py) or written out: "50%:int4:gptq:fast", "2:4:int4:ours:best:rank64@c4". Rows go to
benchmarks/results/grid_<model>.json; a row that is there is not run again, unless its preset stands for something else since then.
--group is the number of inputs that share a scale at 4 bits; int8 and fp8 have one scale a column. Protocol: as in bench.py;
weights in bfloat16, every value as a reader of the file computes it.

Methods: "ours"; "rounding", "gptq" (GPTQ's sweep with the mask held, from the dense weights), "gptq-order" (the same, inputs of
large H_ii first) and "gptq-start" (from the rebuilt ones), each with the preset's own mask and target; "sparsegpt+gptq" and "slim",
which choose mask and weights in one.
bits_per_weight: codes, scales and adapters (16 bits) over the weights of all pruned layers; zeros are stored as codes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.inputs.grid_cases import GROUPS, JOINT, GridCase, chosen, register_joint
from benchmarks.models.bench import Bench, add_protocol, card, measure_all, open_bench, pruned, result
from benchmarks.rows import Results
from qprecon.grids import find_grid
from qprecon.llm.lowbit.adapter import remove_adapters


def identity(bench: Bench, case: GridCase) -> dict:
    """What tells rows apart."""
    return {
        "model": bench.name, "calibration": case.calibration, "pattern": case.pattern, "grid": case.grid, "group": case.group_size,
        "method": case.method, "preset": None if case.method in JOINT else case.preset, "rank": case.rank, "seed": case.seed,
        "split": case.split, "windows": bench.arguments.windows, "seqlen": bench.arguments.seqlen,
        "eval_windows": bench.arguments.eval_windows,
    }  # fmt: skip


def is_current(row: dict | None, case: GridCase) -> bool:
    """Whether a row was measured with what its preset stands for today."""
    return row is not None and row.get("settings") == json.loads(json.dumps(case.effective()))


def measure(bench: Bench, case: GridCase) -> dict:
    remove_adapters(bench.model)
    report, seconds, phases = pruned(bench, case)
    gaps = [row.stored_gap for row in report.layers if row.stored_gap is not None]
    facts = {
        "mask": report.settings["mask"], "settings": case.effective(), "bits_per_weight": round(bits(report.layers, case), 4),
        "sparsity": report.sparsity,
        "error_updated": report.mean_error("error_updated"), "error_stored": report.mean_error("error_stored"),
        "stored_gap": sum(gaps) / len(gaps) if gaps and max(gaps) < float("inf") else None,
        "phases": phases,
    }  # fmt: skip
    return identity(bench, case) | facts | result(bench, case, seconds) | bench.accuracy()


def bits(rows: Sequence, case: GridCase) -> float:
    """Mean over all weights of the pruned layers."""
    grid = find_grid(case.grid, group_size=case.group_size, scale_dtype="bfloat16") if case.grid != "bf16" else find_grid("bf16")
    total = sum(row.n_inputs * row.n_outputs * grid.bits_per_weight(row.n_inputs) for row in rows)
    total += sum(16 * min(case.rank, row.n_inputs, row.n_outputs) * (row.n_inputs + row.n_outputs) for row in rows)
    return total / sum(row.n_inputs * row.n_outputs for row in rows)


def run(bench: Bench, cases: Sequence[GridCase], results: Results) -> int:
    """Measure the cases that lack a row; how many failed."""

    def added(case: GridCase) -> Iterator[str]:
        row = measure(bench, case)
        results.add(row, identity(bench, case))
        values = " / ".join(f"{value:.2f}" for value in row["perplexity"].values())
        yield f"{case!s:44} {values}  {row['seconds']} s  {row['phases']}"

    return measure_all(bench, cases, lambda case: is_current(results.get(identity(bench, case)), case), added)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_protocol(parser)
    parser.add_argument("--cases", nargs="+", default=list(GROUPS), help="groups, or PATTERN:GRID:METHOD:PRESET")
    parser.add_argument("--group", type=int, default=128, help="inputs that share a scale at 4 bits (128)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of windows")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    parsed.dtype = "bfloat16"
    register_joint()
    cases = chosen(parsed.cases, group=parsed.group, seed=parsed.seed, split=parsed.split)
    bench = open_bench(parsed)
    results = Results(parsed.out / f"grid_{bench.name}.json")
    print(f"{bench.name} on {card(bench)}; results in {results.path}", flush=True)
    return 1 if run(bench, cases, results) else 0


if __name__ == "__main__":
    sys.exit(main())
