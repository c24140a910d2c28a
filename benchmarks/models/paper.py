"""Prune a model in every way of the paper's tables and append the perplexities to benchmarks/results/paper_<model>.json.

    python benchmarks/models/paper.py --model FOLDER --texts FOLDER --device cuda --budget 400 [--rows main]

Rows that the file has are skipped, so a run that was cut off goes on where it stopped. The protocol: float32 weights and
calibration; windows randperm(seed 0)[:n] of the non-overlapping windows of the calibration text; damping 0.01; masks from
the undamped H; later blocks calibrated on pruned outputs; perplexity on the whole WikiText-2 test under bfloat16 autocast
on a GPU, in float32 on a CPU. The tokenizer decides about a BOS: none for SmolLM2, one a window for Gemma. Smaller
protocols (--windows, --seqlen, --eval-windows) are for machines without a GPU; each row states its own.

Texts (gzipped, in --texts): wiki.test.raw.gz, the WikiText-2 test rows; wikitext2_train_5k.txt.gz, paragraphs of its
training part, already joined by blank lines; c4_train_first1000.jsonl.gz, C4 documents, which are joined by blank lines,
since few are as long as a window.

Rows of the group "accuracy" are scored on the paper's six tasks too, zero-shot through lm-eval from local files (--tasks FOLDER),
in float32, with TF32 products on a GPU; without --tasks they are as any other row. A row that is there already keeps its numbers:
the accuracies are added, with the perplexity of the model that was scored, which another machine may have rounded differently.

ProxSparse learns from the same windows as the others calibrate on, three passes (384 steps; the paper takes 400 samples).
Adam is the paper's grid of four learning rates, 20 steps each, on the Gram form of the squared error.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import time
import traceback
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import torch

# The package of this checkout, installed or not; this file's own folder is there anyway.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.inputs.paper_rows import DAMPING, DENSE, LEARNED, SCORED, Row, chosen, reference
from benchmarks.rows import Results, describe, figures, put_back, tf32, versions
from qprecon.llm import PruneReport, perplexity, prune_model
from qprecon.llm.calibration.sampling import calibration_windows
from qprecon.llm.calibration.texts import load_texts
from qprecon.llm.calibration.windows import TokenWindows, cut_windows
from qprecon.llm.evaluation.perplexities import PerplexityResult
from qprecon.llm.evaluation.scores import PAPER_TASKS, TaskScores
from qprecon.llm.evaluation.tasks import check_tasks, evaluate_tasks
from qprecon.llm.masks import get_selector
from qprecon.llm.model.loading import choose_device, load_causal_lm
from qprecon.llm.pruning.plan import plan_layers
from qprecon.llm.settings.targets import ATTENTION

TEXTS = {"wikitext2": "wikitext2_train_5k.txt.gz", "c4": "c4_train_first1000.jsonl.gz"}
TEST_TEXT = "wiki.test.raw.gz"
SEED, TOL = 0, 1e-4
PROX_EPOCHS = 3
# By model type and width: folders made from a GGUF don't hold the model's usual name.
NAMES = {("llama", 576): "SmolLM2-135M", ("gemma3_text", 640): "Gemma-3-270M"}


@dataclass
class Bench:
    """A model on its device, its dense weights beside it, and the texts as tokens."""

    model: torch.nn.Module
    tokenizer: object
    name: str
    texts: Path
    seqlen: int
    test: TokenWindows
    eval_windows: int
    batch_size: int
    autocast: str | None
    tasks: Path | None = None
    task_limit: int | None = None
    dense: list[torch.Tensor] = field(default_factory=list)
    calibration: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    learned: dict[tuple, tuple[dict, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dense = [parameter.detach().clone() for parameter in self.model.parameters()]

    def restore(self) -> None:
        put_back(self.model, self.dense)

    def windows(self, row: Row) -> torch.Tensor:
        """The calibration windows of a row; a text is read and tokenised once for all numbers of windows."""
        key = (row.calibration, self.seqlen)
        if key not in self.calibration:
            text = load_texts(self.texts / TEXTS[row.calibration])
            self.calibration[key] = cut_windows(text, tokenizer=self.tokenizer, seqlen=self.seqlen).tokens
        return calibration_windows(self.calibration[key], nsamples=row.windows, seqlen=self.seqlen, seed=SEED)

    def must_learn(self, row: Row) -> bool:
        return row.mask == LEARNED and (row.calibration, row.windows, row.layers) not in self.learned

    def perplexity(self) -> PerplexityResult:
        return perplexity(
            self.model, self.test.tokens, seqlen=self.seqlen, bos="none", batch_size=self.batch_size,
            autocast=self.autocast, max_windows=self.eval_windows, text_name=TEST_TEXT,
        )  # fmt: skip

    def accuracy(self) -> TaskScores:
        with tf32():
            return evaluate_tasks(
                self.model, PAPER_TASKS, data_dir=self.tasks, tokenizer=self.tokenizer, limit=self.task_limit,
                batch_size=4 * self.batch_size,
            )  # fmt: skip


def open_bench(arguments: argparse.Namespace) -> Bench:
    """Load the model in float32 and the evaluation text."""
    device = choose_device(arguments.device)
    model, tokenizer = load_causal_lm(arguments.model, device=device, dtype="float32")
    config = model.config.get_text_config()
    name = arguments.name or NAMES.get((config.model_type, config.hidden_size)) or Path(arguments.model).resolve().name
    test = cut_windows(arguments.texts / TEST_TEXT, tokenizer=tokenizer, seqlen=arguments.seqlen)
    count = min(len(test.tokens), arguments.eval_windows or len(test.tokens))
    on_gpu = device.type == "cuda"
    return Bench(
        model, tokenizer, name, arguments.texts, arguments.seqlen, test, count,
        arguments.batch_size or (8 if on_gpu else 1), "bfloat16" if on_gpu else None, arguments.tasks, arguments.task_limit,
    )  # fmt: skip


def prune(bench: Bench, row: Row) -> tuple[PruneReport, float]:
    """Prune the dense model as the row says; the report and the wall-clock seconds, those of learning masks included."""
    windows, ignore = bench.windows(row), ATTENTION if row.layers == "mlp" else None
    mask, options, learning = row.mask, {}, 0.0
    if row.mask == LEARNED:
        masks, learning = learned_masks(bench, row, windows, ignore)
        mask, options = "given", {"masks": masks}
    started = time.perf_counter()
    update = {"update": "optimal", "backend": "adam"} if row.update == "adam" else {"update": row.update}
    report = prune_model(
        bench.model, windows, preset="fast", pattern=row.pattern, mask=mask, **update, damping=row.damping, tol=TOL,
        ignore=ignore, mask_options=options, device=bench.dense[0].device, progress=False,
    )  # fmt: skip
    _wait(bench)
    return report, time.perf_counter() - started + learning


def learned_masks(bench: Bench, row: Row, windows: torch.Tensor, ignore: str | None) -> tuple[dict, float]:
    """Masks learned on the whole model and the seconds that took; learned once for all updates."""
    key = (row.calibration, row.windows, row.layers)
    if key not in bench.learned:
        plan = plan_layers(bench.model, row.pattern, ignore=ignore)
        linears = {layer.view.name: layer.view.module for layers in plan.layers for layer in layers}
        started = time.perf_counter()
        masks = get_selector(row.mask).learn(bench.model, list(windows), linears=linears, epochs=PROX_EPOCHS)
        bench.learned[key] = masks, time.perf_counter() - started
    return bench.learned[key]


def measure(bench: Bench, row: Row, scored: bool = False) -> dict:
    """One row of results; `scored`: with the tasks' accuracies."""
    bench.restore()
    pruned = {}
    if (row.calibration, row.pattern, row.mask, row.update) != DENSE:
        report, seconds = prune(bench, row)
        pruned = describe(report) | {"seconds": round(seconds, 3)}
    found = bench.perplexity()
    where = {"machine": machine(bench), "date": datetime.date.today().isoformat()}
    accuracy = {"accuracy": figures(bench.accuracy()) | {"perplexity": found.value, **where}} if scored else {}
    return identity(bench, row) | {
        "perplexity": found.value, "seconds": 0.0, **pruned, "eval_seconds": round(found.seconds, 3), **accuracy,
        "protocol": {
            "dtype": "float32", "seqlen": bench.seqlen, "seed": SEED, "damping": row.damping, "tol": TOL, "propagate": "pruned",
            "text": TEXTS.get(row.calibration), "bos": bench.test.bos,
        },
        "eval": {
            "text": TEST_TEXT, "seqlen": found.seqlen, "windows": found.windows, "bos": bench.test.bos,
            "whole_text": found.windows == len(bench.test.tokens), "dtype": "float32", "autocast": bench.autocast,
        },
        "versions": versions(), **where,
    }  # fmt: skip


