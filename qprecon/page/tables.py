"""The page's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .escaping import escape
from .runs import Run

_SIX = ("mmlu", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa")


def comparison(runs: Sequence[Run]) -> str:
    """One column a run, so that two fit on a phone; a row for each text and task that any of them was measured on."""
    texts = list(dict.fromkeys(_condition(row) for run in runs for row in run.evaluation.get("perplexity", [])))
    tasks = list(dict.fromkeys(_task(row) for run in runs for row in run.evaluation.get("tasks", [])))
    columns = []
    for run in runs:
        s = run.settings
        cells = [s["pattern"] if isinstance(s["pattern"], str) else "by layer", s["mask"], s["update"]]
        cells += [f"{len(run.layers)}", f"{run.report['sparsity']:.2%}"]
        cells += [f"{run.mean('error_masked'):.4g}", f"{run.mean('error_stored'):.4g}"]
        cells += [_number(run.report["largest_gap"], ".1e"), f"{run.uncertified:,}", f"{run.report['fallbacks']:,}"]
        found = {_condition(row): row["value"] for row in run.evaluation.get("perplexity", [])}
        scores = {_task(row): row["acc"] for row in run.evaluation.get("tasks", [])}
        cells += [_number(found.get(text), ".2f") for text in texts] + [_number(scores.get(task), ".2%") for task in tasks]
        columns.append([*cells, f"{run.seconds:.0f}"])
    names = ["pattern", "masks", "update", "layers", "zeros in them", "mean error, mask alone", "mean error, as stored"]
    names += ["largest certified gap", "columns not certified", "columns that fell back"]
    names += [*(f"perplexity, {text}" for text in texts), *(f"acc, {task}" for task in tasks), "seconds"]
    rows = [list(row) for row in zip(names, *columns, strict=True)]
    return _table(["", *(run.name for run in runs)], rows, words=1, style="runs")


def evaluation(run: Run) -> str:
    """Perplexities and accuracies with the conditions they were measured under; nothing where there are none."""
    measured, tasks = run.evaluation.get("perplexity", []), run.evaluation.get("tasks", [])
    parts = []
    if measured:
        rows = [
            [row["text"], f"{row['windows']:,} × {row['seqlen']:,}", row["bos"], _number(row["value"], ".3f")] for row in measured
        ]
        parts.append(_table(["text", "windows × tokens", "BOS", "perplexity"], rows, words=3))
    if tasks:
        rows = [
            [row["task"], row["source"], f"{row['items']:,}", _plus_minus(row["acc"], row["acc_stderr"]),
             _plus_minus(row["acc_norm"], row["acc_norm_stderr"])] for row in tasks
        ]  # fmt: skip
        average = _average(tasks)
        rows += [["average of six", "", "", f"{average:.2%}", ""]] if average is not None else []
        parts.append(_table(["zero-shot task", "source", "items", "acc", "acc_norm"], rows, words=2))
    return "".join(["<h3>Quality</h3>", *parts]) if parts else ""


def facts(run: Run) -> str:
    """Settings, versions and the recipe."""
    rows = [(key, value) for key, value in run.settings.items() if value not in (None, {}, [])]
    rows += [(f"version of {key}", value) for key, value in run.report["versions"].items()]
    cells = "".join(f'<tr><th>{escape(key)}</th><td class="w">{escape(_plain(value))}</td></tr>' for key, value in rows)
    recipe = f"<details><summary>Recipe</summary><pre>{escape(run.recipe)}</pre></details>" if run.recipe else ""
    return f'<table class="facts">{cells}</table>{recipe}'


def layer_table(run: Run) -> str:
    """Every layer's figures, folded away."""
    head = ["layer", "inputs × outputs", "zeros", "error, mask alone", "error, stored", "gap", "iterations", "seconds"]
    rows = [
        [row["name"], f"{row['n_inputs']:,} × {row['n_outputs']:,}", f"{row['reached_sparsity']:.2%}",
         f"{row['error_masked']:.4g}", f"{row['error_stored']:.4g}", _number(row["relative_gap"], ".1e"),
         _number(row["iterations"], "d"), f"{row['seconds']:.2f}"] for row in run.layers
    ]  # fmt: skip
    return f"<details><summary>All {len(rows)} layers</summary>{_table(head, rows, words=1)}</details>"


def _table(head: Sequence[Any], rows: Iterable[Sequence[Any]], words: int, style: str = "") -> str:
    """The first `words` columns hold words, the others numbers."""

    def line(tag: str, cells: Sequence[Any]) -> str:
        made = (f"<{tag}{'' if i < words else ' class=n'}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    return f'<div class="scroll"><table class="{style}">{line("th", head)}{"".join(line("td", row) for row in rows)}</table></div>'


def _average(tasks: Sequence[dict[str, Any]]) -> float | None:
    """Of the paper's six tasks, where all were measured on all their items."""
    whole = {row["task"]: row["acc"] for row in tasks if row["limit"] is None}
    return sum(whole[name] for name in _SIX) / len(_SIX) if set(_SIX) <= set(whole) else None


def _condition(row: dict[str, Any]) -> str:
    return f"{row['text']} ({row['windows']}×{row['seqlen']}, BOS {row['bos']})"


def _task(row: dict[str, Any]) -> str:
    return row["task"] if row["limit"] is None else f"{row['task']} (first {row['limit']})"


def _number(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def _plus_minus(value: float | None, stderr: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2%}" + ("" if stderr is None else f" ± {100 * stderr:.2f}")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
