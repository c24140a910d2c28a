"""What the page says of a recovered model."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from qprecon.wording import counted

from .charts import Course, bars, step_chart
from .runs import RecoveryRun
from .tables import Table, duration, facts, perplexity_tiles, quality


def recovered(run: RecoveryRun) -> dict[str, Any]:
    """What the template recovered.html is filled with."""
    report = run.report
    return {
        "name": run.name,
        "model": run.settings.dense,
        "layers": report.layers,
        "lead": _lead(run),
        "warnings": list(report.warnings),
        "tiles": _tiles(run),
        "charts": _charts(run),
        "best": report.best_step,
        "quality": quality(run),
        "facts": facts(run),
        "looks": Table(["step", "divergence", "perplexity"], _looks(run), words=0),
    }


def _looks(run: RecoveryRun) -> list[list[str]]:
    return [[f"{at['step']:g}", f"{at['loss']:.4g}", f"{at['perplexity']:.3f}"] for at in run.report.held_out]


def _lead(run: RecoveryRun) -> str:
    s, was = run.settings, run.report.pruned_with or {}
    pruned = f" They were pruned to {was['pattern']} with {was['mask']} masks." if {"pattern", "mask"} <= set(was) else ""
    return (
        f"have the zeros that they had; {counted(run.report.trained, 'weight was', 'weights were')} trained towards the dense "
        f"model's predictions in {counted(len(run.report.losses), 'step')} of {counted(s.batch, 'window')} (AdamW, peak learning "
        f"rate {s.lr:.3g}, temperature {s.temperature:g}). Text: {counted(s.nsamples, 'window')} of {counted(s.seqlen, 'token')}, "
        f"seed {s.seed}; {counted(s.windows_held_out, 'of them was', 'of them were')} not trained on.{pruned}"
    )


def _tiles(run: RecoveryRun) -> list[tuple[str, str]]:
    report = run.report
    return [
        (f"{report.sparsity:.2%}", "zeros in the pruned layers"),
        (
            f"{report.perplexity_before:.2f} → {report.perplexity_stored:.2f}",
            "perplexity on the windows held out: pruned → as stored",
        ),
        (f"{report.perplexity_dense:.2f}", "perplexity of the dense model there"),
        (f"{report.held_out[0]['loss']:.3g} → {report.loss_stored:.3g}", "divergence from the dense model there, nats a token"),
        (duration(run.seconds), "in all"),
        *perplexity_tiles(run),
    ]


def _charts(run: RecoveryRun) -> dict[str, Markup]:
    report = run.report
    looks = [(float(at["step"]), at["perplexity"]) for at in report.held_out]
    losses = [(float(step), loss) for step, loss in enumerate(report.losses, start=1)]
    held = [(float(at["step"]), at["loss"]) for at in report.held_out]
    dense = report.perplexity_dense
    return {
        "perplexity": step_chart(
            "Perplexity on the windows held out", [Course("pruned model", looks, "a")], from_zero=False,
            line=(dense, f"dense model: {dense:.4g}"),
        ),
        "losses": step_chart(
            "Divergence from the dense model, nats a token",
            [Course("steps, on their own windows", losses, "b", joined=True), Course("windows held out", held, "a")],
        ),
        "time": bars("Wall-clock time by phase", [(key, t, duration(t)) for key, t in report.phase_seconds.items()]),
    }
