"""What each ingredient of quality gains, alone and on top of the others: perplexities of pruned models, also after recovery.

    python benchmarks/models/quality.py --model FOLDER --data FOLDER --device cuda [--cases ladder] [--recover] [--seeds 0,1]

Cases are groups (see inputs/quality_cases.py) or written out: "60%:alps+order+drift=0.25@c4", "2:4:balanced". Rows go to
benchmarks/results/quality_<model>.json; a row that is there is not run again. The model is loaded once and its weights are put back
between cases.

Protocol: weights as they are stored (bfloat16); calibration on windows randperm(seed)[:n] of the non-overlapping windows of a text,
half from each of two for "wikitext2+c4"; every linear layer of every block. Perplexity: split "test" is the whole WikiText-2 test
and the first 60 windows of 2048 tokens of the joined C4 validation documents; split "validation", on which choices are made, is
WikiText-2's validation part and 60 windows of C4's training documents that the seed does not calibrate on. Forward passes have
float32 weights, with bfloat16 autocast on a GPU. --data holds text/ and, where accuracies are asked for (--tasks), tasks/.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.inputs.quality_cases import Case, chosen, ladder
from benchmarks.models.paper import TEXTS, Results, figures, tf32, versions
from qprecon.llm import PruneReport, perplexity, prune_model
from qprecon.llm.calibration.texts import load_texts
from qprecon.llm.calibration.windows import cut_windows
from qprecon.llm.evaluation.scores import PAPER_TASKS
from qprecon.llm.evaluation.tasks import evaluate_tasks
from qprecon.llm.model.loading import choose_device, load_causal_lm

EVALUATION = {
    "test": {"wikitext2": "wiki.test.raw.gz", "c4": "c4_validation_2k.jsonl.gz"},
    "validation": {"wikitext2": "wiki.valid.raw.gz", "c4": TEXTS["c4"]},
}
C4_WINDOWS = 60
# By model type and width: folders made from a GGUF don't hold the model's usual name.
NAMES = {("llama", 576): "smollm2-135m", ("gemma3_text", 640): "gemma-3-270m", ("qwen2", 896): "qwen2.5-coder-0.5b"}


@dataclass
class Bench:
    """A model on its device, its dense weights beside it, and the texts as windows of tokens."""

    model: torch.nn.Module
    tokenizer: Any
    name: str
    arguments: argparse.Namespace
    dense: list[torch.Tensor] = field(default_factory=list)
    texts: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dense = [parameter.detach().clone() for parameter in self.model.parameters()]

    @property
    def device(self) -> torch.device:
        return self.dense[0].device

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, dense in zip(self.model.parameters(), self.dense, strict=True):
            parameter.copy_(dense)

    def windows(self, file: str) -> torch.Tensor:
        """All windows of a text, (S, L); tokenised once, kept in --cache if there is one."""
        if file not in self.texts:
            cache = self.arguments.cache and self.arguments.cache / f"{self.name}_{file}_{self.arguments.seqlen}.pt"
            if cache and cache.exists():
                self.texts[file] = torch.load(cache)
            else:
                text = load_texts(self.arguments.data / "text" / file)
                self.texts[file] = cut_windows(text, tokenizer=self.tokenizer, seqlen=self.arguments.seqlen).tokens
                if cache:
                    cache.parent.mkdir(parents=True, exist_ok=True)
                    torch.save(self.texts[file], cache)
        return self.texts[file]

    def calibration(self, case: Case) -> torch.Tensor:
        names = case.calibration.split("+")
        each = self.arguments.windows // len(names)
        parts = []
        for name in names:
            windows = self.windows(TEXTS[name])
            parts.append(windows[_order(windows, case.seed)[:each]])
        return torch.cat(parts)

    def evaluation(self, case: Case) -> dict[str, torch.Tensor]:
        files = EVALUATION[case.split]
        wikitext, c4 = self.windows(files["wikitext2"]), self.windows(files["c4"])
        if case.split == "validation":  # those that a calibration with this seed leaves
            c4 = c4[_order(c4, case.seed)[self.arguments.windows :]]
        most = self.arguments.eval_windows or len(wikitext)
        return {"wikitext2": wikitext[:most], "c4": c4[: min(most, C4_WINDOWS)]}

    def perplexity(self, case: Case) -> dict[str, float]:
        how = {"batch_size": 8, "autocast": "bfloat16"} if self.device.type == "cuda" else {}
        how |= {"seqlen": self.arguments.seqlen, "bos": "none"}
        with in_float32(self.model):
            return {name: perplexity(self.model, windows, **how).value for name, windows in self.evaluation(case).items()}

    def accuracy(self) -> dict:
        with in_float32(self.model), tf32():
            folder = self.arguments.data / "tasks"
            return figures(evaluate_tasks(self.model, PAPER_TASKS, data_dir=folder, tokenizer=self.tokenizer, batch_size=32))


def _order(windows: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))


@contextmanager
def in_float32(model: torch.nn.Module):
    """While open, the weights are float32; then what they were, in their own dtype."""
    before = [parameter.data for parameter in model.parameters()]
    try:
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        yield
    finally:
        for parameter, data in zip(model.parameters(), before, strict=True):
            parameter.data = data


def pruned(bench: Bench, case: Any) -> tuple[PruneReport, float, dict[str, float]]:
    """Prune the dense model as the case says: the report, seconds, and seconds by phase, which are not kept on a shared device."""
    bench.restore()
    windows = bench.calibration(case)
    started = time.perf_counter()
    report = prune_model(bench.model, windows, device=bench.device, progress=False, **case.settings())
    _wait(bench)
    seconds = time.perf_counter() - started
    phases = {} if bench.arguments.shared else {phase: round(value, 2) for phase, value in report.phase_seconds.items()}
    return report, seconds, phases


def measure(bench: Bench, case: Case, recovering: bool) -> list[dict]:
    """The case's rows: the pruned model and, if asked for, the recovered one."""
    report, seconds, phases = pruned(bench, case)
    rows = [identity(bench, case, False) | result(bench, case, seconds) | {"phases": phases, "sparsity": report.sparsity}]
    if recovering:
        from qprecon.llm import recover

        dense, _ = load_causal_lm(bench.arguments.model, device=bench.device, dtype=bench.arguments.dtype)
        windows, started = bench.calibration(case), time.perf_counter()
        recover(bench.model, dense, windows, device=bench.device, progress=False)
        _wait(bench)
        seconds += time.perf_counter() - started
        rows.append(identity(bench, case, True) | result(bench, case, seconds) | {"sparsity": report.sparsity})
    return rows


