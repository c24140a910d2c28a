"""Preconditioned conjugate gradients on all columns at once: one product H·P advances every column, the mask follows.

Each column is CG on its own H_II. In Δ form: the residual is never formed from Hw − Hŵ.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..interop import Array, cast, dtype_name, kind_of, namespace, to_numpy
from ..linalg import column_dots
from ..registry import Chunk, RawColumns, SolveChunk, System
from . import _precondition as precondition

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
    """

    preconditioner: str = "auto"
    rank: int | None = None
    power_steps: int = 1

    def __post_init__(self) -> None:
        if self.preconditioner not in ("auto", "dc", "jacobi"):
            raise ValueError(f"preconditioner must be 'auto', 'dc' or 'jacobi', got {self.preconditioner!r}")
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
    """Sketch H once a layer."""
    rank = chosen_rank(system.hessian_NN.shape[0], options)
    shared = precondition.low_rank(system.hessian_NN, system.ridge, rank, options.power_steps) if rank else None
    return lambda chunk: _solve(system.hessian_NN, shared, chunk)


def _solve(hessian_NN: Array, shared: precondition.LowRank | None, chunk: Chunk) -> RawColumns:
    mask_NK = cast(chunk.mask_NK, dtype_name(hessian_NN))
    apply = precondition.for_columns(shared, mask_NK) if shared else precondition.jacobi(hessian_NN)
    state = _State.begin(chunk, mask_NK, apply)
    limit, status = chunk.max_iterations or _DEFAULT_LIMIT, "iteration_limit"
    for iteration in range(1, limit + 1):
        state.step(hessian_NN)
        if iteration % _CHECK_EVERY and iteration != limit:
            continue
        if not state.freeze_finished():
            status = "converged"
            break
        if chunk.deadline is not None and time.monotonic() >= chunk.deadline:
            status = "time_limit"
            break
    words = np.where(to_numpy(state.active_K), status, "converged").astype(object)
    extras = {"preconditioner": "jacobi" if shared is None else f"dc, rank {shared.factor_Nr.shape[1]}"}
    return RawColumns(chunk.start_NK + state.x_NK, words, to_numpy(state.iterations_K), extras)


@dataclass(eq=False)
class _State:
    """The iterates of the columns; x is the change from the start, r and p are zero on pruned entries."""

    chunk: Chunk
    mask_NK: Array
    precondition: precondition.Preconditioner
    x_NK: Array
    r_NK: Array
    p_NK: Array
    rz_K: Array
    objective_K: Array
    active_K: Array
    iterations_K: Array

    @staticmethod
    def begin(chunk: Chunk, mask_NK: Array, apply: precondition.Preconditioner) -> _State:
        r_NK = chunk.residual_NK * mask_NK
        z_NK = apply.apply(r_NK, mask_NK)
        rz_K = column_dots(r_NK, z_NK)
        active_K = rz_K > 0
        xp = namespace(r_NK)
        zeros = xp.zeros_like(r_NK)
        return _State(
            chunk, mask_NK, apply, zeros, r_NK, z_NK, rz_K, cast(chunk.start_objective_K, "float64"), active_K,
            cast(active_K, "int64") * 0,
        )  # fmt: skip

    def step(self, hessian_NN: Array) -> None:
        """One iteration of every active column; a finished column's step is zero."""
        xp = namespace(self.r_NK)
        q_NK = hessian_NN @ self.p_NK
        q_NK *= self.mask_NK
        curvature_K = column_dots(self.p_NK, q_NK)
        usable_K = self.active_K & (curvature_K > 0)
        zero_K = xp.zeros_like(curvature_K)
        alpha_K = xp.where(usable_K, self.rz_K / xp.where(usable_K, curvature_K, curvature_K * 0 + 1), zero_K)
        _add_scaled(self.x_NK, self.p_NK, alpha_K)
        _add_scaled(self.r_NK, q_NK, -alpha_K)
        self.objective_K = self.objective_K - cast(alpha_K * self.rz_K, "float64")
        self.iterations_K = self.iterations_K + cast(usable_K, "int64")
        z_NK = self.precondition.apply(self.r_NK, self.mask_NK)
        rz_K = column_dots(self.r_NK, z_NK)
        beta_K = xp.where(usable_K, rz_K / xp.where(usable_K, self.rz_K, rz_K * 0 + 1), zero_K)
        self.p_NK *= beta_K[None, :]
        self.p_NK += z_NK
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


def _add_scaled(x_NK: Array, y_NK: Array, scale_K: Array) -> None:
    """x += y·scale in place."""
    if kind_of(x_NK) == "torch":
        x_NK.addcmul_(y_NK, scale_K[None, :])
    else:
        x_NK += y_NK * scale_K[None, :]
