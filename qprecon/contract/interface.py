"""What the core and a backend hand each other, and what a backend declares of itself.

A backend is one module with ``prepare(system, options) -> solve_chunk`` and one ``Backend`` record. ``prepare`` does the work that
depends on H alone, once; ``solve_chunk`` is then called for any number of chunks of columns.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..arrays.interop import Array


@dataclass(frozen=True, eq=False)
class System:
    """What all columns share: the damped Hessian after normalisation, (N, N), and the ridge that it contains (same scale).

    samples: how many rows X has, if known; the rank of the Hessian without its ridge is at most that.
    """

    hessian_NN: Array
    ridge: float = 0.0
    samples: int | None = None


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some columns of a normalised problem: minimise ΔᵀHΔ − 2gᵀΔ over Δ = ŵ − w, H the system's.

    Attributes:
        weights_NK: dense weights w.
        mask_NK: bool, True = kept; ŵ is 0 elsewhere.
        start_NK: ŵ to start from, feasible.
        residual_NK: g + H(w − start), all N rows (minus half the gradient at the start).
        start_objective_K: f at the start, ΔᵀHΔ − 2gᵀΔ, float64; about 1 for the masked weights.
        improved_K: what was gained on f before this start, float64; zeros on a first call.
        linear_NK: g, or None for zero.
        lower_NK, upper_NK: bounds on kept ŵ, or None.
        tolerance: relative gap wanted: f − f* ≤ tolerance · f* without g, tolerance · (gain since the first start) with it.
        max_iterations: None for the backend's default.
        deadline: ``time.monotonic()`` seconds, or None.
    """

    weights_NK: Array
    mask_NK: Array
    start_NK: Array
    residual_NK: Array
    start_objective_K: Array
    improved_K: Array
    linear_NK: Array | None = None
    lower_NK: Array | None = None
    upper_NK: Array | None = None
    tolerance: float = 1e-4
    max_iterations: int | None = None
    deadline: float | None = None


@dataclass(frozen=True, eq=False)
class RawColumns:
    """A backend's answer: ŵ (N, K); a status word for all columns or one each ("iteration_limit" and "time_limit" are
    understood, any other is only passed on); iterations likewise; extras such as {"compile_seconds": …}, which go to provenance.
    """

    weights_NK: Array
    reported_status: str | np.ndarray = "solved"
    iterations: int | np.ndarray = 0
    extras: dict[str, Any] = field(default_factory=dict)


class SolveChunk(Protocol):
    """What ``prepare`` returns, called for any number of chunks.

    It is kept with the prepared Hessian for later solves. If it learns from chunk to chunk, it has a method ``fresh()`` that
    returns it in its first state and shares the costly parts. Each solve takes a fresh one, so that no answer depends on earlier
    solves.
    """

    def __call__(self, chunk: Chunk) -> RawColumns: ...


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; the core refuses the rest, naming the backends that can.

    Attributes:
        bounds: general lower ≤ ŵ ≤ upper on kept entries, beside the fixed zeros.
        linear: an explicit rhs.
        libraries: array libraries that it computes in; the core converts to the first one unless the data is in another of them.
        devices: device types.
        dtypes: floating dtypes that it computes in. If "auto" gives it columns of another dtype, it uses the last of these.
        scaling: "mean" (H divided by its mean diagonal), "jacobi" (unit diagonal) or "none" (the problem as given, columns too).
        warm_start: makes use of ``Chunk.start_NK``, so that a second call continues the first.

    A backend's ``Options`` may carry ``scaling`` and ``warm_start`` too (None = as declared), for a mode in which it differs.
    """

    bounds: bool = False
    linear: bool = True
    libraries: tuple[str, ...] = ("numpy",)
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32", "float64")
    scaling: str = "jacobi"
    warm_start: bool = False


@dataclass(frozen=True)
class Backend:
    """The record of a backend.

    Attributes:
        name: what ``solve(backend=…)`` takes.
        target: "module" holding ``prepare(system, options)``; optionally ``Options`` (a dataclass; its fields are the backend's
            own options) and ``bytes_per_column(n_inputs, itemsize, options)``.
        summary: one line.
        requires: modules that must be importable.
        extra: the pip extra of qprecon that brings them; "" if none is needed.
        capabilities: see there.
        takes: "module:class" of its options, looked at before the target is imported, where that takes long; "": the target's own.
    """

    name: str
    target: str
    summary: str
    requires: tuple[str, ...] = ()
    extra: str = ""
    capabilities: Capabilities = Capabilities()
    takes: str = ""

    @property
    def installed(self) -> bool:
        """Whether every required module can be found (nothing is imported)."""
        return not self.missing()

    def missing(self) -> list[str]:
        """Required modules that cannot be found."""
        return [name for name in self.requires if importlib.util.find_spec(name) is None]
