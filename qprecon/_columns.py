"""Columns through a backend: chunks that fit in memory, audited rounds, and what is accepted in the end.

A backend's own stopping test only estimates the gap. So a chunk is solved, audited, and the columns whose certified gap is
still too large go on from where they are, with a tolerance tightened by as much as the audit asks for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import registry
from ._chunks import automatic_width, compose, indices_of, out_of_memory, release, slices, width_of, within
from ._start import Start, find_start, surely_better
from .audit import Figures, audit
from .certificate import Certificate
from .errors import BackendBrokenError
from .interface import Chunk, RawColumns, SolveChunk
from .interop import Array, as_given_back, back_to, cast, like, namespace, synchronize, to_library
from .normalise import Scaling
from .problem import ColumnQP
from .status import Status

_ROUNDS = 8  # audited rounds at most; a column's gap must shrink by a fifth for there to be another
_FIRST = 0.25  # of the tolerance is what the first round asks for: an iteration more costs less than a second round
_AUDIT_BYTES = 8 * 10  # the audit's float64 temporaries, per entry of W
_LIMITS = {"iteration_limit": Status.ITERATION_LIMIT, "time_limit": Status.TIME_LIMIT}


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that the columns of a layer share."""

    problem: ColumnQP
    loaded: registry.Loaded
    cert: Certificate
    scaling: Scaling
    solve_chunk: SolveChunk
    dtype: str
    library: str

    def automatic_width(self) -> int:
        """How many columns go to the backend together."""
        n, itemsize = self.problem.n_inputs, 8 if self.dtype == "float64" else 4
        per_column = self.loaded.bytes_per_column(n, itemsize, self.loaded.options) + _AUDIT_BYTES * n
        return automatic_width(self.problem.place, n, self.problem.n_columns, per_column)


@dataclass(frozen=True)
class Limits:
    """When to stop: certified gap, iterations a call of the backend, ``time.monotonic()`` seconds."""

    tol: float
    max_iterations: int | None
    deadline: float | None

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline


@dataclass(eq=False)
class Columns:
    """Results of some columns, filled in as chunks come back; figures as in ``Solution``."""

    weights_NK: Array
    status: np.ndarray
    reported_status: np.ndarray
    iterations: np.ndarray
    objective: np.ndarray
    baseline: np.ndarray
    stationarity: np.ndarray
    violation: np.ndarray
    gap_bound: np.ndarray
    relative_gap: np.ndarray
    fell_back: np.ndarray
    extras: dict[str, Any] = field(default_factory=dict)
    solve_seconds: float = 0.0
    audit_seconds: float = 0.0

    def unfinished(self, tol: float) -> np.ndarray:
        """Indices of the columns that no limit stopped, whose input is sound, and whose certified gap exceeds ``tol``."""
        stopped = np.isin(self.status, np.array([Status.INVALID_INPUT, *_LIMITS.values()], dtype=object))
        return np.flatnonzero(~stopped & ~(self.relative_gap <= tol))


