"""Runs as read from their folders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qprecon.files import YAML, local_path, read_text
from qprecon.llm.recovery.report import RecoveryReport
from qprecon.llm.reporting.reading import read_json, validated
from qprecon.llm.reporting.report import RECOVERY_NAME, REPORT_NAME, LayerRow, PruneReport

# The names under which qprecon.llm writes them; a test holds the two together.
EVALUATION_NAME = "qprecon_eval.json"
RECIPE_NAME = "recipe.yaml"


@dataclass(frozen=True)
class Settings:
    """The settings of a report that the page shows."""

    mask: str
    update: str
    pattern: str | dict[str, str]
    damping: float
    tol: float
    nsamples: int
    seqlen: int
    seed: int
    backend: str = "auto"
    model: str = "a model"


@dataclass(frozen=True)
class RecoverySettings:
    """The settings of a recovery's report that the page shows."""

    nsamples: int
    seqlen: int
    windows_held_out: int
    batch: int
    lr: float
    temperature: float
    seed: int
    model: str = "a pruned model"
    dense: str = "a model"


@dataclass(frozen=True)
class Perplexity:
    """A row of `qprecon_eval.json`; the value is None or infinite where the loss was."""

    value: float | None
    text: str
    windows: int
    seqlen: int
    bos: str

    @property
    def condition(self) -> str:
        return f"{self.text} ({self.windows}×{self.seqlen}, BOS {self.bos})"


@dataclass(frozen=True)
class Task:
    """A row of `qprecon_eval.json`: the accuracies of one task, of its first `limit` items only unless that is None."""

    task: str
    source: str
    limit: int | None
    items: int
    acc: float
    acc_stderr: float | None
    acc_norm: float | None
    acc_norm_stderr: float | None
    perplexity: float | None = None  # LAMBADA's, of the last word

    @property
    def condition(self) -> str:
        return self.task if self.limit is None else f"{self.task} (first {self.limit})"


@dataclass(frozen=True)
class Evaluation:
    """What `qprecon eval --save` measured."""

    perplexity: list[Perplexity] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One output folder: its report, and what else lies there (empty where it doesn't)."""

    name: str
    report: PruneReport
    settings: Settings
    evaluation: Evaluation
    recipe: str

    @property
    def layers(self) -> tuple[LayerRow, ...]:
        return self.report.layers

    @property
    def columns(self) -> int:
        """How many columns were solved for."""
        return sum(row.n_outputs for row in self.layers if row.uncertified is not None)

    @property
    def uncertified(self) -> int:
        return sum(row.uncertified or 0 for row in self.layers)

    @property
    def seconds(self) -> float:
        return sum(self.report.phase_seconds.values())

    def values(self, name: str) -> list[float | None]:
        """A number of each layer; None where there is none or it is not finite."""
        return [finite(getattr(row, name)) for row in self.layers]

    def mean(self, name: str) -> float:
        """The mean of a number over the layers that have it."""
        known = [value for value in self.values(name) if value is not None]
        return sum(known) / len(known) if known else 0.0


@dataclass(frozen=True)
class RecoveryRun:
    """One output folder of `recover`."""

    name: str
    report: RecoveryReport
    settings: RecoverySettings
    evaluation: Evaluation

    @property
    def seconds(self) -> float:
        return sum(self.report.phase_seconds.values())


def finite(value: Any) -> Any:
    """The number, or None where it is None or not finite."""
    return None if value is None or not math.isfinite(value) else value


def read_runs(folders: Sequence[str | Path]) -> list[Run | RecoveryRun]:
    """The runs in `folders`, with names that tell them apart."""
    if not folders:
        raise ValueError("no folder given")
    paths = [local_path(folder) for folder in folders]
    return [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _read(folder: Path, name: str) -> Run | RecoveryRun:
    path = folder / REPORT_NAME
    if not path.is_file() and (folder / RECOVERY_NAME).is_file():
        return _read_recovery(folder, name)
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {REPORT_NAME} and no {RECOVERY_NAME}: neither `qprecon prune` nor `qprecon recover` wrote it"
        )
    report = PruneReport.load(path)
    if not report.layers:
        raise ValueError(f"{path}: layers is empty")
    settings = validated(Settings, {key: value for key, value in report.settings.items() if value is not None}, path)
    recipe = folder / RECIPE_NAME
    return Run(name, report, settings, _evaluation(folder), read_text(recipe, YAML) if recipe.is_file() else "")


def _read_recovery(folder: Path, name: str) -> RecoveryRun:
    path = folder / RECOVERY_NAME
    report = RecoveryReport.load(path)
    settings = validated(RecoverySettings, {key: value for key, value in report.settings.items() if value is not None}, path)
    for place, look in enumerate(report.held_out):
        if missing := {"step", "loss", "perplexity"} - set(look):
            raise ValueError(f"{path}: held_out[{place}].{min(missing)} is missing")
    if not report.held_out:
        raise ValueError(f"{path}: held_out is empty")
    return RecoveryRun(name, report, settings, _evaluation(folder))


def _evaluation(folder: Path) -> Evaluation:
    path = folder / EVALUATION_NAME
    return validated(Evaluation, read_json(path, form=1), path) if path.is_file() else Evaluation()


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as it takes to tell them apart."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(part) for part in parts]
