"""Large layers on one GPU: qprecon's solver beside SparseGPT's and Thanos's own updates, rAPDHG, ADMM and batched Cholesky.

    python benchmarks/layers/solver.py                      (one GPU, about two minutes)
    python benchmarks/layers/solver.py --npz LAYER.npz ...  (real layers too, of make_fixtures.py --whole)
    python benchmarks/layers/solver.py --device cpu --small (a check that the script runs)
    python benchmarks/layers/solver.py --device cpu --arrays numpy --repeated  (five solves with one H, without a GPU)

Times are medians of warm runs, certification included, device synchronised. Methods that would take minutes are timed on some
columns and extrapolated to all of them (``columns_timed``). Gaps are the largest of all columns timed, relative to the optimum:
certified by the audit, except for SparseGPT and Thanos, whose gap is that to the certified lower bound for their own mask.

Besides: five solves with one H and five masks, once with one ``qprecon.prepare`` and once by five calls of ``qprecon.solve``. The
weights are the same bits; ``solves`` says how many there were, ``seconds`` are those of all of them, the preparation included.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # the package and the benchmarks of this checkout

import qprecon
from benchmarks.inputs.problems import LARGE, REPEATED, Real, Synthetic, extreme_eigenvalues, wanda_mask
from qprecon.llm.masks import SELECTORS, LayerData
from qprecon.llm.masks.patterns import Pattern

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "solver_layers.json"
DAMPING, TOL = 0.01, 1e-4
SMALL = (Synthetic("256x128 easy 50%", 256, 128, 1.0, 0.5), Synthetic("256x160 easy 50%", 256, 160, 1.0, 0.5))
SMALL_REPEATED = (Synthetic("256x32 easy 50%", 256, 32, 1.0, 0.5),)
SPARSITIES = (0.4, 0.45, 0.5, 0.55, 0.6)  # of the masks that are solved with one H


@dataclass(frozen=True, eq=False)
class Layer:
    """A problem on the device, and what every method's row repeats."""

    spec: Synthetic | Real
    h_NN: torch.Tensor
    w_NK: torch.Tensor
    mask_NK: torch.Tensor
    about: dict[str, Any]
    arrays: str = "torch"

    def given(self, x: torch.Tensor) -> Any:
        """An array of the kind that is measured."""
        return x.numpy() if self.arrays == "numpy" else x

    def solve(self, columns: int | None = None, **options: Any) -> qprecon.Solution:
        """The first ``columns`` columns (all of them by default) at the benchmark's damping and tolerance."""
        w_NK, mask_NK = self.w_NK[:, :columns], self.mask_NK[:, :columns]
        return qprecon.solve(self.h_NN, w_NK, mask_NK, damping=DAMPING, **{"tol": TOL, **options})


@dataclass(frozen=True)
class Measured:
    """Seconds for all columns, the largest gap, and remarks."""

    seconds: float
    relative_gap: float
    more: dict[str, Any]


def timed(run: Callable[[], Any], budget: float, own_clock: Callable[[Any], float] | None = None) -> tuple[float, Any, int]:
    """Median of three runs after a warm-up, fewer where they take more than ``budget`` seconds; the last answer; how many runs.

    ``own_clock`` reads the seconds from the answer. With it a warm-up of four times the budget is the measurement.
    """

    def once() -> tuple[float, Any]:
        synchronize()
        began = time.perf_counter()
        answer = run()
        synchronize()
        wall = time.perf_counter() - began
        return (own_clock(answer) if own_clock else wall), answer

    began = time.perf_counter()
    seconds, answer = once()
    if own_clock and time.perf_counter() - began > 4.0 * budget:
        return seconds, answer, 1
    taken: list[float] = []
    while len(taken) < 3 and (not taken or time.perf_counter() - began < budget):
        seconds, answer = once()
        taken.append(seconds)
    return statistics.median(taken), answer, len(taken)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def certified(solution: qprecon.Solution) -> dict[str, Any]:
    """What the audit says of a solution."""
    optimal = sum(status is qprecon.Status.OPTIMAL for status in solution.status)
    return {
        "certified_fraction": optimal / max(len(solution.status), 1),
        "median_gap": float(statistics.median(solution.relative_gap.tolist())),
        "iterations": int(solution.iterations.max(initial=0)),
        "chosen": {key: str(value) for key, value in solution.provenance.automatic.items()},
    }


