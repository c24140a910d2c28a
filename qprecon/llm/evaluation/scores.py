"""What tasks are scored: accuracies with their standard errors, and the average that the paper gives.

The paper's columns: `acc` (not acc_norm), zero-shot, and the unweighted average of its six tasks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qprecon.wording import counted

PAPER_TASKS = ("mmlu", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa")


@dataclass(frozen=True)
class TaskScore:
    """One task's figures. Standard errors are those of a mean over `items` items; None where lm-eval has no such metric.

    `perplexity` is LAMBADA's, of the last word.
    """

    task: str
    items: int
    acc: float
    acc_stderr: float | None
    acc_norm: float | None = None
    acc_norm_stderr: float | None = None
    perplexity: float | None = None


@dataclass(frozen=True)
class TaskScores:
    """The outcome of `evaluate_tasks`. source: "hub", or "local files". limit: items a task, None for all of them."""

    scores: tuple[TaskScore, ...]
    source: str
    limit: int | None
    seconds: float
    versions: dict[str, str]

    @property
    def average(self) -> float | None:
        """The unweighted mean `acc` of the paper's six tasks; None unless all six were measured."""
        six = self._six()
        return math.fsum(score.acc for score in six) / len(six) if six else None

    @property
    def average_stderr(self) -> float | None:
        """Of `average`, the tasks' items being independent."""
        errors = [score.acc_stderr for score in self._six()]
        if not errors or None in errors:
            return None
        return math.sqrt(math.fsum(error**2 for error in errors if error is not None)) / len(errors)

    def _six(self) -> list[TaskScore]:
        by_name = {score.task: score for score in self.scores}
        return [by_name[name] for name in PAPER_TASKS] if set(PAPER_TASKS) <= set(by_name) else []

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {**dataclasses.asdict(self), "average": self.average, "average_stderr": self.average_stderr}

    def __str__(self) -> str:
        rows = [("task", "items", "acc", "acc_norm")]
        rows += [
            (score.task, f"{score.items:,}", _percent(score.acc, score.acc_stderr), _percent(score.acc_norm, score.acc_norm_stderr))
            for score in self.scores
        ]
        if self.average is not None:
            rows.append(("average of six", "", _percent(self.average, self.average_stderr), ""))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        words = [f"LAMBADA perplexity {s.perplexity:.2f}" for s in self.scores if s.perplexity is not None]
        part = "all items" if self.limit is None else f"the first {counted(self.limit, 'item')} a task or subject"
        return "\n".join([*table, *words, f"zero-shot, in %, {part}, {self.source}, {self.seconds:.0f} s"])


def task_score(name: str, results: dict[str, Any]) -> TaskScore:
    """A task's or group's figures out of lm-eval's results. ValueError for one that reports no accuracy."""
    figures = results["results"][name]
    members = results.get("group_subtasks", {}).get(name) or [name]
    items = sum(results["n-samples"][task]["effective"] for task in _leaves(members, results))
    acc, acc_norm = figures.get("acc,none"), figures.get("acc_norm,none")
    if acc is None:
        raise ValueError(f"task {name!r} reports no acc but {', '.join(key for key in figures if ',' in key)}")
    return TaskScore(
        task=name,
        items=items,
        acc=float(acc),
        acc_stderr=_stderr(acc, items),
        acc_norm=None if acc_norm is None else float(acc_norm),
        acc_norm_stderr=None if acc_norm is None else _stderr(acc_norm, items),
        perplexity=figures.get("perplexity,none"),
    )


def _leaves(names: Sequence[str], results: dict[str, Any]) -> list[str]:
    """The tasks of groups of groups."""
    groups = results.get("group_subtasks", {})
    return [leaf for name in names for leaf in (_leaves(groups[name], results) if groups.get(name) else [name])]


def _stderr(mean: float, items: int) -> float | None:
    """Of a mean of zeros and ones: the sample standard deviation over the root of the count, as lm-eval's mean_stderr."""
    return math.sqrt(mean * (1 - mean) / (items - 1)) if items > 1 else None


def _percent(value: float | None, stderr: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.2f}" + ("" if stderr is None else f" ± {100 * stderr:.2f}")
