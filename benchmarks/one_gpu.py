"""What wants one GPU, in one go: timings that want the card to themselves, then tests and allocations that fail, side by side.

    python benchmarks/one_gpu.py --models FOLDER --data FOLDER --out FOLDER [--steps whole,eight] [--seconds 900]

--models holds folders by the names smollm2 and gemma3, those that there are; --data holds text/. Every step is a command of its
own, with a log of its own in --out, a limit, and its results as JSON in --out/results. That folder begins as a copy of
benchmarks/results, and what earlier steps wrote there stays. A step that fails or takes too long stops no other. `--list` prints
the commands. Perplexities are measured by `models/quality.py` and `models/grid.py`, each for itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Step:
    """A command: arguments of python. seconds: its limit. lane: steps of one lane run one after another, lanes side by side;
    None: alone, before all lanes. model: the folder that it needs."""

    name: str
    seconds: int
    command: tuple[str, ...]
    lane: str | None = None
    model: str | None = None


def steps(models: Path, data: Path, results: Path) -> list[Step]:
    """All of them, in order."""

    def whole(name: str, preset: str, seconds: int, *more: str) -> Step:
        to = f"{results}/end_to_end_presets_h200.json"
        settings = ("--setting", f"preset={preset}", *more)
        return Step(name, seconds, ("benchmarks/models/end_to_end.py", "--model", "llama-3.1-8b", "--out-json", to, *settings))

    def small(name: str, model: str) -> Step:
        text = ("--text", f"{data}/text/wikitext2_train_5k.txt.gz", "--setting", "preset=fast")
        to = ("--model", f"{models}/{model}", "--name", name, "--out-json", f"{results}/end_to_end.json")
        return Step(f"small_{model}", 90, ("benchmarks/models/end_to_end.py", *to, *text), model=model)

    eight, alps = ("--blocks", "8"), ("--mask", "alps")
    return [
        Step("layers", 120, ("benchmarks/layers/phases.py", "--no-rates", "--out", f"{results}/layer_phases.json")),
        Step("gram", 60, ("benchmarks/layers/gram_rows.py", "--out", f"{results}/gram_rows.json")),
        Step("calls", 120, ("benchmarks/models/block_calls.py", "--blocks", "8", "--out", f"{results}/block_calls.json")),
        Step("profile", 90, ("benchmarks/models/block_profile.py", "--out", f"{results}/block_profile.json")),
        whole("whole", "fast", 150), whole("whole_balanced", "balanced", 240), whole("whole_best", "best", 300, *alps),
        whole("eight", "fast", 90, *eight), whole("eight_int4", "fast", 120, *eight, "--setting", "quantize=int4"),
        whole("eight_balanced", "balanced", 120, *eight), whole("eight_best", "best", 150, *eight, *alps),
        small("SmolLM2-135M", "smollm2"), small("Gemma-3-270M", "gemma3"),
        Step("tests", 400, ("-m", "pytest", "-v", "-m", "gpu", "tests", "--ignore", "tests/llm/ranks"), lane="tests"),
        Step("faults", 200, (
            "benchmarks/faults.py", "--only", "memory", "--device", "cuda", "--count", "100", "--processes", "5",
            "--seconds", "150", "--out", f"{results}/faults_gpu.json",
        ), lane="faults"),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    results = parsed.out / "results"
    wanted = list(chosen(steps(parsed.models, parsed.data, results), parsed))
    if parsed.list:
        print("\n".join(f"{step.name}: python {' '.join(step.command)}" for step in wanted))
        return 0
    if not results.exists():
        shutil.copytree(ROOT / "benchmarks" / "results", results)
    ends = time.monotonic() + parsed.seconds
    codes = [run(step, parsed.out, ends) for step in wanted if step.lane is None]
    codes += side_by_side([step for step in wanted if step.lane is not None], parsed.out, ends)
    return 1 if any(codes) else 0


def chosen(all_of_them: Sequence[Step], parsed: argparse.Namespace) -> Iterator[Step]:
    """Those that are asked for, and whose model is there."""
    names = parsed.steps.split(",") if parsed.steps else [step.name for step in all_of_them]
    if unknown := set(names) - {step.name for step in all_of_them}:
        raise SystemExit(f"no step {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in all_of_them)}")
    for step in all_of_them:
        if step.name in names and step.model and not (parsed.models / step.model / "config.json").exists():
            print(f"{step.name} is left out: no model in {parsed.models / step.model}", flush=True)
        elif step.name in names:
            yield step


def run(step: Step, out: Path, ends: float) -> int:
    """One step to its end, or to the end of its time; its exit code."""
    with started(step, out) as process:
        return finished(step, process, time.monotonic(), ends)


def side_by_side(lanes: Sequence[Step], out: Path, ends: float) -> list[int]:
    """All lanes at once."""
    waiting = {lane: [step for step in lanes if step.lane == lane] for lane in dict.fromkeys(step.lane for step in lanes)}
    running: dict[str | None, tuple[Step, subprocess.Popen, float]] = {}
    codes = []
    while waiting or running:
        for lane in [lane for lane in waiting if lane not in running]:
            step = waiting[lane].pop(0)
            running[lane] = (step, started(step, out), time.monotonic())
            if not waiting[lane]:
                del waiting[lane]
        for lane, (step, process, began) in list(running.items()):
            if process.poll() is not None or time.monotonic() > min(ends, began + step.seconds):
                codes.append(finished(step, process, began, time.monotonic()))
                del running[lane]
        if time.monotonic() > ends:
            waiting.clear()
        time.sleep(0.2)
    return codes


def started(step: Step, out: Path) -> subprocess.Popen:
    """In a session of its own, so that what it starts can be ended with it."""
    out.mkdir(parents=True, exist_ok=True)
    log = (out / f"{step.name}.log").open("w")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *step.command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def finished(step: Step, process: subprocess.Popen, began: float, ends: float) -> int:
    """Waits for a step until its time or all time is over; then ends it with all that it started."""
    try:
        code = process.wait(max(0.0, min(ends, began + step.seconds) - time.monotonic()))
        word = "done" if code == 0 else f"FAILED ({code})"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code, word = process.wait(), "STOPPED: no time left"
    print(f"{step.name}: {word} after {time.monotonic() - began:.0f} s", flush=True)
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="the folder of model folders")
    parser.add_argument("--data", type=Path, required=True, help="the folder with text/")
    parser.add_argument("--out", type=Path, required=True, help="for logs and results")
    parser.add_argument("--steps", help="only these, with commas between")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of it (3600)")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
