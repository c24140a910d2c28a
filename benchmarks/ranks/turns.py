"""Ranks that take turns on one card: what each would take with a card of its own.

Between two meetings of the ranks only one of them computes, and the clock of the others stands still: a file lock goes from rank
to rank. On cards of their own all would compute at once, so that a stretch between two meetings takes as long as the slowest rank.
What is sent takes its time beside that, and reading in the background has more time here than it would have.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from qprecon.llm.ranks.group import Ranks
from qprecon.llm.ranks.meeting import Meeting
from qprecon.llm.reporting.log import RunLog


@dataclass
class Turns:
    """This rank's turns. io: phases in which a rank waits for the disk. stretches: seconds, and those of them for the disk, between
    two meetings."""

    lock: TextIO
    cuda: bool
    io: tuple[str, ...]
    now: Callable[[], float] = time.perf_counter
    away: float = 0.0
    left: float | None = None
    begun: float = 0.0
    disk: float = 0.0
    stretches: list[tuple[float, float]] = field(default_factory=list)

    def clock(self) -> float:
        """Seconds of this rank's turns."""
        return (self.now() if self.left is None else self.left) - self.away

    def take(self) -> None:
        """Wait for the turn."""
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        if self.left is not None:
            self.away, self.left = self.away + self.now() - self.left, None

    def leave(self) -> None:
        """End the turn, with all that was begun on the card."""
        if self.cuda:
            torch.cuda.synchronize()
        self.left = self.now()
        fcntl.flock(self.lock, fcntl.LOCK_UN)

    def end_stretch(self) -> None:
        self.stretches.append((self.clock() - self.begun, self.disk))
        self.begun, self.disk = self.clock(), 0.0


@contextmanager
def by_turns(path: Path, cuda: bool, io: tuple[str, ...]) -> Iterator[Turns]:
    """While open, this process computes in its turns only, and `time.perf_counter` is their clock."""
    gathered, wait, add = Meeting.gathered, Ranks._wait, RunLog.add

    def meets(self: Meeting, what: Any) -> Any:
        turns.leave()
        turns.end_stretch()
        try:
            return gathered(self, what)
        finally:
            turns.take()

    def waits(self: Ranks, works: Any) -> None:
        turns.leave()
        try:
            wait(self, works)
            if turns.cuda:
                torch.cuda.synchronize()
        finally:
            turns.take()

    def adds(self: RunLog, phase: str, seconds: float) -> None:
        turns.disk += seconds if phase in turns.io else 0.0
        add(self, phase, seconds)

    with path.open("w") as lock:
        turns = Turns(lock, cuda, io)
        turns.take()
        Meeting.gathered, Ranks._wait, RunLog.add, time.perf_counter = meets, waits, adds, turns.clock  # type: ignore[method-assign,assignment]
        turns.begun = turns.clock()
        try:
            yield turns
        finally:
            turns.leave()
            turns.end_stretch()
            Meeting.gathered, Ranks._wait, RunLog.add = gathered, wait, add  # type: ignore[method-assign]
            time.perf_counter = turns.now


def side_by_side(stretches: list[list[tuple[float, float]]]) -> tuple[float, float]:
    """Seconds of the ranks' stretches, on cards of their own, and without the disk: each stretch as long as its longest."""
    together = list(zip(*stretches, strict=True))
    whole = sum(max(seconds for seconds, _ in each) for each in together)
    return whole, sum(max(seconds - disk for seconds, disk in each) for each in together)
