"""Runs as read from their folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The names under which qprecon.llm writes them; a test holds the two together.
REPORT_NAME = "qprecon_report.json"
EVALUATION_NAME = "qprecon_eval.json"
RECIPE_NAME = "recipe.yaml"


@dataclass(frozen=True)
class Run:
    """One output folder: its report, and what else lies there (empty or "" where it doesn't)."""

    name: str
    report: dict[str, Any]
    evaluation: dict[str, Any]
    recipe: str

    @property
    def layers(self) -> list[dict[str, Any]]:
        return self.report["layers"]

    @property
    def settings(self) -> dict[str, Any]:
        return self.report["settings"]

    @property
    def columns(self) -> int:
        """How many columns were solved for."""
        return sum(row["n_outputs"] for row in self.layers if row["uncertified"] is not None)

    @property
    def uncertified(self) -> int:
        return sum(row["uncertified"] or 0 for row in self.layers)

    @property
    def seconds(self) -> float:
        return sum(self.report["phase_seconds"].values())

    def mean(self, field: str) -> float:
        """The mean of a field over layers; those without it are left out."""
        values = [row[field] for row in self.layers if row[field] is not None]
        return sum(values) / len(values) if values else 0.0


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """The runs in `folders`, with names that tell them apart."""
    if not folders:
        raise ValueError("no folder given")
    paths = [Path(folder) for folder in folders]
    return [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _read(folder: Path, name: str) -> Run:
    path = folder / REPORT_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {REPORT_NAME}, so qprecon did not write it")
    report = _json(path)
    if report.get("format") != 1 or not report.get("layers"):
        raise ValueError(f"{path} is of another format than this version of qprecon writes")
    evaluation = _json(folder / EVALUATION_NAME) if (folder / EVALUATION_NAME).is_file() else {}
    totals = {key: report[key] for key in _TOTALS} | {"tol": report["settings"]["tol"]}
    for row in (totals, report["phase_seconds"], *report["layers"]):
        _check_numbers(path, row)
    for row in (*evaluation.get("perplexity", []), *evaluation.get("tasks", [])):
        _check_numbers(folder / EVALUATION_NAME, row)
    recipe = folder / RECIPE_NAME
    return Run(name, report, evaluation, recipe.read_text(encoding="utf-8") if recipe.is_file() else "")


# Of the two files' rows; everything else in a row is a number.
_TEXTS = {"name", "pattern", "note", "backend", "text", "bos", "task", "source"}
_TOTALS = ("sparsity", "model_sparsity", "largest_gap", "fallbacks")


def _check_numbers(path: Path, row: dict[str, Any]) -> None:
    for field, value in row.items():
        if field not in _TEXTS and value is not None and not isinstance(value, int | float):
            raise ValueError(f"{path}: {field} is {value!r}, which is no number")


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return data if isinstance(data, dict) else {}


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as it takes to tell them apart."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(part) for part in parts]