def whole(backend: str) -> Callable[[Layer, float], Measured]:
    """All columns at once, wall-clock time of the whole call."""

    def measure(layer: Layer, budget: float) -> Measured:
        seconds, solution, runs = timed(lambda: layer.solve(backend=backend), budget)
        return Measured(seconds, float(solution.relative_gap.max()), {"runs": runs, **certified(solution)})

    return measure


def sampled(columns_at: Callable[[int], int], **options: Any) -> Callable[[Layer, float], Measured]:
    """Some columns, the backend's own seconds (compilation and what columns share apart), times all columns over some."""

    def measure(layer: Layer, budget: float) -> Measured:
        columns = min(columns_at(layer.spec.n_inputs), layer.spec.n_outputs)
        run = lambda: layer.solve(columns, **options)  # noqa: E731
        seconds, solution, runs = timed(run, budget, lambda s: s.timing.solve)
        factor = layer.spec.n_outputs / columns
        more = {"runs": runs, "columns_timed": columns, "compile_seconds": solution.timing.compile, **certified(solution)}
        return Measured(seconds * factor, float(solution.relative_gap.max()), more)

    return measure


def own_update(selector: str) -> Callable[[Layer, float], Measured]:
    """Mask and weights of a pruning method; its gap is to the optimum for its own mask."""

    def measure(layer: Layer, budget: float) -> Measured:
        data = LayerData(layer.spec.name, layer.w_NK, layer.h_NN, layer.spec.n_inputs)
        pattern = Pattern.parse(layer.spec.sparsity)
        seconds, selection, runs = timed(lambda: SELECTORS[selector].select(data, pattern, damping=DAMPING), budget)
        best = qprecon.solve(layer.h_NN, layer.w_NK, selection.mask_NK, damping=DAMPING, tol=TOL)
        a_NN = layer.h_NN.double()
        a_NN.diagonal().add_(DAMPING * a_NN.diagonal().mean())
        delta_NK = (selection.weights_NK - layer.w_NK).double()
        f_K = (delta_NK * (a_NN @ delta_NK)).sum(0).cpu().numpy()
        lower_K = best.objective - best.gap_bound
        more = {"runs": runs, "gap_of_layer": float(f_K.sum() / lower_K.sum() - 1.0), "gap_is": "to the optimum for its own mask"}
        return Measured(seconds, float((f_K / lower_K - 1.0).max()), more)

    return measure


def five_solves(layer: Layer, prepare_once: bool) -> list[qprecon.Solution]:
    """One layer under five masks, H prepared once or by each call anew."""
    masks = [wanda_mask(layer.h_NN, layer.w_NK, sparsity) for sparsity in SPARSITIES]
    h_NN, w_NK = (layer.given(x) for x in (layer.h_NN, layer.w_NK))
    if prepare_once:
        prepared = qprecon.prepare(h_NN, damping=DAMPING)
        return [prepared.solve(w_NK, layer.given(mask_NK), tol=TOL) for mask_NK in masks]
    return [qprecon.solve(h_NN, w_NK, layer.given(mask_NK), damping=DAMPING, tol=TOL) for mask_NK in masks]


