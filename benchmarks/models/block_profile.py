"""Where the GPU's time goes while one block of a model is pruned: by part, by kernel, and what waits for the device.

    python benchmarks/models/block_profile.py --model llama-3.1-8b              (one GPU, a minute)
    python benchmarks/models/block_profile.py --model tiny --device cpu         (to check that the script runs)

The second block of a model with random weights is pruned under torch's profiler, which slows the host down: GPU milliseconds are
those of any run, host milliseconds are not. Parts are exclusive: a kernel counts for the innermost part it was started in. In the
third block each line of the package that makes the host wait for the device is counted.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import contextlib
import datetime
import functools
import json
import pathlib
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # the package and the benchmarks of this checkout

from benchmarks.layers.phases import SOLVE_PARTS
from benchmarks.models import end_to_end
from qprecon.engine import in_progress
from qprecon.llm.lowbit import rounding
from qprecon.llm.pruning import loop, update
from qprecon.llm.statistics import gram
from qprecon.llm.statistics.statistics import Statistics
from qprecon.problem.hessian import Hessian
from qprecon.proof import audit, passes

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "block_profile.json"
PROFILED, WATCHED = 1, 2  # blocks
_MARK = "part: "
PARTS: tuple[tuple[Any, str, str], ...] = (
    *SOLVE_PARTS,
    (in_progress, "audit_begun", "audit"),
    (Hessian, "product", "float64 product"),
    (passes, "symmetric_product", "product of halves"),
    (audit, "_norm", "triangular solve"),
    (rounding, "_apart", "what storing costs"),
    (rounding, "descend", "descent"),
    (rounding, "_as_floats", "rounding, the rest"),
    (update, "draft_rows", "measure"),
    (update, "choose_masks", "masks"),
    (update, "prune_parts", "group, the rest"),
    (gram.Gram, "accumulate", "Gram products"),
    (gram.Gram, "finish", "Gram products"),
    (Statistics, "collect", "forward, for H"),
    (Statistics, "advance", "forward, onwards"),
    (loop, "finished_rows", "rows"),
)


def marked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, a part of its own in the profile."""

    @functools.wraps(function)
    def inner(*args: Any, **options: Any) -> Any:
        with record_function(_MARK + name):
            return function(*args, **options)

    return inner


@contextlib.contextmanager
def marks() -> Iterator[None]:
    """While open, parts are marked; one that this version of the code does not have is left out."""
    kept = [(owner, name, vars(owner)[name]) for owner, name, _ in PARTS if name in vars(owner)]
    gram_test = vars(Hessian)["is_gram"]
    for owner, name, part in PARTS:
        if name in vars(owner):
            setattr(owner, name, marked(getattr(owner, name), part))
    again = functools.cached_property(marked(gram_test.func, "is H a Gram matrix"))
    again.__set_name__(Hessian, "is_gram")
    Hessian.is_gram = again
    try:
        yield
    finally:
        Hessian.is_gram = gram_test
        for owner, name, function in kept:
            setattr(owner, name, function)


