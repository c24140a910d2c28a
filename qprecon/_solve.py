"""One solve with a prepared Hessian: choose, check, run, audit, accept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import _columns, automatic, registry
from .errors import UnsupportedError
from .hessian import as_number
from .interface import Backend
from .interop import Array, cast, describe_device, from_core, synchronize, to_core
from .linalg import exact_float32, fitting_threads
from .problem import ColumnQP
from .solution import Provenance, Solution, Timing

if TYPE_CHECKING:
    from .prepared import PreparedHessian

_LAST_RESORT = "cholesky"
_FEW_LEFT = 64


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


def run(prepared: PreparedHessian, problem: ColumnQP, request: Request, started: float) -> Solution:
    """Solve ``problem``, whose Hessian is ``prepared``. ``started``: when the call began, in ``time.monotonic()`` seconds."""
    dtype, why_dtype = automatic.choose_dtype(problem, request.tol, request.dtype)
    automatically = request.backend == "auto"
    name, why_backend = automatic.choose_backend(problem, dtype) if automatically else (request.backend, None)
    loaded = registry.load(registry.find(name), dict(request.backend_options))
    if why_dtype and dtype not in loaded.record.capabilities.dtypes:
        dtype = loaded.record.capabilities.dtypes[-1]
        why_dtype = f"{dtype}: backend {name!r} has no other"
    problem = problem.with_rounded_bounds(dtype)
    _check_capabilities(loaded.record, problem, dtype)
    warm_NK = _check_warm_start(request.warm_start, problem, dtype)
    chosen = {key: why for key, why in (("backend", why_backend), ("dtype", why_dtype)) if why}
    with exact_float32(), fitting_threads(problem.n_inputs, problem.n_columns, problem.place.library):
        setup = _set_up(prepared, problem, loaded, dtype)
        deadline = None if request.time_limit is None else started + request.time_limit
        limits = _columns.Limits(request.tol, request.max_iterations, deadline)
        synchronize(problem.weights_NK)
        setup_seconds = time.monotonic() - started
        columns, notes = _columns.solve_in_chunks(setup, limits, warm_NK, request.batch_size)
        if automatically and name != _LAST_RESORT:
            notes |= _finish_exactly(prepared, setup, limits, columns)
    chosen.update(notes)
    return _assemble(problem, loaded, columns, dtype, request, chosen, setup_seconds)


def _finish_exactly(
    prepared: PreparedHessian, setup: _columns.Setup, limits: _columns.Limits, columns: _columns.Columns
) -> dict[str, Any]:
    """With "auto": the few columns that the fast backend could not bring to ``tol`` go to a direct method."""
    left = columns.unfinished(limits.tol)
    if not len(left) or len(left) > _FEW_LEFT or setup.cert.factor_NN is None or setup.problem.has_bounds or limits.expired:
        return {}
    exact = registry.load(registry.find(_LAST_RESORT), {})
    _columns.improve(_set_up(prepared, setup.problem, exact, setup.dtype), limits, columns, left)
    return {"finished by": f"{_LAST_RESORT}: {len(left)} columns"}


def _set_up(prepared: PreparedHessian, problem: ColumnQP, loaded: registry.Loaded, dtype: str) -> _columns.Setup:
    cert, backend = prepared.certificate, prepared.setup(loaded, dtype)
    return _columns.Setup(problem, loaded, cert, backend.scaling, backend.solve_chunk, dtype, backend.library)


def _assemble(
    problem: ColumnQP,
    loaded: registry.Loaded,
    columns: _columns.Columns,
    dtype: str,
    request: Request,
    chosen: dict[str, Any],
    setup_seconds: float,
) -> Solution:
    compile_seconds = float(columns.extras.pop("compile_seconds", 0.0))
    chosen.update(columns.extras)
    return Solution(
        weights=from_core(columns.weights_NK, problem.place),
        status=columns.status,
        reported_status=columns.reported_status,
        iterations=columns.iterations,
        objective=columns.objective,
        baseline_objective=columns.baseline,
        stationarity=columns.stationarity,
        violation=columns.violation,
        gap_bound=columns.gap_bound,
        relative_gap=columns.relative_gap,
        fell_back=columns.fell_back,
        tol=request.tol,
        timing=Timing(setup_seconds, compile_seconds, columns.solve_seconds - compile_seconds, columns.audit_seconds),
        provenance=Provenance(
            backend=loaded.record.name,
            versions=automatic.versions(loaded.record),
            device=describe_device(problem.weights_NK),
            dtype=dtype,
            options=dict(request.backend_options),
            automatic=chosen,
        ),
        problem=problem,
    )


def _count(name: str, value: Any) -> int | None:
    """A positive whole number as an int, also where it is given as 1e3."""
    if value is None:
        return None
    number = as_number(value)
    if not (number >= 1.0 and number.is_integer()):
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(number)


def _check_numbers(tol: float, time_limit: float | None) -> None:
    if not 0.0 < as_number(tol) < 1.0:
        raise ValueError(f"tol must lie between 0 and 1, got {tol!r}")
    if time_limit is not None and not as_number(time_limit) > 0.0:
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
    warm_NK = to_core(warm_start, problem.place)
    if tuple(warm_NK.shape) != tuple(problem.weights_NK.shape):
        raise ValueError(f"warm_start has shape {tuple(warm_NK.shape)}, W has {tuple(problem.weights_NK.shape)}")
    return cast(warm_NK, dtype)
