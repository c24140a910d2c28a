"""What each ingredient of quality gains, alone and on top of the others: perplexities of pruned models, also after recovery.

    python benchmarks/models/quality.py --model FOLDER --data FOLDER --device cuda [--cases ladder] [--recover] [--seeds 0,1]

Cases are groups (see inputs/quality_cases.py) or written out: "60%:alps+order+drift=0.25@c4", "2:4:balanced", and "dense" for the
model that is not pruned. Rows go to benchmarks/results/quality_<model>.json; a row that is there is not run again. Several
processes may write to one file. The model is loaded once and its weights are put back between cases. --recover also trains each
pruned model towards the dense one, for a second row; --recover only leaves out the first. Protocol: see bench.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.inputs.quality_cases import DENSE, Case, chosen, ladder
from benchmarks.models.bench import Bench, add_protocol, card, measure_all, open_bench, pruned, result, wait
from benchmarks.rows import Results
from qprecon.llm.model.loading import load_causal_lm


def measure(bench: Bench, case: Case, recovering: str) -> Iterator[dict]:
    """The case's rows, each as soon as it is known: the pruned model and, if asked for, the recovered one.

    Each comes again with accuracies, if they are asked for. recovering: "no", "both" or "only".
    """
    if case.pattern == DENSE:
        bench.restore()
        yield from scored(bench, identity(bench, case, False) | result(bench, case, 0.0) | {"sparsity": 0.0})
        return
    report, seconds, phases = pruned(bench, case)
    more = {"sparsity": report.sparsity}
    if recovering != "only":
        yield from scored(bench, identity(bench, case, False) | result(bench, case, seconds) | {"phases": phases} | more)
    if recovering != "no":
        from qprecon.llm import recover

        dense, _ = load_causal_lm(bench.arguments.model, device=bench.device, dtype=bench.arguments.dtype)
        windows, started = bench.calibration(case), time.perf_counter()
        trained = recover(bench.model, dense, windows, device=bench.device, progress=False)
        wait(bench)
        seconds += time.perf_counter() - started
        del dense
        looks = [[look["step"], round(look["loss"], 4)] for look in trained.held_out]
        more["recovery"] = {"held_out": looks, "steps": len(trained.losses), "best_step": trained.best_step}
        yield from scored(bench, identity(bench, case, True) | result(bench, case, seconds) | more)


def scored(bench: Bench, row: dict) -> Iterator[dict]:
    """The row of the model as it is, then with the tasks' accuracies, which take longer than all before."""
    yield row
    if accuracy := bench.accuracy():
        yield row | accuracy


def identity(bench: Bench, case: Case, recovered: bool) -> dict:
    """What tells rows apart."""
    return {
        "model": bench.name, "calibration": case.calibration, "pattern": case.pattern, "preset": case.preset,
        "ingredients": list(case.ingredients), "recovered": recovered, "seed": case.seed, "split": case.split,
        "windows": bench.arguments.windows, "seqlen": bench.arguments.seqlen, "eval_windows": bench.arguments.eval_windows,
        "dtype": bench.arguments.dtype,
    }  # fmt: skip


def wanted_rows(case: Case, recovering: str) -> tuple[bool, ...]:
    """Whether each row of a case is about the recovered model."""
    return (False,) if case.pattern == DENSE else {"no": (False,), "both": (False, True), "only": (True,)}[recovering]


def is_complete(bench: Bench, row: dict | None) -> bool:
    """Whether the row is there, with an accuracy of every task that there is."""
    return row is not None and set(bench.tasks) <= set(row.get("accuracy", {}).get("tasks", {}))


def beside(old: dict | None, row: dict) -> dict:
    """A row that was there keeps its numbers; it gets the accuracies, with the perplexities of the model that was scored."""
    if old is None or "accuracy" not in row:
        return old or row
    return old | {"accuracy": row["accuracy"] | {key: row[key] for key in ("perplexity", "card", "date")}}


def run(bench: Bench, cases: Sequence[Case], results: Results) -> int:
    """Measure the cases that lack a row; how many failed."""

    def there(case: Case, recovered: bool) -> dict | None:
        return None if bench.arguments.again else results.get(identity(bench, case, recovered))

    def is_done(case: Case) -> bool:
        return all(is_complete(bench, there(case, recovered)) for recovered in wanted_rows(case, bench.arguments.recover))

    def added(case: Case) -> Iterator[str]:
        for row in measure(bench, case, bench.arguments.recover):
            row = beside(there(case, row["recovered"]), row)
            results.add(row, identity(bench, case, row["recovered"]))
            yield line(case, row)

    return measure_all(bench, cases, is_done, added)


def line(case: Case, row: dict) -> str:
    values = " / ".join(f"{value:.2f}" for value in row["perplexity"].values())
    values += f", {100 * row['accuracy']['average']:.2f} % right" if row.get("accuracy", {}).get("average") is not None else ""
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in row.get("phases", {}).items() if seconds >= 0.5)
    return f"{case!s:60} {'recovered ' if row['recovered'] else ''}{values}  {row['seconds']} s ({phases})"


def print_ladder(bench: Bench, results: Results, pattern: str, seed: int, split: str) -> None:
    """Every ingredient's gain alone and on top of the ones before, WikiText-2 / C4."""
    rows = {case.ingredients: results.get(identity(bench, _of(case, seed, split), False)) for case in ladder(pattern)}
    base = rows[()]
    if base is None:
        return
    print(f"\nladder at {pattern}, seed {seed}, {split}: {' / '.join(f'{v:.2f}' for v in base['perplexity'].values())} without any")
    names = max((ingredients for ingredients in rows), key=len)
    for count, name in enumerate(names):
        alone, on_top, below = rows[(name,)], rows[names[: count + 1]], rows[names[:count]]
        if alone and on_top and below:
            parts = [_gain(base, alone), _gain(below, on_top), " / ".join(f"{v:.2f}" for v in on_top["perplexity"].values())]
            print(f"{name:>16}  alone {parts[0]}  on top {parts[1]}  -> {parts[2]}")


def _of(case: Case, seed: int, split: str) -> Case:
    return Case(case.calibration, case.pattern, case.preset, case.ingredients, seed, split)


def _gain(before: dict, after: dict) -> str:
    return " / ".join(f"{100 * (after['perplexity'][text] / value - 1):+.1f} %" for text, value in before["perplexity"].items())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_protocol(parser)
    parser.add_argument("--cases", nargs="+", default=["ladder"], help="groups, or PATTERN:INGREDIENT+INGREDIENT@CALIBRATION")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights while the model is pruned, and as they are stored")
    parser.add_argument("--seeds", default="0", help="of the choice of windows, joined by commas")
    parser.add_argument(
        "--recover", nargs="?", const="both", default="no", choices=("no", "both", "only"),
        help="train the pruned model towards the dense one as well, or measure only the model trained so",
    )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="measure rows that are there once more, in their places")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    seeds = [int(seed) for seed in parsed.seeds.split(",")]
    cases = chosen(parsed.cases, seeds, parsed.split)
    bench = open_bench(parsed)
    results = Results(parsed.out / f"quality_{bench.name}.json")
    print(f"{bench.name} on {card(bench)}; results in {results.path}", flush=True)
    failed = run(bench, cases, results)
    for pattern in dict.fromkeys(case.pattern for case in cases):
        for seed in seeds:
            print_ladder(bench, results, pattern, seed, parsed.split)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