def identity(bench: Bench, row: Row) -> dict:
    """What tells rows of one file apart."""
    return {
        "model": bench.name, "calibration": row.calibration, "windows": row.windows, "pattern": row.pattern,
        "mask": row.mask, "update": row.update, "layers": row.layers, "damping": row.damping,
        "seqlen": bench.seqlen, "eval_windows": bench.eval_windows,
    }  # fmt: skip


def machine(bench: Bench) -> str:
    device = bench.dense[0].device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def _wait(bench: Bench) -> None:
    if bench.dense[0].is_cuda:
        torch.cuda.synchronize()


class Budget:
    """Seconds that may be spent; a row is begun only if one of its kind would still fit."""

    def __init__(self, seconds: float | None):
        self.seconds, self.started = seconds, time.perf_counter()
        self.longest: dict[tuple[str, str], float] = {}

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.started

    def note(self, row: Row, seconds: float) -> None:
        if row.mask != LEARNED:  # whose first row takes far longer than the next
            key = (row.mask, row.update)
            self.longest[key] = max(seconds, self.longest.get(key, 0.0))

    def allows(self, row: Row, learns: bool) -> bool:
        """`learns`: whether masks are to be learned first, about ten times the work of any other row."""
        if self.seconds is None:
            return True
        unknown = max(self.longest.values(), default=0.0) * (10 if learns else 2)
        return self.spent + self.longest.get((row.mask, row.update), unknown) <= self.seconds


