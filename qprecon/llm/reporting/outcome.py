"""The report of a finished run: totals of its rows, and notes on what a reader of the rows would otherwise miss."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
import transformers

import qprecon
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.reporting.log import RunLog
from qprecon.llm.reporting.report import LayerRow, PruneReport, no_zeros_asked, quantised_only
from qprecon.wording import counted, counted_of

_SHORT = 1e-3  # of a layer's weights: what is missing of the sparsity asked for, and is said


def outcome(
    rows: Sequence[LayerRow], parameters: tuple[int, int], settings: dict[str, Any], log: RunLog, **facts: Any
) -> PruneReport:
    """The report of these rows. parameters: of the whole model, how many are zero and how many there are. facts: further fields
    of the report."""
    zeros, total = parameters
    known = [row.zeros_before for row in rows if row.zeros_before is not None]
    before = sum(known) + max(zeros - sum(row.zeros for row in rows), 0) if len(known) == len(rows) else None
    return PruneReport(
        layers=tuple(rows),
        sparsity=sum(row.zeros for row in rows) / sum(row.n_inputs * row.n_outputs for row in rows),
        model_sparsity=zeros / total,
        zero_before=None if before is None else before / total,
        parameters=total,
        settings=settings,
        versions=versions(),
        phase_seconds=dict(log.seconds),
        warnings=(*log.notes, *_remarks(rows, settings["mask"])),
        told=tuple(log.told),
        **facts,
    )


def among_ranks(ranks: Ranks, device: torch.device, windows: int | None, log: RunLog) -> dict[str, Any]:
    """The report's fields about the ranks of a run; what the others noted goes to the first one's notes. All must call it.

    windows: None where they are dealt out anew in each step, by collectives whose bytes are not counted.
    """
    if ranks.size == 1:
        return {}
    facts = ranks.facts(device)
    if windows is None:
        facts = {name: value for name, value in facts.items() if not name.startswith("bytes_")}
    else:
        share = ranks.share([0] * windows)
        facts["windows"] = 0 if share is None or share.spare else len(share.numbers)
    told = ranks.gathered(({**facts, "phase_seconds": dict(log.seconds)}, log.notes))
    for rank, (_, notes) in enumerate(told):
        log.notes += [f"rank {rank}: {note}" for note in notes if rank and note not in told[0][1]]
    return {"world_size": ranks.size, "ranks": tuple(facts for facts, _ in told)}


def _remarks(rows: Sequence[LayerRow], mask: str) -> list[str]:
    """mask: which method made them; given masks were not asked for a sparsity."""
    notes, given = [], mask == "given"
    if not any(row.zeros for row in rows) and not quantised_only(rows):
        notes.append("no weight was pruned" + (": the given masks keep all" if given else ""))
    elif all(row.zeros == row.zeros_before and row.requested_sparsity for row in rows):
        notes.append("no weight was pruned that was not zero before")
    if emptied := [row.name for row in rows if row.zeros == row.n_inputs * row.n_outputs]:
        notes.append(f"{_layers_have(emptied)} no weight left, first {emptied[0]}")
    notes += _not_held(rows, mask)
    others = [row for row in rows if not row.off_pattern]
    # Low bits make zeros of small weights, which were kept. Where none was asked for, all were zero before.
    asked = [row for row in others if row.bits is None and row.requested_sparsity]
    fuller = [row.name for row in asked if row.reached_sparsity > row.requested_sparsity + 1e-9]
    if fuller and not given:
        notes.append(f"{_layers_have(fuller)} more zeros than were asked for, first {fuller[0]}: what was zero stays so")
    short = [row for row in others if row.requested_sparsity - row.reached_sparsity >= _SHORT]
    if short and not given:
        worst = max(short, key=lambda row: row.requested_sparsity - row.reached_sparsity)
        notes.append(
            f"{_layers_have(short)} fewer zeros than were asked, at worst {worst.name}: {worst.requested_sparsity:.2%} asked, "
            f"{worst.reached_sparsity:.2%} got; counts in a column are rounded down to whole weights"
        )
    if idle := [row.name for row in rows if row.tokens == 0]:
        instead = "" if no_zeros_asked(rows) else ": masked by magnitude"
        notes.append(f"{counted(len(idle), 'expert')} got no calibration token, first {idle[0]}{instead}")
    if silent := [row.name for row in rows if row.tokens and row.zeros and row.requested_sparsity and row.error_masked == 0]:
        notes.append(
            f"in {counted(len(silent), 'layer')} the mask costs nothing at all, first {silent[0]}: the inputs of what it prunes "
            "are zero for every calibration token, or those weights were"
        )
    notes += _too_few_tokens(rows)
    notes += _missed(rows)
    return notes


def _layers_have(some: Sequence[Any]) -> str:
    return counted(len(some), "layer has", "layers have")


def _not_held(rows: Sequence[LayerRow], mask: str) -> list[str]:
    """Where a third party's masks are not what was asked for."""
    missed = [row for row in rows if row.off_pattern]
    if not missed:
        return []
    worst = max(missed, key=lambda row: abs(row.reached_sparsity - row.requested_sparsity))
    return [
        f"mask {mask!r} did not keep to the pattern asked for in {len(missed)} of {counted(len(rows), 'layer')}, at "
        f"worst {worst.name}: {worst.pattern} asked, {worst.reached_sparsity:.2%} zeros got"
    ]


