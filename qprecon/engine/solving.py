"""One solve: check what is asked for, choose what is left open, run, put the answer together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..arrays.checksum import bits
from ..arrays.interop import Array, cast, describe_device, from_core, moment, namespace, seconds_between, to_numpy
from ..arrays.linalg import exact_float32
from ..contract import registry
from ..contract.interface import Backend
from ..contract.options import as_number
from ..errors import UnsupportedError, reraise_from_signal
from ..problem.column_qp import ColumnQP
from ..problem.hessian import floating
from ..solution import Provenance, Solution, Timing
from ..wording import counted
from . import choice
from .in_progress import numbers_may_fail
from .rounds import Limits, Outcome, Task, solve_again, solve_in_chunks
from .shared import Shared

_LAST_RESORT, _WITH_BOUNDS = "cholesky", ("piqp", "clarabel")
_FEW_LEFT = 64
_INTERIOR_WORK = 1e12
"""Columns · N³ up to which those with bounds are finished: ten iterations of I³/3 on half of the inputs take half a minute of a
processor."""


@dataclass(frozen=True, eq=False)
class Request:
    """How a problem is to be solved: the arguments of ``qprecon.solve`` that are not about the problem itself, checked."""

    backend: str = "auto"
    tol: float = 1e-4
    max_iterations: int | None = None
    time_limit: float | None = None
    warm_start: Array | None = None
    batch_size: int | None = None
    dtype: str | None = None
    backend_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers(self.tol, self.time_limit)
        for name in ("max_iterations", "batch_size"):
            object.__setattr__(self, name, _count(name, getattr(self, name)))
        if self.backend == "auto":
            registry.refuse_options_of_auto(self.backend_options)


def run(shared: Shared, problem: ColumnQP, request: Request, started: float) -> Solution:
    """Solve ``problem``, whose Hessian is that of ``shared``. ``started``: when the call began, in ``time.monotonic()`` seconds."""
    dtype, why_dtype = choice.choose_dtype(problem, request.tol, request.dtype)
    automatically = request.backend == "auto"
    name, why_backend = choice.choose_backend(problem, dtype) if automatically else (request.backend, None)
    loaded = registry.load(registry.find(name), dict(request.backend_options))
    if why_dtype and dtype not in loaded.record.capabilities.dtypes:
        dtype = loaded.record.capabilities.dtypes[-1]
        why_dtype = f"{dtype}: backend {name!r} has no other"
    problem = problem.with_rounded_bounds(dtype)
    _check_capabilities(loaded.record, problem, dtype)
    warm_NK = _check_warm_start(request.warm_start, problem, dtype)
    chosen = {key: why for key, why in (("backend", why_backend), ("dtype", why_dtype)) if why}
    with exact_float32(), numbers_may_fail(), shared.fitting_threads(problem.n_columns):
        checked = moment(problem.weights_NK)
        task = _task(shared, problem, loaded, dtype)
        deadline = None if request.time_limit is None else started + request.time_limit
        limits = Limits(request.tol, request.max_iterations, deadline)
        set_up = moment(problem.weights_NK)
        last = _last_resort(problem) if automatically and name != _LAST_RESORT else None
        at_first = _patience(task, limits, last)
        outcome = solve_in_chunks(task, at_first, warm_NK, request.batch_size)
        if last is not None:
            chosen |= _finish(last, shared, task, limits, outcome)
        if at_first is not limits and len(left := outcome.results.unfinished(limits.tol, own_limits=True)) and not limits.expired:
            solve_again(task, limits, outcome, left, None)  # ADMM goes on badly from weights without their multipliers
    return _assemble(task, outcome, request, chosen, seconds_between(checked, set_up))


def _task(shared: Shared, problem: ColumnQP, loaded: registry.Loaded, dtype: str) -> Task:
    """A GPU makes the certificate's factor while the host sets up the backend. On a CPU it is one after the other."""
    if problem.place.device_type != "cuda":
        return Task(problem, shared.certificate, shared.setup(loaded, dtype))
    shared.begin_certificate()
    try:
        backend = shared.setup(loaded, dtype)
    except Exception as error:
        reraise_from_signal(error)
        _ = shared.certificate  # where H is at fault, its error tells more
        raise
    return Task(problem, shared.certificate, backend)


def _last_resort(problem: ColumnQP) -> Backend | None:
    """With "auto": who gets the few columns that the fast backend cannot bring to ``tol``: a direct method, or with bounds an
    interior-point one, where one is installed."""
    names = _WITH_BOUNDS if problem.has_bounds else (_LAST_RESORT,)
    return next((record for record in map(registry.find, names) if record.installed), None)


def _can_take(problem: ColumnQP, columns: int) -> bool:
    """Whether that would be worth its time for so many columns."""
    return columns <= _FEW_LEFT and not (problem.has_bounds and columns * problem.n_inputs**3 > _INTERIOR_WORK)