@dataclass(eq=False)
class _Work:
    """A chunk in progress: the best weights so far, their figures, and what the backend said of each column."""

    start: Start
    columns: Any  # index of the chunk in the problem
    weights_NK: Array
    figures: Figures
    gap_K: np.ndarray  # relative
    reported: np.ndarray
    iterations: np.ndarray
    fell_back: np.ndarray
    certified: np.ndarray  # whether the figures hold a certificate: the start's do not
    doubted: np.ndarray  # whether an answer looked better than the start, but by less than H is known to

    @staticmethod
    def begin(setup: Setup, start: Start, columns: Any) -> _Work:
        k = width_of(columns)
        gap_K = start.relative_gap(setup.problem, start.audit)
        no_K = np.zeros(k, dtype=bool)
        words, none_K = np.full(k, "not run", dtype=object), np.zeros(k, dtype=np.int64)
        return _Work(start, columns, start.weights_NK, start.audit, gap_K, words, none_K, no_K, no_K.copy(), no_K.copy())

    def accept(self, setup: Setup, local: np.ndarray, raw: RawColumns, answer_NK: Array) -> None:
        """Audit the answers to the local columns and keep each where it is no worse than what was there."""
        first = self.reported[local] == "not run"
        self.reported[local] = raw.reported_status
        self.iterations[local] += raw.iterations
        columns = compose(self.columns, local, self.weights_NK)
        with _numbers_may_fail():
            fresh = audit(setup.problem, setup.cert, answer_NK, columns)
        start, some = self.start, within(local, self.weights_NK)
        masked, began = start.masked.take(local, some), start.audit.take(local, some)
        with np.errstate(invalid="ignore"):
            lower_K = fresh.value + fresh.rounding < began.value - began.rounding
            higher_K = ~(fresh.value - fresh.rounding <= began.value + began.rounding)
            sure_K = surely_better(setup.problem, setup.cert, answer_NK, fresh, masked, columns)
            better_K = lower_K & sure_K & (fresh.value <= self.figures.value[local])
        self._replace(setup, local, better_K, answer_NK, fresh)
        self.doubted[local] = lower_K & ~sure_K
        self.fell_back[local] = (self.fell_back[local] | first) & ~better_K & (higher_K | self.doubted[local])
        self.certified[local] |= better_K

    def certify_starts(self, setup: Setup, tol: float) -> None:
        """Columns that still are their start, which was audited without a certificate, get theirs."""
        local = np.flatnonzero(~self.certified & (self.gap_K > tol))
        if len(local):
            some_NK = self.weights_NK[:, within(local, self.weights_NK)]
            fresh = audit(setup.problem, setup.cert, some_NK, compose(self.columns, local, self.weights_NK))
            self._replace(setup, local, np.ones(len(local), dtype=bool), some_NK, fresh)

    def _replace(self, setup: Setup, local: np.ndarray, better_K: np.ndarray, answer_NK: Array, fresh: Figures) -> None:
        xp, some = namespace(self.weights_NK), within(local, self.weights_NK)
        mixed_NK = xp.where(like(better_K, answer_NK)[None, :], answer_NK, self.weights_NK[:, some])
        mixed = fresh.where(better_K, self.figures.take(local, some))
        if len(local) == self.weights_NK.shape[1]:
            self.weights_NK, self.figures = mixed_NK, mixed
        else:
            if self.weights_NK is self.start.weights_NK:  # which is compared with again
                self.weights_NK, self.figures = self.weights_NK + 0, self.figures.copy()
            self.weights_NK[:, some] = mixed_NK
            self.figures.put(local, some, mixed)
        self.gap_K = self.start.relative_gap(setup.problem, self.figures)


