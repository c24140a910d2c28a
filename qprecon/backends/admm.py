"""ADMM (Boyd et al. 2011, chapter 5) on all columns at once, with one inverse (H + ρI)⁻¹ shared by them.

In x = ŵ − start, with C the box (a pruned entry is fixed at 0) and r the residual at the start:

    x ← (H + ρI)⁻¹(r + ρ(z − u)),   z ← proj_C(αx + (1 − α)z + u),   u ← u + αx + (1 − α)z_old − z

One product with an N×N matrix an iteration, whatever the masks and bounds. z is the answer: always feasible. After Jacobi scaling
ρ = 0.1 is near the best one on most problems (30 to 480 iterations to 1e-4 on all but one of backends_cpu.json); where it is far
off it is balanced between the residuals, at the price of a new inverse. The stopping test is the audit's own duality gap with a
factor of H, so that one round mostly does.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.interop import Array, cast, dtype_name, like, namespace, to_numpy
from ..arrays.linalg import add_to_diagonal, cholesky, column_dots, identity, solve_lower
from ..contract.interface import Chunk, RawColumns, SolveChunk, System

_ITERATION_LIMIT = 5000
_LARGEST_RHO = 1e12
_EVERY = 10  # iterations between two checks: each costs a product, a triangular solve and, on a GPU, a wait
_PATIENCE = 100  # float32 iterations without progress: rounding rules then, and the core's next round computes the residual anew
_FLOOR = 1e-6  # as in the audit: gaps are not measured relative to less than this share of the start's objective


@dataclass(frozen=True)
class Options:
    """Own options.

    Attributes:
        rho: first penalty, in units of H's scaled diagonal (1).
        relaxation: α, 1 to 1.9.
        adapt: balance ρ between the primal and the dual residual.
    """

    rho: float = 0.1
    relaxation: float = 1.6
    adapt: bool = True

    def __post_init__(self) -> None:
        if not self.rho > 0.0:
            raise ValueError(f"rho must be positive, got {self.rho!r}")
        if not 1.0 <= self.relaxation < 2.0:
            raise ValueError(f"relaxation must lie in [1, 2), got {self.relaxation!r}")


def prepare(system: System, options: Options) -> SolveChunk:
    """Factorise H once for the stopping test and H + ρI for the iteration."""
    return _SolveChunk(_Shared(system.hessian_NN, options.rho), options)


def bytes_per_column(n_inputs: int, itemsize: int, options: Any) -> float:
    """The chunk, the state (six arrays) and temporaries."""
    return 24.0 * n_inputs * itemsize


class _Shared:
    """H, a factor of it for the gap, and (H + ρI)⁻¹."""

    def __init__(self, hessian_NN: Array, rho: float) -> None:
        self.hessian_NN = hessian_NN
        eps = np.finfo(dtype_name(hessian_NN)).eps
        shifts = (eps * hessian_NN.shape[0] * 10.0**power for power in range(0, 12, 2))  # the first that makes H definite
        factors = (cholesky(add_to_diagonal(hessian_NN, shift)) for shift in shifts)
        self.factor_NN = next((factor for factor in factors if factor is not None), None)
        self.set_rho(rho)

    def set_rho(self, rho: float) -> None:
        """Change ρ: a Cholesky factorisation and an inverse. ρ is raised where H + ρI is not positive definite."""
        factor_NN = cholesky(add_to_diagonal(self.hessian_NN, rho))
        while factor_NN is None:
            rho *= 10.0
            if not rho < _LARGEST_RHO:
                raise ValueError("H holds no finite numbers in the units of the solver")
            factor_NN = cholesky(add_to_diagonal(self.hessian_NN, rho))
        half_NN = solve_lower(factor_NN, identity(len(factor_NN), factor_NN))
        self.rho, self.inverse_NN = rho, half_NN.T @ half_NN


@dataclass(frozen=True, eq=False)
class _SolveChunk:
    """ρ and its inverse go from chunk to chunk of a solve, not from solve to solve."""

    shared: _Shared
    options: Options

    def __call__(self, chunk: Chunk) -> RawColumns:
        return _solve(self.shared, chunk, self.options)

    def fresh(self) -> _SolveChunk:
        """One with the first ρ, for another solve; a change of ρ replaces the inverse and leaves the old one as it is."""
        return _SolveChunk(copy.copy(self.shared), self.options)


@dataclass(eq=False)
class _State:
    """Iterates and data of the columns still running."""

    z_NK: Array
    u_NK: Array
    residual_NK: Array  # at the start
    lower_NK: Array
    upper_NK: Array
    start_K: Array  # objective that the gap is relative to, at the start
    gain: bool  # whether it is relative to the gain instead (an explicit rhs)

    def take(self, index: Array) -> _State:
        """Only some of the columns."""
        arrays = (self.z_NK, self.u_NK, self.residual_NK, self.lower_NK, self.upper_NK)
        return _State(*(x[:, index] for x in arrays), self.start_K[index], self.gain)


def _solve(shared: _Shared, chunk: Chunk, options: Options) -> RawColumns:
    k, state = chunk.start_NK.shape[1], _start(shared, chunk)
    out_NK = state.z_NK * 0.0
    status, iterations, running = np.full(k, "solved", dtype=object), np.zeros(k, dtype=np.int64), np.arange(k)
    limit, next_balance, done, best, best_at = chunk.max_iterations or _ITERATION_LIMIT, _EVERY, 0, np.inf, 0
    patience = _PATIENCE if dtype_name(out_NK) == "float32" else limit
    while len(running):
        expired = chunk.deadline is not None and time.monotonic() >= chunk.deadline
        stalled = done - best_at > patience
        if expired or done >= limit or stalled:
            status[running] = "time_limit" if expired else "stalled" if stalled else "iteration_limit"
            out_NK[:, like(running, out_NK)] = state.z_NK
            break
        steps = min(_EVERY, limit - done)
        x_NK, before_NK = _iterate(shared, state, steps, options.relaxation)
        done += steps
        iterations[running] = done
        excess_K = to_numpy(_excess(shared, state, chunk.tolerance))
        met_K, worst = excess_K <= 1.0, float(excess_K.max())
        if worst < 0.9 * best:
            best, best_at = worst, done
        if met_K.all() or met_K.sum() * 2 > len(met_K):
            finished, left = np.flatnonzero(met_K), np.flatnonzero(~met_K)
            out_NK[:, like(running[finished], out_NK)] = state.z_NK[:, like(finished, out_NK)]
            x_NK, before_NK = x_NK[:, like(left, x_NK)], before_NK[:, like(left, x_NK)]
            state, running = state.take(like(left, out_NK)), running[left]
        if options.adapt and len(running) and done >= next_balance:
            next_balance *= 2
            _balance(shared, state, x_NK, before_NK)
    return RawColumns(chunk.start_NK + out_NK, status, iterations, {"rho": shared.rho})


def _start(shared: _Shared, chunk: Chunk) -> _State:
    """z = 0; ρu, the multiplier, is the residual where that pushes against a bound that the start is at (pruned: always)."""
    xp, r_NK = namespace(chunk.start_NK), chunk.residual_NK
    zero_NK = xp.zeros_like(r_NK)
    bounds = []
    for bound_NK, infinite in ((chunk.lower_NK, -np.inf), (chunk.upper_NK, np.inf)):
        free_NK = xp.full_like(r_NK, infinite) if bound_NK is None else bound_NK - chunk.start_NK
        bounds.append(xp.where(chunk.mask_NK, free_NK, zero_NK))
    held_NK = ((bounds[0] >= 0) & (r_NK < 0)) | ((bounds[1] <= 0) & (r_NK > 0))
    value_K = chunk.start_objective_K if chunk.linear_NK is None else chunk.improved_K
    u_NK = xp.where(held_NK, r_NK / shared.rho, zero_NK)
    return _State(zero_NK, u_NK, r_NK, *bounds, cast(value_K, dtype_name(r_NK)), chunk.linear_NK is not None)


def _iterate(shared: _Shared, state: _State, steps: int, relaxation: float) -> tuple[Array, Array]:
    """Some steps without looking; returns the last x and the z before it."""
    xp, x_NK, before_NK = namespace(state.z_NK), state.z_NK, state.z_NK
    for _ in range(steps):
        x_NK = shared.inverse_NN @ (state.residual_NK + shared.rho * (state.z_NK - state.u_NK))
        before_NK, moved_NK = state.z_NK, relaxation * x_NK + (1.0 - relaxation) * state.z_NK + state.u_NK
        state.z_NK = xp.minimum(xp.maximum(moved_NK, state.lower_NK), state.upper_NK)
        state.u_NK = moved_NK - state.z_NK
    return x_NK, before_NK


def _excess(shared: _Shared, state: _State, tolerance: float) -> Array:
    """The duality gap at z, ‖L⁻¹s‖² with s the residual that no bound holds, in units of the one allowed, (K,)."""
    xp, z_NK = namespace(state.z_NK), state.z_NK
    s_NK = state.residual_NK - shared.hessian_NN @ z_NK
    gain_K = column_dots(z_NK, state.residual_NK + s_NK)
    held_NK = ((z_NK <= state.lower_NK) & (s_NK <= 0)) | ((z_NK >= state.upper_NK) & (s_NK >= 0))
    held_NK = held_NK | (state.lower_NK == state.upper_NK)
    free_NK = xp.where(held_NK, xp.zeros_like(s_NK), s_NK)
    solved_NK = free_NK if shared.factor_NN is None else solve_lower(shared.factor_NN, free_NK)
    gap_K = column_dots(solved_NK, solved_NK)
    base_K = state.start_K + gain_K if state.gain else state.start_K - gain_K - gap_K
    return gap_K / (tolerance * xp.maximum(base_K, xp.full_like(base_K, _FLOOR)))


def _balance(shared: _Shared, state: _State, x_NK: Array, before_NK: Array) -> None:
    """Change ρ by the root of the ratio of relative residuals, the median over columns, where that is worth a factorisation."""
    norm = lambda a_NK: to_numpy(column_dots(a_NK, a_NK)) ** 0.5  # noqa: E731
    primal_K = norm(x_NK - state.z_NK) / np.maximum(np.maximum(norm(x_NK), norm(state.z_NK)), 1e-30)
    dual_K = norm(state.z_NK - before_NK) / np.maximum(norm(state.u_NK), 1e-30)
    usable_K = (primal_K > 0) & (dual_K > 0) & np.isfinite(primal_K) & np.isfinite(dual_K)
    if not usable_K.any():
        return
    factor = float(np.sqrt(np.median(primal_K[usable_K] / dual_K[usable_K])))
    rho = float(np.clip(shared.rho * factor, 1e-4, 1e4))
    if 0.5 <= rho / shared.rho <= 2.0:
        return
    state.u_NK = state.u_NK * (shared.rho / rho)
    shared.set_rho(rho)
