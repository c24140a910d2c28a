"""Where a backend that must be OPTIMAL is not, and why: the only table of exceptions to the contract.

The audit holds everywhere, here too: an exception only says that a column may come back honestly as something else than OPTIMAL.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

MUST = ("cholesky", "pcg", "mpax")
"""Backends that must be OPTIMAL in float64 in every family that they can take."""


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
        "*",
        "duplicate_inputs",
        "*",
        ("UNCERTIFIED",),
        "Kept blocks are singular although f* > 0, without damping: no lower bound on f* but 0 can be proved in floating point. "
        "The weights are optimal; add damping to have that certified.",
    ),
)


def exempt(backend: str, family: str, dtype: str) -> Exempt | None:
    """The exception that covers a case, or None."""
    return next((entry for entry in EXCEPTIONS if entry.covers(backend, family, dtype)), None)


def table() -> str:
    """The exceptions as a Markdown table, for the documentation."""
    rows = [f"| {e.backend} | {e.family} | {e.dtype} | {', '.join(e.status)} | {e.reason} |" for e in EXCEPTIONS]
    return "\n".join(["| backend | family | dtype | status | reason |", "| --- | --- | --- | --- | --- |", *rows])
