"""Tables of `benchmarks/results/quality_<model>.json` and what stands beside them: presets, ingredients, calibrations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.pages import load, rows_of, table

Row = dict[str, Any]
PATTERNS = ("50%", "60%", "70%", "2:4")
KINDS = (("fast", False), ("balanced", False), ("best", False), ("best", True))
TEXTS = {"wikitext2": "WikiText-2", "c4": "C4", "code": "code"}
NAMES = {"gemma-3-270m": "Gemma-3-270M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B"}
LABELS = {
    ("wanda", "none"): "Wanda, kept as they are",
    ("wanda", "optimal"): "**Wanda + optimal**",
    ("sparsegpt", "own"): "SparseGPT + its own update",
    ("sparsegpt", "optimal"): "**SparseGPT mask + optimal**",
    ("thanos", "own"): "Thanos + its own update",
    ("thanos", "optimal"): "**Thanos mask + optimal**",
    ("proxsparse", "none"): "ProxSparse, kept as they are",
    ("proxsparse", "optimal"): "**ProxSparse mask + optimal**",
    ("alps", "own"): "ALPS + its own update",
    ("alps", "optimal"): "**ALPS mask + optimal**",
}
"""Masks and updates, as `methods` calls them."""
DEFAULT = {"wikitext2": "WikiText-2", "c4": "C4", "wikitext2+c4": "half of each"}


def presets() -> str:
    """Perplexities of the presets for SmolLM2 on both texts, and of a peer on the same windows."""
    name = "smollm2-135m"
    rows, peers = plain(rows_of(f"quality_{name}"), "wikitext2"), load(f"peers_{name}")
    (dense,) = (row for row in load(f"grid_{name}") if (row["pattern"], row["grid"]) == ("dense", "bf16"))
    scored = _dense(rows_of(f"quality_{name}"))  # of the same model; its perplexities are those of the run with the tasks
    accuracies = _accuracies(rows, scored)
    accuracies = accuracies if set(accuracies[1:]) - {"–"} else []  # those of the dense model alone say nothing
    body, ran_on = [["dense", *[perplexities([dense])] * len(PATTERNS), *accuracies[:1], "–"]], {}
    at_60: list[str] = []
    for place, (preset, recovered) in enumerate(KINDS, start=1):
        own = _of(rows, preset, recovered)
        timed, later = (next(row for row in own if row["pattern"] == pattern) for pattern in ("50%", "60%"))
        at_60.append(f"{later['seconds']:.0f}")
        cells = [*_cells(own, PATTERNS), *accuracies[place : place + 1]]
        body.append([_label(preset, recovered), *cells, f"{timed['seconds']:.0f} s"])
        ran_on.setdefault(timed["card"], []).append(_label(preset, recovered))
    for method, title in (("wanda", "Wanda"), ("sparsegpt", "SparseGPT")):
        own = [row for row in peers if row["method"] == method]
        more = ["–"] if accuracies else []
        body.append([f"llm-compressor, {title}", *_cells(own, PATTERNS), *more, f"{own[0]['seconds']:.0f} s"])
    ran_on.setdefault(peers[0]["card"], []).append("llm-compressor")
    cards = "; ".join(f"{', '.join(labels)}: {card}" for card, labels in ran_on.items())
    version = peers[0]["versions"]["llmcompressor"]
    note = "WikiText-2 / C4; the peer on WikiText-2 only. Seconds at 50 %; at 60 % ours take "
    note += f"{', '.join(at_60[:-1])} and {at_60[-1]} s. "
    note += f"llm-compressor {version}. – not run. Cards: {cards}. {_dates([*rows, *peers])}." + _about_accuracies(rows)
    return table(["", *PATTERNS, *(["tasks"] if accuracies else []), "pruning"], body) + "\n\n" + note


def others() -> str:
    """The same of the other models, as far as they were measured: a table each."""
    return "\n\n".join(_other(name) for name in NAMES if rows_of(f"quality_{name}")) or "Not measured yet."


def _other(name: str) -> str:
    """One model: the presets on the calibration that most of its rows have."""
    everything = rows_of(f"quality_{name}")
    pruned = [row["calibration"] for row in plain(everything) if row["calibration"]]
    calibration = max(dict.fromkeys(pruned), key=pruned.count)
    rows, dense = plain(everything, calibration), _dense(everything)
    patterns = [pattern for pattern in PATTERNS if any(row["pattern"] == pattern for row in rows)]
    accuracies = _accuracies(rows, dense)
    body = [["dense", *[perplexities(dense)] * len(patterns), *accuracies[:1]]]
    for place, (preset, recovered) in enumerate(KINDS, start=1):
        body.append([_label(preset, recovered), *_cells(_of(rows, preset, recovered), patterns), *accuracies[place : place + 1]])
    body = [line for line in body if set(line[1:]) != {"–"}]
    shown = [*rows, *dense]
    texts = " / ".join(TEXTS[text] for text in max((row["perplexity"] for row in shown), key=len))
    parts = [TEXTS[text] for text in calibration.split("+")]
    source = parts[0] if len(parts) == 1 else f"equal parts of {', '.join(parts[:-1])} and {parts[-1]}"
    codes = {part["text"]: None for row in shown for part in row.get("code", {}).values()}
    note = f"{texts}. Calibrated on {rows[0]['windows']} windows of {rows[0]['seqlen']} tokens: {source}. "
    note += "".join(f"Code: {code.replace('*.py', '`*.py`')}. " for code in codes)
    note += f"– not run. {', '.join(sorted({row['card'] for row in shown}))}; {_dates(shown)}." + _about_accuracies(rows)
    return f"{NAMES[name]}:\n\n{table(['', *patterns, *(['tasks'] if accuracies else [])], body)}\n\n{note}"


def ladder() -> str:
    """What each ingredient gains, on validation texts."""
    rows = [row for row in load("quality_smollm2-135m") if row["split"] == "validation"]
    names = {
        "alps": "ALPS's mask", "order": "order", "drift": "drift", "token_weights": "token weights", "residual": "residual stream",
        "output_weights": "output weights", "allocation": "allocation by loss", "refine=block": "refinement of blocks",
        "refine=halves": "refinement of half blocks",
    }  # fmt: skip

    def switched_on(row: Row) -> str:
        own = [names.get(each, each) for each in row["ingredients"]]
        return " + ".join([f"`{row['preset']}`", *own] if row["preset"] != "fast" or not own else own)

    body = [
        [row["pattern"], switched_on(row), *(f"{value:.2f}" for value in row["perplexity"].values()), row["card"]]
        for row in sorted(rows, key=lambda row: (PATTERNS.index(row["pattern"]), -row["perplexity"]["wikitext2"]))
    ]
    return table(["pattern", "switched on", "WikiText-2", "C4", "card"], body) + f"\n\n{_dates(rows)}."


def calibrations() -> str:
    """`best`, by the text it is calibrated on and by the seed that chooses the windows; test texts."""
    rows = [row for row in load("quality_smollm2-135m") if row["split"] == "test" and row["preset"] == "best"]
    kinds = sorted({(row["calibration"], row["seed"], row["recovered"]) for row in rows}, key=lambda k: (k[0] != "wikitext2", *k))
    body = []
    for calibration, seed, recovered in kinds:
        own = [row for row in rows if (row["calibration"], row["seed"], row["recovered"]) == (calibration, seed, recovered)]
        body.append([DEFAULT[calibration], str(seed), _label("best", recovered), *_cells(own, PATTERNS)])
    cards = ", ".join(sorted({row["card"] for row in rows}))
    return table(["calibrated on", "seed", "", *PATTERNS], body) + f"\n\nWikiText-2 / C4. – not run. {cards}, {_dates(rows)}."


def plain(rows: Sequence[Row], calibration: str | None = None) -> list[Row]:
    """Rows on whole test texts of the presets as they are, seed 0, of one calibration or of all."""
    rows = [row for row in rows if row["split"] == "test" and not row["ingredients"] and row["seed"] == 0]
    rows = [row for row in rows if row["eval_windows"] is None]
    return [row for row in rows if row["pattern"] != "dense" and calibration in (None, row["calibration"])]


def perplexities(rows: Sequence[Row]) -> str:
    """Those of the first row, a text each; – where there is none."""
    return " / ".join(f"{value:.2f}" for value in rows[0]["perplexity"].values()) if rows else "–"


def _label(preset: str, recovered: bool) -> str:
    return f"`{preset}`, then `recover`" if recovered else f"`{preset}`"


def _of(rows: Sequence[Row], preset: str, recovered: bool) -> list[Row]:
    return [row for row in rows if row["preset"] == preset and row["recovered"] == recovered]


def _dense(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["pattern"] == "dense" and row["split"] == "test" and row["eval_windows"] is None]


def _cells(rows: Sequence[Row], patterns: Sequence[str]) -> list[str]:
    return [perplexities([row for row in rows if row["pattern"] == pattern]) for pattern in patterns]


def _scored(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The accuracies of the row at 50 % or of the dense model."""
    return next((row["accuracy"] for row in rows if row["pattern"] in ("50%", "dense") and "accuracy" in row), None)