def run(bench: Bench, rows: Sequence[Row], results: Results, budget: Budget, to_score: Set[Row]) -> int:
    """Measure the rows that are not there yet, or lack the accuracies that they should have; how many failed."""
    failed = 0
    for row in rows:
        scored, old = row in to_score, results.get(identity(bench, row))
        if old is not None and ("accuracy" in old or not scored):
            continue
        if not budget.allows(row, learns=bench.must_learn(row)):
            print(f"stopped before {row}: the budget is nearly spent", flush=True)
            break
        started = time.perf_counter()
        try:
            result = measure(bench, row, scored)
        except Exception:  # the other rows are still wanted; the run ends with exit code 1
            traceback.print_exc()
            print(f"FAILED {row}", flush=True)
            failed += 1
            continue
        if old is not None:  # only the accuracies were missing
            result = old | {"accuracy": result["accuracy"]}
        results.add(result, identity(bench, row))
        budget.note(row, time.perf_counter() - started)
        print(f"{budget.spent:6.1f} s  {line(result)}", flush=True)
    return failed


def line(result: dict) -> str:
    """A row in words, with the prototype's value and the deviation from it where there is one."""
    known = reference(result)
    beside = "" if known is None else f"  prototype {known:g} ({100 * (result['perplexity'] / known - 1):+.1f} %)"
    gap = result.get("max_relative_gap")
    certified = "" if gap is None else f"  gap {gap:.1e} ({result['uncertified']} columns above {TOL:g})"
    extra = "" if result["layers"] == "all" else f" [{result['layers']}]"
    extra += "" if result["damping"] == DAMPING else f" [damping {result['damping']:g}]"
    scored = f"  average acc {100 * result['accuracy']['average']:.2f} %" if "accuracy" in result else ""
    return (
        f"{result['calibration']:>9} x{result['windows']:<3} {result['pattern']:>5} {result['mask']:>10} + {result['update']:<7}"
        f"{extra} {result['perplexity']:9.2f}  {result['seconds']:6.1f} s{beside}{certified}{scored}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--name", help="the model's name in the results; known ones are recognised")
    parser.add_argument("--texts", type=Path, required=True, help="the folder with the texts")
    parser.add_argument("--tasks", type=Path, help="a folder of local task files; without it no accuracies")
    parser.add_argument("--task-limit", type=int, help="only the first items of each task or subject (all)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", default="all", help="main, all, or groups such as core,sizes (see paper_rows.py)")
    parser.add_argument("--budget", type=float, help="seconds after which no further row is begun")
    parser.add_argument("--windows", type=int, default=128, help="calibration windows (128)")
    parser.add_argument("--seqlen", type=int, default=2048, help="tokens a window, of calibration and evaluation (2048)")
    parser.add_argument("--eval-windows", type=int, help="only the first windows of the test text (all)")
    parser.add_argument("--batch-size", type=int, help="evaluation windows a forward pass (8 on a GPU, 1 on a CPU)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results", help="folder of the JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    budget = Budget(parsed.budget)
    if parsed.tasks:
        check_tasks(PAPER_TASKS, data_dir=parsed.tasks, limit=parsed.task_limit)
    rows = chosen(parsed.rows, parsed.windows)
    bench = open_bench(parsed)
    results = Results(parsed.out / f"paper_{bench.name.lower()}.json")
    print(f"{bench.name} on {machine(bench)}, loaded in {budget.spent:.1f} s; results in {results.path}", flush=True)
    failed = run(bench, rows, results, budget, set(chosen(SCORED, parsed.windows) if parsed.tasks else ()))
    wanted = [identity(bench, row) for row in rows]
    done = [result for result in results.rows if any(wish.items() <= result.items() for wish in wanted)]
    print(f"\n{len(done)} of {len(rows)} rows are there, {failed} failed")
    print("\n".join(line(result) for result in done))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
