"""Rows of results: the JSON file that they are in, and what rows say of reports, scores and versions.

Several processes may write to a file at once; a row that is there is found by what tells rows apart.
"""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock

from qprecon.llm import PruneReport
from qprecon.llm.evaluation.scores import TaskScores


class Results:
    """The rows on disk: JSON, one row a line, rewritten as a whole after each."""

    def __init__(self, path: Path):
        self.path = path
        self.rows = self._read()

    def _read(self) -> list[dict]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else []

    def get(self, wanted: dict) -> dict | None:
        return next((row for row in self.rows if wanted.items() <= row.items()), None)

    def add(self, row: dict, wanted: dict) -> None:
        """Append, or put in the place of the row that has the same identity. Other processes may write to the file meanwhile."""
        with FileLock(Path(tempfile.gettempdir()) / f"{self.path.name}.lock"):
            self.rows = self._read()
            self._add(row, wanted)

    def _add(self, row: dict, wanted: dict) -> None:
        if (old := self.get(wanted)) is not None:
            self.rows[self.rows.index(old)] = row
        else:
            self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text("[\n" + ",\n".join(map(json.dumps, self.rows)) + "\n]\n", encoding="utf-8")
        os.replace(partial, self.path)


# What tells the runs of whole models apart.
_WHOLE = ("model", "gpu", "pattern", "mask", "update", "settings", "samples", "seqlen", "tol")


def put_whole(path: str | Path, run: dict) -> None:
    """Add a run of a whole model to the rows of a JSON file, in the place of an earlier one of this model, card and settings."""
    Results(Path(path)).add(run, {name: run[name] for name in _WHOLE if name in run})


def versions() -> dict:
    import transformers

    import qprecon

    return {
        "qprecon": qprecon.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def figures(scores: TaskScores) -> dict:
    """What of the tasks' scores goes into the row: acc and its standard error."""
    return {
        "tasks": {s.task: {"acc": s.acc, "stderr": s.acc_stderr, "items": s.items} for s in scores.scores},
        "average": scores.average, "stderr": scores.average_stderr, "limit": scores.limit, "seconds": round(scores.seconds, 3),
        "lm_eval": scores.versions["lm_eval"],
    }  # fmt: skip


def describe(report: PruneReport) -> dict:
    """What of a report goes into the row. Errors are relative ones, a layer each, in the order of the model."""
    names = [row.name for row in report.layers]
    return {
        "sparsity": report.sparsity,
        "max_relative_gap": report.largest_gap,
        "uncertified": sum(row.uncertified or 0 for row in report.layers),
        "fallbacks": report.fallbacks,
        "columns": sum(row.n_outputs for row in report.layers),
        "backends": sorted({row.backend for row in report.layers if row.backend}),
        "phases": {phase: round(seconds, 3) for phase, seconds in report.phase_seconds.items()},
        "layer_names": _factored(names),
        "error_masked": [_short(row.error_masked) for row in report.layers],
        "error_updated": [_short(row.error_updated) for row in report.layers],
    }


def _factored(names: list[str]) -> list[str] | dict:
    """Names as blocks times the layers of one block where that gives them all, since they are most of a row's text."""
    found = [re.match(r"(.*?\.\d+)\.(.*)", name) for name in names]
    if all(found):
        blocks, inner = (list(dict.fromkeys(match[part] for match in found)) for part in (1, 2))
        if [f"{block}.{layer}" for block in blocks for layer in inner] == names:
            return {"blocks": blocks, "inner": inner}
    return names


def _short(value: float) -> float:
    return float(f"{value:.5g}")


@contextmanager
def tf32() -> Iterator[None]:
    """While open, float32 products are made in TF32, where the device has it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def put_back(model: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
    """Give each parameter of the model its value in `weights` again."""
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.copy_(value)
