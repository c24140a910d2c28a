"""The page's tables, as text in rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .runs import RecoveryRun, Run, Task, finite

_SIX = ("mmlu", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa")


@dataclass(frozen=True)
class Table:
    """The first `words` columns hold words, the others numbers. style: a class of the style sheet."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int
    style: str = ""


def comparison(runs: Sequence[Run | RecoveryRun]) -> Table:
    """One column a run, so that two fit on a phone; a row for each text and task that any of them was measured on."""
    texts = list(dict.fromkeys(row.condition for run in runs for row in run.evaluation.perplexity))
    tasks = list(dict.fromkeys(row.condition for run in runs for row in run.evaluation.tasks))
    columns = []
    for run in runs:
        cells = _pruned(run) if isinstance(run, Run) else _recovered(run)
        found = {row.condition: number(row.value, ".2f") for row in run.evaluation.perplexity}
        scores = {row.condition: number(row.acc, ".2%") for row in run.evaluation.tasks}
        cells += [found.get(text, "–") for text in texts] + [scores.get(task, "–") for task in tasks]
        columns.append([*cells, f"{run.seconds:.0f}"])
    names = ["pattern", "preset", "masks", "update", "calibration", "stored in", "rank of the adapter"]
    names += ["layers", "zeros in them", "mean error, mask alone", "mean error, as stored"]
    names += ["largest certified gap", "columns not certified", "columns that fell back"]
    names += [*(f"perplexity, {text}" for text in texts), *(f"acc, {task}" for task in tasks), "seconds"]
    rows = [list(row) for row in zip(names, *columns, strict=True)]
    rows = [row for row in rows if row[0] != "rank of the adapter" or set(row[1:]) != {"–"}]
    return Table(["", *(run.name for run in runs)], rows, words=1, style="runs")


def _pruned(run: Run) -> list[str]:
    s, given = run.settings, run.report.settings
    cells = [_pattern(s.pattern), str(given.get("preset") or "–"), s.mask, s.update, _calibration(given), _stored(run)]
    cells += [str(given.get("adapter_rank") or "–"), f"{len(run.layers)}", f"{run.report.sparsity:.2%}"]
    cells += [f"{run.mean('error_masked'):.4g}", f"{run.mean('error_stored'):.4g}"]
    return [*cells, number(run.report.largest_gap, ".1e"), f"{run.uncertified:,}", f"{run.report.fallbacks:,}"]


def _recovered(run: RecoveryRun) -> list[str]:
    was = run.report.pruned_with or {}
    first = [_pattern(was.get("pattern", "–")), "–", str(was.get("mask", "–")), "recovered"]
    return [*first, _calibration(run.report.settings), "–", "–", f"{run.report.layers}", f"{run.report.sparsity:.2%}", *["–"] * 5]


def _calibration(settings: Mapping[str, Any]) -> str:
    """The text, where it has a name, and how many windows of how many tokens."""
    text = settings.get("calibration")
    return f"{_plain(text)}, " * bool(text) + f"{settings.get('nsamples')} × {settings.get('seqlen')}"


def _stored(run: Run) -> str:
    """Low-bit weights by the grid's name and their bits with scales, all others dense."""
    bits = [(row.bits, row.n_inputs * row.n_outputs) for row in run.layers if row.bits is not None]
    if not bits:
        return "dense"
    mean = sum(each * count for each, count in bits) / sum(count for _, count in bits)
    return f"{run.report.settings.get('quantize')}, {mean:.3g} bits"


def _pattern(pattern: Any) -> str:
    return pattern if isinstance(pattern, str) else "by layer"


def perplexity_tiles(run: Run | RecoveryRun) -> list[tuple[str, str]]:
    """The first perplexities that were measured, with what they are."""
    tiles = []
    for row in run.evaluation.perplexity[:3]:
        value = math.inf if row.value is None else row.value
        tiles.append((f"{value:.2f}" if math.isfinite(value) else "infinite", f"perplexity, {row.text}, windows of {row.seqlen}"))
    return tiles


def quality(run: Run | RecoveryRun) -> list[Table]:
    """Perplexities and accuracies with the conditions they were measured under; nothing where there are none."""
    measured, tasks = run.evaluation.perplexity, run.evaluation.tasks
    tables = []
    if measured:
        rows = [[row.text, f"{row.windows:,} × {row.seqlen:,}", row.bos, number(row.value, ".3f")] for row in measured]
        tables.append(Table(["text", "windows × tokens", "BOS", "perplexity"], rows, words=3))
    if tasks:
        tables.append(_task_table(tasks))
    return tables


def _task_table(tasks: Sequence[Task]) -> Table:
    """Accuracies; perplexities beside them where a task has one (LAMBADA's)."""
    rows = [
        [row.task, row.source, f"{row.items:,}", _plus_minus(row.acc, row.acc_stderr),
         _plus_minus(row.acc_norm, row.acc_norm_stderr)] for row in tasks
    ]  # fmt: skip
    average = _average(tasks)
    rows += [["average of six", "", "", f"{average:.2%}", ""]] if average is not None else []
    head = ["zero-shot task", "source", "items", "acc", "acc_norm"]
    if any(row.perplexity is not None for row in tasks):
        found = [number(row.perplexity, ".2f") for row in tasks]
        head, rows = [*head, "perplexity"], [[*row, value] for row, value in zip(rows, [*found, ""], strict=False)]
    return Table(head, rows, words=2)


def facts(run: Run | RecoveryRun) -> list[tuple[str, str]]:
    """Settings and versions."""
    rows = [(key, value) for key, value in run.report.settings.items() if value not in (None, {}, [])]
    rows += [("processes (ranks)", run.report.world_size)] if run.report.world_size > 1 else []
    rows += [(f"version of {key}", value) for key, value in run.report.versions.items()]
    return [(str(key), _plain(value)) for key, value in rows]


def layer_table(run: Run) -> Table:
    """Every layer's figures."""
    head = ["layer", "inputs × outputs", "zeros", "error, mask alone", "error, stored", "gap", "stored gap", "iterations"]
    rows = [
        [row.name, f"{row.n_inputs:,} × {row.n_outputs:,}", f"{row.reached_sparsity:.2%}", number(row.error_masked, ".4g"),
         number(row.error_stored, ".4g"), number(row.relative_gap, ".1e"), number(row.stored_gap, ".1e"),
         number(row.iterations, "d"), f"{row.seconds:.2f}"]
        for row in run.layers
    ]  # fmt: skip
    return Table([*head, "seconds"], rows, words=1)


def number(value: float | None, form: str) -> str:
    """The number in words: a dash for none, "unbounded" for an infinite one."""
    if value is None or math.isnan(value):
        return "–"
    return format(value, form) if finite(value) is not None else "unbounded"


def duration(seconds: float) -> str:
    """Seconds in words that suit their size."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _average(tasks: Sequence[Task]) -> float | None:
    """Of the paper's six tasks, where all were measured on all their items."""
    whole = {row.task: row.acc for row in tasks if row.limit is None}
    return sum(whole[name] for name in _SIX) / len(_SIX) if set(_SIX) <= set(whole) else None


def _plus_minus(value: float | None, stderr: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2%}" + ("" if stderr is None else f" ± {100 * stderr:.2f}")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
