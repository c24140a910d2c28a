"""What is known of columns: filled in while a chunk is worked on, put together chunk by chunk, and given back in a ``Solution``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..arrays.chunks import filled
from ..arrays.interop import Array
from ..contract.answers import UNDERSTOOD
from ..status import Status

LIMITS = {word: Status[word.upper()] for word in UNDERSTOOD}
"""What a backend says when a limit stopped it."""
NOT_RUN = "not run"


@dataclass(eq=False)
class Results:
    """Weights (N, K) in the core's library, and (K,) numpy arrays that have the names and meanings of ``Solution``'s."""

    weights_NK: Array
    status: np.ndarray
    reported_status: np.ndarray
    iterations: np.ndarray
    objective: np.ndarray
    baseline_objective: np.ndarray
    stationarity: np.ndarray
    violation: np.ndarray
    gap_bound: np.ndarray
    relative_gap: np.ndarray
    fell_back: np.ndarray

    @staticmethod
    def empty(weights_NK: Array) -> Results:
        """Nothing is known yet."""
        k = int(weights_NK.shape[1])
        real = lambda value: np.full(k, value, dtype=np.float64)  # noqa: E731
        return Results(
            weights_NK,
            status=filled(k, Status.INACCURATE),
            reported_status=filled(k, NOT_RUN),
            iterations=np.zeros(k, dtype=np.int64),
            objective=real(np.nan),
            baseline_objective=real(np.nan),
            stationarity=real(np.inf),
            violation=real(np.nan),
            gap_bound=real(np.inf),
            relative_gap=real(np.inf),
            fell_back=np.zeros(k, dtype=bool),
        )

    def by_name(self) -> dict[str, np.ndarray]:
        """Everything but the weights."""
        return {name: getattr(self, name) for name in _NAMES}

    def put(self, columns: Any, part: Results) -> None:
        """Write the results of a chunk to their places."""
        self.weights_NK[:, columns] = part.weights_NK
        for name in _NAMES:
            getattr(self, name)[columns] = getattr(part, name)

    def unfinished(self, tol: float, own_limits: bool) -> np.ndarray:
        """Indices of the columns that no limit stopped, whose input is sound, and whose certified gap exceeds ``tol``.

        own_limits: a limit of iterations is the backend's own, not the caller's, and stops nobody else.
        """
        ends = {Status.INVALID_INPUT, Status.TIME_LIMIT} | (set() if own_limits else {Status.ITERATION_LIMIT})
        open_ = np.flatnonzero(~(self.relative_gap <= tol))  # as a rule few or none: statuses are compared one by one
        return open_[[status not in ends for status in self.status[open_]]] if len(open_) else open_


_NAMES = tuple(field.name for field in fields(Results) if field.name != "weights_NK")
