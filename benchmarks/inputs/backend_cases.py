"""The problems on which backends are compared: random and real layers, and these with bounds, an explicit rhs and both."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from .problems import Synthetic, from_file, from_fixture

FIXTURES = pathlib.Path(__file__).parents[2] / "tests" / "fixtures" / "real"
DAMPING = 0.01


@dataclass(frozen=True)
class Case:
    """A named problem: ``series`` groups those whose cost grows in the order given; ``bounded`` adds −c ≤ ŵ ≤ c, ``rhs`` asks for
    the outputs of other weights than W."""

    name: str
    series: str
    source: Any  # Synthetic, or a fixture's path
    bounded: bool = False
    rhs: bool = False

    def also(self, *, bounded: bool = False, rhs: bool = False) -> Case:
        """The same with bounds, or an explicit right-hand side, or both."""
        said = " and ".join(["rhs"] * rhs + ["bounds"] * bounded)
        return Case(f"{self.name}, {said}", f"{self.series}, {said}", self.source, bounded, rhs)

    def arguments(self, device: str) -> dict[str, Any]:
        """H, W, mask and bounds: numpy on the CPU, torch on CUDA."""
        if isinstance(self.source, Synthetic):
            arrays = self.source.make(device)
            arrays = arrays if device == "cuda" else tuple(x.numpy() for x in arrays)
        else:
            arrays = from_fixture(self.source) if "tests" in self.source.parts else from_file(self.source)
            if device == "cuda":
                import torch

                arrays = tuple(torch.as_tensor(x, device=device) for x in arrays)
        found = dict(zip(("H", "W", "mask"), arrays, strict=True))
        if self.bounded:  # tight enough to be active at some weights of every column
            limit = 2.0 * float(abs(found["W"]).mean())
            found |= {"lower": -limit, "upper": limit}
        if self.rhs:  # the outputs of weights a fifth of W's size away from W
            found["rhs"] = found["H"] @ (found["W"] + 0.2 * _noise(found["W"]))
        return found


def _noise(weights_NK: Any) -> Any:
    """Normal, of the weights' size, the same on every device."""
    noise_NK = np.random.default_rng(1).standard_normal(tuple(weights_NK.shape)).astype(np.float32)
    if not isinstance(weights_NK, np.ndarray):
        import torch

        noise_NK = torch.as_tensor(noise_NK, device=weights_NK.device)
    return noise_NK * float(weights_NK.std())


def cases(device: str, processor: bool = False) -> list[Case]:
    """The problems: layers of K = N on a GPU, of 256 outputs on a CPU; real layers; and these with bounds, rhs and both.

    processor: the small ones of each kind.
    """
    sizes = (256, 512, 1024, 2048, 4096)
    wide = lambda n: n if device == "cuda" else 256  # noqa: E731
    named = lambda n, power, kind, share: Synthetic(f"{n}x{wide(n)} {kind}", n, wide(n), power, share)  # noqa: E731
    easy = [Case(spec.name, "easy", spec) for spec in (named(n, 1.0, "easy 50%", 0.5) for n in sizes)]
    hard = [Case(spec.name, "hard", spec) for spec in (named(n, 1.5, "hard 60%", 0.6) for n in (1024,))]
    small = [Case(spec.name, "small", spec) for spec in (Synthetic("128x128 easy 50%", 128, 128, 1.0, 0.5),)]
    real = [Case(path.stem, path.stem, path) for path in sorted(FIXTURES.glob("*.npz"))]
    few = [small[0], *easy[:2], *(case for case in real if case.name in ("smollm2_0_o_proj", "gemma3_8_gate_proj"))]
    kinds = ({"bounded": True}, {"rhs": True}, {"rhs": True, "bounded": True})
    more = [case.also(**kind) for case in few for kind in kinds]
    return [*few, *more] if processor else [*small, *easy, *hard, *real, *more]