def result(bench: Bench, case: Case, seconds: float) -> dict:
    accuracy = {"accuracy": bench.accuracy()} if bench.arguments.tasks else {}
    return {
        "perplexity": bench.perplexity(case), **accuracy, "seconds": None if bench.arguments.shared else round(seconds, 2),
        "card": card(bench),
        "date": datetime.date.today().isoformat(), "versions": versions(),
    }  # fmt: skip


def identity(bench: Bench, case: Case, recovered: bool) -> dict:
    """What tells rows apart."""
    return {
        "model": bench.name, "calibration": case.calibration, "pattern": case.pattern, "preset": case.preset,
        "ingredients": list(case.ingredients), "recovered": recovered, "seed": case.seed, "split": case.split,
        "windows": bench.arguments.windows, "seqlen": bench.arguments.seqlen, "eval_windows": bench.arguments.eval_windows,
        "dtype": bench.arguments.dtype,
    }  # fmt: skip


def card(bench: Bench) -> str:
    if bench.device.type == "cuda":
        return torch.cuda.get_device_name(bench.device)
    return f"CPU, {torch.get_num_threads()} threads"


def _wait(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize(bench.device)


def run(bench: Bench, cases: Sequence[Case], results: Results) -> int:
    """Measure the cases that lack a row; how many failed."""
    failed, started = 0, time.perf_counter()
    for case in cases:
        wanted = [identity(bench, case, recovered) for recovered in ((False, True) if bench.arguments.recover else (False,))]
        if all(results.get(each) is not None for each in wanted):
            continue
        if bench.arguments.budget and time.perf_counter() - started > bench.arguments.budget:
            print(f"stopped before {case}: the budget is spent", flush=True)
            break
        try:
            rows = measure(bench, case, bench.arguments.recover)
        except Exception:  # the other cases are still wanted; the run ends with exit code 1
            traceback.print_exc()
            print(f"FAILED {case}", flush=True)
            failed += 1
            continue
        for row in rows:
            results.add(row, identity(bench, case, row["recovered"]))
            print(f"{time.perf_counter() - started:6.1f} s  {line(case, row)}", flush=True)
    return failed


def line(case: Case, row: dict) -> str:
    values = " / ".join(f"{value:.2f}" for value in row["perplexity"].values())
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
    parser.add_argument("--recover", action="store_true", help="train the pruned model towards the dense one as well")
    parser.add_argument("--tasks", action="store_true", help="score the tasks as well")
    return parser.parse_args(arguments)


def add_protocol(parser: argparse.ArgumentParser) -> None:
    """What `quality.py` and `grid.py` are both told."""
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--data", type=Path, required=True, help="the folder with text/ and tasks/")
    parser.add_argument("--name", help="the model's name in the results; known ones are recognised")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--split", default="test", choices=EVALUATION)
    parser.add_argument("--windows", type=int, default=128, help="calibration windows (128)")
    parser.add_argument("--seqlen", type=int, default=2048, help="tokens a window (2048)")
    parser.add_argument("--eval-windows", type=int, help="only the first windows of each evaluation text")
    parser.add_argument("--budget", type=float, help="seconds after which no further case is begun")
    parser.add_argument("--shared", action="store_true", help="other processes use the device too: seconds are not kept")
    parser.add_argument("--cache", type=Path, help="a folder for tokenised texts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results", help="folder of the JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    seeds = [int(seed) for seed in parsed.seeds.split(",")]
    cases = chosen(parsed.cases, seeds, parsed.split)
    device = choose_device(parsed.device)
    model, tokenizer = load_causal_lm(parsed.model, device=device, dtype=parsed.dtype)
    config = model.config.get_text_config()
    name = parsed.name or NAMES.get((config.model_type, config.hidden_size)) or Path(parsed.model).resolve().name
    bench = Bench(model, tokenizer, name, parsed)
    results = Results(parsed.out / f"quality_{bench.name}.json")
    print(f"{bench.name} on {card(bench)}; results in {results.path}", flush=True)
    failed = run(bench, cases, results)
    for pattern in dict.fromkeys(case.pattern for case in cases):
        for seed in seeds:
            print_ladder(bench, results, pattern, seed, parsed.split)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
