"""The page's text: runs -> HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .charts import Series, bars, layer_chart
from .escaping import escape
from .runs import Run
from .style import STYLE
from .tables import comparison, evaluation, facts, layer_table

_MOST_SERIES = 4  # as many shapes and colours as the charts tell apart


def page(runs: Sequence[Run]) -> str:
    """The whole document."""
    title = f"Pruned {runs[0].settings.get('model', 'model')}" if len(runs) == 1 else f"{len(runs)} pruning runs"
    body = [f"<h1>{escape(title)}</h1>", '<p class="dim">Written by qprecon from the reports in the output folders.</p>']
    if len(runs) > 1:
        body.append(_compared(runs))
    for run in runs:
        body.append(_run(run, heading=len(runs) > 1))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _compared(runs: Sequence[Run]) -> str:
    parts = ["<h2>Comparison</h2>", comparison(runs)]
    shown = runs[:_MOST_SERIES]
    names = [row["name"] for row in runs[0].layers]
    if all([row["name"] for row in run.layers] == names for run in shown):
        series = [
            Series(run.name, [row["error_stored"] for row in run.layers], style) for run, style in zip(shown, "abcd", strict=False)
        ]
        parts.append(layer_chart("Relative reconstruction error of the stored weights", names, series, log=True))
        if len(runs) > len(shown):
            parts.append(f'<p class="dim">The chart shows the first {len(shown)} of {len(runs)} runs.</p>')
    else:
        parts.append('<p class="dim">The runs pruned different layers, so their errors are not drawn in one chart.</p>')
    return "".join(parts)


def _run(run: Run, heading: bool) -> str:
    parts = [f'<h2 class="run">{escape(run.name)}</h2>'] if heading else []
    parts += [_lead(run), _warnings(run), _tiles(run)]
    parts += ["<h3>What it cost: reconstruction error</h3>", *_error_charts(run)]
    if any(row["relative_gap"] is not None for row in run.layers):
        parts += ["<h3>How near the optimum: certified gaps</h3>", _gap_chart(run)]
    parts += ["<h3>Sparsity</h3>", _sparsity_chart(run), "<h3>Time</h3>", _time_chart(run), evaluation(run)]
    parts += ["<h3>Settings</h3>", facts(run), layer_table(run), _excluded(run)]
    return "".join(parts)


def _lead(run: Run) -> str:
    s = run.settings
    update = {
        "optimal": "their kept weights were rebuilt by solving each column's quadratic program",
        "none": "the kept weights were left as they were",
        "own": f"the kept weights were updated as {s['mask']} itself does",
        "adam": "the kept weights were rebuilt with Adam",
    }.get("adam" if s.get("backend") == "adam" and s["update"] == "optimal" else s["update"], f"update: {s['update']}")
    pattern = s["pattern"] if isinstance(s["pattern"], str) else "patterns by layer"
    reached = "" if pattern == "given" else f" to {pattern}"
    text = (
        f"were pruned{reached} with {s['mask']} masks; {update}. Calibration: {s['nsamples']} windows of {s['seqlen']} tokens, "
        f"seed {s['seed']}, damping {s['damping']}. The weights are stored dense: these zeros make the file no smaller and, "
        "without kernels made for them, the model no faster."
    )
    return f"<p>{len(run.layers)} linear layers of <b>{escape(s.get('model', 'a model'))}</b> {escape(text)}</p>"


def _warnings(run: Run) -> str:
    found = list(run.report["warnings"])
    if run.uncertified:
        found.append(f"{run.uncertified:,} of {run.columns:,} columns are not certified to the tolerance {run.settings['tol']:g}")
    if run.report["fallbacks"]:
        found.append(f"{run.report['fallbacks']:,} columns kept their start, because the solver's answer was worse or not finite")
    unbounded = [row for row in run.layers if row["uncertified"] and row["relative_gap"] is None]
    if unbounded:
        found.append(f"{len(unbounded)} layers have a column without any certificate, first {unbounded[0]['name']}")
    found += [f"{row['name']}: {row['note']}" for row in run.layers if row["note"]][:20]
    if not found:
        return ""
    return '<ul class="warn">' + "".join(f"<li>{escape(text)}</li>" for text in found) + "</ul>"


def _tiles(run: Run) -> str:
    masked, stored = run.mean("error_masked"), run.mean("error_stored")
    tiles = [
        (f"{run.report['sparsity']:.2%}", "zeros in the pruned layers"),
        (f"{run.report['model_sparsity']:.2%}", "zeros in the whole model"),
        (f"{masked:.3g} → {stored:.3g}", "mean relative error: mask alone → as stored"),
    ]
    if run.columns:
        gap = run.report["largest_gap"]
        tiles.append(("unbounded" if gap is None else f"{gap:.1e}", "largest certified relative gap of a column"))
        tiles.append((f"{run.report['fallbacks']:,}", f"of {run.columns:,} columns fell back to their start"))
    tiles.append((duration(run.seconds), "in all"))
    for row in run.evaluation.get("perplexity", [])[:3]:
        value = "infinite" if row["value"] is None else f"{row['value']:.2f}"
        tiles.append((value, f"perplexity, {row['text']}, windows of {row['seqlen']}"))
    cells = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(text)}</span></div>' for value, text in tiles)
    return f'<div class="tiles">{cells}</div>'


def _error_charts(run: Run) -> list[str]:
    names = [row["name"] for row in run.layers]
    before, after = ([row[field] for row in run.layers] for field in ("error_masked", "error_stored"))
    series = [Series("mask alone", before, "b"), Series("as stored", after, "a")]
    reduction = [100 * (1 - new / old) if old else None for old, new in zip(before, after, strict=True)]
    return [
        layer_chart("Relative reconstruction error, layer by layer", names, series, log=True, join=True),
        layer_chart("Error taken away by the weight update", names, [Series("reduction", reduction, "c")], unit="%"),
        '<p class="dim">tr(DᵀHD) / tr(WᵀHW) with D the change of the weights, on the undamped H of the calibration text.</p>',
    ]


def _gap_chart(run: Run) -> str:
    names, gaps = [row["name"] for row in run.layers], [row["relative_gap"] for row in run.layers]
    tol = run.settings["tol"]
    chart = layer_chart(
        "Largest certified relative gap of a column",
        names,
        [Series("certified gap", gaps, "a")],
        log=True,
        line=(tol, f"asked for: {tol:g}") if tol > 0 else None,
    )
    note = "An upper bound on how far a column's error is above the smallest possible one, checked after the solver in float64. "
    excess = max((row["rounding_excess"] or 0.0 for row in run.layers), default=0.0)
    rounding = f"Rounding to the stored dtype afterwards added at most {excess:.2%} to a layer's error."
    return f'{chart}<p class="dim">{note}{rounding}</p>'


def _sparsity_chart(run: Run) -> str:
    names = [row["name"] for row in run.layers]
    wanted, reached = ([100 * row[field] for row in run.layers] for field in ("requested_sparsity", "reached_sparsity"))
    series = [Series("asked for", wanted, "b"), Series("reached", reached, "a")]
    off = max(abs(a - b) for a, b in zip(wanted, reached, strict=True))
    chart = layer_chart("Zeros in each layer", names, series, unit="%")
    return f'{chart}<p class="dim">The largest difference between the two is {off:.3g} percentage points.</p>'


def _time_chart(run: Run) -> str:
    phases = run.report["phase_seconds"]
    return bars("Wall-clock time by phase", [(name, seconds, duration(seconds)) for name, seconds in phases.items()])


def _excluded(run: Run) -> str:
    left: list[Any] = run.report["excluded"]
    if not left:
        return ""
    rows = "".join(f'<tr><td class="w">{escape(name)}</td><td>{escape(why)}</td></tr>' for name, why in left)
    return (
        f"<details><summary>{len(left)} matrices left dense</summary>"
        f'<div class="scroll"><table><tr><th>matrix</th><th>why</th></tr>{rows}</table></div></details>'
    )


def duration(seconds: float) -> str:
    """Seconds in words that suit their size."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
