"""Columns through a backend: chunks that fit in memory, and audited rounds.

A backend's own stopping test only estimates the gap. So a chunk is solved, audited, and the columns whose certified gap is
still too large go on from where they are, with a tolerance tightened by as much as the audit asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays.chunks import compose, indices_of, slices, width_of, within
from ..arrays.interop import Array, as_given_back, back_to, cast, like, moment, seconds_between, to_library
from ..arrays.linalg import masked
from ..arrays.memory import automatic_width, out_of_memory, release
from ..contract.answers import checked_bytes
from ..contract.interface import Chunk, RawColumns
from ..problem.column_qp import ColumnQP
from ..proof.factor import Certificate
from ..proof.starting_point import Start, check_squared_error, start_begun
from ..status import Status
from .in_progress import InProgress, numbers_may_fail
from .results import LIMITS, Results
from .shared import BackendSetup

_ROUNDS = 8  # audited rounds at most
_IN_VAIN = 2
"""Rounds in a row that bring no column nearer, after which there is none. A certificate may become worse as f becomes better, and
where the backend's estimate is far off, the next tolerance is too."""
_FIRST = 0.25  # of the tolerance is what the first round asks for: an iteration more costs less than a second round
_AUDIT_BYTES = 8 * 10  # the audit's float64 temporaries, per entry of W


@dataclass(frozen=True, eq=False)
class Task:
    """A problem, what is proved of its H, and a backend that was set up for it."""

    problem: ColumnQP
    cert: Certificate
    backend: BackendSetup

    def automatic_width(self) -> int:
        """How many columns go to the backend together."""
        loaded, n = self.backend.loaded, self.problem.n_inputs
        itemsize = 8 if self.backend.dtype == "float64" else 4
        own = checked_bytes(loaded.record.name, loaded.bytes_per_column, n, itemsize, loaded.options)
        return automatic_width(self.problem.place, n, self.problem.n_columns, own + _AUDIT_BYTES * n)


@dataclass(frozen=True)
class Limits:
    """When to stop: certified gap, iterations of a column, ``time.monotonic()`` seconds."""

    tol: float
    max_iterations: int | None
    deadline: float | None

    def left(self, used_K: np.ndarray) -> int | None:
        """Iterations that columns have which took so many already."""
        return None if self.max_iterations is None else self.max_iterations - int(used_K.max(initial=0))

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline


@dataclass(eq=False)
class Ahead:
    """The start of the chunk that comes next: the device finds it while the host reads the audit of the one before.

    Attributes:
        columns, begun: of which chunk it is, and what gives it; None where none is begun.
    """

    task: Task
    warm_NK: Array | None
    columns: Any = None
    begun: Callable[[], Start] | None = None

    def begin(self, columns: Any) -> None:
        """Begin the start of these columns, if there is room for it."""
        try:
            self.begun, self.columns = self._begun(columns), columns
        except Exception as error:
            if not out_of_memory(error):
                raise

    def start_of(self, columns: Any) -> Start:
        """The start of these columns."""
        begun, self.begun = self.begun if columns is self.columns else None, None
        return (begun or self._begun(columns))()

    def _begun(self, columns: Any) -> Callable[[], Start]:
        return start_begun(self.task.problem, self.task.cert, self.task.backend.dtype, self.warm_NK, columns)


@dataclass(eq=False)
class Outcome:
    """Results of all columns; what was chosen automatically and what backends said besides; from when to when what was done."""

    results: Results
    automatic: dict[str, Any] = field(default_factory=dict)
    laps: list[tuple[str, Any, Any]] = field(default_factory=list)

    def add_extras(self, extras: dict[str, Any]) -> None:
        """What a backend said in one call: seconds add up, of anything else the last word counts."""
        for key, value in extras.items():
            self.automatic[key] = self.automatic[key] + value if key.endswith("_seconds") and key in self.automatic else value

    def lap(self, since: Any, name: str) -> Any:
        """``name`` was done from then until now, on the device of the results; returns the moment."""
        now = moment(self.results.weights_NK)
        self.laps.append((name, since, now))
        return now

    def seconds(self, name: str) -> float:
        """What was done under that name took."""
        return sum(seconds_between(since, until) for done, since, until in self.laps if done == name)