def _numbers_may_fail() -> np.errstate:
    """A backend may diverge, and numpy would warn of it; that is found by the audit and said in the status."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


def solve_in_chunks(
    setup: Setup, limits: Limits, warm_NK: Array | None, batch_size: int | None
) -> tuple[Columns, dict[str, Any]]:
    """Solve every column; returns the results and notes on what was chosen automatically."""
    problem = setup.problem
    out = _empty_columns(problem, setup.dtype)
    bad_K = problem.invalid_columns()
    out.status[bad_K] = Status.INVALID_INPUT
    size = batch_size or setup.automatic_width()
    notes: dict[str, Any] = {} if batch_size else {"batch_size": size}
    pending = list(slices(np.flatnonzero(~bad_K), size, contiguous=not bad_K.any()))
    while pending:
        columns = pending.pop(0)
        try:
            _solve_chunk(setup, limits, warm_NK, columns, out)
        except Exception as error:
            width = width_of(columns)
            if not out_of_memory(error) or width == 1:
                raise
            release(problem.weights_NK)
            half = (width + 1) // 2
            notes["batch_size"] = f"{half}, halved after running out of memory at {width}"
            pending[:0] = slices(indices_of(columns), half, contiguous=isinstance(columns, slice))
    return out, notes


def improve(setup: Setup, limits: Limits, out: Columns, columns: np.ndarray) -> None:
    """Give some columns to another backend, from where they are; ``out`` keeps the better of both."""
    iterations, fell_back, status = (x[columns].copy() for x in (out.iterations, out.fell_back, out.status))
    for part in slices(np.arange(len(columns)), setup.automatic_width(), contiguous=True):
        _solve_chunk(setup, limits, out.weights_NK, columns[part], out)
    out.iterations[columns] += iterations
    kept_K = out.fell_back[columns] & ~fell_back  # what was there before was no fallback and stays
    out.status[columns[kept_K]] = status[kept_K]
    out.fell_back[columns] &= fell_back


def _solve_chunk(setup: Setup, limits: Limits, warm_NK: Array | None, columns: Any, out: Columns) -> None:
    clock = time.monotonic()
    start = find_start(setup.problem, setup.cert, setup.dtype, warm_NK, columns)
    work = _Work.begin(setup, start, columns)
    clock = _lap(setup, clock, out, "audit_seconds")
    local = np.flatnonzero(work.gap_K > limits.tol)  # the columns of this chunk that are still to be improved
    tolerance = _FIRST * limits.tol
    for round_ in range(_ROUNDS):
        if not len(local):
            break
        if limits.expired:
            work.reported[local] = "time_limit"
            break
        raw, answer_NK = _run(setup, limits, work, local, tolerance)
        clock = _lap(setup, clock, out, "solve_seconds")
        _merge_extras(out.extras, raw.extras)
        before_K = work.gap_K[local]
        work.accept(setup, local, raw, answer_NK)
        clock = _lap(setup, clock, out, "audit_seconds")
        failing_K = work.gap_K[local] > limits.tol
        if not _worth_another(setup, before_K, work.gap_K[local], failing_K, raw, round_):
            break
        local = local[failing_K]
        tolerance *= _tightening(work.gap_K[local], limits.tol)
    work.certify_starts(setup, limits.tol)
    _store(setup, limits, work, out)
    _lap(setup, clock, out, "audit_seconds")


def _tightening(gap_K: np.ndarray, tol: float) -> float:
    """By how much the backend must do better for the failing columns' certified gaps to pass."""
    finite_K = gap_K[np.isfinite(gap_K)]
    ratio = float(np.median(finite_K)) / tol if len(finite_K) else 1e6
    return float(np.clip(0.3 / ratio, 1e-4, 0.3))


def _run(
    setup: Setup, limits: Limits, work: _Work, local: np.ndarray, tolerance: float
) -> tuple[RawColumns, Array]:
    """Hand the local columns to the backend, normalised; returns its answer in the problem's units, feasible."""
    start, weights_NK, figures = work.start, work.weights_NK, work.figures
    problem, some = setup.problem, within(local, weights_NK)
    wanted = compose(work.columns, local, weights_NK)
    scale = setup.scaling.columns(start.energy_K[local])
    lib = lambda x: to_library(x, setup.library)  # noqa: E731
    scaled = lambda x: None if x is None else lib(scale.weights(cast(x[:, wanted], setup.dtype)))  # noqa: E731
    g_NK = problem.linear("float64", wanted)
    chunk = Chunk(
        weights_NK=scaled(problem.weights_NK),
        mask_NK=lib(problem.mask_NK[:, wanted] & True),  # a copy: the rest is made here, the mask may be the caller's own
        start_NK=lib(scale.weights(weights_NK[:, some])),
        residual_NK=lib(scale.residual(cast(figures.rho_NK[:, some], setup.dtype), setup.cert.unit)),
        start_objective_K=lib(scale.objective(like(figures.value[local], weights_NK))),
        improved_K=lib(scale.objective(like(start.masked.value[local] - figures.value[local], weights_NK))),
        linear_NK=None if g_NK is None else lib(cast(scale.linear(g_NK), setup.dtype)),
        lower_NK=scaled(problem.lower_NK),
        upper_NK=scaled(problem.upper_NK),
        tolerance=tolerance,
        max_iterations=limits.max_iterations,
        deadline=limits.deadline,
    )
    with _numbers_may_fail():
        raw = setup.solve_chunk(chunk)
    if not isinstance(raw, RawColumns):
        raise BackendBrokenError(f"backend {setup.loaded.record.name!r} answered with {type(raw).__name__}, not RawColumns")
    if tuple(raw.weights_NK.shape) != tuple(chunk.start_NK.shape):
        raise BackendBrokenError(
            f"backend {setup.loaded.record.name!r} answered with weights of shape {tuple(raw.weights_NK.shape)}, "
            f"not {tuple(chunk.start_NK.shape)}"
        )
    answer_NK = problem.clip(scale.unscale_weights(back_to(raw.weights_NK, weights_NK)), wanted)
    return raw, as_given_back(answer_NK, problem.place)  # what is audited is what is returned


