"""A model under measurement: pruned, put back, and measured on texts and tasks. What `quality.py` and `grid.py` share.

Protocol: weights as they are stored (bfloat16); calibration on windows randperm(seed)[:n] of the non-overlapping windows of a text,
of several joined by "+" equal parts; every linear layer of every block. Perplexity: split "test" is the whole WikiText-2 test and
the first 60 windows of 2048 tokens of the joined C4 validation documents; split "validation", on which choices are made, is
WikiText-2's validation part and 60 windows of C4's training documents that the seed does not calibrate on; --code adds 60 windows
of Python sources (see inputs/quality_texts.py). Forward passes have float32 weights, with bfloat16 autocast on a GPU. The tokenizer
decides about a BOS: none for SmolLM2 and Qwen, one a window for Gemma.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.inputs.quality_texts import CALIBRATION, CODE, EVALUATION, describe_code, file_name, read
from benchmarks.rows import figures, put_back, tf32, versions
from qprecon.llm import PruneReport, perplexity, prune_model
from qprecon.llm.calibration.windows import cut_windows
from qprecon.llm.evaluation.local_tasks import local_file
from qprecon.llm.evaluation.scores import PAPER_TASKS
from qprecon.llm.evaluation.tasks import check_tasks, evaluate_tasks
from qprecon.llm.model.loading import choose_device, load_causal_lm, load_tokenizer

WINDOWS = 60  # of C4, and of code
# Numbers in the logits of one batch of perplexities: 2 GB of 16 bits.
_ENTRIES = 1 << 30
# By model type and width: folders made from a GGUF don't hold the model's usual name.
NAMES = {("llama", 576): "smollm2-135m", ("gemma3_text", 640): "gemma-3-270m", ("qwen2", 896): "qwen2.5-coder-0.5b"}


@dataclass
class Bench:
    """A model on its device, its dense weights beside it, and the texts as windows of tokens."""

    model: torch.nn.Module
    tokenizer: Any
    name: str
    arguments: argparse.Namespace
    tasks: tuple[str, ...] = ()
    dense: list[torch.Tensor] = field(default_factory=list)
    texts: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dense = [parameter.detach().clone() for parameter in self.model.parameters()]

    @property
    def device(self) -> torch.device:
        return self.dense[0].device

    @property
    def vocabulary(self) -> int:
        return self.model.get_input_embeddings().num_embeddings

    def restore(self) -> None:
        put_back(self.model, self.dense)

    def windows(self, text: str) -> torch.Tensor:
        """All windows of a text, (S, L); tokenised once, kept in --cache if there is one."""
        if text not in self.texts:
            cache = self.arguments.cache and self.arguments.cache / f"{self.name}_{file_name(text)}_{self.arguments.seqlen}.pt"
            if cache and cache.exists():
                self.texts[text] = torch.load(cache)
            else:
                documents = read(text, self.arguments.data / "text")
                self.texts[text] = cut_windows(documents, tokenizer=self.tokenizer, seqlen=self.arguments.seqlen).tokens
                if cache:
                    cache.parent.mkdir(parents=True, exist_ok=True)
                    torch.save(self.texts[text], cache)
        return self.texts[text]

    def calibration(self, case: Any) -> torch.Tensor:
        """(--windows, L): equal parts of each text, the first ones a window more where they cannot be equal."""
        names = case.calibration.split("+")
        parts = []
        for place, name in enumerate(names):
            windows = self.windows(CALIBRATION[name])
            count = (self.arguments.windows + len(names) - 1 - place) // len(names)
            parts.append(windows[_order(windows, case.seed)[:count]])
        return torch.cat(parts)

    def evaluation(self, case: Any) -> dict[str, torch.Tensor]:
        files = EVALUATION[case.split]
        wikitext, c4 = self.windows(files["wikitext2"]), self.windows(files["c4"])
        if case.split == "validation":  # those that a calibration with this seed leaves
            c4 = c4[_order(c4, case.seed)[self.arguments.windows :]]
        most = self.arguments.eval_windows or len(wikitext)
        found = {"wikitext2": wikitext[:most], "c4": c4[: min(most, WINDOWS)]}
        return found | ({CODE: self.windows(files[CODE])[: min(most, WINDOWS)]} if self.arguments.code else {})

    def perplexity(self, case: Any) -> dict[str, float]:
        on_gpu, seqlen = self.device.type == "cuda", self.arguments.seqlen
        batch = max(1, min(8, _ENTRIES // (seqlen * self.vocabulary))) if on_gpu else 1
        how = {"batch_size": batch, "autocast": "bfloat16" if on_gpu else None, "seqlen": seqlen, "bos": "none"}
        with in_float32(self.model):
            return {name: perplexity(self.model, windows, **how).value for name, windows in self.evaluation(case).items()}

    def accuracy(self) -> dict:
        """{"accuracy": …} of the tasks that there are, in float32, TF32 on a GPU; {} without any, and if they fail."""
        if not self.tasks:
            return {}
        folder, limit = self.arguments.data / "tasks", self.arguments.task_limit
        how = {"data_dir": folder, "tokenizer": self.tokenizer, "limit": limit}
        try:
            with in_float32(self.model), tf32():
                return {"accuracy": figures(evaluate_tasks(self.model, self.tasks, **how))}
        except Exception:  # the perplexities are still wanted
            traceback.print_exc()
            return {}


def open_bench(parsed: argparse.Namespace) -> Bench:
    """The model on its device. Tasks that cannot be scored are said, and left out; a broken file of theirs raises."""
    tasks = scorable(parsed.data / "tasks", parsed.task_limit) if parsed.tasks else ()
    model, tokenizer = load_causal_lm(parsed.model, device=choose_device(parsed.device), dtype=parsed.dtype)
    if parsed.tokenizer:
        tokenizer = load_tokenizer(parsed.tokenizer, needed_by="--tokenizer")
    config = model.config.get_text_config()
    name = parsed.name or NAMES.get((config.model_type, config.hidden_size)) or Path(parsed.model).resolve().name
    return Bench(model, tokenizer, name, parsed, tasks)


def scorable(folder: Path, limit: int | None) -> tuple[str, ...]:
    """Which of the six tasks have a file; none where lm-eval is missing."""
    found = []
    for task in PAPER_TASKS:
        try:
            local_file(task, folder)
            check_tasks(task, data_dir=folder, limit=limit)
            found.append(task)
        except (FileNotFoundError, ImportError) as error:
            print(f"no accuracy of {task}: {error}", flush=True)
    return tuple(found)


def _order(windows: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))


@contextmanager
def in_float32(model: torch.nn.Module) -> Iterator[None]:
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
    wait(bench)
    seconds = time.perf_counter() - started
    phases = {} if bench.arguments.shared else {phase: round(value, 2) for phase, value in report.phase_seconds.items()}
    return report, seconds, phases


def result(bench: Bench, case: Any, seconds: float) -> dict:
    """What is measured of the model as it is now."""
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()  # other processes may want it
    sources = (case.calibration or "").split("+")
    parts = [part for part, used in (("train", CODE in sources), (case.split, bench.arguments.code)) if used]
    return {
        "perplexity": bench.perplexity(case), "seconds": None if bench.arguments.shared else round(seconds, 2), "card": card(bench),
        "date": datetime.date.today().isoformat(), "versions": versions(),
        **({"code": {part: describe_code(part) for part in parts}} if parts else {}),
    }  # fmt: skip


def measure_all(bench: Bench, cases: Sequence[Any], is_done: Callable[[Any], bool], measure: Callable[[Any], Iterable[str]]) -> int:
    """Measure the cases that are not done, until the budget is spent; how many failed.

    `measure` adds a case's rows to the results, and gives a line to print for each as it is added.
    """
    failed, started = 0, time.perf_counter()
    for case in cases:
        if is_done(case):
            continue
        if bench.arguments.budget and time.perf_counter() - started > bench.arguments.budget:
            print(f"stopped before {case}: the budget is spent", flush=True)
            break
        try:
            for line in measure(case):
                print(f"{time.perf_counter() - started:6.1f} s  {line}", flush=True)
        except Exception:  # the other cases are still wanted; the run ends with exit code 1
            traceback.print_exc()
            print(f"FAILED {case}", flush=True)
            failed += 1
    return failed


def card(bench: Bench) -> str:
    if bench.device.type == "cuda":
        return torch.cuda.get_device_name(bench.device)
    return f"CPU, {torch.get_num_threads()} threads"


def wait(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize(bench.device)


def add_protocol(parser: argparse.ArgumentParser) -> None:
    """What `quality.py` and `grid.py` are both told."""
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--data", type=Path, required=True, help="the folder with text/ and tasks/")
    parser.add_argument("--name", help="the model's name in the results; known ones are recognised")
    parser.add_argument("--tokenizer", help="a folder with the tokenizer, where the model's has none or another one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--split", default="test", choices=EVALUATION)
    parser.add_argument("--windows", type=int, default=128, help="calibration windows (128)")
    parser.add_argument("--seqlen", type=int, default=2048, help="tokens a window (2048)")
    parser.add_argument("--eval-windows", type=int, help="only the first windows of each evaluation text")
    parser.add_argument("--code", action="store_true", help="measure on Python sources as well")
    parser.add_argument("--tasks", action="store_true", help="score the six tasks as well, those that have a file")
    parser.add_argument("--task-limit", type=int, help="only the first items of each task or subject (all)")
    parser.add_argument("--budget", type=float, help="seconds after which no further case is begun")
    parser.add_argument("--shared", action="store_true", help="other processes use the device too: seconds are not kept")
    parser.add_argument("--cache", type=Path, help="a folder for tokenised texts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results", help="folder of the JSON")