def _useless(rows: Sequence[LayerRow]) -> set[str]:
    """The backends of which no answer to any column was used."""
    solved = [row for row in rows if row.backend is not None]
    return {row.backend for row in solved} - {row.backend for row in solved if (row.fallbacks or 0) < row.n_outputs}


def _missed(rows: Sequence[LayerRow]) -> list[str]:
    """Where columns are not certified to the tolerance, those of weights beside adapters included."""
    useless = _useless(rows)
    notes = [
        f"backend {name!r}: none of its answers could be used, as they were not finite or no better than the weights that columns "
        "started from, which are kept "
        f"({counted(sum(row.n_outputs for row in rows if row.backend == name), 'column')}). Take another backend"
        for name in sorted(useless)
    ]
    late = [row for row in rows if row.uncertified and row.backend not in useless]
    return notes + _late(late, len(rows))


def _late(late: Sequence[LayerRow], layers: int) -> list[str]:
    if not late:
        return []
    worst = max(late, key=lambda row: row.uncertified or 0)
    columns, stopped = (sum(getattr(row, name) or 0 for row in late) for name in ("uncertified", "out_of_time"))
    remedy = "a larger tol, a larger damping, more iterations (solve_options) or another backend may do"
    if stopped:
        limit = f"the time limit stopped {stopped} of {counted(columns, 'column')}: raise time_limit (solve_options)"
        remedy = limit if stopped == columns else f"{limit}; for the others {remedy}"
    return [
        f"{counted_of(len(late), layers, 'layer', 'has', 'have')} columns above the tolerance, most of them {worst.name} "
        f"({worst.uncertified} of {counted(worst.n_outputs, 'column')}): {remedy}"
    ]


def _fitted(row: LayerRow) -> bool:
    """Whether any weight was: where nothing is asked of a layer it stays as it is, unless another target asks for more."""
    return row.bits is not None or row.requested_sparsity > 0 or row.error_updated > 0


def _too_few_tokens(rows: Sequence[LayerRow]) -> list[str]:
    """Layers whose outputs can be met exactly, whatever the mask: the rank of H is at most the number of tokens."""
    share = {row.name: row.requested_sparsity if row.bits is not None else row.reached_sparsity for row in rows}
    kept = {row.name: row.n_inputs - round(share[row.name] * row.n_inputs) for row in rows}
    few = [row for row in rows if 0 < row.tokens < kept[row.name] and _fitted(row)]
    if not few:
        return []
    worst, layers = min(few, key=lambda row: row.tokens / row.n_inputs), counted_of(len(few), len(rows), "layer", "has", "have")
    is_whole = no_zeros_asked(rows)
    of = counted(worst.n_inputs, "input") if is_whole else f"{kept[worst.name]} of {counted(worst.n_inputs, 'input')}"
    return [
        f"{layers} fewer calibration tokens than {'inputs' if is_whole else 'kept inputs'}, at worst {worst.name} "
        f"({counted(worst.tokens, 'token')}, {of}): such weights fit this text and may not fit another; take more windows"
    ]


def versions() -> dict[str, str]:
    """Of what the outcome depends on."""
    return {
        "qprecon": qprecon.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
