"""All backends on named problems at named settings, certified by the same audit.

    python benchmarks/layers/backends.py --device cpu|cuda     measure what the results file lacks
    python benchmarks/layers/backends.py --device cpu --processor --limit 3     the small problems in seconds of one processor
    python benchmarks/layers/backends.py --report              table and figure from the results (needs matplotlib)
    python benchmarks/layers/backends.py --check-auto          fail where "auto" takes 1.5 times as long as the fastest certified

Resumable: a case that results/backends_<cpu|gpu>.json has is not run again. Seconds are medians of warm runs, the backends of one
problem and setting taking turns, compilation apart (the first run's). A case that the time limit stops is recorded as such, and
so are the larger problems of its kind, unrun. With --processor seconds are those that a processor worked for this process, which
other processes disturb less; then BLAS must have one thread (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import pathlib
import random
import statistics
import sys
import time
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # the package and the benchmarks of this checkout

import qprecon
from benchmarks.inputs.backend_cases import DAMPING, Case, cases
from benchmarks.machine import environment
from qprecon.contract import registry

HERE = pathlib.Path(__file__).parents[1]
RESULTS = HERE / "results"
FILES = {"cpu": RESULTS / "backends_cpu.json", "cuda": RESULTS / "backends_gpu.json"}
PROCESSOR = RESULTS / "backends_processor.json"
AUTO_FACTOR = 1.5
_BUSY = 6.0  # times as long, on the wall, as the processor works for a process where others want it too
_REST = {"cpu": 0.1, "cuda": 0.0}  # seconds before a timed run: where processors are metered, the next one pays for a burst
ORDER = ("auto", *(record.name for record in registry.BUILT_IN))

SETTINGS: dict[str, tuple[float, dict[str, dict[str, Any]]]] = {
    "paper": (1e-2, {"mpax": {"paper": True}, "adam": {"steps": 20}}),
    "1e-4": (1e-4, {}),
    "1e-6": (1e-6, {"adam": {"steps": 1000}}),
}
"""Name -> certified gap asked for, and the options of the backends that need some. "paper" is the paper's own setting for rAPDHG
(raw scale, eps 0.01) and for Adam (20 steps a learning rate); the others are asked for 1e-2."""


class Results:
    """The rows of one device's file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def has(self, problem: str, backend: str, setting: str) -> bool:
        """Whether this case is there already."""
        return self.get(problem, backend, setting) is not None

    def get(self, problem: str, backend: str, setting: str) -> dict[str, Any] | None:
        """The row of a case, or None."""
        key = (problem, backend, setting)
        return next((row for row in self.rows if (row["problem"], row["backend"], row["setting"]) == key), None)

    def add(self, row: dict[str, Any]) -> None:
        """Append and write."""
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("[\n" + ",\n".join(json.dumps(row) for row in self.rows) + "\n]\n")

    def drop(self, backends: list[str]) -> None:
        """Forget the rows of some backends, to measure them anew."""
        self.rows = [row for row in self.rows if row["backend"] not in backends]


