"""Recovery on one rank and on several of the same host, through FSDP2: time of a step, memory, and whether the answers agree.

    python benchmarks/ranks/recover_ranks.py --model llama-3.2-1b --ranks 1 2 --workdir /tmp/models
    python benchmarks/ranks/recover_ranks.py --model tiny --ranks 1 2 3 --device cpu              (a try on any computer)

A random model of the named shape is written first, and a copy of it whose smallest half of every layer's weights is zero. Each run
goes from disk to disk, with the same windows and the same batch. torchrun starts the processes once: each does a step on its own
card first, so that all is loaded, then the first of them do the runs together, one number of ranks after the other.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
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

from benchmarks.inputs.random_models import SHAPES, random_model
from benchmarks.machine import append_run
from benchmarks.ranks.scaling import compared
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
    runs = _launched(arguments, dense, pruned)
    for run in runs:
        print(_line(run, runs[0]), flush=True)
        if run is not runs[0]:
            outs = (_out(pruned, of["ranks"]) for of in (runs[0], run))
            run["against_first"] = compared(*outs, torch.device("cuda:0" if run["card"] != "none" else "cpu"))
            print(json.dumps(run["against_first"]), flush=True)
    result = {
        "model": dense.name, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "windows": arguments.windows, "seqlen": arguments.seqlen, "batch": arguments.batch, "passes": arguments.passes,
        "torch": torch.__version__, "optimizer_state": arguments.optimizer_state, "runs": runs,
    }  # fmt: skip
    append_run(arguments.out_json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.2-1b", help=", ".join(SHAPES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", type=int, help="only so many blocks")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--device", help="cpu; by default each rank has its own card")
    parser.add_argument("--optimizer-state", default="auto", help="as `recover` takes it")
    parser.add_argument("--workdir", default="/tmp/qprecon-recover", help="for models, random and recovered")
    parser.add_argument("--out-json", default="benchmarks/results/recover_ranks.json", help="the runs are appended to this list")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which processes show where they are, and end")
    parser.add_argument("--one", nargs=2, metavar=("DENSE", "PRUNED"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _models(arguments: argparse.Namespace) -> tuple[Path, Path]:
    cuda = torch.cuda.is_available() and arguments.device != "cpu"
    dense = random_model(arguments.model, arguments.workdir, blocks=arguments.blocks, device="cuda" if cuda else "cpu")
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


def _out(pruned: Path, size: int) -> Path:
    return pruned.with_name(f"{pruned.name}-recovered-on-{size}")


def _launched(arguments: argparse.Namespace, dense: Path, pruned: Path) -> list[dict[str, Any]]:
    """The runs, in processes of their own."""
    most, answers = max(arguments.ranks), [_out(pruned, size).with_suffix(".json") for size in arguments.ranks]
    for old in (*answers, *pruned.parent.glob("error-*")):
        old.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(most), __file__]
    command += ["--one", str(dense), str(pruned), "--windows", str(arguments.windows), "--limit", str(arguments.limit)]
    command += ["--seqlen", str(arguments.seqlen), "--batch", str(arguments.batch), "--passes", str(arguments.passes)]
    command += ["--optimizer-state", arguments.optimizer_state]
    command += ["--ranks", *map(str, arguments.ranks), *(["--device", arguments.device] if arguments.device else [])]
    threads = str(max(1, len(os.sched_getaffinity(0)) // most))  # torchrun would give each rank one
    code = subprocess.run(command, env=os.environ | {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": threads}).returncode
    if code:
        texts = [(path.name, path.read_text()) for path in sorted(pruned.parent.glob("error-*"))]
        errors = [f"{name}:\n{text if len(text) < 1600 else text[:800] + ' ... ' + text[-800:]}" for name, text in texts]
        done = [path.name for path in answers if path.is_file()]
        raise SystemExit("\n".join([f"exit code {code}; done: {done}", *errors]))
    return [json.loads(path.read_text()) for path in answers]


def _one(arguments: argparse.Namespace) -> None:
    """What each process does; an error, or where it was when its time was up, is left for the parent, which shows it last."""
    dense, pruned = map(Path, arguments.one)
    path, rank = pruned.parent / f"error-{os.environ['RANK']}", int(os.environ["RANK"])
    store, _, _ = next(distributed.rendezvous("env://"))
    with path.open("w") as file:
        faulthandler.dump_traceback_later(arguments.limit, exit=True, file=file)
        try:
            _recovered(arguments, dense, pruned, pruned.parent / f"warm-{rank}", 2, 0, None)
            for size in arguments.ranks:
                if rank < size:
                    _recovered(arguments, dense, pruned, _out(pruned, size), size, rank, distributed.PrefixStore(str(size), store))
                store.add(f"done {size}", 1)
                while store.add(f"done {size}", 0) < int(os.environ["WORLD_SIZE"]):
                    time.sleep(0.05)
        except Exception:
            file.write(traceback.format_exc())
            raise


def _recovered(
    arguments: argparse.Namespace, dense: Path, pruned: Path, out: Path, size: int, rank: int, store: Any
) -> None:
    """One run of `size` ranks that meet in the store; without a store a short one of this process alone, to load everything."""
    device = torch.device(arguments.device or f"cuda:{os.environ['LOCAL_RANK']}")
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if store is not None and size > 1:
        backend = "nccl" if cuda else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    vocabulary = transformers.AutoConfig.from_pretrained(dense).vocab_size
    count = arguments.windows if store is not None else 2
    windows = torch.randint(vocabulary, (count, arguments.seqlen), generator=torch.Generator().manual_seed(0))
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    report = recover(
        pruned, dense, windows, out=out, device=device, progress=False, resume=False, batch=arguments.batch,
        passes=arguments.passes if store is not None else 1, patience=100, optimizer_state=arguments.optimizer_state,
    )  # fmt: skip
    if rank == 0 and store is not None:
        own = {"peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None, "phase_seconds": report.phase_seconds}
        found = {
            "ranks": size, "seconds": time.perf_counter() - started, "phase_seconds": report.phase_seconds,
            "card": torch.cuda.get_device_name() if cuda else "none", "losses": report.losses, "held_out": report.held_out,
            "perplexity_stored": report.perplexity_stored, "perplexity_before": report.perplexity_before, "memory": report.memory,
            "windows_together": report.settings["windows_together"], "checkpointing": report.settings["checkpointing"],
            "by_rank": list(report.ranks) or [own],
        }  # fmt: skip
        out.with_suffix(".json").write_text(json.dumps(found))
    if store is not None and size > 1:
        distributed.barrier()
        distributed.destroy_process_group()
    if store is None:
        shutil.rmtree(out)


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
