"""Where a backend is not OPTIMAL, and why: the only table of exceptions to the contract.

The audit holds everywhere, here too: an exception only says that a column may come back honestly as something else than OPTIMAL.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

MUST = ("cholesky", "pcg", "mpax")
"""Backends that are held to tight tolerances too, and to agree with each other."""


@dataclass(frozen=True)
class Exempt:
    """``backend`` and ``family`` are patterns; ``status`` names what the columns may come back as instead of OPTIMAL."""

    backend: str
    family: str
    dtype: str
    status: tuple[str, ...]
    reason: str

    def covers(self, backend: str, family: str, dtype: str) -> bool:
        """Whether this exception is about that case."""
        return all(
            fnmatch.fnmatch(value, pattern)
            for value, pattern in ((backend, self.backend), (family, self.family), (dtype, self.dtype))
        )


EXCEPTIONS = (
    Exempt(
        "adam",
        "*",
        "*",
        ("ITERATION_LIMIT", "INACCURATE", "FELL_BACK", "UNCERTIFIED"),
        "A reference only: its default of 200 steps a learning rate stops short of 1e-4 on many columns.",
    ),
    Exempt(
        "*",
        "duplicate_inputs",
        "*",
        ("UNCERTIFIED",),
        "Kept blocks are singular although f* > 0, without damping: no lower bound on f* but 0 can be proved in floating point. "
        "The weights are optimal; add damping to have that certified.",
    ),
    Exempt(
        "*",
        "rank_8_of_256",
        "float32",
        ("UNCERTIFIED", "FELL_BACK"),
        "H stored in float32 is indefinite by rounding, without damping: f is not bounded below. In float64, or damped: OPTIMAL.",
    ),
    Exempt(
        "*",
        "kappa_1e8",
        "float32",
        ("INACCURATE", "ITERATION_LIMIT"),
        "A condition number of 1e8 without damping is beyond float32 arithmetic.",
    ),
    Exempt(
        "admm",
        "kappa_1e6",
        "float32",
        ("INACCURATE",),
        "The shared inverse of a matrix of condition number 1e6 is poor in float32: some columns stop near 1e-4.",
    ),
    Exempt(
        "admm",
        "real_smollm2_0_o_proj_undamped",
        "*",
        ("INACCURATE", "ITERATION_LIMIT"),
        "A condition number of 7e6 without damping takes more iterations than its default limit. With 1 % damping: OPTIMAL.",
    ),
    Exempt(
        "cvxpy",
        "bounds_away_from_zero",
        "float64",
        ("INACCURATE",),
        "Clarabel gives up on a column (numerical error); solver='OSQP' solves it.",
    ),
)


def exempt(backend: str, family: str, dtype: str) -> Exempt | None:
    """The exception that covers a case, or None."""
    return next((entry for entry in EXCEPTIONS if entry.covers(backend, family, dtype)), None)


def table() -> str:
    """The exceptions as a Markdown table, for the documentation."""
    name = lambda pattern: "any" if pattern == "*" else pattern  # noqa: E731
    rows = [f"| {name(e.backend)} | {name(e.family)} | {name(e.dtype)} | {', '.join(e.status)} | {e.reason} |" for e in EXCEPTIONS]
    return "\n".join(["| backend | family | dtype | status | reason |", "| --- | --- | --- | --- | --- |", *rows])