def repeated(prepare_once: bool) -> Callable[[Layer, float], Measured]:
    """Seconds of all five solves; gaps and certified columns of all of them together."""

    def measure(layer: Layer, budget: float) -> Measured:
        seconds, solutions, runs = timed(lambda: five_solves(layer, prepare_once), budget)
        gaps = [gap for solution in solutions for gap in solution.relative_gap.tolist()]
        more = {"runs": runs, "solves": len(solutions), "arrays": layer.arrays, **certified(solutions[0])}
        more |= {"median_gap": statistics.median(gaps), "certified_fraction": sum(gap <= TOL for gap in gaps) / len(gaps)}
        return Measured(seconds, max(gaps), more)

    return measure


OURS, MPAX_PAPER = "qprecon pcg", "rAPDHG, paper's calling form"
PREPARED = "five solves, one prepared H"
REPEATED_METHODS: dict[str, Callable[[Layer, float], Measured]] = {
    PREPARED: repeated(prepare_once=True),
    "five solves, five calls": repeated(prepare_once=False),
}
METHODS: dict[str, Callable[[Layer, float], Measured]] = {
    OURS: whole("auto"),
    "SparseGPT's update": own_update("sparsegpt"),
    "Thanos's update": own_update("thanos"),
    "ADMM": whole("admm"),
    "Cholesky, batched": sampled(lambda n: 128 if n <= 4096 else 8, backend="cholesky"),
    "mpax": sampled(lambda n: 512 if n <= 4096 else 256, backend="mpax", max_iterations=20_000),
    MPAX_PAPER: sampled(lambda n: 96, backend="mpax", paper=True, jit=False),
}
PER_COLUMN = ("Cholesky, batched", "mpax", MPAX_PAPER)
"""Timed by the column, so that a layer with the same H and more columns needs no run of its own."""


def why_not(method: str, layer: Layer) -> str | None:
    """Why a method is left out, or None."""
    if "mpax" in method or method == MPAX_PAPER:
        missing = [name for name in ("jax", "mpax") if importlib.util.find_spec(name) is None]
        if missing:
            return f"{', '.join(missing)} not installed"
    if method.startswith("Thanos") and layer.spec.n_inputs > 4096:
        return "timed up to 4096 inputs only"
    return None


def scaled_from(rows: list[dict[str, Any]], method: str, layer: Layer) -> dict[str, Any] | None:
    """The row of an earlier problem with the same H, for a method that is timed by the column."""
    if method not in PER_COLUMN:
        return None
    for row in rows:
        if row["method"] == method and row.get("h") == layer.about["h"] and row["seconds"] is not None:
            note = f"timed on {row['problem']}, which has the same H, and scaled to {layer.spec.n_outputs} columns"
            return {**row, **layer.about, "seconds": row["seconds"] * layer.spec.n_outputs / row["k"], "note": note}
    return None


def load(spec: Synthetic | Real, device: str, arrays: str = "torch") -> Layer:
    """Make a layer and find its condition number."""
    h_NN, w_NK, mask_NK = spec.make(device)
    low, high = extreme_eigenvalues(h_NN, DAMPING)
    about = {"problem": spec.name, "n": spec.n_inputs, "k": spec.n_outputs, "sparsity": spec.sparsity, "kappa": high / low}
    synthetic = isinstance(spec, Synthetic)
    # What a column's difficulty depends on.
    about["h"] = [spec.n_inputs, spec.power, spec.outliers, spec.seed, spec.sparsity] if synthetic else [spec.name]
    return Layer(spec, h_NN, w_NK, mask_NK, about, arrays)


def run_method(method: str, layer: Layer, rows: list[dict[str, Any]], budget: float) -> dict[str, Any]:
    """One row; a method that cannot run says why."""
    if earlier := scaled_from(rows, method, layer):
        return earlier
    row = {**layer.about, "method": method, "seconds": None, "relative_gap": None}
    if reason := why_not(method, layer):
        return {**row, "note": reason}
    try:
        measured = (METHODS | REPEATED_METHODS)[method](layer, budget)
    except Exception as error:  # an out-of-memory error or a broken package must not cost the other rows
        return {**row, "note": f"failed: {type(error).__name__}: {str(error)[:300]}"}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # jax takes its own memory beside torch's
    return {**row, "seconds": measured.seconds, "relative_gap": measured.relative_gap, **measured.more}


