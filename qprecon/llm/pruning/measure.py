"""What pruning cost a layer: relative reconstruction errors, zeros and solver facts, as rows of the report.

Figures stay on the device until a block is done and are fetched together. Shapes as in `update`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from qprecon.halves import has_fast_halves
from qprecon.linalg import bfloat16_parts
from qprecon.llm.masks.packed import pack
from qprecon.llm.reporting.report import LayerRow

if TYPE_CHECKING:
    import qprecon
    from qprecon.grids import Fitted
    from qprecon.llm.lowbit.rounding import Stored
    from qprecon.llm.pruning.method import Method
    from qprecon.llm.pruning.plan import LayerPlan

_PANEL = 8192  # columns whose products exist at a time


@dataclass(frozen=True)
class Seconds:
    """Wall-clock time of a group or a layer. `update` is everything from masks to stored weights, `solve` and `audit` within it."""

    mask: float
    update: float
    measure: float
    solve: float = 0.0
    audit: float = 0.0

    @staticmethod
    def of(mask: float, update: float, measure: float, solution: qprecon.Solution | None) -> Seconds:
        if solution is None:
            return Seconds(mask, update, measure)
        t = solution.timing
        return Seconds(mask, update, measure, t.setup + t.compile + t.solve, t.audit)

    def share(self, part: float) -> Seconds:
        """The time of a layer: its share of the group's columns."""
        return Seconds(*(part * getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Draft:
    """A row whose figures are on the device: energies (dense, masked, updated, stored), zeros, kept, finite; float64 (7,).

    mask: the bits of the mask that was used (`masks.packed`), scales: of low-bit weights, each if the method keeps them.
    """

    layer: LayerPlan
    facts: dict[str, Any]
    figures: torch.Tensor
    mask: torch.Tensor | None = None
    scales: Fitted | None = None
    seconds: Seconds | None = None

    @property
    def width(self) -> int:
        return self.layer.view.n_outputs

    def timed(self, seconds: Seconds) -> Draft:
        return replace(self, seconds=seconds)


def draft_rows(
    layers: Sequence[LayerPlan],
    prepared: qprecon.PreparedHessian,
    tokens: int,
    matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    solution: qprecon.Solution | None,
    method: Method,
    stored: Stored,
    note: str = "",
) -> list[Draft]:
    """A draft for each layer of a group. `matrices`: dense weights, mask, new and stored weights, all (N, K)."""
    dense_NK, mask_NK, new_NK, stored_NK = matrices
    energy = Energy(prepared.hessian.hessian_NN)
    narrow = all(layer.view.parameter.dtype == torch.bfloat16 for layer in layers)
    figures = [energy(dense_NK, narrow), *_energies(energy, prepared.ridge, matrices, solution, method)]
    figures += [(stored_NK == 0).sum(0), mask_NK.sum(0), stored_NK.isfinite().all(0)]
    figures_7K = torch.stack([row.double() for row in figures])
    drafts, first = [], 0
    for layer in layers:
        columns = slice(first, first := first + layer.view.n_outputs)
        facts = {"tokens": tokens, "note": note, **_solver_facts(solution, columns, method.tol), "stored_gap": stored.gap(columns)}
        if stored.fitted is not None:
            facts["bits"] = stored.fitted.grid.bits_per_weight(layer.view.n_inputs)
        if method.mask == "given":
            facts["pattern"] = "given"  # it is taken as it is, whatever pattern was asked for
        bits = pack(mask_NK[:, columns]) if method.keep_masks else None
        scales = stored.scales(columns) if method.keep_scales else None
        drafts.append(Draft(layer, facts, figures_7K[:, columns].sum(1), bits, scales))
    return drafts


def kept_masks(drafts: Sequence[Draft]) -> dict[str, torch.Tensor]:
    """The packed masks of a block, layer -> bits; none unless the method keeps them."""
    return {draft.layer.view.name: draft.mask for draft in drafts if draft.mask is not None}


def kept_scales(drafts: Sequence[Draft]) -> dict[str, Fitted]:
    """The grids and scales of a block's layers; none unless the method keeps them."""
    return {draft.layer.view.name: draft.scales for draft in drafts if draft.scales is not None}


def finished_rows(drafts: Sequence[Draft]) -> list[LayerRow]:
    """The rows of a block: one transfer. ValueError, naming the layer, where a new weight did not fit into its dtype."""
    if not drafts:
        return []
    return [_row(draft, figures) for draft, figures in zip(drafts, torch.stack([d.figures for d in drafts]).tolist(), strict=True)]


def _row(draft: Draft, figures: list[float]) -> LayerRow:
    dense, masked, updated, stored, zeros, kept, finite = figures
    view, pattern, seconds = draft.layer.view, draft.layer.pattern, draft.seconds
    if finite < view.n_outputs:
        raise ValueError(
            f"{view.name}: a new weight does not fit into {view.parameter.dtype}; load the model in bfloat16 or float32"
        )
    size = view.n_inputs * view.n_outputs
    masked, updated, stored = (max(value, 0.0) / dense if dense > 0 else 0.0 for value in (masked, updated, stored))
    row = LayerRow(
        name=view.name, n_inputs=view.n_inputs, n_outputs=view.n_outputs, pattern=str(pattern),
        requested_sparsity=1 - kept / size if "pattern" in draft.facts else pattern.sparsity,
        reached_sparsity=zeros / size, zeros=int(zeros), tokens=0, error_masked=masked, error_updated=updated,
        error_stored=stored, rounding_excess=stored / updated - 1 if updated > 0 else stored,
        mask_seconds=seconds.mask, update_seconds=seconds.update, seconds=seconds.mask + seconds.update + seconds.measure,
        solve_seconds=seconds.solve, audit_seconds=seconds.audit,
    )  # fmt: skip
    return replace(row, **draft.facts)


def _energies(
    energy: Energy, ridge: float, matrices: tuple[torch.Tensor, ...], solution: qprecon.Solution | None, method: Method
) -> list[torch.Tensor]:
    """Per column tr(DᵀHD) of the masked, the new and the stored weights, (K,), undamped; a product only where one is needed.

    The solver's objectives are float64 and of the damped problem, DᵀHD + λ‖D‖², so that they give the first two without any.
    """
    dense_NK, mask_NK, new_NK, stored_NK = matrices
    if solution is None:
        new_K = energy(new_NK - dense_NK)
        masked_K = energy(dense_NK * mask_NK - dense_NK) if method.update == "own" else new_K  # otherwise they are the same
    else:
        undamped = lambda f, d_NK: torch.as_tensor(f, device=d_NK.device) - ridge * d_NK.square().sum(0, dtype=torch.float64)  # noqa: E731
        bounded = not method.solve_options.keys().isdisjoint(("lower", "upper"))  # then the solver's start is clipped to them
        masked_K = energy(dense_NK * ~mask_NK) if bounded else undamped(solution.baseline_objective, dense_NK * ~mask_NK)
        new_K = undamped(solution.objective, new_NK - dense_NK)
    same = stored_NK is new_NK or (solution is None and method.update != "own" and method.quantize == "none")
    return [masked_K, new_K, new_K if same else energy(stored_NK - dense_NK)]


class Energy:
    """diag(DᵀHD), (K,) float64, of float32 H and D.

    On a GPU H and D are split into two bfloat16 halves, and the product of the low halves is left out: 2⁻¹⁶ relative to |H||D|,
    at several times the speed of float32 products. Elsewhere the product is float32.
    """

    def __init__(self, hessian_NN: torch.Tensor):
        self.hessian_NN = hessian_NN
        self.halves = tuple(bfloat16_parts(hessian_NN, 2)) if has_fast_halves(hessian_NN) else None

    def __call__(self, d_NK: torch.Tensor, narrow: bool = False) -> torch.Tensor:
        """`narrow`: whether D is exact in bfloat16."""
        panels = d_NK.split(_PANEL, dim=1)
        per_column = [(panel * self._product(panel, narrow)).sum(0, dtype=torch.float64) for panel in panels]
        return torch.cat(per_column).clamp(min=0)  # rounding can leave a tiny negative where the energy is 0

    def _product(self, d_NK: torch.Tensor, narrow: bool) -> torch.Tensor:
        if self.halves is None:
            return self.hessian_NN @ d_NK
        multiply = lambda a, b: torch.mm(a, b, out_dtype=torch.float32)  # noqa: E731
        (high_NN, low_NN), (high_NK, low_NK) = self.halves, bfloat16_parts(d_NK, 2)
        product_NK = multiply(high_NN, high_NK).add_(multiply(low_NN, high_NK))
        return product_NK if narrow else product_NK.add_(multiply(high_NN, low_NK))


def _solver_facts(solution: qprecon.Solution | None, columns: slice, tol: float) -> dict[str, Any]:
    if solution is None:
        return {}
    gap_K = solution.relative_gap[columns]
    return {
        "backend": solution.provenance.backend,
        "relative_gap": float(gap_K.max(initial=0.0)),
        "uncertified": int((~(gap_K <= tol)).sum()),
        "iterations": int(solution.iterations[columns].max(initial=0)),
        "fallbacks": int(solution.fell_back[columns].sum()),
    }
