"""The facade: validate, normalise, chunk, run, audit, accept."""

from __future__ import annotations

import time
from typing import Any

from . import _columns, automatic, registry
from ._chunks import out_of_memory
from .certificate import Certificate, certificate
from .errors import BackendBrokenError, UnsupportedError
from .interop import Array, cast, describe_device, from_core, synchronize, to_core, to_library
from .linalg import exact_float32, fitting_threads
from .normalise import layer_scaling
from .problem import ColumnQP, as_number
from .solution import Provenance, Solution, Timing

_LAST_RESORT = "cholesky"
_FEW_LEFT = 64


def solve(
    H: Array,
    W: Array,
    mask: Array,
    backend: str = "auto",
    *,
    rhs: Array | None = None,
    lower: Array | float | None = None,
    upper: Array | float | None = None,
    damping: float = 0.0,
    tol: float = 1e-4,
    max_iterations: int | None = None,
    time_limit: float | None = None,
    warm_start: Array | None = None,
    batch_size: int | None = None,
    dtype: str | None = None,
    **backend_options: Any,
) -> Solution:
    """Optimal weights for a given mask, certified (paper, sections 3.1 and 3.2).

    Minimises per column ŵᵀHŵ − 2 rhsᵀŵ + λ‖ŵ − w‖² with λ = damping · mean(diag H), ŵ = 0 where the mask is 0.
    All arrays undamped: the λ terms are added here. numpy, torch (CPU, CUDA) and jax arrays go in, the same kind comes out on
    the same device; inputs are not changed.

    Args:
        H: (N, N) = XᵀX, symmetric positive semidefinite.
        W: (N, K) dense weights, inputs by outputs: the **transpose** of ``torch.nn.Linear.weight``. A square layer given the
            wrong way round cannot be noticed.
        mask: (N, K), 1 or True = kept. Columns are independent.
        backend: a name from ``available_backends()``, or "auto".
        rhs: (N, K) right-hand side b; None means HW, which asks for W's outputs back.
        lower, upper: bounds on the new weights ŵ, scalar or broadcastable to (N, K); kept entries only. Rounded to ``dtype``.
        damping: δ ≥ 0. 0.01 is usual and makes the answer unique and certifiable.
        tol: certified relative gap that makes a column ``OPTIMAL``.
        max_iterations, time_limit: limits for the backend; seconds for the whole call.
        warm_start: (N, K) weights to start from, if the backend can; also what a column falls back to where it beats the
            masked weights.
        batch_size: columns solved together; by default as many as memory allows.
        dtype: "float32" or "float64" for the backend's arithmetic; by default float64 if H or W is, if tol < 1e-6 or
            if damping < 1e-3, otherwise float32. The audit is always in float64. ``weights`` come back in this dtype, but for
            jax without its x64 switch, which has float32 only.
        **backend_options: those of the backend that is named, checked by name and type; none with "auto".

    Returns:
        Solution: weights with a certificate for each column.

    Raises:
        ValueError: bad shapes, values or options (the argument is named), or a clearly indefinite H.
        UnknownBackendError, BackendNotInstalledError, BackendBrokenError, UnsupportedError: see ``qprecon.errors``.
    """
    started = time.monotonic()
    _check_numbers(tol, time_limit)
    max_iterations, batch_size = _count("max_iterations", max_iterations), _count("batch_size", batch_size)
    if backend == "auto":
        registry.refuse_options_of_auto(backend_options)
    problem = ColumnQP(H, W, mask, rhs_NK=rhs, lower_NK=lower, upper_NK=upper, damping=damping)
    dtype, why_dtype = automatic.choose_dtype(problem, tol, dtype)
    name, why_backend = automatic.choose_backend(problem, dtype) if backend == "auto" else (backend, None)
    loaded = registry.load(registry.find(name), backend_options)
    if why_dtype and dtype not in loaded.record.capabilities.dtypes:
        dtype = loaded.record.capabilities.dtypes[-1]
        why_dtype = f"{dtype}: backend {name!r} has no other"
    problem.round_bounds(dtype)
    _check_capabilities(loaded.record, problem, dtype)
    warm_NK = _check_warm_start(warm_start, problem, dtype)
    chosen = {key: why for key, why in (("backend", why_backend), ("dtype", why_dtype)) if why}
    with exact_float32(), fitting_threads(problem.n_inputs, problem.n_columns, problem.place.library):
        setup = _set_up(problem, loaded, dtype)
        deadline = None if time_limit is None else started + time_limit
        limits = _columns.Limits(tol, max_iterations, deadline)
        synchronize(problem.weights_NK)
        setup_seconds = time.monotonic() - started
        columns, notes = _columns.solve_in_chunks(setup, limits, warm_NK, batch_size)
        if why_backend and name != _LAST_RESORT:
            notes |= _finish_exactly(setup, limits, columns)
    chosen.update(notes)
    return _assemble(problem, loaded, columns, tol, dtype, backend_options, chosen, setup_seconds)


def _finish_exactly(setup: _columns.Setup, limits: _columns.Limits, columns: _columns.Columns) -> dict[str, Any]:
    """With "auto": the few columns that the fast backend could not bring to ``tol`` go to a direct method."""
    left = columns.unfinished(limits.tol)
    if not len(left) or len(left) > _FEW_LEFT or setup.cert.factor_NN is None or setup.problem.has_bounds or limits.expired:
        return {}
    exact = registry.load(registry.find(_LAST_RESORT), {})
    _columns.improve(_set_up(setup.problem, exact, setup.dtype, setup.cert), limits, columns, left)
    return {"finished by": f"{_LAST_RESORT}: {len(left)} columns"}


def _set_up(
    problem: ColumnQP, loaded: registry.Loaded, dtype: str, cert: Certificate | None = None
) -> _columns.Setup:
    cert = cert or certificate(problem)
    capabilities = loaded.capabilities
    scaling = layer_scaling(capabilities.scaling, problem, dtype)
    own = problem.place.library
    library = own if own in capabilities.libraries else capabilities.libraries[0]
    ridge = problem.ridge / scaling.hessian_scale if capabilities.scaling != "jacobi" else 0.0
    system = registry.System(to_library(scaling.hessian(problem, dtype), library), ridge)
    try:
        solve_chunk = loaded.prepare(system, loaded.options)
    except ValueError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise BackendBrokenError(f"backend {loaded.record.name!r} failed to set up: {error!r}") from error
    return _columns.Setup(problem, loaded, cert, scaling, solve_chunk, dtype, library)


def _assemble(
    problem: ColumnQP,
    loaded: registry.Loaded,
    columns: _columns.Columns,
    tol: float,
    dtype: str,
    options: dict[str, Any],
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
        tol=tol,
        timing=Timing(setup_seconds, compile_seconds, columns.solve_seconds - compile_seconds, columns.audit_seconds),
        provenance=Provenance(
            backend=loaded.record.name,
            versions=automatic.versions(loaded.record),
            device=describe_device(problem.weights_NK),
            dtype=dtype,
            options=dict(options),
            automatic=chosen,
        ),
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


def _check_capabilities(record: registry.Backend, problem: ColumnQP, dtype: str) -> None:
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