def _patience(task: Task, limits: Limits, last: Backend | None) -> Limits:
    """Limits of the fast backend where it has bounds and another could take all columns: what that would take, and no more.

    An iteration of ADMM is 2N² a column, ten of an interior-point method about 10(N/2)³/3, at a third of the speed: together
    that is 0.6 N iterations.
    """
    problem = task.problem
    if last is None or not problem.has_bounds or limits.max_iterations or task.cert.factor_NN is None:
        return limits
    return replace(limits, max_iterations=max(100, 3 * problem.n_inputs // 5)) if _can_take(problem, problem.n_columns) else limits


def _finish(record: Backend, shared: Shared, task: Task, limits: Limits, outcome: Outcome) -> dict[str, Any]:
    """The columns that are left, if they are few, to the last resort."""
    left = outcome.results.unfinished(limits.tol, own_limits=limits.max_iterations is None)
    if not len(left) or not _can_take(task.problem, len(left)) or task.cert.factor_NN is None or limits.expired:
        return {}
    exact = shared.setup_in(registry.load(record, {}), task.backend.dtype)
    solve_again(Task(task.problem, task.cert, exact), limits, outcome, left, outcome.results.weights_NK)
    return {"finished by": f"{record.name}: {counted(len(left), 'column')}"}


def _assemble(task: Task, outcome: Outcome, request: Request, chosen: dict[str, Any], setup_seconds: float) -> Solution:
    problem, backend, automatic = task.problem, task.backend, outcome.automatic
    compile_seconds = float(automatic.pop("compile_seconds", 0.0))
    if request.time_limit is not None and compile_seconds > request.time_limit:
        took = f"{compile_seconds:.3g} s of compilation, which no limit cuts short"
        chosen["time_limit"] = f"{took}, against {request.time_limit:g} s"
    return Solution(
        weights=from_core(outcome.results.weights_NK, problem.place),
        **outcome.results.by_name(),
        tol=request.tol,
        timing=Timing(setup_seconds, compile_seconds, outcome.seconds("solve") - compile_seconds, outcome.seconds("audit")),
        provenance=Provenance(
            backend=backend.loaded.record.name,
            versions=choice.versions(backend.loaded.record),
            device=describe_device(problem.weights_NK),
            dtype=backend.dtype,
            options=dict(request.backend_options),
            automatic={**chosen, **automatic},
        ),
        problem=problem,
        sums={name: bits(array) for name, array in problem.given()},
    )


def _count(name: str, value: Any) -> int | None:
    """A positive whole number as an int, also where it is given as 1e3."""
    if value is None:
        return None
    number = as_number(value, name, "a positive integer")
    if not (number >= 1.0 and number.is_integer()):
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(number)


def _check_numbers(tol: float, time_limit: float | None) -> None:
    if not 0.0 < as_number(tol, "tol") < 1.0:
        raise ValueError(f"tol must lie between 0 and 1, got {tol!r}")
    if time_limit is not None and not as_number(time_limit, "time_limit") > 0.0:
        raise ValueError(f"time_limit must be positive seconds, got {time_limit!r}")


def _check_capabilities(record: Backend, problem: ColumnQP, dtype: str) -> None:
    def refuse(what: str, able: Any) -> None:
        names = [name for name, other in registry.backends().items() if able(other.capabilities)]
        raise UnsupportedError(f"backend {record.name!r} cannot do {what}; these can: {', '.join(names) or 'none'}")

    can, device = record.capabilities, problem.place.device_type
    if problem.has_bounds and not can.bounds:
        refuse("general bounds (lower, upper)", lambda c: c.bounds)
    if problem.rhs_NK is not None and not can.linear:
        refuse("an explicit rhs", lambda c: c.linear)
    if dtype not in can.dtypes:
        refuse(f"{dtype} arithmetic", lambda c: dtype in c.dtypes)
    if device not in can.devices and "numpy" not in can.libraries:
        refuse(f"arrays on {device!r}", lambda c: device in c.devices)


def _check_warm_start(warm_start: Array | None, problem: ColumnQP, dtype: str) -> Array | None:
    if warm_start is None:
        return None
    warm_NK = floating(warm_start, problem.place, "warm_start")
    if tuple(warm_NK.shape) != tuple(problem.weights_NK.shape):
        raise ValueError(f"warm_start has shape {tuple(warm_NK.shape)}, W has {tuple(problem.weights_NK.shape)}")
    with numbers_may_fail():  # said here
        narrow_NK = cast(warm_NK, dtype)
    wrong_NK = ~namespace(narrow_NK).isfinite(narrow_NK) & problem.mask_NK
    if bool(wrong_NK.any()):
        _refuse_start(warm_NK, to_numpy(wrong_NK) & ~problem.invalid_columns(), dtype)
    return narrow_NK


def _refuse_start(warm_NK: Array, wrong_NK: np.ndarray, dtype: str) -> None:
    """ValueError for the first column with a start that no weight can be. A column that cannot be solved anyway is left to its
    status: what an earlier solve made of it is a usual start."""
    if wrong_NK.any():
        j, i = (int(x[0]) for x in np.nonzero(wrong_NK.T))
        raise ValueError(f"warm_start is {float(warm_NK[i, j]):g} at input {i}, column {j}, which no weight in {dtype} can be")
