"""What the main thread does while a script runs, looked at every 4 ms: seconds by phase, line, innermost function and import.

    python benchmarks/models/where.py where.json benchmarks/models/end_to_end.py --model MODEL --text TEXT

A call into a library counts for the Python line that made it, a wait for the device for the line that waits. Looking takes some per
cent of the time. `before` is all outside of the pipeline's phases: imports, and the work of the layers.
"""

from __future__ import annotations

import collections
import json
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qprecon.llm.reporting.log import RunLog  # loads no torch

_EACH, _LEAST, _MOST = 0.004, 0.03, 25  # seconds between looks; of a line that is written; lines of a phase
_ROOTS = ("/site-packages/", "/dist-packages/", f"/python3.{sys.version_info.minor}/", f"{Path(__file__).resolve().parents[2]}/")


class Looking:
    """While open, looks. lines, functions, imports: phase -> what -> seconds."""

    def __init__(self) -> None:
        self.phase, self.main = "before", threading.get_ident()
        self.lines, self.functions, self.imports = (collections.defaultdict(collections.Counter) for _ in range(3))
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Looking:
        self._phase = RunLog.phase
        looking = self

        @contextmanager
        def phase(log: RunLog, name: str) -> Iterator[None]:
            before, looking.phase = looking.phase, name
            try:
                with looking._phase(log, name):
                    yield
            finally:
                looking.phase = before

        RunLog.phase = phase
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()
        RunLog.phase = self._phase

    def _look(self) -> None:
        last = time.perf_counter()
        while not self.over.wait(_EACH):
            frames = list(_stack(sys._current_frames().get(self.main)))
            now = time.perf_counter()
            took, last = now - last, now
            if not frames:
                continue
            own = [f"{file}:{line} {name}" for file, line, name in frames if file.startswith("qprecon/")]
            self.lines[self.phase][" < ".join(own[:2]) or "elsewhere"] += took
            self.functions[self.phase][f"{frames[0][0]}:{frames[0][2]}"] += took
            for module in {file for file, _, name in frames if name == "<module>"}:
                self.imports[self.phase][module] += took

    def seconds(self) -> dict[str, Any]:
        """What was seen, the most of each phase."""
        tables = {"lines": self.lines, "functions": self.functions, "imports": self.imports}
        most = {name: {phase: _most(counter) for phase, counter in table.items()} for name, table in tables.items()}
        return {"phases": {phase: round(counter.total(), 3) for phase, counter in self.lines.items()}, **most}


def _stack(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """File, line and function, the innermost first."""
    while frame is not None:
        yield _short(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _short(file: str) -> str:
    return next((file.split(root, 1)[1] for root in _ROOTS if root in file), file)


def _most(counter: collections.Counter[str]) -> dict[str, float]:
    return {what: round(seconds, 3) for what, seconds in counter.most_common(_MOST) if seconds >= _LEAST}


def main() -> None:
    """Run the script, and write what was seen."""
    out, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    started = time.perf_counter()
    with Looking() as looking:
        runpy.run_path(script, run_name="__main__")
    found = {"command": " ".join([Path(script).name, *arguments]), "seconds": round(time.perf_counter() - started, 2)}
    Path(out).write_text(json.dumps(found | looking.seconds(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
