"""Preconditioned conjugate gradients on all columns at once: one product H·P advances every column, the mask follows.

Each column is CG on its own H_II. In Δ form: the residual is never formed from Hw − Hŵ.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.interop import Array, cast, device_type, dtype_name, like, namespace
from ..arrays.linalg import column_dots
from ..contract.interface import Chunk, RawColumns, SolveChunk, System
from ._pcg import precondition as precondition
from ._pcg import samples as sample_space
from ._pcg.factor import Factor, FactorInHalves
from ._pcg.looks import Looks
from ._pcg.product import Full, Narrow, chosen_precision, product
from ._pcg.recorded import recorded
from ._pcg.state import State, leave_finished
from ._pcg.vectors import vectors

_LOOK_AFTER = {"cpu": 1, "cuda": 3}  # iterations at most: a look waits for the device, and on a GPU costs as much as some launches
_DEFAULT_LIMIT = 1000
_ALIGNMENT = 64  # columns
_LOW_REACHES, _FULL_UP_TO = 2.5e-6, 2048
"""A smaller tolerance may take the float16 product a second round, from a new residual. Up to so many inputs, where an iteration is
mostly launches, the full product gets there in one: 18 iterations at 1024 inputs and tol=1e-6 (an H200, backends_gpu.json)."""
_FULL_WORK = 2.0**30
"""N²K up to which the full product is taken whatever the tolerance: float32 takes no longer than the launches for the halves. On an
H200 all iterations at 1024 x 1024 took 7 ms so, and 14 with the pieces of then (layer_phases_tried.json)."""
_FEW, _FEW_LEFT = 64, "few left"
"""When so few columns are left for a second time, they go on alone: a wide iteration costs the same for all, and the columns that
take long are as a rule those that rounding holds up. Waiting for them in halves, without the others, gains nothing:
docs/performance.md, "What was tried"."""
_RECORDED_LATE = 10
"""The iteration of a few columns that is recorded: recording takes the host as long as starting ten, and these are as a rule left
over from an earlier round and done in six. Beside many columns the GPU is still busy with what came before."""
_LEFT_ALONE = {"cpu": (0.5, 0, 1), "cuda": (0.25, 2**24, 2)}
"""Once this share of the columns of a chunk of so many numbers goes on, for so many iterations more by what was seen, it does so
without the others. On a GPU a few columns are copied in less than an iteration, and small iterations wait for their launches
anyway."""
_WITH_THE_LAST = 3  # iterations that the others wait for these: most of them are done by then
_PATIENCE = 60  # iterations in halves without progress of the worst column: its residual is to be made anew


@dataclass(frozen=True)
class Options:
    """Options of ``pcg``.

    Attributes:
        preconditioner: "dc" (low rank plus diagonal), "jacobi", or "auto": dc from 128 inputs on; in the space of the samples
            (`_pcg/samples.py`) where H is known to have few of them.
        rank: r of dc; None chooses it from N and the device.
        power_steps: subspace iterations of its sketch.
        precision: "full", "fp16" (H = FFᵀ + E with E·P in float16; float32 data on CUDA), or "auto".
    """

    preconditioner: str = "auto"
    rank: int | None = None
    power_steps: int = 3
    precision: str = "auto"

    def __post_init__(self) -> None:
        if self.preconditioner not in ("auto", "dc", "jacobi"):
            raise ValueError(f"preconditioner must be 'auto', 'dc' or 'jacobi', got {self.preconditioner!r}")
        if self.precision not in ("auto", "full", "fp16"):
            raise ValueError(f"precision must be 'auto', 'full' or 'fp16', got {self.precision!r}")
        if self.rank is not None and not self.rank >= 1:
            raise ValueError(f"rank must be at least 1, got {self.rank!r}")
        if not self.power_steps >= 0:
            raise ValueError(f"power_steps must not be negative, got {self.power_steps!r}")


def chosen_rank(n_inputs: int, options: Options, device: str = "cuda") -> int:
    """Rank of dc, 0 for Jacobi: the set-up costs about r²/2N products with H, so r grows as √N.

    On a GPU the nearest power of two to 1.25·√N: by trial, layers of 576 to 14336 inputs.
    """
    if options.preconditioner == "jacobi" or (options.preconditioner == "auto" and n_inputs < 128):
        return 0
    if options.rank is not None:
        return min(options.rank, n_inputs)
    if device == "cpu":
        return min(max(16 * round(1.25 * n_inputs**0.5 / 16), 16), n_inputs)
    return min(int(2 ** np.round(np.log2(max(1.25 * n_inputs**0.5, 1.0)))), n_inputs)


def bytes_per_column(n_inputs: int, itemsize: int, options: Any) -> float:
    """Six vectors, and r×r numbers for K_j in this dtype and while they are made in float64."""
    rank = chosen_rank(n_inputs, options)
    return 6.0 * n_inputs * itemsize + rank * rank * (2.0 * itemsize + 16.0)


def prepare(system: System, options: Options) -> SolveChunk:
    """Sketch H and choose the product once a layer."""
    rank = chosen_rank(system.hessian_NN.shape[0], options, device_type(system.hessian_NN))
    shared = precondition.low_rank(system.hessian_NN, system.ridge, rank, options.power_steps) if rank else None
    factor_Nr = None if shared is None else shared.factor_Nr
    usual = chosen_precision(system.hessian_NN, factor_Nr, options.precision)
    multiplying = functools.cache(lambda precision: product(system.hessian_NN, factor_Nr, precision))
    few = system.samples if options.preconditioner == "auto" and options.rank is None else None
    space = functools.cache(lambda: sample_space.SampleSpace.of(system.hessian_NN, system.ridge, few))

    def solve_chunk(chunk: Chunk) -> RawColumns:
        precision = usual if options.precision != "auto" or not _full_is_quicker(*chunk.start_NK.shape, chunk.tolerance) else "full"
        extras = {"preconditioner": f"dc, rank {rank}" if rank else "jacobi", "precision": precision}
        if not chunk.start_NK.shape[0] or not chunk.start_NK.shape[1]:
            return RawColumns(chunk.start_NK, "converged", 0, dict(extras))
        if chunk.linear_NK is None and sample_space.fits(few, chunk.mask_NK, system.ridge) and space() is not None:
            found = sample_space.solve(system.hessian_NN, space(), chunk)
            if found is not None and found.reported_status != sample_space.STALLED:
                return found
        multiply, tall = multiplying(precision), FactorInHalves if precision == "fp16" else Factor
        columns, chunk = chunk.start_NK.shape[1], _padded(chunk)
        apply = precondition.for_columns(shared, chunk.mask_NK, tall) if shared else precondition.jacobi(system.hessian_NN)
        raw = _solve(multiply, apply, chunk, extras)
        if shared:
            raw = _again(system.hessian_NN, shared, chunk, raw, (_FEW_LEFT, "breakdown"), "few_columns")
            raw = _again(system.hessian_NN, shared, chunk, raw, ("breakdown",), "jacobi_columns")
        return RawColumns(raw.weights_NK[:, :columns], _words(raw, columns), raw.iterations[:columns], raw.extras)

    return solve_chunk


def _full_is_quicker(n: int, k: int, tolerance: float) -> bool:
    """On a GPU, than the product in halves. A few columns are as a rule left for another round, which asks for more digits."""
    return n * n * k <= _FULL_WORK or k <= _ALIGNMENT or (tolerance < _LOW_REACHES and n <= _FULL_UP_TO)


def _padded(chunk: Chunk) -> Chunk:
    """On a GPU, the chunk with empty columns up to a multiple of 64: an odd width costs the tensor cores half their speed or worse,
    and kernels their compilation."""
    more = -chunk.start_NK.shape[1] % _ALIGNMENT
    if device_type(chunk.start_NK) != "cuda" or not more:
        return chunk
    pad = lambda x: None if x is None else namespace(x).nn.functional.pad(x, (0, more))  # noqa: E731
    fields = ("weights_NK", "mask_NK", "start_NK", "residual_NK", "start_objective_K", "improved_K", "linear_NK")
    return replace(chunk, **{name: pad(getattr(chunk, name)) for name in fields})


def _again(
    hessian_NN: Array, shared: precondition.LowRank, chunk: Chunk, raw: RawColumns, words: tuple[str, ...], kind: str
) -> RawColumns:
    """The columns with these words go on alone, with the full product and from a residual made anew by it.

    "few_columns": in float64 but for the product, if they are few indeed and in float32; many only after the product in halves.
    "jacobi_columns": with the diagonal alone for a preconditioner, which is positive whatever the rounding.
    """
    if isinstance(raw.reported_status, str):
        return raw
    chosen_K = np.logical_or.reduce([raw.reported_status == word for word in words])
    if chunk.max_iterations is not None:
        chosen_K &= raw.iterations < chunk.max_iterations
    chosen = np.flatnonzero(chosen_K)
    jacobi = kind == "jacobi_columns"
    wide = not jacobi and len(chosen) <= _FEW and dtype_name(chunk.start_NK) == "float32"
    if not len(chosen) or not (jacobi or wide or raw.extras["precision"] == "fp16"):
        return raw
    most = None if chunk.max_iterations is None else chunk.max_iterations - int(raw.iterations[chosen].max())
    at = like(chosen, hessian_NN)
    step_NK = raw.weights_NK[:, at] - chunk.start_NK[:, at]
    rest_NK = chunk.residual_NK[:, at] - hessian_NN @ step_NK
    gained_K = column_dots(step_NK, chunk.residual_NK[:, at] + rest_NK)
    fit = lambda x: cast(x, "float64") if wide else x  # noqa: E731
    part = Chunk(
        chunk.weights_NK[:, at], chunk.mask_NK[:, at], fit(raw.weights_NK[:, at]), fit(rest_NK),
        fit(chunk.start_objective_K[at] - gained_K), fit(chunk.improved_K[at] + gained_K),
        None if chunk.linear_NK is None else chunk.linear_NK[:, at],
        tolerance=chunk.tolerance, max_iterations=most, deadline=chunk.deadline,
    )  # fmt: skip
    if wide:
        more = _solve(Narrow(hessian_NN), precondition.for_few_columns(shared, part.mask_NK), part, {})
    else:
        part = _padded(part)
        apply = precondition.jacobi(hessian_NN) if jacobi else precondition.for_columns(shared, part.mask_NK)
        more = _solve(Full(hessian_NN), apply, part, {})
    raw.weights_NK[:, at] = cast(more.weights_NK[:, : len(chosen)], dtype_name(raw.weights_NK))
    raw.reported_status[chosen] = _words(more, len(chosen))
    raw.iterations[chosen] += more.iterations[: len(chosen)]
    return RawColumns(raw.weights_NK, raw.reported_status, raw.iterations, {**raw.extras, kind: len(chosen)})


def _words(raw: RawColumns, count: int) -> str | np.ndarray:
    """What is said of the first columns."""
    return raw.reported_status if isinstance(raw.reported_status, str) else raw.reported_status[:count]


def _solve(multiply: Any, apply: precondition.Preconditioner, chunk: Chunk, extras: dict[str, Any]) -> RawColumns:
    ops = vectors(chunk.residual_NK, chunk.mask_NK, multiply, apply)
    device, columns = device_type(chunk.residual_NK), chunk.start_NK.shape[1]
    state, out, looks = State.begin(chunk, ops), None, Looks(_LOOK_AFTER[device], _FEW)
    limit, status = chunk.max_iterations or _DEFAULT_LIMIT, "iteration_limit"
    step, first_recorded = state.step, 2 if columns > _FEW else _RECORDED_LATE
    share, least, ahead = _LEFT_ALONE[device]
    for iteration in range(1, limit + 1):
        if iteration == first_recorded and ops.takes_no_memory:
            step = recorded(step, state.x_NK)
        step()
        if iteration < looks.next and iteration != limit:
            continue
        seen = state.look()
        looks.note(iteration, seen.worst, seen.left)
        if not looks.left:
            break
        if ops.is_rough and iteration - looks.better_at >= _PATIENCE:
            status = "stalled"
            break
        if ops.is_rough and columns > 2 * _FEW and looks.few_for >= _WITH_THE_LAST and iteration != limit:
            status = _FEW_LEFT
            break
        if chunk.deadline is not None and time.monotonic() >= chunk.deadline:
            status = "time_limit"
            break
        n, width = state.x_NK.shape
        if looks.left <= share * width and n * width >= least and looks.next - iteration >= ahead:
            out, state = leave_finished(out, state, 1 if device == "cpu" else _ALIGNMENT)
            step, first_recorded = state.step, iteration + _RECORDED_LATE
    if out is None:
        return RawColumns(chunk.start_NK + state.x_NK, *state.report(status), dict(extras))
    out.put(state, status)
    return RawColumns(chunk.start_NK + out.x_NK, out.words, out.iterations, dict(extras))
