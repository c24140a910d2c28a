"""Memory that runs out at one of a run's allocations, drawn from all above a size: on a CPU, or on a GPU (`device`).

What must hold: the run finishes with all columns certified (with fewer of them at a time, so the last digits may be others), or
ends with one line that says so; then the same command goes on after what was finished, and on a CPU gives the bits of a run that
had memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .kills import CONTINUED, finished_blocks
from .runs import Ended, Models, Server, Tally, beside, contents

LEAST = {"cpu": 2**10, "cuda": 2**20}  # bytes of an allocation that counts; models on a CPU are tiny
_WIDER = ["--nsamples", "4", "--seqlen", "512"]  # of a model on a GPU, see `make_wide`


class InProcess:
    """As `Server`, without a fork, which CUDA does not survive: runs in this process."""

    def run(self, arguments: Sequence[str], fault: dict[str, Any] | None = None) -> Ended:
        """One run to its end."""
        from qprecon import cli

        from . import inject

        out, err, began, code = io.StringIO(), io.StringIO(), time.monotonic(), 1
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _no_recipe_files():
            try:
                with inject.fault(fault):
                    code = cli.main([*map(str, arguments)])
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except Exception:
                traceback.print_exc()
        return Ended(code, out.getvalue(), err.getvalue(), time.monotonic() - began)


@contextmanager
def _no_recipe_files() -> Iterator[None]:
    """While open, runs neither read nor write recipe.yaml: a machine with a GPU may lack ruamel.yaml."""
    name = "qprecon.llm.settings.recipe_file"
    stand_in = ModuleType(name)
    stand_in.command_words = lambda path, flags: flags  # type: ignore[attr-defined]
    stand_in.save_recipe = lambda words, out: None  # type: ignore[attr-defined]
    before = sys.modules.get(name)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


def make_wide(folder: Path) -> Models:
    """Models whose runs allocate by the megabyte, as folders `llama`, in shards, and `llama-pickled`."""
    import torch
    import transformers as tf

    from tests.llm.toy_text import VOCABULARY, toy_tokenizer, words

    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config)
    model.save_pretrained(folder / "llama", max_shard_size="10MB")
    toy_tokenizer().save_pretrained(folder / "llama")
    shutil.copytree(folder / "llama", folder / "llama-pickled", ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.save(model.state_dict(), folder / "llama-pickled" / "pytorch_model.bin")
    (folder / "text.jsonl").write_text("\n".join(f'{{"text": "{words(600, start=i)}"}}' for i in range(20)), encoding="utf-8")
    return Models(folder)


@dataclass(frozen=True)
class _Known:
    """A run that nothing disturbs: what it writes, the fault as `inject` takes it, and how many allocations it makes."""

    command: list[str]
    out: Path
    right: dict[str, str]
    fault: dict[str, Any]
    allocations: int


def _undisturbed(server: Server | InProcess, models: Models, folder: Path, kind: str, device: str) -> _Known:
    out, told = folder / kind / "out", folder / f"{kind}-allocations"
    command = models.prune(kind, out, *(_WIDER if device == "cuda" else []))
    command[command.index("--device") + 1] = device
    fault = {"kind": "no_memory", "at": 0, "least": LEAST[device], "device": device, "told": str(told)}
    out.parent.mkdir(parents=True)
    if (ended := server.run(command, fault)).code != 0:
        raise RuntimeError(f"a run without any fault failed: {ended.err[-1000:]}")
    return _Known(command, out, contents(out), fault, int(told.read_text()))


def out_of_memory(
    server: Server | InProcess, models: Models, folder: Path, count: int, tally: Tally, device: str = "cpu",
    kinds: Sequence[str] = ("llama", "llama-pickled", "moe"),
) -> None:  # fmt: skip
    """`count` runs, each without memory for one allocation drawn at random of those of `LEAST` and more."""
    known = [_undisturbed(server, models, folder, kind, device) for kind in kinds]
    tally.counts["allocations that one is drawn from"] += sum(each.allocations for each in known)
    for number in range(count):
        _drawn(server, known[number % len(kinds)], number, device, tally)


def _drawn(server: Server | InProcess, run: _Known, number: int, device: str, tally: Tally, at: int | None = None) -> None:
    """Run `number`; at: the allocation that fails, if it is not drawn."""
    if at is None:
        at = tally.random(number).randrange(run.allocations) + 1
    else:
        tally.counts[f"one of the first allocations of {run.out.parent.name}, each in turn"] += 1
    for path in (run.out, *(run.out.parent / name for name in beside(run.out))):
        shutil.rmtree(path, ignore_errors=True)
    ended = server.run(run.command, {**run.fault, "at": at})
    for wrong in _wrong(server, ended, run.command, run.out, run.right, device == "cpu", tally):
        tally.fault(f"{number}: allocation {at} of {run.allocations} of {run.out.parent.name}", wrong)


_HERE: dict[str, Any] = {}  # of a process of `side_by_side`


def side_by_side(
    models: Models, folder: Path, numbers: Sequence[int], tally: Tally, device: str, kinds: Sequence[str],
    processes: int = 8, seconds: float = math.inf, each: int = 0,
) -> int:  # fmt: skip
    """As `out_of_memory` for the runs of these numbers, in so many processes, all of them on one device. A line for each run.

    seconds: none begins after so many. each: after them, runs of the last kind in which each of its first so many allocations
    fails. Returns the number of the first run that was not made, or the number after the last.
    """
    after = max(numbers, default=-1) + 1
    cases: list[tuple[int, int | None]] = [(number, None) for number in numbers]
    cases += [(after + place, place + 1) for place in range(each)]
    began, left = time.monotonic(), len(cases)
    context, until = multiprocessing.get_context("spawn"), time.time() + seconds
    given = (models, folder, kinds, device, tally.part, tally.seed, until)
    with ProcessPoolExecutor(processes, context, initializer=_begin, initargs=given) as pool:
        missing = []
        for future in as_completed(pool.submit(_one, *case) for case in cases):
            number, own, allocations = future.result()
            if own is None:
                missing.append(number)
                continue
            left -= 1
            tally.counts.update(own.counts)
            tally.faults += own.faults
            tally.counts["allocations that one is drawn from"] = allocations
            what = "; ".join(own.faults) or ("one line" if own.counts["one line"] else "finished")
            print(f"{time.monotonic() - began:5.0f} s, {left} left: run {number}: {what[:200]}", flush=True)
    return min(missing, default=after + each)


def _begin(models: Models, folder: Path, kinds: Sequence[str], device: str, part: str, seed: int, until: float) -> None:
    own = folder / f"process-{os.getpid()}"
    known = [_undisturbed(InProcess(), models, own, kind, device) for kind in kinds]
    _HERE.update(known=known, device=device, part=part, seed=seed, until=until)


def _one(number: int, at: int | None) -> tuple[int, Tally | None, int]:
    known, own = _HERE["known"], Tally(_HERE["part"], _HERE["seed"])
    allocations = sum(each.allocations for each in known)
    if time.time() > _HERE["until"]:
        return number, None, allocations
    run = known[number % len(known)] if at is None else known[-1]
    if at is None or at <= run.allocations:
        _drawn(InProcess(), run, number, _HERE["device"], own, at)
    return number, own, allocations


def _wrong(
    server: Server | InProcess, ended: Ended, command: list[str], out: Path, right: dict[str, str], exact: bool, tally: Tally
) -> Iterator[str]:
    tally.counts["runs"] += 1
    if (wrong := ended.wrong(0, 2)) is not None:
        yield wrong
        return
    if ended.code == 2:
        tally.counts["one line"] += 1
        if "out of memory" not in ended.line:
            yield f"it does not say that memory ran out: {ended.line}"
        finished = finished_blocks(out)
        again = server.run(command)
        if (wrong := again.wrong(0)) is not None:
            yield f"run again: {wrong}"
            return
        continued = sum(map(int, CONTINUED.findall(again.out + again.err)))
        tally.counts["blocks finished before"] += finished
        tally.counts["blocks taken over by the next run"] += continued
        if continued < finished:
            yield f"{finished} blocks were finished, the next run went on after {continued}"
    else:
        tally.counts["finished all the same"] += 1
    if ended.code == 2 and exact and contents(out) != right:
        yield f"other bits: {sorted({*contents(out).items()} ^ {*right.items()})}"
    rows = json.loads((out / "qprecon_report.json").read_text(encoding="utf-8"))["layers"]  # no pydantic needed
    if any(row["uncertified"] or row["fallbacks"] for row in rows):
        yield "a column is not certified"
    if left := beside(out):
        yield f"left beside the output: {left}"


@contextmanager
def no_memory(at: int, least: int, device: str, told: str | None = None, words_of: str | None = None) -> Iterator[None]:
    """The `at`-th allocation of `least` bytes or more on the device fails, in whatever thread; 0: none. told: gets their number.
    words_of: the device whose error is raised, if not the same."""
    import concurrent.futures

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    seen = 0

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal seen
            found = function(*args, **(kwargs or {}))
            given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
            for each in tree_leaves(found):
                if isinstance(each, torch.Tensor) and each.device.type == device and _storage(each) not in given:
                    size = each.untyped_storage().nbytes()
                    seen += size >= least
                    if size >= least and seen == at:
                        del found, each
                        raise _error(torch, words_of or device, size)
            return found

    submit = concurrent.futures.ThreadPoolExecutor.submit

    def watched(pool, function, *arguments, **named):
        def inside():
            with Allocations():
                return function(*arguments, **named)

        return submit(pool, inside)

    concurrent.futures.ThreadPoolExecutor.submit = watched  # type: ignore[method-assign]
    try:
        with Allocations():
            yield
    finally:
        concurrent.futures.ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
        if told is not None:
            Path(told).write_text(str(seen))


def _storage(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata


def _error(torch: Any, device: str, size: int) -> Exception:
    """As torch raises it there."""
    if device == "cuda":
        return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a total …")
    return RuntimeError(
        f"[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} "
        "bytes. Error code 12 (Cannot allocate memory)"
    )
