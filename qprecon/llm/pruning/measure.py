"""What pruning cost a layer: relative reconstruction errors, zeros and solver facts, as rows of the report.

Figures stay on the device until a block is done and are fetched together. Shapes as in `update`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from qprecon.llm.lowbit.rounding import at_host, joined_scales, relative_gap
from qprecon.llm.masks.packed import pack
from qprecon.llm.ranks.group import Ranks
from qprecon.llm.reporting.report import LayerRow
from qprecon.llm.statistics.energy import Energy
from qprecon.status import Status

if TYPE_CHECKING:
    import qprecon
    from qprecon.grids.formats import Fitted
    from qprecon.llm.lowbit.adapter import Adapter
    from qprecon.llm.lowbit.rounding import Stored
    from qprecon.llm.pruning.method import Method
    from qprecon.llm.pruning.plan import LayerPlan, Part

@dataclass(frozen=True)
class Seconds:
    """Wall-clock time of a group or a layer. `update` is everything from masks to stored weights; `solve`, `audit` and
    `rounding`, which has an audit of its own, are within it."""

    mask: float
    update: float
    measure: float
    solve: float = 0.0
    audit: float = 0.0
    rounding: float = 0.0

    @staticmethod
    def of(mask: float, update: float, measure: float, solution: qprecon.Solution | None, rounding: float = 0.0) -> Seconds:
        if solution is None:
            return Seconds(mask, update, measure, rounding=rounding)
        t = solution.timing
        return Seconds(mask, update, measure, t.setup + t.compile + t.solve, t.audit, rounding)

    def share(self, part: float) -> Seconds:
        """The time of a layer: its share of the group's columns."""
        return Seconds(*(part * getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Remark:
    """A row's remarks on its mask: fields of `LayerRow` with these names."""

    note: str = ""
    off_pattern: bool = False


@dataclass(frozen=True)
class Rebuilt:
    """What became of the weights of a group, matrices (N, K).

    asked_NK: the weights that were asked for. dense_NK: these, or what is left of them beside the adapters. mask_NK: True = kept.
    new_NK: the best values, or other ones where nothing was solved; stored: these on their grid.
    """

    asked_NK: torch.Tensor
    dense_NK: torch.Tensor
    mask_NK: torch.Tensor
    new_NK: torch.Tensor
    solution: qprecon.Solution | None
    stored: Stored
    adapters: Sequence[Adapter]
    rounding_spans: Sequence[tuple[Any, Any]]

    @property
    def is_adapted(self) -> bool:
        """Whether adapters make up for a part of the weights."""
        return self.asked_NK is not self.dense_NK


@dataclass(frozen=True)
class Draft:
    """A row, or a part of one, whose figures are on the device: energies (dense, masked, updated, stored), zeros, kept, finite,
    zeros before; float64 (8,), sums over columns.

    mask: the bits of the mask that was used (`masks.packed`), scales: of low-bit weights, each if the method keeps them.
    """

    part: Part
    facts: dict[str, Any]
    figures: torch.Tensor
    mask: torch.Tensor | None = None
    scales: Fitted | None = None
    seconds: Seconds | None = None

    @property
    def width(self) -> int:
        return self.part.width

    @property
    def name(self) -> str:
        return self.part.view.name

    def timed(self, seconds: Seconds) -> Draft:
        return replace(self, seconds=seconds)


def draft_rows(
    parts: Sequence[Part],
    prepared: qprecon.PreparedHessian,
    tokens: int,
    rebuilt: Rebuilt,
    stored_NK: torch.Tensor,
    method: Method,
    remarks: Sequence[Remark],
    zeros_before: Sequence[torch.Tensor],
) -> list[Draft]:
    """A draft for each part of a group. stored_NK: what its layers hold, (N, K); zeros_before: a number each."""
    mask_NK, solution, stored = rebuilt.mask_NK, rebuilt.solution, rebuilt.stored
    narrow = all(part.view.dtype == torch.bfloat16 for part in parts) and not rebuilt.is_adapted
    figures_7K = _figures(Energy(prepared.hessian.hessian_NN), prepared.ridge, rebuilt, stored_NK, method, narrow)
    drafts, first = [], 0
    for part, remark, before in zip(parts, remarks, zeros_before, strict=True):
        columns = slice(first, first := first + part.width)
        facts = {"tokens": tokens, **asdict(remark), **_solver_facts(solution, columns, method.tol)}
        facts["stored_costs"] = stored.costs(columns)
        if stored.fitted is not None:
            facts["bits"] = stored.fitted.grid.bits_per_weight(part.view.n_inputs)
        if rebuilt.is_adapted:
            facts["rank"] = min(method.adapter_rank, part.view.n_inputs, part.view.n_outputs)
        if method.mask == "given":
            facts["pattern"] = "given"  # it is taken as it is, whatever pattern was asked for
        bits = pack(mask_NK[:, columns]) if method.keep_masks else None
        scales = stored.scales(columns) if method.keep_scales else None
        figures_8 = torch.cat([figures_7K[:, columns].sum(1), before.double()[None]])
        drafts.append(Draft(part, facts, figures_8, bits, scales))
    return drafts


def kept_masks(drafts: Sequence[Draft], ranks: Ranks = Ranks()) -> dict[str, torch.Tensor]:
    """The packed masks of a block, layer -> bits, on every rank; none unless the method keeps them."""
    if ranks.alone:
        return {draft.name: draft.mask for draft in drafts if draft.mask is not None}
    own = [(draft.name, draft.part.columns.start, draft.mask.cpu().numpy()) for draft in drafts if draft.mask is not None]
    bits: dict[str, list[torch.Tensor]] = {}
    for name, _, part in sorted((each for told in ranks.gathered(own) for each in told), key=lambda each: each[:2]):
        bits.setdefault(name, []).append(torch.from_numpy(part))
    return {name: torch.cat(parts) for name, parts in bits.items()}  # parts begin at whole bytes


def kept_scales(drafts: Sequence[Draft], ranks: Ranks = Ranks()) -> dict[str, Fitted]:
    """The grids and scales of a block's layers, on every rank; none unless the method keeps them."""
    if ranks.alone:
        return {draft.name: draft.scales for draft in drafts if draft.scales is not None}
    own = [(draft.name, draft.part.columns.start, at_host(draft.scales)) for draft in drafts if draft.scales is not None]
    parts: dict[str, list[Fitted]] = {}
    for name, _, part in sorted((each for told in ranks.gathered(own) for each in told), key=lambda each: each[:2]):
        parts.setdefault(name, []).append(part)
    return {name: joined_scales(each) for name, each in parts.items()}


def finished_rows(layers: Sequence[LayerPlan], drafts: Sequence[Draft], ranks: Ranks = Ranks()) -> list[LayerRow]:
    """The rows of a block's layers: one transfer. With several ranks, which have drafts of some columns each: the same on all.

    ValueError, naming the layer, where a new weight did not fit into its dtype.
    """
    figures = torch.stack([draft.figures for draft in drafts]).tolist() if drafts else []
    own = [_Counted(d.name, d.facts, row, d.seconds) for d, row in zip(drafts, figures, strict=True)]
    counted: dict[str, _Counted] = {}
    for each in (each for told in ranks.gathered(own) for each in told):
        counted[each.name] = counted[each.name].plus(each) if each.name in counted else each
    return [_row(layer, counted[layer.view.name]) for layer in layers]


_JOINED = {"relative_gap": max, "iterations": max, "uncertified": sum, "out_of_time": sum, "fallbacks": sum}


@dataclass(frozen=True)
class _Counted:
    """What is known of some columns of a layer; `figures` as a draft's."""

    name: str
    facts: dict[str, Any]
    figures: list[float]
    seconds: Seconds

    def plus(self, other: _Counted) -> _Counted:
        """Of these columns and some others."""
        facts, more = dict(self.facts), other.facts
        facts["note"], facts["off_pattern"] = facts["note"] or more["note"], facts["off_pattern"] or more["off_pattern"]
        for name, joined in _JOINED.items():
            if name in facts:
                facts[name] = joined((facts[name], more[name]))
        if facts["stored_costs"] is not None:
            facts["stored_costs"] = tuple(a + b for a, b in zip(facts["stored_costs"], more["stored_costs"], strict=True))
        if "backend" in facts and more["backend"] not in facts["backend"].split(", "):
            facts["backend"] += f", {more['backend']}"
        figures = [mine + its for mine, its in zip(self.figures, other.figures, strict=True)]
        seconds = [getattr(self.seconds, each.name) + getattr(other.seconds, each.name) for each in fields(Seconds)]
        return _Counted(self.name, facts, figures, Seconds(*seconds))


def _row(layer: LayerPlan, counted: _Counted) -> LayerRow:
    dense, masked, updated, stored, zeros, kept, finite, before = counted.figures
    view, pattern, seconds = layer.view, layer.pattern, counted.seconds
    if finite < view.n_outputs:
        raise ValueError(
            f"{view.name}: a new weight does not fit into {view.dtype}; load the model in bfloat16 or float32"
        )
    size = view.n_inputs * view.n_outputs
    masked, updated, stored = (max(value, 0.0) / dense if dense > 0 else 0.0 for value in (masked, updated, stored))
    row = LayerRow(
        name=view.name, n_inputs=view.n_inputs, n_outputs=view.n_outputs, pattern=str(pattern),
        requested_sparsity=1 - kept / size if "pattern" in counted.facts else pattern.sparsity,
        reached_sparsity=zeros / size, zeros=int(zeros), tokens=0, error_masked=masked, error_updated=updated,
        error_stored=stored, rounding_excess=stored / updated - 1 if updated > 0 else stored,
        mask_seconds=seconds.mask, update_seconds=seconds.update, seconds=seconds.mask + seconds.update + seconds.measure,
        solve_seconds=seconds.solve, audit_seconds=seconds.audit, zeros_before=int(before),
    )  # fmt: skip
    facts = dict(counted.facts)
    costs = facts.pop("stored_costs")
    return replace(row, **facts, stored_gap=costs and relative_gap(*costs))


def _figures(
    energy: Energy, ridge: float, rebuilt: Rebuilt, stored_NK: torch.Tensor, method: Method, narrow: bool
) -> torch.Tensor:
    """Per column, (7, K): tr(DᵀHD) of the dense, the masked, the new and the stored weights, undamped; zeros, kept, finite. Beside
    adapters, which make up for the rest, the first two are of the weights that were asked for.

    The solver's objectives are float64 and of the damped problem, DᵀHD + λ‖D‖², so that no product is needed for theirs. narrow:
    whether the dense weights are exact in bfloat16.
    """
    dense_NK, mask_NK, new_NK, solution = rebuilt.dense_NK, rebuilt.mask_NK, rebuilt.new_NK, rebuilt.solution
    values_of_the_model = method.update != "own" and method.quantize == "none" and not method.adapter_rank
    unchanged = stored_NK is new_NK or (solution is None and values_of_the_model)
    changed = values_of_the_model and not unchanged
    sums = energy.sums(dense_NK, mask_NK, new_NK, stored_NK, narrow=narrow, changed=changed, of_dense=not rebuilt.is_adapted)
    dense_K, added_K, pruned_K, moved_K, zeros_K, kept_K, finite_K = sums
    undamped = lambda f, square_K: torch.as_tensor(f, device=square_K.device) - ridge * square_K  # noqa: E731
    bounded = not method.solve_options.keys().isdisjoint(("lower", "upper"))  # then the solver's start is clipped to them
    new_K = energy(new_NK - dense_NK) if solution is None else undamped(solution.objective, moved_K)
    if rebuilt.is_adapted:
        dense_K, masked_K = energy(rebuilt.asked_NK), energy(rebuilt.asked_NK * ~mask_NK)
    elif solution is None:
        masked_K = energy(dense_NK * mask_NK - dense_NK) if method.update == "own" else new_K  # otherwise they are the same
    else:
        masked_K = energy(dense_NK * ~mask_NK) if bounded else undamped(solution.baseline_objective, pruned_K)
    if unchanged:
        stored_K = new_K
    elif changed:
        stored_K = (new_K + added_K).clamp(min=0)
    else:
        stored_K = energy(stored_NK - dense_NK)
    rows = (dense_K.clamp(min=0), masked_K, new_K, stored_K, zeros_K, kept_K, finite_K == len(stored_NK))
    return torch.stack([row.double() for row in rows])


def _solver_facts(solution: qprecon.Solution | None, columns: slice, tol: float) -> dict[str, Any]:
    if solution is None:
        return {}
    gap_K, late_K = solution.relative_gap[columns], solution.status[columns] == Status.TIME_LIMIT
    return {
        "backend": solution.provenance.backend,
        "relative_gap": float(gap_K.max(initial=0.0)),
        "uncertified": int((~(gap_K <= tol)).sum()),
        "out_of_time": int((late_K & ~(gap_K <= tol)).sum()),
        "iterations": int(solution.iterations[columns].max(initial=0)),
        "fallbacks": int(solution.fell_back[columns].sum()),
    }
