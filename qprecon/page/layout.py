"""The page's text from runs: the values for each place in the templates. jinja2 escapes everything but charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from qprecon.wording import counted, counted_of

from .charts import Series, bars, layer_chart
from .recovered import recovered
from .runs import RecoveryRun, Run
from .tables import comparison, duration, facts, layer_table, number, perplexity_tiles, quality

_MOST_SERIES = 4  # as many shapes and colours as the charts tell apart


def page(runs: Sequence[Run | RecoveryRun]) -> str:
    """The whole document."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("qprecon.page"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    several = len(runs) > 1
    return environment.get_template("page.html").render(
        title=counted(len(runs), "run") if several else _title(runs[0]),
        compared=_compared(runs) if several else None,
        runs=[_run(run) for run in runs],
    )


def _title(run: Run | RecoveryRun) -> str:
    return f"Pruned {run.settings.model}" if isinstance(run, Run) else f"Pruned and recovered {run.settings.dense}"


def _compared(every: Sequence[Run | RecoveryRun]) -> dict[str, Any]:
    runs = [run for run in every if isinstance(run, Run)]
    shown = runs[:_MOST_SERIES]
    chart, notes = None, []
    if len(runs) < len(every):
        notes.append("A recovery looks at the whole model: it has no errors of layers.")
    if len(runs) > 1:
        names = [row.name for row in runs[0].layers]
        if all([row.name for row in run.layers] == names for run in shown):
            series = [Series(run.name, run.values("error_stored"), style) for run, style in zip(shown, "abcd", strict=False)]
            chart = layer_chart("Relative reconstruction error of the stored weights", names, series, log=True)
        else:
            notes.append("The runs pruned different layers, so their errors are not drawn in one chart.")
        if len({run.report.measure for run in runs}) > 1:
            notes.append("Token weights and drift differ between the runs: their errors are of different measures.")
        if chart is not None and len(runs) > len(shown):
            notes.append(f"The chart shows the first {len(shown)} of {counted(len(runs), 'run')}.")
    return {"table": comparison(every), "chart": chart, "note": " ".join(notes)}


def _run(run: Run | RecoveryRun) -> dict[str, Any]:
    """What its template is filled with, and which that is."""
    return _pruned(run) | {"template": "run.html"} if isinstance(run, Run) else recovered(run) | {"template": "recovered.html"}


def _pruned(run: Run) -> dict[str, Any]:
    off = max(abs(100 * (row.requested_sparsity - row.reached_sparsity)) for row in run.layers)
    excess = max((value for value in run.values("rounding_excess") if value is not None), default=0.0)
    return {
        "name": run.name,
        "model": run.settings.model,
        "layers": len(run.layers),
        "lead": _lead(run),
        "measure": run.report.measure,
        "warnings": _warnings(run),
        "tiles": _tiles(run),
        "charts": _charts(run),
        "rounding": f"{max(excess, 0.0):.2%}",
        "off": f"{off:.3g}",
        "allotted": (found := run.report.settings.get("allocation") or "uniform") != "uniform" and found,
        "quality": quality(run),
        "facts": facts(run),
        "recipe": run.recipe,
        "layer_table": layer_table(run),
        "excluded": run.report.excluded,
    }


def _lead(run: Run) -> str:
    s = run.settings
    update = {
        "optimal": "their kept weights were rebuilt by solving each column's quadratic program",
        "none": "the kept weights were left as they were",
        "own": f"the kept weights were updated as {s.mask} itself does",
        "adam": "the kept weights were rebuilt with Adam",
    }.get("adam" if s.backend == "adam" and s.update == "optimal" else s.update, f"update: {s.update}")
    pattern = s.pattern if isinstance(s.pattern, str) else "patterns by layer"
    reached = "" if pattern == "given" else f" to {pattern}"
    done = f"were pruned{reached} with {s.mask} masks; {update}"
    if run.report.quantised_only:
        done = f"were quantised to {run.report.settings['quantize']}"
    return (
        f"{done}. Calibration: {counted(s.nsamples, 'window')} of {counted(s.seqlen, 'token')}, "
        f"seed {s.seed}, damping {s.damping}. {run.report.stored_as()}"
    )


def _warnings(run: Run) -> list[str]:
    found = list(run.report.warnings)
    if run.uncertified:
        late = counted_of(run.uncertified, run.columns, "column", "is", "are")
        found.append(f"{late} not certified to the tolerance {run.settings.tol:g}")
    if run.report.fallbacks:
        fallen = counted(run.report.fallbacks, "column")
        found.append(f"{fallen} kept the start, because the solver's answer was worse or not finite")
    unbounded = [row for row in run.layers if row.relative_gap is not None and not math.isfinite(row.relative_gap)]
    if unbounded:
        have = counted(len(unbounded), "layer has", "layers have")
        found.append(f"{have} a column without any certificate, first {unbounded[0].name}")
    return found + [f"{row.name}: {row.note}" for row in run.layers if row.note][:20]


def _tiles(run: Run) -> list[tuple[str, str]]:
    error = f"{run.mean('error_stored'):.3g}", "mean relative error as stored"
    if not run.report.quantised_only:
        error = f"{run.mean('error_masked'):.3g} → {error[0]}", "mean relative error: mask alone → as stored"
    tiles = [
        (f"{run.report.sparsity:.2%}", f"zeros in the {run.report.made} layers"),
        (f"{run.report.model_sparsity:.2%}", f"zeros in the whole model{run.report.were_zero}"),
        error,
    ]
    if run.columns:
        tiles.append((number(run.report.largest_gap, ".1e"), "largest certified relative gap of a column"))
        tiles.append((f"{run.report.fallbacks:,}", f"of {counted(run.columns, 'column')} fell back to their start"))
    return [*tiles, (duration(run.seconds), "in all"), *perplexity_tiles(run)]


def _charts(run: Run) -> dict[str, Markup]:
    names, tol = [row.name for row in run.layers], run.settings.tol
    before, after, gaps = (run.values(name) for name in ("error_masked", "error_stored", "relative_gap"))
    series = [Series("mask alone", before, "b"), Series("as stored", after, "a")]
    reduction = [100 * (1 - new / old) if old and new is not None else None for old, new in zip(before, after, strict=True)]
    shares = [[None if v is None else 100 * v for v in run.values(name)] for name in ("requested_sparsity", "reached_sparsity")]
    charts = {
        "errors": layer_chart("Relative reconstruction error, layer by layer", names, series, log=True, join=True),
        "reduction": layer_chart("Error taken away by the weight update", names, [Series("reduction", reduction, "c")], unit="%"),
        "sparsity": layer_chart(
            "Zeros in each layer", names, [Series("asked for", shares[0], "b"), Series("reached", shares[1], "a")], unit="%"
        ),
        "time": bars("Wall-clock time by phase", [(key, t, duration(t)) for key, t in run.report.phase_seconds.items()]),
        "gaps": Markup(),
    }
    if any(row.relative_gap is not None for row in run.layers):
        charts["gaps"] = layer_chart(
            "Largest certified relative gap of a column",
            names,
            [Series("certified gap", gaps, "a")],
            log=True,
            line=(tol, f"asked for: {tol:g}") if tol > 0 else None,
        )
    return charts