class Run:
    """One backend on one problem at one setting: a first run under the time limit, then warm ones."""

    def __init__(
        self, arguments: dict[str, Any], backend: str, setting: str, limit: float, device: str, processor: bool = False
    ) -> None:
        self.device, self.clock = device, time.process_time if processor else time.perf_counter
        self.most = (1, 10, 0.3) if processor else (5, 25, 1.0)
        tol, options = SETTINGS[setting]
        self.arguments = {**arguments, "backend": backend, "damping": DAMPING, "tol": tol, **options.get(backend, {})}
        self.limit, self.seconds, self.note = limit, [], None
        if backend != "auto":
            registry.load(registry.find(backend), {})  # imports take seconds and are no part of the first run
        self.compile = 0.0
        if backend == "mpax":  # compiles: apart from the limit, which would end before it
            self.compile = self._timed(max_iterations=1)[1].timing.compile
        self._first(limit)
        if self.stopped and self._first_seconds < 4.0 * limit:
            self._first(limit)  # perhaps stopped by what a process does once: loading kernels, compiling for later rounds' widths

    def _first(self, limit: float) -> None:
        first, self.solution = self._timed(time_limit=limit * (_BUSY if self.clock is time.process_time else 1.0))
        self._first_seconds = first - self.solution.timing.compile
        self.compile += self.solution.timing.compile

    def _timed(self, **more: Any) -> tuple[float, qprecon.Solution]:
        torch = sys.modules.get("torch")
        wait = torch.cuda.synchronize if torch is not None and torch.cuda.is_available() else lambda: None
        wait()
        began = self.clock()
        solution = qprecon.solve(**self.arguments, **more)
        wait()
        return self.clock() - began, solution

    @property
    def stopped(self) -> bool:
        """Whether the time limit ended the first run."""
        return bool((self.solution.reported_status == "time_limit").any()) or self._first_seconds > 2.0 * self.limit

    @property
    def wants_more(self) -> bool:
        """Some warm runs, more of short ones, which schedulers disturb most, and fewer of long ones."""
        (few, many, short), warm = self.most, sum(self.seconds)
        more = len(self.seconds) < few or (len(self.seconds) < many and warm < short)
        return not self.stopped and (not self.seconds or (more and self._first_seconds + warm < 0.5 * self.limit))

    def again(self) -> None:
        """A warm run, without the limit: it would change how some backends work."""
        time.sleep(_REST[self.device])
        seconds, self.solution = self._timed()
        self.seconds.append(seconds)

    def row(self, reference_K: np.ndarray | None) -> dict[str, Any]:
        """What is recorded."""
        solution, seconds = self.solution, self.seconds or [self._first_seconds]
        optimal_K = np.array([status is qprecon.Status.OPTIMAL for status in solution.status])
        gap = float(solution.relative_gap.max())
        true = None if reference_K is None else float(((solution.objective - reference_K) / reference_K).max())
        return {
            "seconds": statistics.median(seconds),
            "seconds_min": min(seconds),
            "runs": len(seconds),
            "warm": bool(self.seconds),
            "compile_seconds": self.compile,
            "relative_gap": gap if np.isfinite(gap) else None,
            "true_gap": true,
            "certified_fraction": float(optimal_K.mean()),
            "iterations": int(solution.iterations.max()),
            "ran": solution.provenance.backend,
            "dtype": solution.provenance.dtype,
            "note": "stopped by the time limit" if self.stopped else None,
            "limit": self.limit,
        }


def measure(
    case: Case, setting: str, backends: list[str], results: Results, device: str, limit: float, processor: bool = False
) -> None:
    """The cases that are missing of one problem and setting, the backends taking turns."""
    missing = [name for name in backends if not results.has(case.name, name, setting)]
    if not missing:
        return
    arguments = case.arguments(device)
    n, k = arguments["W"].shape
    about = {"problem": case.name, "n": n, "k": k, "kappa": condition(case, device), "setting": setting}
    about |= environment(device) | {"limit": limit}
    if processor:
        about["device"] += ", seconds of the processor"
    about["load_average"] = round(os.getloadavg()[0], 1)  # before the case: on a busy machine times say little
    runs: dict[str, Run] = {}
    for name in missing:
        if reason := too_slow(case, name, setting, results, device) or cannot(name, case):
            results.add({**about, "backend": name, "seconds": None, "note": reason})
            continue
        try:
            runs[name] = Run(arguments, name, setting, limit, device, processor)
        except Exception as error:
            results.add({**about, "backend": name, "seconds": None, "note": f"{type(error).__name__}: {str(error)[:200]}"})
    turns = random.Random(0)
    while waiting := [run for run in runs.values() if run.wants_more]:
        turns.shuffle(waiting)  # else the same backend always pays for what the same other one leaves behind
        for run in waiting:
            run.again()
    reference_K = reference(case, device)
    for name, run in runs.items():
        row = {**about, "backend": name, **run.row(reference_K)}
        results.add(row)
        gap = "-" if row["relative_gap"] is None else f"{row['relative_gap']:.1e}"
        print(f"{case.name:24} {setting:6} {name:9} {row['seconds']:9.4f} s  gap {gap}  {row['note'] or ''}", flush=True)


def cannot(backend: str, case: Case) -> str | None:
    """Why a backend does not take part, or None."""
    if backend == "auto":
        return None
    record = registry.find(backend)
    if not record.installed:
        return f"not installed: {', '.join(record.missing())}"
    return "takes no general bounds" if case.bounded and not record.capabilities.bounds else None


