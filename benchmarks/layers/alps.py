"""ALPS's masks: seconds, work and agreement with the algorithm as it was first written here, which inverts anew for each ρ.

    python benchmarks/layers/alps.py                       (one GPU, about a minute)
    python benchmarks/layers/alps.py --npz LAYER.npz ...   (whole real layers too, of inputs/make_fixtures.py --whole)
    python benchmarks/layers/alps.py --device cpu --small  (a check that the script runs)

Seconds are those of the second run, device synchronised. `differs` is the share of mask entries that are not the reference's,
`excess` the loss at the optimal weights for the new mask over that for the reference's, minus 1. The reference is also run on H
with a relative perturbation of 6e-8, one rounding of float32 (`reference_differs`): no more agreement than that can be asked for.
`predicted` is work over the rates that products and copies reach on this device in this run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # the package and the benchmarks of this checkout

import qprecon
from benchmarks.inputs.problems import Real, Synthetic, from_fixture
from qprecon.arrays import halves
from qprecon.llm.masks import LayerData, alps, get_selector
from qprecon.llm.masks.patterns import Pattern, lowest_of_m
from qprecon.llm.masks.sweep import prepared_hessian

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "alps_gpu.json"
REAL = ROOT / "tests" / "fixtures" / "real"
DAMPING = 0.01
SHAPES = (
    Synthetic("576x576", 576, 576, 1.0, 0.5),
    Synthetic("1024x1024", 1024, 1024, 1.0, 0.5),
    Synthetic("4096x1024", 4096, 1024, 1.0, 0.5),
    Synthetic("4096x4096", 4096, 4096, 1.0, 0.5),
    Synthetic("4096x4096 hard", 4096, 4096, 1.5, 0.6),
    Synthetic("4096x14336", 4096, 14336, 1.0, 0.5),
    Synthetic("14336x4096", 14336, 4096, 1.0, 0.5),
)
SMALL = (Synthetic("256x128", 256, 128, 1.0, 0.5),)


class Reference:
    """ALPS with float32 products, a Cholesky inverse for each ρ and `topk` over the layer."""

    every, growth, still, still_after = 3, ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1)), 3e-4, 30

    def __init__(self, pattern: Pattern):
        self.pattern = pattern

    def select(self, h_NN: torch.Tensor, w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask, bool (N, K), and own weights of a layer without dead inputs."""
        a_NN = prepared_hessian(LayerData("layer", w_NK, h_NN, 1)).ridged(DAMPING)
        torch.linalg.cholesky(a_NN)
        scale_N1 = a_NN.diagonal().sqrt()[:, None]
        a_NN /= scale_N1 * scale_N1.T
        dense_NK = self.admm(a_NN, w_NK * scale_N1)
        pruned_NK = self.pruned(dense_NK)
        start_NK = dense_NK.masked_fill(pruned_NK, 0)
        return ~pruned_NK, self.conjugate_gradients(a_NN, w_NK * scale_N1, start_NK, pruned_NK) / scale_N1

    def pruned(self, values_NK: torch.Tensor) -> torch.Tensor:
        """True at the smallest."""
        if self.pattern.is_nm:
            return lowest_of_m(values_NK.abs(), self.pattern)
        count, size = self.pattern.pruned_per_group(values_NK.numel()), values_NK.abs().view(-1)
        threshold = size.topk(count, largest=False, sorted=False).values.max()
        below, equal = size < threshold, size == threshold  # quantised weights tie, and a few entries more send the mask elsewhere
        return (below | (equal & (equal.cumsum(0, dtype=torch.int32) <= count - below.sum(0)))).view_as(values_NK)

    def admm(self, a_NN: torch.Tensor, w_NK: torch.Tensor, rho: float = 0.1) -> torch.Tensor:
        """The last dense B."""
        first_NK = self.pruned(w_NK)
        n_kept, seen_NK, growing = int((~first_NK).sum()), first_NK, False
        sparse_NK, dual_NK = w_NK.masked_fill(first_NK, 0), torch.zeros_like(w_NK)
        inverse_NN = self.inverse(a_NN, rho)
        for iteration in range(300):
            dense_NK = w_NK + inverse_NN @ (rho * (sparse_NK - w_NK) - dual_NK)
            shifted_NK = dense_NK + dual_NK / rho
            pruned_NK = self.pruned(shifted_NK)
            sparse_NK = shifted_NK.masked_fill(pruned_NK, 0)
            dual_NK = rho * (shifted_NK - sparse_NK)
            if (iteration + 1) % self.every:
                continue
            changed, seen_NK = int((pruned_NK != seen_NK).sum()) / n_kept, pruned_NK
            if (changed == 0 and growing) or (changed < self.still and iteration >= self.still_after):
                break
            if growing or changed > self.growth[1][0]:
                growing = True
                rho *= next(factor for share, factor in self.growth if changed > share)
            else:
                rho /= 5
                if changed:
                    sparse_NK, dual_NK = w_NK.masked_fill(first_NK, 0), torch.zeros_like(w_NK)
            inverse_NN = self.inverse(a_NN, rho)
        return dense_NK

    @staticmethod
    def conjugate_gradients(
        a_NN: torch.Tensor, w_NK: torch.Tensor, x_NK: torch.Tensor, pruned_NK: torch.Tensor
    ) -> torch.Tensor:
        """Ten steps on the kept places."""
        r_NK = (a_NN @ (w_NK - x_NK)).masked_fill_(pruned_NK, 0)
        p_NK, energy_K = r_NK.clone(), r_NK.square().sum(0)
        for _ in range(10):
            q_NK = (a_NN @ p_NK).masked_fill_(pruned_NK, 0)
            step_K = energy_K / (p_NK * q_NK).sum(0).clamp_min(1e-38)
            x_NK, r_NK = x_NK + step_K * p_NK, r_NK - step_K * q_NK
            before_K, energy_K = energy_K, r_NK.square().sum(0)
            p_NK = r_NK + energy_K / before_K.clamp_min(1e-38) * p_NK
        return x_NK

    @staticmethod
    def inverse(a_NN: torch.Tensor, rho: float) -> torch.Tensor:
        """(A + ρI)⁻¹."""
        shifted_NN = a_NN.clone()
        shifted_NN.diagonal().add_(rho)
        return torch.cholesky_inverse(torch.linalg.cholesky(shifted_NN))


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often ALPS iterates and inverts meanwhile."""
    counts = {"iterations": 0, "inverses": 0}
    advance, response = alps._Iterate.advance, alps._response

    def counting_advance(self: Any, *args: Any) -> None:
        counts["iterations"] += 1
        advance(self, *args)

    def counting_response(*args: Any) -> halves.Multiplier:
        counts["inverses"] += 1
        return response(*args)

    alps._Iterate.advance, alps._response = counting_advance, counting_response
    try:
        yield counts
    finally:
        alps._Iterate.advance, alps._response = advance, response


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, device synchronised, and its answer."""
    synchronize()
    began = time.perf_counter()
    answer = run()
    synchronize()
    return time.perf_counter() - began, answer


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rates(device: str) -> dict[str, float]:
    """Flops of products and bytes of copies a second on this device: float32, and float16 with a float32 result."""
    n = 8192 if device != "cpu" else 1024
    x_NN = torch.randn(n, n, device=device)
    half_NN = x_NN.half()
    wide = halves.has_fast_halves(x_NN)
    product = (lambda: torch.mm(half_NN, half_NN, out_dtype=torch.float32)) if wide else (lambda: x_NN @ x_NN)
    runs: dict[str, tuple[Callable[[], Any], float]] = {
        "float32": (lambda: x_NN @ x_NN, 2.0 * n**3),
        "halves": (product, 2.0 * n**3),
        "bytes": (lambda: x_NN.clone(), 8.0 * n**2),
    }
    found = {}
    for name, (run, work) in runs.items():
        run()
        found[name] = work / min(timed(run)[0] for _ in range(5))
    return found


