"""Wall-clock seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from qprecon.llm.reporting.report import LayerRow


@dataclass
class Clock:
    """`with clock("gram"): …`; phases do not overlap."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.add(phase, time.perf_counter() - started)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def add_rows(self, rows: Sequence[LayerRow]) -> None:
        """The phases within the layers of a block."""
        for row in rows:
            self.add("mask", row.mask_seconds)
            self.add("solve", row.solve_seconds)
            self.add("audit", row.audit_seconds)
            self.add("update", row.update_seconds - row.solve_seconds - row.audit_seconds)
            self.add("measure", row.seconds - row.mask_seconds - row.update_seconds)
