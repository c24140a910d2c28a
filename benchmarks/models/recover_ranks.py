"""Recovery on one rank and on several of the same host, through FSDP2: time of a step, memory, and whether the answers agree.

    python benchmarks/models/recover_ranks.py --model llama-3.2-1b --ranks 1 2 --workdir /tmp/models
    python benchmarks/models/recover_ranks.py --model tiny --ranks 1 2 3 --device cpu              (a try on any computer)

A random model of the named shape is written first, and a copy of it whose smallest half of every layer's weights is zero. Each run
is started by torchrun, from disk to disk, with the same windows and the same batch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.inputs.random_models import SHAPES, write_random_model
from benchmarks.models.scaling import compared
from qprecon.llm import recover
from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.linears import find_linears


def main() -> None:
    """Write the models, run, compare."""
    arguments = _arguments()
    if arguments.one:
        _one(arguments)
        return
    dense, pruned = _models(arguments)
    runs = []
    for size in arguments.ranks:
        out = Path(arguments.workdir) / f"{pruned.name}-recovered-on-{size}"
        shutil.rmtree(out, ignore_errors=True)
        runs.append(_launched(arguments, dense, pruned, out, size))
        print(_line(runs[-1], runs[0]), flush=True)
        if size != arguments.ranks[0]:
            first = Path(arguments.workdir) / f"{pruned.name}-recovered-on-{arguments.ranks[0]}"
            runs[-1]["against_first"] = compared(first, out, torch.device("cpu"))
            print(json.dumps(runs[-1]["against_first"]), flush=True)
    result = {
        "model": dense.name, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "windows": arguments.windows, "seqlen": arguments.seqlen, "batch": arguments.batch, "passes": arguments.passes,
        "torch": torch.__version__, "runs": runs,
    }  # fmt: skip
    path = Path(arguments.out_json)
    known = json.loads(path.read_text()) if path.is_file() else []
    path.write_text(json.dumps([*known, result], indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.2-1b", help=f"tiny, {', '.join(SHAPES)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", type=int, help="only so many blocks")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--device", help="cpu; by default each rank has its own card")
    parser.add_argument("--workdir", default="/tmp/qprecon-recover", help="for models, random and recovered")
    parser.add_argument("--out-json", default="benchmarks/results/recover_ranks.json", help="the runs are appended to this list")
    parser.add_argument("--one", nargs=4, metavar=("DENSE", "PRUNED", "OUT", "JSON"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _models(arguments: argparse.Namespace) -> tuple[Path, Path]:
    if arguments.model == "tiny":
        config = transformers.LlamaConfig(
            vocab_size=1024, hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4,
        )  # fmt: skip
    else:
        config = SHAPES[arguments.model]()
    if arguments.blocks is not None:
        config.num_hidden_layers = min(arguments.blocks, config.num_hidden_layers)
    dense = Path(arguments.workdir) / f"{arguments.model}-{config.num_hidden_layers}"
    cuda = torch.cuda.is_available() and arguments.device is None
    write_random_model(config, dense, device="cuda" if cuda else "cpu")
    pruned = dense.with_name(f"{dense.name}-pruned")
    if not pruned.is_dir():
        model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype="auto")
        for block in find_blocks(model):
            for view in find_linears(block, model=model).views:
                weights_NK = view.weights_NK().to("cuda" if cuda else "cpu")
                limit = weights_NK.abs().float().flatten().sort().values[weights_NK.numel() // 2]
                view.write(weights_NK.where(weights_NK.abs() > limit, 0).to(view.parameter.device))
        model.save_pretrained(pruned)
    return dense, pruned


def _launched(arguments: argparse.Namespace, dense: Path, pruned: Path, out: Path, size: int) -> dict[str, Any]:
    """One run on so many ranks, in processes of its own."""
    answer = out.with_suffix(".json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), __file__]
    command += ["--one", str(dense), str(pruned), str(out), str(answer), "--windows", str(arguments.windows)]
    command += ["--seqlen", str(arguments.seqlen), "--batch", str(arguments.batch), "--passes", str(arguments.passes)]
    command += ["--device", arguments.device] if arguments.device else []
    threads = str(max(1, len(os.sched_getaffinity(0)) // size))  # torchrun would give each rank one, and a single rank all
    code = subprocess.run(command, env=os.environ | {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": threads}).returncode
    if code:
        errors = [f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(out.parent.glob(f"{out.name}.error-*"))]
        raise SystemExit("\n".join([f"{size} ranks: exit code {code}", *errors]))
    return json.loads(answer.read_text())


def _one(arguments: argparse.Namespace) -> None:
    """What each process of a run does; an error is left for the parent, which shows it last."""
    path = Path(f"{arguments.one[2]}.error-{os.environ['RANK']}")
    path.unlink(missing_ok=True)
    try:
        _recovered(arguments)
    except Exception:
        path.write_text(traceback.format_exc())
        raise


def _recovered(arguments: argparse.Namespace) -> None:
    dense, pruned, out, answer = map(Path, arguments.one)
    size, first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    device = torch.device(arguments.device or f"cuda:{os.environ['LOCAL_RANK']}")
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if size > 1:
        distributed.init_process_group("nccl" if cuda else "gloo")
    vocabulary = transformers.AutoConfig.from_pretrained(dense).vocab_size
    windows = torch.randint(vocabulary, (arguments.windows, arguments.seqlen), generator=torch.Generator().manual_seed(0))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    report = recover(
        pruned, dense, windows, out=out, device=device, progress=False, resume=False, batch=arguments.batch,
        passes=arguments.passes, patience=100,
    )  # fmt: skip
    if first:
        own = {"peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None, "phase_seconds": report.phase_seconds}
        answer.write_text(json.dumps({
            "ranks": size, "seconds": time.perf_counter() - started, "phase_seconds": report.phase_seconds,
            "card": torch.cuda.get_device_name() if cuda else "none", "losses": report.losses, "held_out": report.held_out,
            "perplexity_stored": report.perplexity_stored, "perplexity_before": report.perplexity_before, "memory": report.memory,
            "windows_together": report.settings["windows_together"], "checkpointing": report.settings["checkpointing"],
            "by_rank": list(report.ranks) or [own],
        }))  # fmt: skip
    if size > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def _line(run: dict[str, Any], first: dict[str, Any]) -> str:
    def a_step(of: dict[str, Any]) -> float:
        return of["phase_seconds"]["train"] / len(of["losses"])

    peaks = ", ".join(f"{facts['peak_gpu_bytes'] / 1e9:.1f}" for facts in run["by_rank"] if facts["peak_gpu_bytes"] is not None)
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in run["phase_seconds"].items())
    return (
        f"{run['ranks']} ranks: {a_step(run):.3f} s a step ({a_step(first) / a_step(run):.2f} x), peak GB [{peaks}], estimated "
        f"{sum(run['memory'].values()) / 1e9:.1f}, loss {run['losses'][0]:.5f} -> {run['losses'][-1]:.5f}, perplexity "
        f"{run['perplexity_before']:.2f} -> {run['perplexity_stored']:.2f}, {run['windows_together']} windows together\n  {phases}"
    )


if __name__ == "__main__":
    main()