def environment(device: str) -> dict[str, Any]:
    """GPU, date and versions."""
    versions = {"qprecon": qprecon.__version__}
    for name in ("torch", "jax", "mpax", "numpy", "scipy"):
        if importlib.util.find_spec(name) is not None:
            versions[name] = importlib.metadata.version(name)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none (cpu)"
    return {"gpu": gpu, "date": datetime.date.today().isoformat(), "versions": versions}


def show(row: dict[str, Any], fastest: float | None) -> None:
    """One line of the table."""
    if row["seconds"] is None:
        print(f"  {row['method']:30} {row['note']}", flush=True)
        return
    times = f"{row['seconds'] / fastest:8.1f}x" if fastest else ""
    timed_on = f"  ({row['columns_timed']} columns timed)" if "columns_timed" in row else ""
    share = f"  certified {100 * row['certified_fraction']:.4g} %" if "certified_fraction" in row else ""
    print(f"  {row['method']:30} {row['seconds']:9.4g} s {times}  gap {row['relative_gap']:.2e}{share}{timed_on}", flush=True)


def jobs(args: argparse.Namespace) -> list[tuple[Synthetic | Real, list[str]]]:
    """Layers with the methods to run on each, the slow methods last."""
    named = lambda specs: [spec for spec in specs if any(part in spec.name for part in args.problem or [""])]  # noqa: E731
    chosen = lambda methods: [method for method in methods if method in (args.method or methods)]  # noqa: E731
    whole_layers = [] if args.repeated else named((*(SMALL if args.small else LARGE), *map(Real, args.npz)))
    found = [(spec, chosen([m for m in METHODS if m not in PER_COLUMN])) for spec in whole_layers]
    found += [(spec, chosen(REPEATED_METHODS)) for spec in named(SMALL_REPEATED if args.small else REPEATED)]
    found += [(spec, chosen(PER_COLUMN)) for spec in whole_layers]
    return [(spec, methods) for spec, methods in found if methods]


def main() -> None:
    """Run what was asked for; the file is written after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny layers, to check that everything runs")
    parser.add_argument("--npz", type=pathlib.Path, nargs="+", default=[], help="real layers, with H (N, N) and W (N, K)")
    parser.add_argument("--problem", action="append", help="part of a problem's name; repeat for several")
    parser.add_argument("--method", action="append", choices=[*METHODS, *REPEATED_METHODS], help="repeat for several; default: all")
    parser.add_argument("--repeated", action="store_true", help="only the rows about several solves with one H")
    parser.add_argument("--arrays", default="torch", choices=("torch", "numpy"), help="what several solves with one H are given")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds after which a method's runs are not repeated")
    parser.add_argument("--limit", type=float, default=140.0, help="seconds after which the slow methods are left out")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    if args.arrays == "numpy" and args.device != "cpu":
        parser.error("--arrays numpy goes with --device cpu")
    began, about = time.perf_counter(), environment(args.device)
    rows: list[dict[str, Any]] = []
    for spec, methods in jobs(args):
        layer = load(spec, args.device, args.arrays)
        print(f"{spec.name}: kappa {layer.about['kappa']:.2g}, {time.perf_counter() - began:.0f} s so far", flush=True)
        for method in methods:
            late = time.perf_counter() - began > args.limit and method != OURS
            skipped = {**layer.about, "method": method, "seconds": None, "relative_gap": None, "note": "left out: time limit"}
            rows.append({**(skipped if late else run_method(method, layer, rows, args.budget)), **about})
            ours = (OURS, PREPARED)
            show(rows[-1], next((r["seconds"] for r in rows if r["problem"] == spec.name and r["method"] in ours), None))
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
        del layer
    print(f"{time.perf_counter() - began:.0f} s; wrote {args.out.name}, {len(rows)} rows")


if __name__ == "__main__":
    main()
