"""When to look at the columns again: a look waits for the device, and an iteration that nobody needs takes longer still."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(eq=False)
class Looks:
    """What is seen of a chunk's columns between iterations.

    Attributes:
        most: iterations from one look to the next at most.
        few: so many columns are few.
        next: the iteration after which to look again.
        left: columns that go on.
        better_at: the iteration after which the worst of them was last clearly nearer to its goal than ever before.
    """

    most: int
    few: int
    next: int = 0
    left: int = 0
    better_at: int = 0
    _at: int = 0
    _worst: float = math.inf
    _best: float = math.inf
    _few_since: int | None = None

    def __post_init__(self) -> None:
        self.next = self.most

    def note(self, iteration: int, worst: float, left: int) -> None:
        """What is seen after this iteration. worst: how many times too large the largest estimate is."""
        self.next = iteration + self._wait(worst, iteration - self._at)
        self._at, self._worst, self.left = iteration, worst, left
        if worst < 0.9 * self._best:
            self.better_at, self._best = iteration, worst
        if left > self.few:
            self._few_since = None
        elif self._few_since is None:
            self._few_since = iteration

    @property
    def few_for(self) -> int:
        """For how many iterations at most ``few`` columns have gone on."""
        return 0 if self._few_since is None else self._at - self._few_since

    def _wait(self, worst: float, iterations: int) -> int:
        """Iterations until the worst is done at the rate at which it has come nearer since the last look, so many before."""
        if not 1.0 < worst < self._worst < math.inf:
            return self.most
        rate = math.log(self._worst / worst)  # 0 of neighbours
        return min(max(math.ceil(iterations * math.log(worst) / rate), 1), self.most) if rate else self.most
