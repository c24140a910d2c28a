"""What a recovery's learning rate does: one pruned model, trained from the same start at several rates, by its held-out windows.

    python benchmarks/models/recovery_rates.py --model FOLDER --data FOLDER --device cuda --rates 4e-4 9e-5 3e-5 --passes 4

The model is pruned to 50 % with `--preset fast` on 128 windows of 2048 tokens of WikiText-2's training part, and trained on the
same windows, of which some are held out. Rows go to benchmarks/results/recovery_rates.json, each as soon as its run has ended.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.inputs.quality_cases import Case
from benchmarks.models.bench import Bench, add_protocol, card, open_bench, pruned, wait
from benchmarks.rows import Results, put_back, versions
from qprecon.llm import RecoveryReport, recover
from qprecon.llm.model.loading import load_causal_lm


def identity(bench: Bench, rate: float) -> dict:
    """What tells rows apart."""
    asked = bench.arguments
    return {"model": bench.name, "windows": asked.windows, "seqlen": asked.seqlen, "passes": asked.passes, "lr": rate}


def course(report: RecoveryReport) -> dict:
    """The loss on the windows held out (KL divergence a token, in nats) after so many steps, and what came of it."""
    looks = [[look["step"], round(look["loss"], 4)] for look in report.held_out]
    return {"held_out": looks, "steps": len(report.losses), "best_step": report.best_step}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_protocol(parser)
    parser.add_argument("--dtype", default="bfloat16", help="of the stored weights")
    parser.add_argument("--rates", type=float, nargs="+", required=True, help="peak learning rates")
    parser.add_argument("--passes", type=int, default=8)
    parsed = parser.parse_args()
    bench = open_bench(parsed)
    case, results = Case("wikitext2", "50%", "fast"), Results(parsed.out / "recovery_rates.json")
    pruned(bench, case)
    start = [parameter.detach().clone() for parameter in bench.model.parameters()]
    dense, _ = load_causal_lm(parsed.model, device=bench.device, dtype=parsed.dtype)
    for rate in parsed.rates:
        if results.get(identity(bench, rate)) is not None:
            continue
        put_back(bench.model, start)
        begun = time.perf_counter()
        report = recover(
            bench.model, dense, bench.calibration(case), lr=rate, passes=parsed.passes, device=bench.device, progress=False
        )
        wait(bench)
        seconds = None if parsed.shared else round(time.perf_counter() - begun, 1)
        facts = {"seconds": seconds, "card": card(bench), "date": datetime.date.today().isoformat(), "versions": versions()}
        results.add(identity(bench, rate) | course(report) | facts, identity(bench, rate))
        print(f"{bench.name} lr {rate:g}: {course(report)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
