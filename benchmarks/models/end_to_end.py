"""Prune whole models from disk to disk and say where the time goes: 50 % Wanda masks, optimal weights, every column certified.

The preset is `fast` unless --setting preset=balanced says otherwise.

    python benchmarks/models/end_to_end.py --model llama-3.1-8b --workdir /tmp/models
    python benchmarks/models/end_to_end.py --model PATH --text calibration.txt

A named shape gets random weights (see inputs/random_models.py); a path is a real model. Phases are timed by the pipeline, which
waits for the device at their ends only; the share of Gram products in a pass is taken with CUDA events, which wait for nothing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import shutil
import sys
import time
from pathlib import Path

import torch
import transformers
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.inputs.random_models import SHAPES, random_model
from benchmarks.models.end_to_end_probe import Probe, floor, measured_rates
from benchmarks.rows import put_whole
from qprecon.llm import PruneReport, prune_model
from qprecon.llm.calibration.texts import load_texts
from qprecon.llm.model.loading import choose_device

IO_PHASES = ("read", "write", "save")  # what is spent waiting for the disk


def main() -> None:
    arguments = _arguments()
    device = choose_device(arguments.device)
    folder, name = _model_folder(arguments, device)
    config = transformers.AutoConfig.from_pretrained(folder)
    calibration = _calibration(arguments, config)
    out = Path(arguments.workdir) / f"{folder.name}-pruned"
    out.parent.mkdir(parents=True, exist_ok=True)
    rates = measured_rates(device)
    targets = None if arguments.blocks is None else [rf"re:.*\.(layers|h)\.({'|'.join(map(str, range(arguments.blocks)))})\."]
    with Probe(device, _probed(arguments, config)) as probe:
        started = time.perf_counter()
        report = prune_model(
            folder, calibration, pattern=arguments.pattern, mask=arguments.mask, update=arguments.update, targets=targets,
            nsamples=arguments.samples, seqlen=arguments.seqlen, out=out, device=device, store=arguments.store, tol=arguments.tol,
            progress=False, resume=False, **{"preset": "fast", **arguments.settings},
        )  # fmt: skip
        _wait(device)
        total = time.perf_counter() - started - probe.excluded
    run = _run(name, device, report, probe, total, rates, config, arguments)
    _print(run, report, probe)
    put_whole(arguments.out_json, run)
    if not arguments.keep:
        shutil.rmtree(out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.2-1b", help=f"{', '.join(SHAPES)}, or a model folder")
    parser.add_argument("--name", help="of a model folder in the results; its own unless given")
    parser.add_argument("--blocks", type=int, help="only the first so many blocks")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--pattern", default="50%")
    parser.add_argument("--mask", default="wanda")
    parser.add_argument("--update", default="optimal")
    parser.add_argument("--tol", type=float, default=1e-4)
    parser.add_argument("--text", help="calibration text for a real model; random tokens otherwise")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--store", help="where activations are kept; as prune_model decides unless given")
    parser.add_argument("--workdir", default="/tmp/qprecon-end-to-end", help="for models, random and pruned")
    parser.add_argument("--out-json", default="benchmarks/results/end_to_end.json", help="the list that gets the run")
    parser.add_argument("--setting", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of prune_model")
    parser.add_argument("--keep", action="store_true", help="keep the pruned model")
    arguments = parser.parse_args()
    arguments.settings = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in arguments.settings)}
    return arguments


def _model_folder(arguments: argparse.Namespace, device: torch.device) -> tuple[Path, str]:
    """The folder of the model and its name in the results; a random model is written first, outside all timing."""
    if arguments.model not in SHAPES:
        return Path(arguments.model), arguments.name or Path(arguments.model).name
    started = time.perf_counter()
    folder = random_model(arguments.model, arguments.workdir, blocks=arguments.blocks, device=str(device))
    depth = folder.name.rpartition("-")[2]
    name = arguments.model if arguments.blocks is None else f"{arguments.model} ({depth} blocks)"
    os.sync()  # else the run would wait for these files to reach the disk when it forces its own there
    print(f"random weights of {name} in {folder}: {time.perf_counter() - started:.1f} s")
    return folder, f"{name}, random weights"


def _calibration(arguments: argparse.Namespace, config: transformers.PretrainedConfig):
    if arguments.text:
        return load_texts(arguments.text)
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.samples, arguments.seqlen)
    return torch.randint(config.get_text_config().vocab_size, shape, generator=generator)


def _probed(arguments: argparse.Namespace, config: transformers.PretrainedConfig) -> set[int]:
    """The blocks whose condition numbers are printed: first, middle, last."""
    depth = config.get_text_config().num_hidden_layers
    depth = depth if arguments.blocks is None else min(depth, arguments.blocks)
    return {0, depth // 2, depth - 1}


def _run(name, device, report: PruneReport, probe: Probe, total: float, rates, config, arguments) -> dict:
    phases = {phase: seconds for phase, seconds in report.phase_seconds.items()}
    forward = phases["gram"] - probe.excluded - probe.gram_seconds()
    phases |= {"gram": probe.gram_seconds(), "forward": forward + phases.pop("propagate", 0.0)}
    whole = () if report.settings["streamed"] else ("load",)  # then loading reads all weights
    seconds_io = sum(phases.get(phase, 0.0) for phase in (*IO_PHASES, *whole))
    return {
        "model": name,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else f"none ({platform.processor() or 'cpu'})",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": report.versions,
        "pattern": arguments.pattern,
        "mask": arguments.mask,
        "update": arguments.update,
        "settings": arguments.settings,
        "samples": report.settings["nsamples"],
        "seqlen": report.settings["seqlen"],
        "tol": arguments.tol,
        "store": str(report.settings.get("store")),
        "seconds_total": total,
        "seconds_io": seconds_io,
        "seconds_beside_io": total - seconds_io,
        "seconds": phases,
        "floor_seconds": floor(report, config, rates),
        "rates_tflops": rates,
        "peak_gpu_gb": probe.peak_gpu_gb(),
        "peak_host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "max_relative_gap": report.largest_gap,
        "uncertified_columns": sum(row.uncertified or 0 for row in report.layers),
        "fallbacks": report.fallbacks,
        "conditions": probe.conditions,
        "warnings": list(report.warnings),
    }


def _print(run: dict, report: PruneReport, probe: Probe) -> None:
    print(f"{run['model']} on {run['gpu']}: {run['samples']} x {run['seqlen']} tokens, {run['mask']} {run['pattern']}")
    print(f"  total {run['seconds_total']:.1f} s, {run['seconds_io']:.1f} s of it disk, {run['seconds_beside_io']:.1f} s beside it")
    for phase, seconds in run["seconds"].items():
        print(f"  {phase:>10} {seconds:8.2f} s")
    accounted = sum(run["seconds"].values())
    print(f"  {'the rest':>10} {run['seconds_total'] - accounted:8.2f} s")
    print("  rates: " + ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in run["rates_tflops"].items()))
    print("  floor: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in run["floor_seconds"].items()))
    print(f"  peak: GPU {run['peak_gpu_gb']:.2f} GB, host {run['peak_host_gb']:.2f} GB")
    if run["max_relative_gap"] is not None:
        print(f"  largest certified gap {run['max_relative_gap']:.2e}, {run['uncertified_columns']} columns above the tolerance, "
              f"{run['fallbacks']} kept their start")  # fmt: skip
    for warning in run["warnings"]:
        print(f"  note: {warning}")
    iterations = {row.name: row.iterations for row in report.layers}
    print("  layer (first, middle and last block): kappa of the damped H, iterations")
    for name, condition in probe.conditions.items():
        print(f"    {name}: {condition:.2e}, {iterations[name]}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
