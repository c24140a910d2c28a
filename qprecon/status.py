"""What became of a column. A member's value is the message, and says what to try next."""

from __future__ import annotations

import enum


class Status(enum.Enum):
    """Audited outcome of one column; only the core sets it, never a backend.

    ``OPTIMAL`` if and only if the certified relative gap is at most ``tol``.
    """

    OPTIMAL = "the certified relative gap is within tol"
    ITERATION_LIMIT = "stopped at the iteration limit before the certified gap reached tol: raise max_iterations"
    TIME_LIMIT = "stopped at the time limit before the certified gap reached tol: raise time_limit"
    INACCURATE = (
        "the backend stopped by itself, but the audit certifies only a larger gap than tol: "
        "use dtype='float64', a larger tol, some damping, or backend='cholesky' ('piqp' with bounds)"
    )
    UNCERTIFIED = (
        "H is singular to working precision, so no gap below the objective itself can be certified: "
        "add damping (0.01 is usual)"
    )
    FELL_BACK = (
        "the backend's answer was not finite or not surely better than the masked weights, which are returned instead: "
        "use another backend, dtype='float64' or some damping"
    )
    INVALID_INPUT = "the column holds NaN or Inf in W, rhs or a bound: repair the input"

    def __repr__(self) -> str:
        return f"Status.{self.name}"
