"""The first blocks of a model on a CPU, phase by phase, and what the whole model takes at that rate.

    taskset -c 0,1 python benchmarks/models/cpu_blocks.py --model PATH --text calibration.txt --windows 32 --seqlen 512

A named shape gets random weights (inputs/random_models.py) and random tokens. Seconds are those on the wall and those of the
processors, which other processes disturb less; with --processor the phases are in those too. Beside them: what the operations that
cannot be left out take at the rate of square products (`counted`). The output is written to --workdir and removed. While it runs,
stderr (a file, not a terminal) gets a line with the seconds so far after each block, which a run that is stopped leaves behind.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

from benchmarks.inputs.random_models import SHAPES, write_random_model
from benchmarks.machine import append_run, processor
from qprecon.llm import PruneReport, prune_model
from qprecon.llm.calibration.texts import load_texts

ONCE = ("load", "capture", "save", "write")  # phases whose time does not grow with the blocks that are pruned


def main() -> None:
    """Run, print, append to the results."""
    arguments = _arguments()
    if arguments.processor:
        time.perf_counter = time.monotonic = time.process_time
    began = time.perf_counter(), time.process_time()
    folder = _folder(arguments)
    config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    blocks = min(arguments.blocks, config.num_hidden_layers)
    made = time.perf_counter() - began[0]
    out = Path(arguments.workdir) / "pruned"
    wall, worked = time.perf_counter(), time.process_time()
    report = prune_model(
        folder, _calibration(arguments, config), nsamples=arguments.windows, seqlen=arguments.seqlen, out=out, device="cpu",
        targets=[rf"re:.*\.layers\.({'|'.join(map(str, range(blocks)))})\."], compute_dtype=arguments.compute_dtype,
        preset=arguments.preset, progress=not arguments.processor, resume=False,
    )  # fmt: skip
    wall, worked = time.perf_counter() - wall, time.process_time() - worked
    shutil.rmtree(out)
    run = _facts(arguments, report, wall, worked, blocks, config.num_hidden_layers)
    print(_described(run) + f"\n  (the model was made in {made:.0f} s)")
    append_run(arguments.out_json, run)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-0.5b", help=f"{', '.join(SHAPES)}, or a model folder")
    parser.add_argument("--text", help="calibration text; random tokens otherwise")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--compute-dtype", default="float32", choices=("auto", "float32", "stored"))
    parser.add_argument("--preset", default="fast", choices=("fast", "balanced", "best"))
    parser.add_argument("--processor", action="store_true", help="phases in seconds of the processors; give torch one thread")
    parser.add_argument("--workdir", default="/tmp/qprecon-cpu-blocks")
    parser.add_argument("--out-json", default=str(Path(__file__).parents[1] / "results" / "cpu_blocks.json"))
    return parser.parse_args()


def _folder(arguments: argparse.Namespace) -> Path:
    if arguments.model not in SHAPES:
        return Path(arguments.model)
    config = SHAPES[arguments.model]()
    config.num_hidden_layers = arguments.blocks  # the others would only be copied
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: arguments.blocks]
    return write_random_model(config, Path(arguments.workdir) / arguments.model)


def _calibration(arguments: argparse.Namespace, config: Any) -> Any:
    if arguments.text:
        return load_texts(arguments.text)
    shape = (arguments.windows, arguments.seqlen)
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def counted(report: PruneReport) -> dict[str, float]:
    """Operations by phase, in units of float32's, of which a float64 one is two: products with weights, H and vectors.

    Two forward passes, the first without the block's last product; 9/16 of XᵀX for each H; a product with H an iteration (of the
    column that takes most); for the certificates two products, a triangular solve and a Cholesky factor in float64.
    """
    work = dict.fromkeys(("forward", "gram", "solve", "audit"), 0.0)
    for row in report.layers:
        name, n, k = row.name.rpartition(".")[2], row.n_inputs, row.n_outputs
        work["forward"] += 2.0 * row.tokens * n * k * (1 if name == "down_proj" else 2)
        work["solve"] += 2.0 * n * n * k * (row.iterations or 0)
        work["audit"] += 2.0 * 5.0 * n * n * k
        if name not in ("k_proj", "v_proj", "up_proj"):  # these share an H with the layer before
            work["gram"] += 9.0 / 16.0 * 2.0 * row.tokens * n * n
            work["audit"] += 2.0 * n**3 / 3.0
    return work


def square_rate(size: int = 2048) -> float:
    """Operations a processor second of a float32 product."""
    x = torch.randn(size, size)
    torch.mm(x, x)
    began = time.process_time()
    for _ in range(4):
        torch.mm(x, x)
    return 4 * 2.0 * size**3 / (time.process_time() - began)


def _facts(
    arguments: argparse.Namespace, report: PruneReport, wall: float, worked: float, blocks: int, depth: int
) -> dict[str, Any]:
    if arguments.model in SHAPES:
        depth = SHAPES[arguments.model]().num_hidden_layers
    phases = dict(report.phase_seconds)
    once = sum(phases.get(phase, 0.0) for phase in ONCE)
    return {
        "model": Path(arguments.model).name + (", random weights" if arguments.model in SHAPES else ""),
        "windows": report.settings["nsamples"], "seqlen": report.settings["seqlen"], "blocks": blocks, "depth": depth,
        "preset": arguments.preset, "compute_dtype": report.settings["compute_dtype"],
        "seconds": wall, "processor_seconds": worked, "phases": phases, "phases_of": "processor" if arguments.processor else "wall",
        "operations": counted(report), "operations_per_processor_second": square_rate(),
        "whole_model_seconds": once + (wall - once) * depth / blocks,
        "whole_model_processor_seconds": worked * (once + (wall - once) * depth / blocks) / wall,
        "iterations": {row.name: row.iterations for row in report.layers},
        "largest_gap": report.largest_gap, "uncertified": sum(row.uncertified or 0 for row in report.layers),
        "threads": torch.get_num_threads(), "processor": processor(), "processors": len(os.sched_getaffinity(0)),
        "versions": report.versions, "warnings": list(report.warnings),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def _described(run: dict[str, Any]) -> str:
    most: dict[str, int] = {}
    for name, iterations in run["iterations"].items():
        kind = name.rpartition(".")[2]
        most[kind] = max(most.get(kind, 0), iterations or 0)
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in run["phases"].items() if seconds >= 0.05)
    rate = run["operations_per_processor_second"]
    floor = ", ".join(f"{name} {operations / rate:.1f}" for name, operations in run["operations"].items())
    return "\n".join([
        f"{run['model']}: {run['blocks']} of {run['depth']} blocks, {run['windows']} x {run['seqlen']} tokens, {run['preset']}, in "
        f"{run['compute_dtype']} on {run['processors']} processors ({run['threads']} threads) of {run['processor']}",
        f"  {run['seconds']:.1f} s, {run['processor_seconds']:.1f} s of processors; {phases}",
        f"  at least {sum(run['operations'].values()) / rate:.1f} s of processors at {rate / 1e9:.0f} GFLOP/s: {floor}",
        f"  the whole model at this rate: {run['whole_model_seconds'] / 60:.1f} minutes",
        f"  iterations at most: {', '.join(f'{kind} {number}' for kind, number in most.items())}; largest gap "
        f"{run['largest_gap']:.1e}, {run['uncertified']} columns above the tolerance",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