def solve_in_chunks(task: Task, limits: Limits, warm_NK: Array | None, batch_size: int | None) -> Outcome:
    """Solve every column, ``batch_size`` at a time or as many as memory allows."""
    problem = task.problem
    # an invalid column comes back as its own kept weights, zeros where pruned
    out = Outcome(Results.empty(masked(cast(problem.weights_NK, task.backend.dtype), problem.mask_NK)))
    bad_K = problem.invalid_columns()
    out.results.status[bad_K] = Status.INVALID_INPUT
    size = batch_size or task.automatic_width()
    if not batch_size:
        out.automatic["batch_size"] = size
    pending = list(slices(np.flatnonzero(~bad_K), size, contiguous=not bad_K.any()))
    ahead = Ahead(task, warm_NK)
    while pending:
        columns = pending.pop(0)
        try:
            _solve_chunk(task, limits, ahead, columns, out, pending[0] if pending else None)
            continue
        except Exception as error:
            if not out_of_memory(error) or width_of(columns) == 1:
                raise
        # Outside of the handler: the exception holds every array of the frames that it came through.
        ahead = Ahead(task, warm_NK)
        release(problem.weights_NK)
        half = (width_of(columns) + 1) // 2
        out.automatic["batch_size"] = f"{half}, halved after running out of memory at {width_of(columns)}"
        pending[:0] = slices(indices_of(columns), half, contiguous=isinstance(columns, slice))
    return out


def solve_again(task: Task, limits: Limits, out: Outcome, columns: np.ndarray, warm_NK: Array | None) -> None:
    """Solve some columns once more, perhaps with another backend, and put what comes of it in ``out``: from the warm start
    ``out.results.weights_NK`` that is the better of both answers, from None whatever the new one is."""
    results = out.results
    iterations, fell_back, status = (x[columns].copy() for x in (results.iterations, results.fell_back, results.status))
    for part in slices(np.arange(len(columns)), task.automatic_width(), contiguous=True):
        _solve_chunk(task, limits, Ahead(task, warm_NK), columns[part], out)
    results.iterations[columns] += iterations
    kept_K = results.fell_back[columns] & ~fell_back  # what was there before was no fallback and stays
    results.status[columns[kept_K]] = status[kept_K]
    results.fell_back[columns] &= fell_back


def _solve_chunk(task: Task, limits: Limits, ahead: Ahead, columns: Any, out: Outcome, following: Any = None) -> None:
    """Solve some columns. following: those that come next, None where none do."""
    problem, clock = task.problem, moment(out.results.weights_NK)
    start = ahead.start_of(columns)
    chunk = InProgress.begin(problem, task.cert, start, columns)
    tolerance, in_vain, goes_on = _FIRST * limits.tol, 0, task.backend.loaded.capabilities.warm_start
    if goes_on:  # a direct method gives an answer with all digits, and in any case takes no iterations
        chunk.certify_optimal_starts(tolerance)
    clock = out.lap(clock, "audit")
    local = np.flatnonzero(chunk.results.relative_gap > limits.tol)  # the columns of this chunk that are still to be improved
    for round_ in range(_ROUNDS):
        local = _within_limits(limits, chunk.results, local)
        if not len(local):
            break
        raw, answer_NK = _run(task, limits, chunk, local, tolerance)
        clock = out.lap(clock, "solve")
        out.add_extras(raw.extras)
        before = chunk.results.relative_gap[local], chunk.figures.value[local]
        arrives = chunk.audit_begun(local, answer_NK)
        if round_ == 0 and following is not None:
            ahead.begin(following)
        chunk.accept(local, raw, answer_NK, arrives())
        clock = out.lap(clock, "audit")
        failing_K = _failing(chunk.results, local, limits.tol)
        in_vain = 0 if round_ == 0 or _nearer(chunk, local, before, limits.tol)[failing_K].any() else in_vain + 1
        local = local[failing_K]
        if not len(local) or not goes_on or in_vain == _IN_VAIN:
            break
        tolerance *= _tightening(chunk.results.relative_gap[local], limits.tol)
    chunk.certify_starts(limits.tol)
    check_squared_error(task.cert, start, chunk.figures, columns)
    out.results.put(columns, chunk.finish(limits.tol))
    out.lap(clock, "audit")