class Watch:
    """Starts and stops the profiler, and the count of waits, as the loop goes from block to block."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.profile, self.waits = cuda, None, collections.Counter[str]()

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """While open, the loop is watched."""
        collect, advance, show = Statistics.collect, Statistics.advance, warnings.showwarning

        def begun(statistics: Statistics, block: Any, index: int, *args: Any, **options: Any) -> Any:
            self._begin(index)
            return collect(statistics, block, index, *args, **options)

        def ended(statistics: Statistics, block: Any, index: int) -> None:
            advance(statistics, block, index)
            self._end(index)

        Statistics.collect, Statistics.advance, warnings.showwarning = begun, ended, self._count
        try:
            yield
        finally:
            Statistics.collect, Statistics.advance, warnings.showwarning = collect, advance, show

    def _begin(self, index: int) -> None:
        if index == PROFILED and self.profile is None:
            self._wait()
            kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.cuda]
            self.profile = profile(activities=kinds)
            self.profile.__enter__()
        if index == WATCHED and self.cuda:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def _end(self, index: int) -> None:
        if index == PROFILED:
            self._wait()
            self.profile.__exit__(None, None, None)
        if index == WATCHED and self.cuda:
            torch.cuda.set_sync_debug_mode("default")

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _count(self, message: Any, *others: Any, **more: Any) -> None:
        if "synchroniz" in str(message).lower():
            lines = [frame for frame in traceback.extract_stack()[:-1] if "/qprecon/" in frame.filename]
            if lines:
                self.waits[f"{lines[-1].filename.rpartition('/qprecon/')[2]}:{lines[-1].lineno}"] += 1


def tables(seen: Any) -> dict[str, Any]:
    """Milliseconds, launches and waits by part, the kernels that take most, and how long the GPU had nothing to do."""
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(pathlib.Path(f"{folder}/trace.json").read_text())["traceEvents"]
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(_MARK))
        for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(_MARK)
    )  # fmt: skip
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = {e["args"]["correlation"]: e for e in events if str(e.get("cat")).startswith("cuda_") and "correlation" in e["args"]}
    part_of, parts = _innermost(spans), collections.defaultdict(lambda: {"gpu_ms": 0.0, "host_ms": 0.0, "launches": 0, "waits": 0})
    inside = collections.defaultdict(list[tuple[str, float]])  # part -> its kernels
    by_kernel, counts = collections.Counter[str](), collections.Counter[str]()
    for kernel in kernels or [e for e in events if e.get("cat") == "cpu_op"]:
        call = calls.get(kernel.get("args", {}).get("correlation"), kernel)
        part = parts[part_of(call["ts"])]
        part["gpu_ms"] += 1e-3 * kernel["dur"]
        part["launches"] += 1
        name = kernel["name"].replace("void ", "").replace("at::native::", "")[:90]
        by_kernel[name] += 1e-3 * kernel["dur"]
        counts[name] += 1
        inside[part_of(call["ts"])].append((name, 1e-3 * kernel["dur"]))
    for call in calls.values():
        parts[part_of(call["ts"])]["waits"] += "ynchronize" in call["name"]
    for name, host in _exclusive(spans).items():
        parts[name]["host_ms"] = 1e-3 * host
    for name, part in parts.items():
        part["kernels"] = _largest(inside[name])
    busy, idle = _busy(kernels)
    top = [{"kernel": name, "ms": ms, "launches": counts[name]} for name, ms in by_kernel.most_common(40)]
    return {"busy_ms": busy, "idle_ms": idle, "parts": dict(parts), "top": top}


def _largest(kernels: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """The five kernels that take most of a part: milliseconds, launches, and the longest launch."""
    ms = collections.defaultdict(list[float])
    for name, each in kernels:
        ms[name].append(each)
    first = sorted(ms.items(), key=lambda item: -sum(item[1]))[:5]
    return [{"kernel": name, "ms": sum(each), "launches": len(each), "longest_ms": max(each)} for name, each in first]


def _innermost(spans: list[tuple[float, float, str]]) -> Callable[[float], str]:
    starts = [span[0] for span in spans]

    def part_of(moment: float) -> str:
        place = bisect.bisect_right(starts, moment) - 1
        while place >= 0 and spans[place][1] < moment:
            place -= 1
        return spans[place][2] if place >= 0 else "outside"

    return part_of


def _exclusive(spans: list[tuple[float, float, str]]) -> collections.Counter[str]:
    """Microseconds of each part without the parts inside it."""
    wall, open_spans = collections.Counter[str](), []
    for start, end, name in spans:
        while open_spans and open_spans[-1][0] <= start:
            open_spans.pop()
        wall[name] += end - start
        if open_spans:
            wall[open_spans[-1][1]] -= end - start
        open_spans.append((end, name))
    return wall


def _busy(kernels: list[dict[str, Any]]) -> tuple[float, float]:
    """Milliseconds in which some kernel ran, and in which none did between the first and the last."""
    busy = idle = edge = 0.0
    for start, end in sorted((k["ts"], k["ts"] + k["dur"]) for k in kernels):
        idle += max(0.0, start - edge) if edge else 0.0
        busy += max(0.0, end - max(start, edge))
        edge = max(edge, end)
    return 1e-3 * busy, 1e-3 * idle


def main() -> None:
    """Print and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--workdir", default="/tmp/qprecon-end-to-end")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    run = pathlib.Path(tempfile.mkdtemp()) / "run.json"
    sys.argv = [
        "end_to_end", "--model", args.model, "--blocks", str(WATCHED + 2), "--samples", str(args.samples),
        "--seqlen", str(args.seqlen), "--device", args.device, "--workdir", args.workdir, "--out-json", str(run),
    ]  # fmt: skip
    watch = Watch(args.device == "cuda")
    with marks(), watch.over(), contextlib.redirect_stdout(sys.stderr):
        end_to_end.main()
    found = tables(watch.profile) | {"waits": dict(watch.waits.most_common())}
    whole = json.loads(run.read_text())[0]
    about = {key: whole[key] for key in ("model", "gpu", "versions", "samples", "seqlen", "settings")}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"about": about | {"date": datetime.date.today().isoformat()}, **found}, indent=1) + "\n")
    print(f"GPU busy {found['busy_ms']:.0f} ms, idle {found['idle_ms']:.0f}; {sum(found['waits'].values())} waits")
    for name, part in sorted(found["parts"].items(), key=lambda item: -item[1]["gpu_ms"]):
        counts = f"{part['launches']} launches, {part['waits']} waits"
        print(f"  {name}: GPU {part['gpu_ms']:.1f}, host {part['host_ms']:.1f} ms, {counts}")


if __name__ == "__main__":
    main()