def work(n: int, k: int, counts: dict[str, int], steps: int = 10) -> dict[str, float]:
    """Flops and bytes of one selection on a GPU, unstructured.

    An iteration is a product of three times the depth and some 130 bytes moved a weight; an inverse 2 N³ flops, three times, and
    some 130 bytes a matrix entry; a step of conjugate gradients a product and some 140 bytes a weight; beside them one Cholesky
    factor and one product in float32. The triangular leaves of an inverse are not counted.
    """
    iterations, inverses = counts["iterations"], counts["inverses"]
    return {
        "halves": 3 * (2.0 * n * n * k * (iterations + steps) + 2.0 * n**3 * inverses),
        "float32": n**3 / 3 + 2.0 * n * n * k,
        "bytes": 130.0 * n * k * iterations + 130.0 * n * n * inverses + 140.0 * n * k * steps,
    }


def objective(h_NN: torch.Tensor, w_NK: torch.Tensor, mask_NK: torch.Tensor) -> float:
    """The damped loss of a layer at the optimal weights for a mask."""
    return float(qprecon.solve(h_NN, w_NK, mask_NK, damping=DAMPING, tol=1e-5).objective.sum())


def measure(name: str, h_NN: torch.Tensor, w_NK: torch.Tensor, pattern: Pattern, speed: dict[str, float]) -> dict[str, Any]:
    """The row of a layer."""
    layer, reference = LayerData(name, w_NK, h_NN, 1), Reference(pattern)
    select = lambda: get_selector("alps").select(layer, pattern, damping=DAMPING)  # noqa: E731
    select()
    with counted() as counts:
        seconds, selection = timed(select)
    before, (theirs_NK, _) = timed(lambda: reference.select(h_NN, w_NK))
    generator = torch.Generator(h_NN.device).manual_seed(0)
    noise_NN = 6e-8 * torch.randn(h_NN.shape, generator=generator, device=h_NN.device)
    nearly_NK, _ = reference.select(h_NN * (1 + noise_NN + noise_NN.T), w_NK)
    n, k = w_NK.shape
    done = work(n, k, counts)
    predicted = sum(done[kind] / speed[kind] for kind in done) if halves.has_fast_halves(h_NN) else None
    exact_NK = selection.mask_NK
    return {
        "layer": name,
        "n": n,
        "k": k,
        "pattern": str(pattern),
        "seconds": seconds,
        "reference_seconds": before,
        "predicted": predicted,
        **counts,
        "pruned_exactly": int((~exact_NK).sum()) == pattern.pruned_per_group(n * k),
        "differs": float((exact_NK != theirs_NK).float().mean()),
        "reference_differs": float((nearly_NK != theirs_NK).float().mean()),
        "excess": objective(h_NN, w_NK, exact_NK) / objective(h_NN, w_NK, theirs_NK) - 1,
    }


