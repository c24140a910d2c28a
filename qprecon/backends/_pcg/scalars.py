"""The numbers of each column while it is iterated, and when a column is done."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from ...arrays.interop import Array, cast, namespace, to_numpy

OF_LOW_RANK, OF_DIAGONAL = 0.9, 2.0
"""What the estimate of the gap is multiplied by. A gap is certified as rᵀA⁻¹r, with all inputs in A, where rᵀz has only the kept
ones in C. rᵀC⁻¹r with all inputs, which a low rank gives at little cost, times 1.1 to 4.0 is the certificate of a real layer's
columns (tests/backends/test_looks.py; rᵀz times 1.2 to 14). The core asks for a quarter of its tolerance at first, so that this
margin takes it for 3.6 times: with 3 times a few of thousands of columns took a second round. A diagonal knows nothing of the other
inputs; there the energy error left is about twice rᵀz."""
LEAST = 1e-6  # of the start's objective, in whose units columns are given, that errors are relative to


@dataclass(eq=False)
class Scalars:
    """The numbers of each column, (K,): rᵀz, how much more rᵀC⁻¹r with all inputs is (0 for a diagonal), what f has gained (same
    dtype), whether it goes on, whether it is done (bool), and iterations (int32)."""

    rz_K: Array
    beyond_K: Array
    gain_K: Array
    active_K: Array
    finished_K: Array
    iterations_K: Array

    @staticmethod
    def zeros(like_NK: Array) -> Scalars:
        """Before the first iteration."""
        xp, first = namespace(like_NK), like_NK[0]
        zero_K = xp.zeros_like(first)
        no_K = zero_K != zero_K
        return Scalars(zero_K, zero_K + 0, zero_K + 0, no_K, no_K | no_K, xp.zeros_like(first, dtype=xp.int32))

    def take(self, index: Array) -> Scalars:
        """Of some of the columns."""
        return Scalars(*(getattr(self, field.name)[index] for field in fields(self)))


@dataclass(frozen=True, eq=False)
class Goal:
    """When a column is done: once ``margin`` · (rᵀz + beyond) is at most ``tolerance`` of what f comes to.

    Attributes:
        base_K: f of the start, (K,) float64, or with an explicit right-hand side, where f has no zero, what was gained before.
        is_gain: the latter.
        tolerance: relative.
        margin: what is left, in units of that estimate.
    """

    base_K: Array
    is_gain: bool
    tolerance: float
    margin: float

    def take(self, index: Array) -> Goal:
        """Of some of the columns."""
        return replace(self, base_K=self.base_K[index])

    def look(self, scalars: Scalars) -> Seen:
        """Stop the columns that are done, and see how the others are."""
        gap_K, xp = self.margin * cast(scalars.rz_K + scalars.beyond_K, "float64"), namespace(scalars.rz_K)
        total_K = self.base_K + scalars.gain_K if self.is_gain else self.base_K - scalars.gain_K - gap_K
        enough_K = self.tolerance * xp.maximum(total_K, xp.full_like(total_K, LEAST))
        scalars.finished_K |= (gap_K <= enough_K) & (gap_K >= 0)
        scalars.active_K &= ~scalars.finished_K  # in its place, where a recorded step looks for it
        far_K = xp.where(scalars.active_K, gap_K / enough_K, xp.zeros_like(gap_K))
        broken_K = ~scalars.active_K & ~scalars.finished_K & (scalars.rz_K != 0)
        seen = [cast(fact, "float64") for fact in (far_K, scalars.active_K, broken_K, scalars.iterations_K)]
        return Seen(*to_numpy(xp.stack(seen)))  # one look at the device


@dataclass(frozen=True, eq=False)
class Seen:
    """What a look shows of the columns, (K,) floats: how many times too large the error of those that go on is, 0 of others; which
    go on; which stopped as rᵀz or the curvature was not positive, so that rounding has the better of them; and iterations."""

    far_K: np.ndarray
    active_K: np.ndarray
    broken_K: np.ndarray
    iterations_K: np.ndarray

    @staticmethod
    def nothing(columns: int) -> Seen:
        """Before the first look."""
        return Seen(*np.zeros((4, columns)))

    def take(self, index: np.ndarray) -> Seen:
        """Of some of the columns."""
        return Seen(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def worst(self) -> float:
        """The largest error; infinite if there is one that is no number."""
        worst = float(self.far_K.max(initial=0.0))  # NaN if there is one
        return worst if worst == worst else np.inf

    @property
    def left(self) -> int:
        """How many go on."""
        return int(np.count_nonzero(self.active_K))
