"""What a run tells as it goes: seconds by phase and notes, which the report then has, and progress."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from qprecon.llm.reporting.progress import Step, library_bars, progress_bar, progress_mode, say


def _no_step(stage: str, advance: int, **news: Any) -> None:
    """Progress is not shown."""


@dataclass
class RunLog:
    """`with log.phase("gram"): …`, `log.note("…")`, `log.step("layers.0", 1)`.

    progress: how steps are shown, see `qprecon.llm.reporting.progress`; ValueError for a word that is no mode. seconds: wall-clock
    time by phase; phases do not overlap. notes: for the report's warnings; told: those that were printed. step: what was done since
    the last call; nothing is shown before `bar` is entered.
    """

    progress: bool | str = False
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    step: Step = _no_step

    def __post_init__(self) -> None:
        progress_mode(self.progress)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of its body. An error's time is not counted."""
        started = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - started)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def add_parts(self, seconds: Iterable[Any]) -> None:
        """The phases within the layers of a block, each as `qprecon.llm.pruning.measure.Seconds`."""
        for each in seconds:
            self.add("mask", each.mask)
            self.add("solve", each.solve)
            self.add("audit", each.audit)
            self.add("rounding", each.rounding)
            self.add("update", each.update - each.solve - each.audit - each.rounding)
            self.add("measure", each.measure)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def say_notes(self, *before: str) -> None:
        """Print `before` and the notes so far, if a bar is shown: the user should see them before hours of work."""
        if say([*before, *self.notes], self.progress):
            self.told += self.notes

    @contextmanager
    def bar(self, total: int, blocks: int | None = None) -> Iterator[None]:
        """While open, steps are shown. `total` units of work; `blocks`: how many blocks there are."""
        with progress_bar(total, self.progress, blocks) as self.step:
            yield
        self.step = _no_step

    def library_bars(self) -> AbstractContextManager[None]:
        """While open, transformers draws its own bars only where ours is to be shown."""
        return library_bars(self.progress)