def layers(args: argparse.Namespace) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, str]]:
    """Name, H, W and pattern of every row."""
    for path in sorted(REAL.glob("*.npz")):
        h_NN, w_NK, _ = from_fixture(path)
        for pattern in ("50%", "2:4"):
            yield path.stem, torch.tensor(h_NN, device=args.device), torch.tensor(w_NK, device=args.device), pattern
    for path in args.npz:
        real = Real(path)
        h_NN, w_NK, _ = real.make(args.device)
        for pattern in ("50%", "2:4"):
            yield path.stem, h_NN, w_NK, pattern
    for spec in SMALL if args.small else SHAPES:
        h_NN, w_NK, _ = spec.make(args.device)
        yield spec.name, h_NN, w_NK, f"{100 * spec.sparsity:g}%"
        if spec.n_inputs == 4096 == spec.n_outputs:
            yield spec.name, h_NN, w_NK, "2:4"


def main() -> None:
    """Print a line a layer, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="one small synthetic layer in place of the large ones")
    parser.add_argument("--npz", type=pathlib.Path, nargs="*", default=[])
    parser.add_argument("--out", type=pathlib.Path, help=f"by default {RESULTS.name}, and nothing for a CPU")
    args = parser.parse_args()
    out = args.out or (RESULTS if args.device != "cpu" else None)
    speed, rows = rates(args.device), []
    for name, h_NN, w_NK, pattern in layers(args):
        rows.append(row := measure(name, h_NN, w_NK, Pattern.parse(pattern), speed))
        print(
            f"{name:24} {row['n']:6}x{row['k']:<6} {pattern:4} {row['seconds']:7.3f} s "
            f"(predicted {row['predicted'] or float('nan'):.3f}, before {row['reference_seconds']:.3f}), "
            f"{row['iterations']} iterations, {row['inverses']} inverses, differs "
            f"{100 * row['differs']:.3f} % (reference {100 * row['reference_differs']:.3f} %), f {row['excess']:+.1e}",
            flush=True,
        )
    card = torch.cuda.get_device_name() if args.device != "cpu" else "cpu"
    about = {"card": card, "date": datetime.date.today().isoformat(), "torch": torch.__version__, "rates": speed}
    if out is not None:
        out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        print(f"{out}: {len(rows)} rows")


if __name__ == "__main__":
    main()
