"""Preconditioned conjugate gradients on all columns at once: one product H·P advances every column, the mask follows.

Each column is CG on its own H_II. In Δ form: the residual is never formed from Hw − Hŵ.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..interop import Array, cast, namespace, to_numpy
from ..registry import Chunk, RawColumns, SolveChunk, System
from . import _precondition as precondition
from ._product import chosen_precision, product
from ._vectors import vectors

_CHECK_EVERY = 3  # iterations between looks at the error estimate (each look waits for the device)
_DEFAULT_LIMIT = 1000
_SAFETY = 2.0  # the energy error left is about _SAFETY·rᵀC⁻¹r: measured on real layers, see docs/backends.md


@dataclass(frozen=True)
class Options:
    """Options of ``pcg``.

    Attributes:
        preconditioner: "dc" (low rank plus diagonal), "jacobi", or "auto": dc from 256 inputs on.
        rank: r of dc; None chooses it from N.
        power_steps: subspace iterations of its sketch.
        precision: "full", "bf16" (H = FFᵀ + E with E·P in bfloat16; float32 data on CUDA), or "auto".
    """

    preconditioner: str = "auto"
    rank: int | None = None
    power_steps: int = 1
    precision: str = "auto"

    def __post_init__(self) -> None:
        if self.preconditioner not in ("auto", "dc", "jacobi"):
            raise ValueError(f"preconditioner must be 'auto', 'dc' or 'jacobi', got {self.preconditioner!r}")
        if self.precision not in ("auto", "full", "bf16"):
            raise ValueError(f"precision must be 'auto', 'full' or 'bf16', got {self.precision!r}")
        if self.rank is not None and not self.rank >= 1:
            raise ValueError(f"rank must be at least 1, got {self.rank!r}")
        if not self.power_steps >= 0:
            raise ValueError(f"power_steps must not be negative, got {self.power_steps!r}")


def chosen_rank(n_inputs: int, options: Options) -> int:
    """Rank of dc, 0 for Jacobi: the set-up costs about r²/2N products with H, so r grows as √N."""
    if options.preconditioner == "jacobi" or (options.preconditioner == "auto" and n_inputs < 128):
        return 0
    if options.rank is not None:
        return min(options.rank, n_inputs)
    return min(int(2 ** np.round(np.log2(max(2.0 * n_inputs**0.5, 1.0)))), n_inputs)


def bytes_per_column(n_inputs: int, itemsize: int, options: Any) -> float:
    """Six vectors, and r×r numbers for K_j in this dtype and while they are made in float64."""
    rank = chosen_rank(n_inputs, options)
    return 6.0 * n_inputs * itemsize + rank * rank * (2.0 * itemsize + 16.0)


def prepare(system: System, options: Options) -> SolveChunk:
    """Sketch H and choose the product once a layer."""
    rank = chosen_rank(system.hessian_NN.shape[0], options)
    shared = precondition.low_rank(system.hessian_NN, system.ridge, rank, options.power_steps) if rank else None
    factor_Nr = None if shared is None else shared.factor_Nr
    precision = chosen_precision(system.hessian_NN, factor_Nr, options.precision)
    multiply = product(system.hessian_NN, factor_Nr, precision)
    extras = {"preconditioner": f"dc, rank {rank}" if rank else "jacobi", "precision": precision}
    return lambda chunk: _solve(system.hessian_NN, shared, multiply, chunk, extras)


def _solve(
    hessian_NN: Array, shared: precondition.LowRank | None, multiply: Any, chunk: Chunk, extras: dict[str, Any]
) -> RawColumns:
    ops = vectors(chunk.residual_NK, chunk.mask_NK)
    apply = precondition.for_columns(shared, chunk.mask_NK) if shared else precondition.jacobi(hessian_NN)
    state = _State.begin(chunk, ops, apply)
    limit, status = chunk.max_iterations or _DEFAULT_LIMIT, "iteration_limit"
    for iteration in range(1, limit + 1):
        state.step(multiply)
        if iteration % _CHECK_EVERY and iteration != limit:
            continue
        if not state.freeze_finished():
            break
        if chunk.deadline is not None and time.monotonic() >= chunk.deadline:
            status = "time_limit"
            break
    words = np.where(to_numpy(state.active_K), status, "converged").astype(object)
    return RawColumns(chunk.start_NK + state.x_NK, words, to_numpy(state.iterations_K), dict(extras))


@dataclass(eq=False)
class _State:
    """The iterates of the columns; x is the change from the start, r and p are zero on pruned entries."""

    chunk: Chunk
    ops: Any
    precondition: precondition.Preconditioner
    x_NK: Array
    r_NK: Array
    p_NK: Array
    rz_K: Array
    objective_K: Array
    active_K: Array
    iterations_K: Array

    @staticmethod
    def begin(chunk: Chunk, ops: Any, apply: precondition.Preconditioner) -> _State:
        xp = namespace(chunk.residual_NK)
        r_NK = xp.where(chunk.mask_NK, chunk.residual_NK, xp.zeros_like(chunk.residual_NK))
        z_NK, rz_K = apply(r_NK, ops)
        active_K = rz_K > 0
        objective_K, none_K = cast(chunk.start_objective_K, "float64"), cast(active_K, "int64") * 0
        p_NK = z_NK.copy() if xp is np else z_NK.clone()
        return _State(chunk, ops, apply, xp.zeros_like(r_NK), r_NK, p_NK, rz_K, objective_K, active_K, none_K)

    def step(self, multiply: Any) -> None:
        """One iteration of every active column; a finished column's step is zero."""
        q_NK = multiply(self.p_NK, self.ops)
        curvature_K = self.ops.curvature(self.p_NK, q_NK)
        usable_K = self.active_K & (curvature_K > 0)
        alpha_K = _ratio(self.rz_K, curvature_K, usable_K)
        self.ops.advance(self.x_NK, self.r_NK, self.p_NK, q_NK, alpha_K)
        self.objective_K = self.objective_K - alpha_K * self.rz_K
        self.iterations_K = self.iterations_K + usable_K
        z_NK, rz_K = self.precondition(self.r_NK, self.ops)
        self.ops.turn(self.p_NK, z_NK, _ratio(rz_K, self.rz_K, usable_K))
        self.rz_K = rz_K
        self.active_K = usable_K & (rz_K > 0)

    def freeze_finished(self) -> bool:
        """Stop the columns whose estimated gap is small enough; whether any is left."""
        gap_K = _SAFETY * cast(self.rz_K, "float64")
        if self.chunk.linear_NK is None:
            base_K = self.objective_K - gap_K
        else:
            base_K = self.chunk.improved_K + self.chunk.start_objective_K - self.objective_K
        xp = namespace(gap_K)
        floor_K = xp.full_like(base_K, 1e-6)
        self.active_K = self.active_K & (gap_K > self.chunk.tolerance * xp.maximum(base_K, floor_K))
        return bool(self.active_K.any())


def _ratio(a_K: Array, b_K: Array, usable_K: Array) -> Array:
    """a / b where usable, else 0."""
    xp = namespace(a_K)
    return xp.where(usable_K, a_K / xp.where(usable_K, b_K, xp.ones_like(b_K)), xp.zeros_like(a_K))