def _within_limits(limits: Limits, results: Results, local: np.ndarray) -> np.ndarray:
    """Those of the local columns that may go on; the others are said to have met a limit."""
    if limits.expired:
        results.reported_status[local] = "time_limit"
        return local[:0]
    if limits.max_iterations is None:
        return local
    spent_K = results.iterations[local] >= limits.max_iterations
    results.reported_status[local[spent_K]] = "iteration_limit"
    return local[~spent_K]


def _failing(results: Results, local: np.ndarray, tol: float) -> np.ndarray:
    """(K,) which of the local columns are to go on: their gaps are too large, and no limit stopped them."""
    failing_K = results.relative_gap[local] > tol
    left = np.flatnonzero(failing_K)  # as a rule few or none: words are compared one by one
    failing_K[left] = [word not in LIMITS for word in results.reported_status[local[left]]]
    return failing_K


def _nearer(chunk: InProgress, local: np.ndarray, before: tuple[np.ndarray, np.ndarray], tol: float) -> np.ndarray:
    """(K,) whether a round lowered a column's certified gap by a fifth, or f by a tenth of the tolerance."""
    gap_K, value_K = before
    after_K = chunk.results.relative_gap[local]
    with np.errstate(invalid="ignore", divide="ignore"):
        unit_K = chunk.figures.gap_bound[local] / after_K  # of relative gaps
        return (after_K < 0.8 * gap_K) | (value_K - chunk.figures.value[local] > 0.1 * tol * unit_K)


def _tightening(gap_K: np.ndarray, tol: float) -> float:
    """By how much the backend must do better for the failing columns' certified gaps to pass."""
    finite_K = gap_K[np.isfinite(gap_K)]
    ratio = float(np.median(finite_K)) / tol if len(finite_K) else 1e6
    return float(np.clip(0.3 / ratio, 1e-4, 0.3))


def _run(
    task: Task, limits: Limits, chunk: InProgress, local: np.ndarray, tolerance: float
) -> tuple[RawColumns, Array]:
    """Hand the local columns to the backend, normalised; returns its answer in the problem's units, feasible."""
    problem, backend, start, figures = task.problem, task.backend, chunk.start, chunk.figures
    some, wanted = within(local, chunk.weights_NK), compose(chunk.columns, local, chunk.weights_NK)
    scale = backend.scaling.columns(start.energy_K[local])
    lib = lambda x: to_library(x, backend.library)  # noqa: E731
    scaled = lambda x: None if x is None else lib(scale.weights(cast(x[:, wanted], backend.dtype)))  # noqa: E731
    g_NK = problem.linear("float64", wanted)
    with numbers_may_fail():  # a backend that wants no scaling is given numbers that its dtype may not hold
        given = Chunk(
            weights_NK=scaled(problem.weights_NK),
            mask_NK=lib(problem.mask_NK[:, wanted] & True),  # a copy: the rest is made here, the mask may be the caller's own
            start_NK=lib(scale.weights(chunk.weights_NK[:, some])),
            residual_NK=lib(scale.residual(cast(figures.rho_NK[:, some], backend.dtype), task.cert.unit)),
            start_objective_K=lib(like(scale.objective(figures.value[local]), chunk.weights_NK)),
            improved_K=lib(like(scale.objective(start.masked.value[local] - figures.value[local]), chunk.weights_NK)),
            linear_NK=None if g_NK is None else lib(cast(scale.linear(g_NK), backend.dtype)),
            lower_NK=scaled(problem.lower_NK),
            upper_NK=scaled(problem.upper_NK),
            tolerance=tolerance,
            max_iterations=limits.left(chunk.results.iterations[local]),
            deadline=limits.deadline,
        )
        raw = backend.solve_chunk(given)
    with numbers_may_fail():  # the optimum itself may be beyond the dtype
        answer_NK = problem.clip(scale.unscale_weights(back_to(raw.weights_NK, chunk.weights_NK)), wanted)
    return raw, as_given_back(answer_NK, problem.place)  # what is audited is what is returned