def too_slow(case: Case, backend: str, setting: str, results: Results, device: str) -> str | None:
    """Whether the limit stopped a smaller problem of the same series, or this one at a looser setting with the same options."""
    series = [other for other in cases(device) if other.series == case.series]
    for smaller in itertools.takewhile(lambda other: other.name != case.name, series):
        if _over_limit(results.get(smaller.name, backend, setting)):
            return f"not run: over the time limit on {smaller.name}"
    options = SETTINGS[setting][1].get(backend)
    for looser, (_, others) in itertools.takewhile(lambda item: item[0] != setting, SETTINGS.items()):
        if others.get(backend) == options and _over_limit(results.get(case.name, backend, looser)):
            return f"not run: over the time limit at {looser}"
    return None


def _over_limit(row: dict[str, Any] | None) -> bool:
    return row is not None and "time limit" in (row.get("note") or "")


@functools.cache
def reference(case: Case, device: str) -> np.ndarray | None:
    """Optimal objectives in float64, where they are cheap."""
    arguments = case.arguments(device)
    if case.bounded or case.rhs or arguments["W"].shape[0] > 640:
        return None
    solution = qprecon.solve(**arguments, backend="cholesky", damping=DAMPING, dtype="float64", tol=1e-9)
    return solution.objective - solution.gap_bound


@functools.cache
def condition(case: Case, device: str) -> float:
    """κ of H + λI, rounded to two digits."""
    import torch

    from benchmarks.inputs.problems import extreme_eigenvalues

    low, high = extreme_eigenvalues(torch.as_tensor(case.arguments(device)["H"]), DAMPING)
    return float(f"{high / low:.2g}")


def check_auto(rows: list[dict[str, Any]]) -> list[str]:
    """Where auto is not certified although another backend is, or is slower than AUTO_FACTOR times the fastest certified one."""
    wrong = []
    for key in sorted({(row["device"], row["problem"], row["setting"]) for row in rows}):
        here = [row for row in rows if (row["device"], row["problem"], row["setting"]) == key and row["seconds"] is not None]
        good = {row["backend"]: row for row in here if row["certified_fraction"] == 1.0 and row["warm"]}
        others = {name: row["seconds"] for name, row in good.items() if name != "auto"}
        if not others:
            continue
        best = min(others, key=others.__getitem__)
        if not any(row["backend"] == "auto" for row in here):
            wrong.append(f"{', '.join(key)}: auto was not measured")
        elif "auto" not in good:
            wrong.append(f"{', '.join(key)}: auto is not certified, {best} is")
        elif good["auto"]["seconds"] > AUTO_FACTOR * others[best]:
            ratio = good["auto"]["seconds"] / others[best]
            wrong.append(f"{', '.join(key)}: auto ({good['auto']['ran']}) takes {ratio:.2f} times as long as {best}")
    return wrong


def main() -> None:
    """Measure, report or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(FILES), help="measure on this device")
    parser.add_argument("--problem", action="append", help="part of a problem's name; repeat for several")
    parser.add_argument("--setting", action="append", choices=tuple(SETTINGS))
    parser.add_argument("--backend", action="append", choices=ORDER)
    parser.add_argument("--again", action="append", default=[], choices=ORDER, help="forget this backend's rows first; repeat")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds a case")
    parser.add_argument("--stop-after", type=float, default=540.0, help="seconds after which no problem is begun; run again")
    parser.add_argument("--report", action="store_true", help="write the table and the figure")
    parser.add_argument("--check-auto", action="store_true")
    parser.add_argument("--processor", action="store_true", help="with --device cpu: seconds of the processor, the small problems")
    args = parser.parse_args()
    began = time.monotonic()
    if args.device:
        if args.processor and (args.device != "cpu" or os.environ.get("OMP_NUM_THREADS") != "1"):
            parser.error("--processor goes with --device cpu and OMP_NUM_THREADS=1: idle threads of BLAS work too")
        results = Results(PROCESSOR if args.processor else FILES[args.device])
        results.drop(args.again)
        for case in cases(args.device, args.processor):
            if args.problem and not any(part in case.name for part in args.problem):
                continue
            for setting in args.setting or SETTINGS:
                if time.monotonic() - began < args.stop_after:
                    measure(case, setting, args.backend or list(ORDER), results, args.device, args.limit, args.processor)
    rows = [row for path in (*FILES.values(), PROCESSOR) for row in Results(path).rows]
    if args.report:
        from benchmarks.tables.backends import write

        write(rows)
    if args.check_auto:
        wrong = check_auto(rows)
        print("\n".join(wrong) or f"auto is within {AUTO_FACTOR} of the fastest certified backend everywhere")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
