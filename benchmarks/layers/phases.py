"""Where one layer's seconds go on a GPU: by part of the solve, by kernel, launches and idle time.

    python benchmarks/layers/phases.py              (one GPU, about a minute)
    python benchmarks/layers/phases.py --device cpu (tiny layers, to check that the script runs)

``seconds`` is the median of whole calls that nothing looks into, ``first_seconds`` the first, in which kernels may be compiled.
``parts`` come from calls in which the device is waited for at the ends of each part; they are exclusive (a part does not hold those
inside it), and their sum is larger than ``seconds``. Kernels, launches and the device's busy time come from one call under torch's
profiler; ``host_launches`` leaves out the kernels that recorded iterations start. ``rates`` are seconds of the dense operations
alone.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import pathlib
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # the package and the benchmarks of this checkout

import qprecon
from benchmarks.inputs.problems import Synthetic
from qprecon.arrays.halves import Multiplier
from qprecon.backends import pcg
from qprecon.backends._pcg import precondition
from qprecon.engine import in_progress, rounds, shared
from qprecon.problem.column_qp import ColumnQP
from qprecon.problem.hessian import Hessian
from qprecon.problem.scaling import Scaling
from qprecon.proof import audit, starting_point

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "layer_phases.json"
LAYERS = (
    Synthetic("4096x4096 easy 50%", 4096, 4096, 1.0, 0.5),
    Synthetic("4096x4096 hard 60%", 4096, 4096, 1.5, 0.6),
    Synthetic("14336x4096 easy 50%", 14336, 4096, 1.0, 0.5),
    Synthetic("1024x1024 easy 50%", 1024, 1024, 1.0, 0.5),
    Synthetic("576x1536 easy 50%", 576, 1536, 1.0, 0.5),
)
TINY = (Synthetic("256x160 easy 50%", 256, 160, 1.0, 0.5),)
SOLVE_PARTS: tuple[tuple[Any, str, str], ...] = (
    (Hessian, "__post_init__", "check H"),
    (shared, "certificate_begun", "factor"),
    (Scaling, "hessian", "scale H"),
    (precondition, "low_rank", "sketch"),
    (pcg, "product", "split H"),
    (rounds, "start_begun", "start"),
    (rounds, "_run", "hand over"),
    (precondition, "_pair_products", "pairs"),
    (precondition, "_inverse_plus_identity", "inverses"),
    (precondition, "for_columns", "K_j, the rest"),
    (pcg, "_solve", "iterations"),
)
PARTS = (
    *SOLVE_PARTS,
    (ColumnQP, "__post_init__", "check W and mask"),
    (starting_point, "audit_begun", "start's audit, vectors"),
    (in_progress, "audit_begun", "audit, vectors"),
    (Hessian, "product", "audit, product"),
    (audit, "solve_lower", "audit, triangular"),
    (in_progress, "surely_better", "better than the start"),
)


class Parts:
    """Exclusive seconds of wrapped functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            wait()
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **options)
            finally:
                wait()
                whole = time.perf_counter() - began
                self.seconds[name] += whole - self._inner.pop()
                self._inner[-1] += whole

        return timed

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While open, each part is timed; one that this version of the code does not have is left out."""
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in PARTS if hasattr(owner, name)]
        try:
            for owner, name, part in PARTS:
                if hasattr(owner, name):
                    setattr(owner, name, self.wrapped(getattr(owner, name), part))
            yield
        finally:
            for owner, name, function in kept:
                setattr(owner, name, function)


def wait() -> None:
    """For the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """After a warm-up, the device waited for."""
    run()
    taken = []
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        run()
        wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def parts_of(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Mean exclusive seconds of the parts of a call."""
    parts = Parts()
    with parts.looking():
        for _ in range(repeats):
            parts.wrapped(run, "the rest")()
    return {name: seconds / repeats for name, seconds in parts.seconds.items()}


def kernels_of(run: Callable[[], Any]) -> dict[str, Any]:
    """Launches, busy seconds, and the kernels that take most, of one call; nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        wait()
    seconds, counts, host_launches = Counter[str](), Counter[str](), 0
    for event in seen.events():
        host_launches += "LaunchKernel" in event.name
        if str(event.device_type).endswith("CUDA"):
            name = event.name.replace("void ", "").replace("at::native::", "")[:90]
            seconds[name] += event.time_range.elapsed_us() / 1e6
            counts[name] += 1
    top = [{"kernel": name, "seconds": value, "launches": counts[name]} for name, value in seconds.most_common(25)]
    return {"launches": counts.total(), "host_launches": host_launches, "busy_seconds": sum(seconds.values()), "top": top}


def rates_of(spec: Synthetic, device: str) -> dict[str, float]:
    """Seconds of the dense operations of a solve, alone, on a piece of columns as the audit takes it."""
    n, k = spec.n_inputs, min(spec.n_outputs, max(2**24 // spec.n_inputs // 64 * 64, 64))
    rank = pcg.chosen_rank(n, pcg.Options(), "cuda")
    h_NN, w_NK, _ = spec.make(device)
    wide_NN, wide_NK = h_NN.double(), w_NK.double()
    wide_NN.diagonal().add_(0.01)
    lower_NN = torch.linalg.cholesky(wide_NN)
    gram_Krr = torch.eye(rank, device=device).expand(k, rank, rank) * 2.0
    factor_Krr = torch.linalg.cholesky(gram_Krr.double())
    halved = Multiplier(h_NN.clone())
    runs = {
        "float64 product": lambda: wide_NN @ wide_NK,
        "float64 triangular solve": lambda: torch.linalg.solve_triangular(lower_NN, wide_NK, upper=False),
        "float64 Cholesky": lambda: torch.linalg.cholesky_ex(wide_NN),
        "float32 Cholesky": lambda: torch.linalg.cholesky_ex(h_NN),
        "halves product": lambda: halved(w_NK),
        "bfloat16 product": lambda: h_NN.bfloat16() @ w_NK.bfloat16(),
        "float32 product": lambda: h_NN @ w_NK,
        "copy of W": lambda: w_NK.clone(),
        "float64 Cholesky, K of r": lambda: torch.linalg.cholesky_ex(gram_Krr.double()),
        "float64 inverse from it, K of r": lambda: torch.cholesky_inverse(factor_Krr),
        "float32 Cholesky, K of r": lambda: torch.linalg.cholesky_ex(gram_Krr),
        "float64 inverse, K of r": lambda: torch.linalg.inv_ex(gram_Krr.double()),
        "float32 inverse, K of r": lambda: torch.linalg.inv_ex(gram_Krr),
    }
    return {"n": n, "k": k, "r": rank} | {name: median_seconds(run, 3) for name, run in runs.items()}


def measured(spec: Synthetic, device: str, repeats: int, options: dict[str, Any]) -> dict[str, Any]:
    """One row."""
    h_NN, w_NK, mask_NK = spec.make(device)
    solve = lambda: qprecon.solve(h_NN, w_NK, mask_NK, "pcg", damping=0.01, tol=1e-4, **options)  # noqa: E731
    wait()
    began = time.perf_counter()
    solve()
    wait()
    first, seconds, solution = time.perf_counter() - began, median_seconds(solve, repeats), solve()
    return {
        "problem": spec.name, "n": spec.n_inputs, "k": spec.n_outputs, "seconds": seconds, "first_seconds": first,
        "timing": {name: getattr(solution.timing, name) for name in ("setup", "solve", "audit")},
        "iterations": int(solution.iterations.max()), "largest_gap": float(solution.relative_gap.max()),
        "chosen": {key: str(value) for key, value in solution.provenance.automatic.items()},
        "parts": parts_of(solve, repeats), **kernels_of(solve),
    }  # fmt: skip


def show(row: dict[str, Any], rows: int) -> None:
    """A few lines."""
    print(f"{row['problem']}: {1e3 * row['seconds']:.1f} ms, first {row['first_seconds']:.1f} s", end="")
    print(f", {row['iterations']} iterations, gap {row['largest_gap']:.0e}", end="")
    print(f", {row['launches']} launches, busy {1e3 * row['busy_seconds']:.1f} ms" if "launches" in row else "")
    parts = sorted(row["parts"].items(), key=lambda part: -part[1])
    print("  " + ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in parts if seconds >= 1e-4))
    for each in row.get("top", [])[:rows]:
        print(f"    {1e3 * each['seconds']:7.2f} ms {each['launches']:4d}  {each['kernel'][:70]}")


def _option(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, int(value) if value.isdigit() else value


def main() -> None:
    """Print and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--problem", action="append", help="part of a problem's name; repeat for several")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--option", type=_option, action="append", default=[], metavar="KEY=VALUE", help="of pcg")
    parser.add_argument("--no-rates", action="store_true", help="leave out the operations alone")
    parser.add_argument("--kernels", type=int, default=0, help="how many kernels of each layer are printed")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    chosen = [spec for spec in (LAYERS if args.device == "cuda" else TINY) if any(p in spec.name for p in args.problem or [""])]
    rows, rates = [], []
    for spec in chosen:
        rows.append(measured(spec, args.device, args.repeats, dict(args.option)))
        show(rows[-1], args.kernels)
        if not args.no_rates and "hard" not in spec.name:
            rates.append(rates_of(spec, args.device))
            told = (f"{k} {1e3 * v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in rates[-1].items())
            print("  rates: " + ", ".join(told))
        if args.device == "cuda":
            torch.cuda.empty_cache()
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "none (cpu)"
    about = {"gpu": gpu, "date": datetime.date.today().isoformat(), "torch": torch.__version__, "qprecon": qprecon.__version__}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"about": about, "layers": rows, "rates": rates}, indent=1) + "\n")


if __name__ == "__main__":
    main()
