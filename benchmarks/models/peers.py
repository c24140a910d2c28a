"""A peer on the same windows: llm-compressor's SparseGPT, Wanda and GPTQ, perplexities and seconds beside ours.

    pip install llmcompressor scipy threadpoolctl rich lm-eval     (an environment of its own: it wants versions of other packages)
    python benchmarks/models/peers.py --model FOLDER --texts FOLDER [--device cuda] [--cases "sparsegpt 50%,wanda 2:4"]

The protocol is that of `paper.py`: float32 weights, windows randperm(seed 0)[:n] of the non-overlapping windows of the calibration
text, every linear layer of every block, perplexity on the whole WikiText-2 test. llm-compressor gets these windows one by one.
Its modifiers run with their own defaults (SparseGPT: damping 0.01, blocks of 128).
Rows are appended to benchmarks/results/peers_<model>.json; a case that the file has is not run again.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.models.paper import TEST_TEXT, TEXTS
from qprecon.llm import perplexity
from qprecon.llm.calibration.sampling import calibration_windows
from qprecon.llm.calibration.texts import load_texts
from qprecon.llm.calibration.windows import cut_windows
from qprecon.llm.model.loading import load_causal_lm

CASES = ("sparsegpt 50%", "wanda 50%", "sparsegpt 2:4", "wanda 2:4", "sparsegpt 60%")
RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    arguments = _arguments()
    path = arguments.out / f"peers_{arguments.name}.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    for case in arguments.cases:
        if any(row["case"] == case and row["windows"] == arguments.windows and row["seqlen"] == arguments.seqlen for row in rows):
            continue
        rows.append(row := run(case, arguments))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{case}: perplexity {row['perplexity']['wikitext2']:.2f}, {row['seconds']:.1f} s", flush=True)


def run(case: str, arguments: argparse.Namespace) -> dict:
    """Prune a fresh copy of the model with llm-compressor and measure it."""
    method, pattern = case.split()
    model, tokenizer = load_causal_lm(arguments.model, device=arguments.device, dtype="float32")
    text = load_texts(arguments.texts / TEXTS["wikitext2"])
    tokens = cut_windows(text, tokenizer=tokenizer, seqlen=arguments.seqlen).tokens
    windows = calibration_windows(tokens, nsamples=arguments.windows, seqlen=arguments.seqlen, seed=arguments.seed)
    started = time.perf_counter()
    _prune(model, windows, method, pattern)
    seconds = time.perf_counter() - started
    model.to(arguments.device)
    test = cut_windows(arguments.texts / TEST_TEXT, tokenizer=tokenizer, seqlen=arguments.seqlen)
    measured = perplexity(
        model, test.tokens, seqlen=arguments.seqlen, bos="none", batch_size=8 if _on_gpu(arguments) else 1,
        autocast="bfloat16" if _on_gpu(arguments) else None, max_windows=arguments.eval_windows, text_name=TEST_TEXT,
    )  # fmt: skip
    return {
        "case": case, "tool": "llm-compressor", "method": method, "pattern": pattern, "model": arguments.name,
        "calibration": "wikitext2", "windows": len(windows), "seqlen": arguments.seqlen, "seed": arguments.seed,
        "evaluated_windows": measured.windows, "perplexity": {"wikitext2": measured.value}, "seconds": seconds,
        "zeros": _zeros(model),
        "card": torch.cuda.get_device_name() if _on_gpu(arguments) else f"cpu, {torch.get_num_threads()} threads",
        "versions": _versions(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def _prune(model: torch.nn.Module, windows: torch.Tensor, method: str, pattern: str) -> None:
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader

    recipe = _rounding(pattern) if method == "gptq" else _pruning(method, pattern)
    batches = DataLoader([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in windows], batch_size=1)
    oneshot(
        model=model, dataset=batches, recipe=recipe, num_calibration_samples=len(windows),
        max_seq_length=windows.shape[1], pipeline="sequential",
    )  # fmt: skip


def _pruning(method: str, pattern: str) -> Any:
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier

    modifier = {"sparsegpt": SparseGPTModifier, "wanda": WandaPruningModifier}[method]
    share, structure = (0.5, pattern) if ":" in pattern else (float(pattern.rstrip("%")) / 100, "0:0")
    return modifier(sparsity=share, mask_structure=structure, targets=["Linear"], ignore=["re:.*lm_head"])


def _rounding(pattern: str) -> Any:
    """GPTQ to "int4-g64": symmetric integers of so many bits, a scale for so many inputs."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier

    bits, _, group = pattern.removeprefix("int").partition("-g")
    weights = QuantizationArgs(num_bits=int(bits), type="int", symmetric=True, strategy="group", group_size=int(group))
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return GPTQModifier(config_groups={"group_0": scheme}, ignore=["re:.*lm_head"])


def _zeros(model: torch.nn.Module) -> float:
    """The share of zeros in the linear layers of the blocks."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    weights = [module.weight for name, module in linears.items() if "lm_head" not in name]
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def _on_gpu(arguments: argparse.Namespace) -> bool:
    return torch.device(arguments.device).type == "cuda"


def _versions() -> dict[str, str]:
    names = ("llmcompressor", "compressed-tensors", "transformers", "torch")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="a folder")
    parser.add_argument("--name", default="smollm2-135m", help="the model's name in the results' file")
    parser.add_argument("--texts", required=True, type=Path, help="folder of the gzipped texts (see paper.py)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", type=lambda text: tuple(text.split(",")), default=CASES)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-windows", type=int, help="only the first so many windows of the test")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
