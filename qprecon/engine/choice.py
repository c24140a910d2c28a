"""What ``"auto"`` and ``None`` mean: the backend and the dtype, each with its reason in words."""

from __future__ import annotations

import functools
import importlib.metadata

from ..arrays.interop import dtype_name
from ..contract import registry
from ..contract.interface import Backend
from ..errors import UnsupportedError
from ..problem.column_qp import ColumnQP

FLOAT32_TOLERANCE = 1e-7  # float32 cannot hold a smaller relative gap (its floor at 1 % damping is about 1e-8)
_FEW, _MODERATE = 8, 1024
"""On a CPU, one factor for each column is faster than shared iterations up to so many columns and inputs."""
_SMALL = 1e11
"""K·N³ up to which a GPU factors all columns in a batch faster than pcg runs: 9.5 ms against 20 at 256 x 256, 17 against 20 at 512
x 512, but 115 against 33 at 1024 x 1024, on an H200 at 1e-4 (benchmarks/results/backends.md)."""


def choose_dtype(problem: ColumnQP, tol: float, dtype: str | None) -> tuple[str, str | None]:
    """The backend's dtype and why; a given ``dtype`` is taken.

    Raises:
        ValueError: neither float32 nor float64, or a tolerance that float32 cannot hold.
    """
    if dtype is not None:
        name = checked_dtype(dtype)
        if name == "float32" and tol < FLOAT32_TOLERANCE:
            raise ValueError(f"tol={tol:g} is beyond float32 (smallest: {FLOAT32_TOLERANCE:g}); use dtype='float64'")
        return name, None
    if "float64" in (dtype_name(problem.hessian_NN), dtype_name(problem.weights_NK)):
        return "float64", "float64: H or W is"
    if tol < 1e-6:
        return "float64", "float64: tol is below 1e-6"
    if problem.damping < 1e-3:
        return "float64", "float64: damping is below 1e-3, so the condition number is unknown"
    return "float32", "float32: enough for this tol and damping"


def choose_backend(problem: ColumnQP, dtype: str) -> tuple[str, str]:
    """The fastest installed backend that can do the problem, and why (measured in docs/backends.md)."""
    if problem.has_bounds:
        for name in ("admm", "osqp", "piqp", "moreau", "mpax", "clarabel", "cvxpy"):
            record = registry.find(name)
            if record.installed and record.capabilities.bounds and dtype in record.capabilities.dtypes:
                return name, f"{name}: the bounds rule out pcg and cholesky"
        raise UnsupportedError("no installed backend takes general bounds: pip install 'qprecon[osqp]'")
    if problem.place.device_type == "cuda" and problem.n_columns * problem.n_inputs**3 <= _SMALL:
        return "cholesky", "cholesky: small enough to factor all columns in a batch"
    if problem.n_columns <= _FEW and problem.n_inputs <= _MODERATE and problem.place.device_type == "cpu":
        return "cholesky", f"cholesky: at most {_FEW} columns"
    return "pcg", "pcg: all columns at once"


def checked_dtype(dtype: object) -> str:
    """``"float32"`` or ``"float64"`` for such a string, a numpy or jax dtype, or a torch dtype; ValueError for any other."""
    name = (getattr(dtype, "__name__", None) or str(dtype)).removeprefix("torch.")
    if name not in ("float32", "float64"):
        raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}")
    return name


def versions(record: Backend) -> dict[str, str]:
    """Versions of qprecon, the array libraries' and the backend's packages."""
    found = {name: _version(name) for name in ("qprecon", "numpy", "scipy", *record.requires)}
    return {name: version for name, version in found.items() if version}


@functools.cache  # reading a distribution's metadata costs milliseconds, and it does not change while the process runs
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