def _average(rows: Sequence[Row]) -> dict[str, Any] | None:
    """These, with their mean, where all six tasks were run."""
    found = _scored(rows)
    return found if found and found["average"] is not None else None


def _accuracies(rows: Sequence[Row], dense: Sequence[Row]) -> list[str]:
    """A cell for the dense model and for each of `KINDS`; no cells where no row has one."""
    found = [_average(dense), *(_average(_of(rows, *kind)) for kind in KINDS)]
    return [f"{100 * each['average']:.1f}" if each else "–" for each in found] if any(found) else []


def _about_accuracies(rows: Sequence[Row]) -> str:
    """What the column of accuracies is, and whether recovery costs any."""
    found = [_average(_of(rows, *kind)) for kind in KINDS]
    known = next((each for each in found if each), None)
    if known is None:
        return ""
    limit = "" if known["limit"] is None else f", the first {known['limit']} items of each task and of each of MMLU's subjects"
    words = f" Tasks: mean zero-shot accuracy of {', '.join(known['tasks'])} at 50 %, in %{limit}; standard error "
    words += f"{100 * max(each['stderr'] for each in found if each):.1f}."
    before, after = (_scored(_of(rows, *kind)) for kind in KINDS[-2:])
    return words + (_changed(before["tasks"], after["tasks"]) if before and after else "")


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What recovery does to the mean over the tasks that both have."""
    both = [task for task in before if task in after]
    change = sum(after[task]["acc"] - before[task]["acc"] for task in both) / len(both)
    error = math.sqrt(sum(each[task]["stderr"] ** 2 for task in both for each in (before, after))) / len(both)
    verdict = "more than" if abs(change) > 2 * error else "less than"
    over = "" if len(both) == len(before) else f" (mean of {', '.join(both)})"
    return f" Recovery changes it by {100 * change:+.1f}{over}, {verdict} two standard errors of a difference."


def _dates(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({row["date"] for row in rows}))


def methods(model: str) -> str:
    """Perplexities by mask, update and pattern; rows that a model has none of are left out."""
    rows = [row for row in load(f"paper_{model}") if row.get("perplexity")]
    dense = next(row for row in rows if row["pattern"] == "dense")
    patterns = ("50%", "60%", "2:4")

    def cell(mask: str, update: str, pattern: str) -> str:
        wanted = {"mask": mask, "update": update, "pattern": pattern, "calibration": "wikitext2", "windows": 128}
        wanted |= {"layers": "all", "damping": 0.01}
        found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
        used.extend(found[:1])
        return f"{found[0]['perplexity']:.2f}" if found else "–"

    used = [dense]
    body = [[label, *(cell(mask, update, p) for p in patterns)] for (mask, update), label in LABELS.items()]
    body = [line for line in body if any(value != "–" for value in line[1:])]
    machines, dates = (", ".join(sorted({row[key] for row in used})) for key in ("machine", "date"))
    note = f"Dense: {dense['perplexity']:.2f}. Damping 0.01. – not run, or not defined. {machines}; {dates}."
    return table(["mask + weights", *patterns], body) + "\n\n" + note
