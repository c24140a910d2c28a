"""One run on one rank and on several ranks of the same host: time, memory, bytes, and whether the answers agree.

    python benchmarks/ranks/scaling.py --model llama-3.1-8b --ranks 1 2 --workdir /tmp/models
    python benchmarks/ranks/scaling.py --model llama-3.2-1b --ranks 1 2 --device cuda:0     (two processes on one card, by Gloo)
    python benchmarks/ranks/scaling.py --model llama-3.1-8b --ranks 1 2 --turns     (the same, one after the other: see turns.py)
    python benchmarks/ranks/scaling.py --model tiny --ranks 1 2 3 --device cpu              (a try on any computer)

A random model of the named shape is written first (inputs/random_models.py). Each run is started by torchrun, from disk to disk.
Its time is that of `prune_model` alone: processes, imports and NCCL's first message come before. Then the outputs are compared
tensor by tensor.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from safetensors import safe_open
from torch import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.inputs.random_models import SHAPES, random_model
from benchmarks.machine import append_run
from benchmarks.ranks.turns import Turns, by_turns, side_by_side
from qprecon.llm import PruneReport, prune_model

IO_PHASES = ("read", "write", "save")


def main() -> None:
    arguments = _arguments()
    if arguments.one:
        _one(arguments)
        return
    folder, name = _model_folder(arguments)
    runs = []
    for size in arguments.ranks:
        out = Path(arguments.workdir) / f"{folder.name}-on-{size}"
        shutil.rmtree(out, ignore_errors=True)
        runs.append(_launched(arguments, folder, out, size))
        print(_line(runs[-1], runs[0]), flush=True)
        if size != arguments.ranks[0]:
            first = Path(arguments.workdir) / f"{folder.name}-on-{arguments.ranks[0]}"
            runs[-1]["against_first"] = compared(first, out, _device(arguments))
            print(json.dumps(runs[-1]["against_first"]), flush=True)
            shutil.rmtree(out)
    result = {
        "model": name, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": arguments.settings, "samples": arguments.samples, "seqlen": arguments.seqlen, "backend": arguments.backend,
        "cards": "one, by turns" if arguments.turns else arguments.device or "one a rank", "runs": runs,
    }  # fmt: skip
    append_run(arguments.out_json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", help=", ".join(SHAPES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", type=int, help="only so many blocks")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--device", help="cpu, or a card that all ranks share; by default each has its own")
    parser.add_argument("--turns", action="store_true", help="ranks take turns on one card, through gloo (turns.py)")
    parser.add_argument("--backend", help="of torch.distributed; nccl between cards of their own, else gloo")
    parser.add_argument("--workdir", default="/tmp/qprecon-scaling", help="for models, random and pruned")
    parser.add_argument("--out-json", default="benchmarks/results/scaling.json", help="the runs are appended to this list")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which processes show where they are, and end")
    parser.add_argument("--setting", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of prune_model")
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "OUT", "JSON"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.words = arguments.settings
    arguments.settings = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in arguments.settings)}
    if arguments.turns and arguments.device is None:
        arguments.device = "cuda:0" if torch.cuda.is_available() else "cpu"
    cuda = torch.cuda.is_available() and not str(arguments.device).startswith("cpu")
    arguments.backend = arguments.backend or ("nccl" if cuda and arguments.device is None else "gloo")
    return arguments


def _device(arguments: argparse.Namespace) -> torch.device:
    return torch.device(arguments.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))


def _model_folder(arguments: argparse.Namespace) -> tuple[Path, str]:
    folder = random_model(arguments.model, arguments.workdir, blocks=arguments.blocks, device=str(_device(arguments)))
    os.sync()
    return folder, f"{arguments.model}, random weights, {folder.name.rpartition('-')[2]} blocks"


def _launched(arguments: argparse.Namespace, folder: Path, out: Path, size: int) -> dict[str, Any]:
    """One run on so many ranks, in processes of its own."""
    answer = out.with_suffix(".json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), __file__]
    command += ["--one", str(folder), str(out), str(answer), "--backend", arguments.backend]
    command += ["--samples", str(arguments.samples), "--seqlen", str(arguments.seqlen)]
    command += ["--device", arguments.device] if arguments.device else []
    command += ["--limit", str(arguments.limit)]
    command += ["--turns"] if arguments.turns else []
    command += [word for each in arguments.words for word in ("--setting", each)]
    started = time.perf_counter()
    threads = str(max(1, len(os.sched_getaffinity(0)) // size))  # torchrun would give each rank one, and a single rank all
    code = subprocess.run(command, env=os.environ | {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": threads}).returncode
    if code:
        errors = [f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(out.parent.glob(f"{out.name}.error-*"))]
        raise SystemExit("\n".join([f"{size} ranks: exit code {code}", *errors]))
    return json.loads(answer.read_text()) | {"seconds_with_start": time.perf_counter() - started}


def _one(arguments: argparse.Namespace) -> None:
    """What each process does; an error, or where it was when its time was up, is left for the parent, which shows it last."""
    path = Path(f"{arguments.one[1]}.error-{os.environ['RANK']}")
    with path.open("w") as file:
        faulthandler.dump_traceback_later(arguments.limit, exit=True, file=file)
        try:
            _pruned(arguments)
        except Exception:
            file.write(traceback.format_exc())
            raise
        faulthandler.cancel_dump_traceback_later()


def _pruned(arguments: argparse.Namespace) -> None:
    folder, out, answer = map(Path, arguments.one)
    size, first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    device = arguments.device or (f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    cuda, begun = device.startswith("cuda"), time.perf_counter()
    if cuda:
        torch.cuda.set_device(device)
    if size > 1:
        distributed.init_process_group(arguments.backend)
        distributed.all_reduce(torch.ones(1, device=device))
    connected = time.perf_counter() - begun
    vocabulary = transformers.AutoConfig.from_pretrained(folder).vocab_size
    windows = torch.randint(vocabulary, (arguments.samples, arguments.seqlen), generator=torch.Generator().manual_seed(0))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    settings = {"preset": "fast", **arguments.settings}
    apart = by_turns(out.with_suffix(".lock"), cuda, IO_PHASES) if arguments.turns and size > 1 else nullcontext()
    with apart as turns:
        started = time.perf_counter()
        report = prune_model(folder, windows, out=out, device=device, progress=False, resume=False, **settings)
        total = time.perf_counter() - started
    taken = _turns(turns, size)
    if first:
        found = _facts(report, total) | {"ranks": size, "seconds_connecting": connected} | taken
        found["peak_gpu_bytes"] = torch.cuda.max_memory_allocated() if cuda else None  # of this rank; `by_rank` has all
        found["card"] = torch.cuda.get_device_name(device) if cuda else f"none ({platform.processor() or 'cpu'})"
        answer.write_text(json.dumps(found))
    if size > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def _turns(turns: Turns | None, size: int) -> dict[str, Any]:
    """Of ranks that took turns: what each took, and what they would take side by side, beside what is sent."""
    if turns is None:
        return {}
    stretches: list[Any] = [None] * size
    distributed.all_gather_object(stretches, turns.stretches)
    whole, beside = side_by_side(stretches)
    return {"seconds": whole, "seconds_beside_io": beside, "seconds_of_turns": [sum(s for s, _ in own) for own in stretches]}


def _facts(report: PruneReport, total: float) -> dict[str, Any]:
    waiting = sum(report.phase_seconds.get(phase, 0.0) for phase in IO_PHASES)
    return {
        "seconds": total, "seconds_beside_io": total - waiting, "phase_seconds": report.phase_seconds,
        "largest_gap": report.largest_gap, "fallbacks": report.fallbacks, "sparsity": report.sparsity,
        "error_stored": report.mean_error("error_stored"), "uncertified": sum(row.uncertified or 0 for row in report.layers),
        "by_rank": list(report.ranks), "versions": report.versions, "warnings": list(report.warnings),
    }  # fmt: skip


def compared(one: Path, other: Path, device: torch.device) -> dict[str, Any]:
    """How two outputs differ: the share of mask entries, and weights relative to their norm (the worst tensor and all of them)."""
    entries = differing = same = tensors = 0
    squares = total = worst = 0.0
    for file in sorted(one.glob("*.safetensors")):
        with safe_open(file, "pt") as mine, safe_open(other / file.name, "pt") as its:
            for name in mine.keys():
                a, b = mine.get_tensor(name).to(device), its.get_tensor(name).to(device)
                tensors, same = tensors + 1, same + bool(torch.equal(a, b))
                entries, differing = entries + a.numel(), differing + int(((a == 0) != (b == 0)).sum())
                away, size = float((a.float() - b.float()).square().sum()), float(a.float().square().sum())
                squares, total, worst = squares + away, total + size, max(worst, (away / size) ** 0.5 if size else 0.0)
    return {
        "tensors": tensors, "identical_tensors": same, "differing_mask_share": differing / entries,
        "relative_difference": (squares / total) ** 0.5, "worst_relative_difference": worst,
    }  # fmt: skip


def _line(run: dict[str, Any], first: dict[str, Any]) -> str:
    peaks = [facts["peak_gpu_bytes"] for facts in run["by_rank"]] or [run["peak_gpu_bytes"]]
    memory = ", ".join(f"{peak / 1e9:.1f}" for peak in peaks if peak is not None)
    waiting = ", ".join(f"{facts['seconds_waiting']:.1f}" for facts in run["by_rank"])
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in run["phase_seconds"].items())
    speed = first["seconds_beside_io"] / run["seconds_beside_io"]
    return (
        f"{run['ranks']} ranks: {run['seconds']:.1f} s ({run['seconds_beside_io']:.1f} without disk, {speed:.2f} x), "
        f"peak GB [{memory}], waited [{waiting}], gap {run['largest_gap']:.1e}\n  {phases}"
    )


if __name__ == "__main__":
    main()