def _worth_another(
    setup: Setup, before_K: np.ndarray, after_K: np.ndarray, failing_K: np.ndarray, raw: RawColumns, round_: int
) -> bool:
    """Another round helps only a backend that continues, was not stopped by a limit, and still makes progress."""
    if not failing_K.any():
        return False
    if not setup.loaded.capabilities.warm_start:
        return False
    if np.isin(np.asarray(raw.reported_status, dtype=object), list(_LIMITS)).all():
        return False
    return round_ == 0 or bool((after_K[failing_K] < 0.8 * before_K[failing_K]).any())


def _store(setup: Setup, limits: Limits, work: _Work, out: Columns) -> None:
    columns, start, figures, gap_K, fell_K = work.columns, work.start, work.figures, work.gap_K, work.fell_back
    reported, iterations, weights_NK = work.reported, work.iterations, work.weights_NK
    status = np.full(len(gap_K), Status.INACCURATE, dtype=object)
    for word, member in _LIMITS.items():
        status[reported == word] = member
    if setup.cert.factor_NN is None:
        status[(status == Status.INACCURATE) & ~(figures.gap_bound < figures.objective)] = Status.UNCERTIFIED
    status[fell_K] = Status.FELL_BACK
    if setup.cert.factor_NN is None:
        status[fell_K & work.doubted] = Status.UNCERTIFIED
    status[gap_K <= limits.tol] = Status.OPTIMAL
    out.weights_NK[:, columns] = weights_NK
    for name, values in (
        ("status", status),
        ("reported_status", reported),
        ("iterations", iterations),
        ("objective", figures.objective),
        ("baseline", start.masked.objective),
        ("stationarity", _relative_stationarity(figures, start)),
        ("violation", figures.violation),
        ("gap_bound", figures.gap_bound),
        ("relative_gap", gap_K),
        ("fell_back", fell_K),
    ):
        getattr(out, name)[columns] = values


def _relative_stationarity(figures: Figures, start: Start) -> np.ndarray:
    scale_K = np.sqrt(np.maximum(start.energy_K, 0.0))
    return np.divide(figures.stationarity, scale_K, out=np.zeros_like(scale_K), where=scale_K > 0)


def _empty_columns(problem: ColumnQP, dtype: str) -> Columns:
    k = problem.n_columns
    real = lambda value: np.full(k, value, dtype=np.float64)  # noqa: E731
    return Columns(
        weights_NK=_masked_copy(problem, dtype),
        status=np.full(k, Status.INACCURATE, dtype=object),
        reported_status=np.full(k, "not run", dtype=object),
        iterations=np.zeros(k, dtype=np.int64),
        objective=real(np.nan),
        baseline=real(np.nan),
        stationarity=real(np.inf),
        violation=real(np.nan),
        gap_bound=real(np.inf),
        relative_gap=real(np.inf),
        fell_back=np.zeros(k, dtype=bool),
    )


def _masked_copy(problem: ColumnQP, dtype: str) -> Array:
    """What an invalid column comes back as: its own kept weights, zeros where pruned."""
    xp = namespace(problem.weights_NK)
    w_NK = cast(problem.weights_NK, dtype)
    return xp.where(problem.mask_NK, w_NK, xp.zeros_like(w_NK))


def _merge_extras(total: dict[str, Any], extras: dict[str, Any]) -> None:
    for key, value in extras.items():
        if key.endswith("_seconds") and key in total:
            total[key] += value
        else:
            total[key] = value


def _lap(setup: Setup, since: float, out: Columns, field_name: str) -> float:
    synchronize(setup.problem.weights_NK)
    now = time.monotonic()
    setattr(out, field_name, getattr(out, field_name) + now - since)
    return now
